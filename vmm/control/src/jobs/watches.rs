//! Owns the handles of the threads that watch a guest's writes.

use std::sync::mpsc::SyncSender;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::error::JobError;
use crate::model::WatchPage;

/// The watches of a guest.
#[derive(Default)]
pub(super) struct DirtyWatches {
    /// Held while a watch is started, which may take time. Reading other watches never waits for
    /// it.
    pub(super) starting: Mutex<()>,
    pub(super) open: Mutex<OpenWatches>,
}

/// The watches that have not ended.
#[derive(Default)]
pub(super) struct OpenWatches {
    pub(super) last_number: u64,
    pub(super) watches: Vec<WatchHandle>,
}

/// One watch.
pub(super) struct WatchHandle {
    pub(super) number: u64,
    /// The thread's inbox. `None` once the thread has been told to end.
    pub(super) inbox: Option<SyncSender<Ask>>,
    pub(super) thread: JoinHandle<()>,
}

/// A question: what was written since the last one?
pub(super) struct Ask {
    pub(super) wait: Duration,
    pub(super) reply: oneshot::Sender<Result<WatchPage, JobError>>,
}

impl DirtyWatches {
    /// Returns whether all threads have ended and released everything that they owned.
    pub(super) fn are_over(&self) -> bool {
        self.open.lock().watches.iter().all(|watch| watch.thread.is_finished())
    }
}
