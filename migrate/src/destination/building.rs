//! Builds a guest on a separate thread.
//!
//! A factory opens the guest's disks and makes copies, and storage that does not answer would block
//! the receiving thread for ever. So the receiving thread waits for a builder thread in slices, and
//! gives up at a limit or when the receiver is cancelled. A builder thread whose storage never
//! answers is abandoned with its guest. No guest is built while [`MAX_ABANDONED`] such threads
//! exist, or while copies are being removed, so that callers cannot make threads accumulate (I9).

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SendError, SyncSender};
use std::thread::{Builder as Thread, JoinHandle};
use std::time::{Duration, Instant};

use driftline_guest::{DriveHead, GuestFactory, Lifecycle, VmId};
use parking_lot::Mutex;

use super::copies::{Copies, CopyLimits};
use crate::error::Cause;
use crate::transport::link::SLICE;
use crate::transport::stop::StopFlag;

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

    /// Builds a guest and copies of `drives`.
    pub(super) fn build(
        &self,
        vm_id: VmId,
        config: &[u8],
        drives: &[DriveHead],
        stop: &Arc<StopFlag>,
    ) -> Result<BuiltGuest<F>, Cause> {
        let mut abandoned = self.abandoned.lock();
        abandoned.retain(|(_, thread)| !thread.is_finished());
        if abandoned.len() >= MAX_ABANDONED {
            let guests: Vec<_> = abandoned.iter().map(|(vm_id, _)| vm_id.to_string()).collect();
            let why = format!(
                "earlier guests are still being built ({}); restart the receiver if their storage \
                 is lost",
                guests.join(", ")
            );
            return Err(failed(io::Error::new(io::ErrorKind::ResourceBusy, why)));
        }
        if Arc::strong_count(&self.busy) > 1 {
            let why = "copies of disks of an earlier guest are still being removed";
            return Err(failed(io::Error::new(io::ErrorKind::ResourceBusy, why)));
        }
        let (sender, results) = rendezvous_channel();
        let (factory, limits) = (self.factory.clone(), CopyLimits::of(self.disk_limit));
        // A weak reference: the factory is not busy before it has made copies.
        let (copies_stop, busy) = (stop.clone(), Arc::downgrade(&self.busy));
        let (config, drives) = (config.to_vec(), drives.to_vec());
        let span = tracing::Span::current();
        let work = move || {
            let _span = span.entered();
            let built = factory.create_with_copies(vm_id, &config, &drives);
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
        let built = self.wait(&results, stop);
        // A thread that has answered is about to end, and does not count as abandoned.
        built.unwrap_or_else(|| {
            abandoned.push((vm_id, thread));
            Err(self.abandon_reason(vm_id, stop))
        })
    }

    /// Waits for the thread's result; `None` if the thread is abandoned.
    fn wait(
        &self,
        results: &Receiver<Result<BuiltGuest<F>, Cause>>,
        stop: &StopFlag,
    ) -> Option<Result<BuiltGuest<F>, Cause>> {
        let until = Instant::now() + self.limit;
        loop {
            match results.recv_timeout(SLICE) {
                Ok(built) => return Some(built),
                Err(RecvTimeoutError::Disconnected) => {
                    return Some(Err(failed(io::Error::other("its thread has ended"))));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            if stop.is_cancelled() || Instant::now() >= until {
                return None;
            }
        }
    }

    /// Returns why the thread is abandoned.
    fn abandon_reason(&self, vm_id: VmId, stop: &StopFlag) -> Cause {
        if stop.is_cancelled() {
            return Cause::Cancelled;
        }
        let why = format!(
            "guest {vm_id} was not built within {:?} (its disks or copies may be on storage that \
             does not answer)",
            self.limit
        );
        tracing::error!(vm = %vm_id, "{why}; restart the receiver if that storage is lost");
        failed(io::Error::new(io::ErrorKind::TimedOut, why))
    }
}

/// Returns a channel without a buffer. A value that is not received returns to the sender, which
/// drops it.
fn rendezvous_channel<T>() -> (SyncSender<T>, Receiver<T>) {
    mpsc::sync_channel(0)
}

fn failed(cause: io::Error) -> Cause {
    Cause::System { what: "building the guest", cause }
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
