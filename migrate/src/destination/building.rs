//! Builds a guest on a separate thread.
//!
//! A factory opens the guest's disks and makes copies, and storage that does not answer would block
//! the receiving thread for ever. So the receiving thread waits for a builder thread in slices, and
//! gives up at a limit or when the receiver is cancelled. A builder thread whose storage never
//! answers is abandoned with its guest. No guest is built while [`MAX_ABANDONED`] such threads
//! exist, or while copies are being removed, so that callers cannot make threads accumulate (I9).

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, SendError, SyncSender};
use std::thread::{Builder as Thread, JoinHandle};
use std::time::{Duration, Instant};

use driftline_guest::{DriveHead, GuestFactory, Lifecycle, SharedGuest, VmId};
use parking_lot::Mutex;

use super::copies::{Copies, CopyLimits};
use crate::error::{BuildFailure, Cause};
use crate::transport::stop::StopFlag;
use crate::transport::wait;

/// A guest, and the copies of its disks.
type BuiltGuest<F> = (Arc<<F as GuestFactory>::Guest>, Copies);

/// Upper bound on abandoned builder threads.
const MAX_ABANDONED: usize = 4;

/// Builds guests, one at a time.
pub(super) struct GuestBuilder<F: GuestFactory + ?Sized> {
    factory: Arc<F>,
    /// Upper bound on building one guest.
    limit: Duration,
    /// Upper bound on one operation on a copy.
    disk_limit: Duration,
    /// Abandoned threads and their guests.
    abandoned: Mutex<Vec<(VmId, JoinHandle<()>)>>,
    /// Shared with copies that have not been removed yet.
    busy: Arc<()>,
}

impl<F: GuestFactory + ?Sized + 'static> GuestBuilder<F> {
    pub(super) fn new(factory: Arc<F>, limit: Duration, disk_limit: Duration) -> Self {
        Self { factory, limit, disk_limit, abandoned: Mutex::default(), busy: Arc::default() }
    }

    /// Builds a guest and copies of `drives`; on `memory`, if that is given.
    pub(super) fn build(
        &self,
        vm_id: VmId,
        config: &[u8],
        drives: &[DriveHead],
        memory: Option<SharedGuest>,
        stop: &Arc<StopFlag>,
    ) -> Result<BuiltGuest<F>, Cause> {
        let mut abandoned = self.abandoned.lock();
        abandoned.retain(|(_, thread)| !thread.is_finished());
        if abandoned.len() >= MAX_ABANDONED {
            let guests = abandoned.iter().map(|(vm_id, _)| *vm_id).collect();
            return Err(BuildFailure::EarlierGuests { guests }.into());
        }
        if Arc::strong_count(&self.busy) > 1 {
            return Err(BuildFailure::EarlierCopies.into());
        }
        let (sender, results) = rendezvous_channel();
        let (factory, limits) = (self.factory.clone(), CopyLimits::of(self.disk_limit));
        // A weak reference: the factory is not busy before it has made copies.
        let (copies_stop, busy) = (stop.clone(), Arc::downgrade(&self.busy));
        let (config, drives) = (config.to_vec(), drives.to_vec());
        let span = tracing::Span::current();
        let work = move || {
            let _span = span.entered();
            let built = match memory {
                None => factory.create_with_copies(vm_id, &config, &drives),
                Some(memory) => {
                    let guest = factory.create_on(vm_id, &config, &memory);
                    guest.map(|guest| (guest, Vec::new()))
                }
            };
            let built = built.map_err(Cause::from).and_then(|(guest, copies)| {
                // Also a guest whose copies cannot be served is dropped on this thread.
                let busy = busy.upgrade().unwrap_or_default();
                let copies = Copies::new(copies, &drives, limits, copies_stop, busy);
                let copies = copies.inspect_err(|cause| {
                    guest.stop(&format!("it was not received: {cause}"));
                })?;
                Ok((guest, copies))
            });
            if let Err(SendError(Ok((guest, _copies)))) = sender.send(built) {
                guest.stop("it was not received: it took too long to build");
            }
        };
        let thread = Thread::new().name("migrate-build".into()).spawn(work);
        let thread = thread.map_err(|cause| Cause::System { what: "starting a thread", cause })?;
        let until = Instant::now() + self.limit;
        let ended = || Cause::ThreadEnded { what: "building the guest" };
        // A thread that has answered is about to end, and does not count as abandoned.
        let mut thread = Some(thread);
        wait::answer(&results, ended, || {
            self.check(vm_id, until, stop).inspect_err(|_| {
                abandoned.extend(thread.take().map(|thread| (vm_id, thread)));
            })
        })?
    }

    /// Fails if the wait for the thread that builds `vm_id` has to end.
    fn check(&self, vm_id: VmId, until: Instant, stop: &StopFlag) -> Result<(), Cause> {
        if stop.is_cancelled() {
            return Err(Cause::Cancelled);
        }
        if Instant::now() < until {
            return Ok(());
        }
        let why = BuildFailure::TooSlow { vm_id, limit: self.limit };
        tracing::error!(vm = %vm_id, "{why}; restart the receiver if that storage is lost");
        Err(why.into())
    }
}

/// Returns a channel without a buffer. A value that is not received returns to the sender, which
/// drops it.
fn rendezvous_channel<T>() -> (SyncSender<T>, Receiver<T>) {
    mpsc::sync_channel(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unreceived_value_returns_to_the_sender() {
        let (sender, results) = rendezvous_channel();
        let sender = std::thread::spawn(move || sender.send("a guest"));
        // The value returns whether `send` begins before or after the drop.
        std::thread::sleep(Duration::from_millis(100));
        drop(results);
        assert_eq!(sender.join().unwrap(), Err(SendError("a guest")));
    }
}
