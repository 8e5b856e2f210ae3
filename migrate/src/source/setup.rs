//! The source until precopy: connections and introductions, and the machine that is built at the
//! destination.

use std::sync::Arc;
use std::time::{Duration, Instant};

use driftline_guest::{Guest, GuestDrive};

use super::channels::Channels;
use super::drives;
use super::job::{Failed, Job};
use super::record::StagedRecord;
use crate::error::{Cause, fits};
use crate::journal::Records;
use crate::protocol::features::{
    COPIES_DRIVES, FEATURES, MEMORY_DIGEST, PACKED_CONTENTS, SEVERAL_CONNECTIONS,
};
use crate::protocol::limits::{MAX_CONFIG, MAX_CONNECTIONS, MAX_SLOTS};
use crate::protocol::message::{Message, Purpose};
use crate::transport::compression::Compression;
use crate::transport::link::Link;
use crate::transport::stop::Stop;
use crate::transport::wire::Wire;

/// Connections that join at once.
const JOINS_AT_ONCE: usize = 4;

/// The destination has introduced itself.
pub(super) struct Connected {
    records: Records,
    /// What the destination can do, from its HELLO.
    features: u64,
    /// That go along.
    drives: Vec<Box<dyn GuestDrive>>,
}

/// The machine is built at the destination, and all channels have joined.
pub(super) struct SetUp {
    /// READY has told the site that it names.
    pub(super) record: StagedRecord,
    pub(super) features: u64,
    pub(super) drives: Vec<Box<dyn GuestDrive>>,
}

impl<G: Guest + ?Sized> Job<'_, G> {
    /// Connects and introduces itself.
    pub(super) fn connect(&self) -> Result<(Channels, Connected), Failed> {
        // Opened now, so that a directory that cannot be used fails before the guest is paused.
        let records = Records::open(&self.options.records)?;
        let stop = self.control.stop.clone();
        let drives = drives::chosen(self.guest, &self.options.copy_drives)?;
        let limit = self.options.connect_timeout;
        let (first, features) = self.introduce(Purpose::Move, limit, stop)?;
        let channels = Channels { first, joined: Vec::new() };
        Ok((channels, Connected { records, features, drives }))
    }

    /// A connection with introductions made; both within `limit`, and not once `stop` says so.
    pub(super) fn introduce(
        &self,
        purpose: Purpose,
        limit: Duration,
        stop: Arc<Stop>,
    ) -> Result<(Wire<Link>, u64), Cause> {
        let link = Link::connect(self.to, limit, self.options.progress_timeout, stop)
            .map_err(|cause| Cause::Connect { peer: self.to.to_owned(), cause })?;
        let mut wire = Wire::new(link);
        wire.stream_mut().set_deadline(Some(Instant::now() + limit));
        wire.send_header(Some((self.guest.vm_id(), self.guest.layout().hash())))?;
        let version = env!("CARGO_PKG_VERSION");
        wire.send(&Message::Hello { purpose, features: FEATURES, version })?;
        wire.recv_header()?;
        let features = match wire.recv()? {
            Message::Hello { version, features, .. } => {
                tracing::debug!(to = self.to, version, features, "connected");
                features
            }
            other => return Err(other.unexpected("HELLO").into()),
        };
        wire.stream_mut().set_deadline(None);
        Ok((wire, features))
    }

    /// Has the machine built at the destination.
    pub(super) fn set_up(
        &self,
        channels: &mut Channels,
        connected: Connected,
    ) -> Result<SetUp, Failed> {
        let Connected { records, features, drives } = connected;
        self.offered(features)?;
        let config = self.guest.config();
        fits("the guest's configuration", config.len() as u64, MAX_CONFIG.into())?;
        let layout = self.guest.layout().clone();
        fits("the guest's memory layout", layout.slots().len() as u64, MAX_SLOTS.into())?;
        if !drives.is_empty() && features & COPIES_DRIVES == 0 {
            return Err(Cause::NotOffered { feature: "copies of disks (--copy-disks)" }.into());
        }
        let wire = &mut channels.first;
        drives::announce(wire, &drives)?;
        wire.send(&Message::Config { token: self.token, layout, config: &config })?;
        // Building a machine shows no progress on the wire.
        wire.stream_mut().set_progress_timeout(self.options.setup_timeout);
        let site = match wire.recv()? {
            Message::Ready { site } => site,
            other => return Err(other.unexpected("READY").into()),
        };
        let staged = records.stage_source(self.token, self.guest.vm_id(), self.to, site)?;
        let record = StagedRecord::new(records, staged);
        wire.stream_mut().set_progress_timeout(self.options.progress_timeout);
        self.join(channels)?;
        Ok(SetUp { record, features, drives })
    }

    /// Whether the destination knows all that is asked for.
    fn offered(&self, features: u64) -> Result<(), Cause> {
        let asked = [
            (self.options.verify, MEMORY_DIGEST, "a digest of memory (--verify)"),
            (
                self.options.compression != Compression::None,
                PACKED_CONTENTS,
                "compressed contents (--compress)",
            ),
            (
                self.options.connections > 1,
                SEVERAL_CONNECTIONS,
                "several connections (--connections)",
            ),
        ];
        match asked.into_iter().find(|(is, bit, _)| *is && features & bit == 0) {
            Some((.., feature)) => Err(Cause::NotOffered { feature }),
            None => Ok(()),
        }
    }

    /// Makes the connections that share in the sending, all at once.
    fn join(&self, channels: &mut Channels) -> Result<(), Failed> {
        let more = self.options.connections.clamp(1, MAX_CONNECTIONS) - 1;
        if more == 0 {
            return Ok(());
        }
        let numbers: Vec<u32> = (2..more + 2).collect();
        // The destination's listener serves a bounded number at once, and others may call, too.
        for batch in numbers.chunks(JOINS_AT_ONCE) {
            let joined: Result<Vec<_>, Cause> = std::thread::scope(|scope| {
                let join = |which: &u32| {
                    let (which, of) = (*which, more + 1);
                    let named = move |cause| {
                        let cause = Box::new(cause);
                        Cause::Connection { which, of, cause }
                    };
                    let span = tracing::Span::current();
                    scope.spawn(move || span.in_scope(|| self.join_one()).map_err(named))
                };
                let threads: Vec<_> = batch.iter().map(join).collect();
                let ended = |thread: std::thread::ScopedJoinHandle<'_, _>| match thread.join() {
                    Ok(result) => result,
                    Err(panic) => std::panic::resume_unwind(panic),
                };
                threads.into_iter().map(ended).collect()
            });
            channels.joined.extend(joined?);
        }
        Ok(channels.first.send(&Message::Connections { joined: more })?)
    }

    fn join_one(&self) -> Result<Wire<Link>, Cause> {
        let (limit, stop) = (self.options.connect_timeout, self.control.stop.clone());
        let (mut wire, _) = self.introduce(Purpose::Join, limit, stop)?;
        wire.stream_mut().set_deadline(Some(Instant::now() + limit));
        wire.send(&Message::Join { token: self.token })?;
        match wire.recv()? {
            Message::Ready { .. } => {}
            other => return Err(other.unexpected("READY").into()),
        }
        wire.stream_mut().set_deadline(None);
        Ok(wire)
    }
}
