//! Building a guest on a thread of its own.
//!
//! A factory opens the guest's disks and makes copies of those that come along, and storage that
//! hangs would keep the receiving thread for ever. So the receiving thread waits for a builder
//! thread in slices, and gives up after the limit or when the receiver is stopped. A builder thread
//! whose storage never answers is left behind, with what it has built, and so are the threads of
//! copies that cannot be removed. No other guest is built until they have ended: callers cannot make
//! such threads accumulate (I9).

use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SendError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder as Thread, JoinHandle};
use std::time::{Duration, Instant};

use checkpoint::{DriveHead, Guest, GuestFactory, VmId};

use super::copies::{Copies, Limits};
use crate::control::Stop;
use crate::error::Cause;
use crate::link::SLICE;

/// A guest, and the copies of drives that come along with it.
type Built<F> = (Arc<<F as GuestFactory>::Guest>, Copies);

/// Builds guests, one at a time.
pub(super) struct Builder<F: GuestFactory + ?Sized> {
    factory: Arc<F>,
    /// Upper bound on building one guest.
    limit: Duration,
    /// Upper bound on one operation on a copy.
    disk_limit: Duration,
    /// A thread that was not waited for.
    left: Mutex<Option<JoinHandle<()>>>,
    /// Shared with copies that are not removed yet.
    busy: Arc<()>,
}

impl<F: GuestFactory + ?Sized + 'static> Builder<F> {
    pub(super) fn new(factory: Arc<F>, limit: Duration, disk_limit: Duration) -> Self {
        Self { factory, limit, disk_limit, left: Mutex::default(), busy: Arc::default() }
    }

    /// Builds a guest and copies of `drives`.
    pub(super) fn build(
        &self,
        vm_id: VmId,
        config: &[u8],
        drives: &[DriveHead],
        stop: &Arc<Stop>,
    ) -> Result<Built<F>, Cause> {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        if left.as_ref().is_some_and(|thread| !thread.is_finished()) {
            let why = "the one before it is still being built: a disk of its has not answered";
            return Err(failed(io::Error::new(io::ErrorKind::ResourceBusy, why)));
        }
        if Arc::strong_count(&self.busy) > 1 {
            let why = "copies of disks of the one before it are still being removed";
            return Err(failed(io::Error::new(io::ErrorKind::ResourceBusy, why)));
        }
        let (tell, told) = mpsc::channel();
        let (factory, limits) = (self.factory.clone(), Limits::of(self.disk_limit));
        let (copies_stop, busy) = (stop.clone(), self.busy.clone());
        let (config, drives) = (config.to_vec(), drives.to_vec());
        let span = tracing::Span::current();
        let work = move || {
            let _span = span.entered();
            let built = factory.create_with_copies(vm_id, &config, &drives);
            let built = built.map_err(Cause::from).and_then(|(guest, copies)| {
                // A guest whose copies cannot be served goes on this thread, too.
                let copies = Copies::new(copies, &drives, limits, copies_stop, busy);
                let copies = copies.inspect_err(|cause| {
                    guest.stop(&format!("it was not received: {cause}"));
                })?;
                Ok((guest, copies))
            });
            if let Err(SendError(Ok((guest, _copies)))) = tell.send(built) {
                guest.stop("it was not received: it took too long to build");
            }
        };
        let thread = Thread::new().name("migrate-build".into()).spawn(work);
        let thread = thread.map_err(|cause| Cause::System { what: "starting a thread", cause })?;
        let built = self.wait(&told, stop);
        // One that has answered is ending, and counts as ended.
        *left = built.is_none().then_some(thread);
        built.unwrap_or_else(|| Err(self.late(stop)))
    }

    /// What the thread says; `None` if it is not waited for any longer.
    fn wait(
        &self,
        told: &Receiver<Result<Built<F>, Cause>>,
        stop: &Stop,
    ) -> Option<Result<Built<F>, Cause>> {
        let until = Instant::now() + self.limit;
        loop {
            match told.recv_timeout(SLICE) {
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

    /// Why the thread is not waited for any longer.
    fn late(&self, stop: &Stop) -> Cause {
        if stop.is_cancelled() {
            return Cause::Cancelled;
        }
        let why = format!("it is not there after {:?}: a disk may hang", self.limit);
        failed(io::Error::new(io::ErrorKind::TimedOut, why))
    }
}

fn failed(cause: io::Error) -> Cause {
    Cause::System { what: "building the guest", cause }
}
