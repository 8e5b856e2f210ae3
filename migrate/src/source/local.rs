//! What takes the place of pre-copy if memory is handed over as it is (`shared_guest`).
//!
//! The passes carry no frames. The destination's acknowledgement of pass 0 ends the preparation;
//! the last pass belongs to the protocol of the pause. This side does not subscribe to the guest's
//! writes, so a hand-over works without tracking.

use std::time::{Duration, Instant};

use driftline_guest::NextHost;

use super::channels::Channels;
use super::drives::Drives;
use super::guest::Migratable;
use super::job::{SendFailed, SendJob};
use super::limit::Limit;
use super::passes::Passes;
use super::precopy::{FLUSH_LIMIT, PrecopyResult, Stats, flush_disks};
use super::record::HandOverRecord;
use super::setup::SetUp;
use super::shared_guest;
use super::throttle::GuestThrottle;
use crate::heap;
use crate::policy::convergence::Reason;
use crate::protocol::message::Counts;
use crate::transport::compression::Compression;

impl<'a, G: Migratable + ?Sized> SendJob<'a, G> {
    /// Takes the place of pre-copy: waits until the destination is ready for the pause, which sends
    /// no memory.
    pub(super) fn prepare_local(
        &self,
        channels: &mut Channels,
        set_up: SetUp,
    ) -> Result<PrecopyResult<'a, G>, SendFailed> {
        let SetUp { record, features, drives } = set_up;
        let (setup, begun) = (self.begun.elapsed(), Instant::now());
        let limit = Limit::of_precopy(begun, &self.options.goals());
        let options = self.options;
        let mut drives = Drives::follow(drives, options.disk_limit, &self.control.stop, limit)?;
        let (ram, none) = (self.guest.ram(), Compression::None);
        let mut passes = Passes::new(ram, self.control, channels, features, none, None)?;
        let nothing = std::iter::empty();
        let done = limit.enforce(channels, |channels| {
            let sent = passes.begin(channels, 0, nothing, 0, &mut drives, limit)?;
            sent.await_end(&mut channels.first)
        })?;
        // A receiver that gets the open files of disks sees writes that are not durable yet. For
        // any other receiver the disks are flushed.
        if shared_guest::next_host(options, features) == NextHost::Another {
            flush_disks(self.guest, FLUSH_LIMIT);
        }
        let record = HandOverRecord::Staged(record).make_durable()?;
        // The pause is next.
        self.guest.stay_awake();
        heap::grow();
        let reports = vec![done.report(Counts::default(), 0, Duration::ZERO)];
        let (reason, throttle) = (Reason::SameMemory, Vec::new());
        Ok(PrecopyResult {
            writes: None,
            verifier: None,
            drives,
            passes,
            guest_throttle: GuestThrottle::new(self.guest, false),
            stats: Stats { setup, passes: reports, throttle, reason },
            record: HandOverRecord::Durable(record),
            features,
            left: 0,
        })
    }
}
