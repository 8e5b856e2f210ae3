//! A subscriber: its tree, with the state that its dirty sets need. A leaf module below `tracker`
//! and `dirty_set`.

use crate::sync::{self, Arc, AtomicBool, AtomicU64, Mutex, MutexGuard, Ordering};
use crate::tree::{RunLists, Tree};

/// A subscriber: dirty sets are drained from its tree and given back to it.
#[derive(Debug)]
pub(crate) struct Subscriber {
    pub(crate) name: String,
    /// The tree of the present layout. [`Tracker::relayout`](crate::Tracker::relayout) holds the
    /// lock while it moves frames to another. See [`with_tree`](Self::with_tree).
    tree: Mutex<Arc<Tree>>,
    drains: AtomicU64,
    /// See [`Subscription::set_passive`](crate::Subscription::set_passive).
    pub(crate) passive: AtomicBool,
    /// Buffers of finished dirty sets, for reuse.
    spare: Mutex<Vec<RunLists>>,
}

/// Number of buffers kept for reuse: the usual number of dirty sets that exist at the same time.
const SPARE_BUFFERS: usize = 4;

impl Subscriber {
    pub(crate) fn new(name: String, tree: Arc<Tree>) -> Self {
        Self {
            name,
            tree: Mutex::new(tree),
            drains: AtomicU64::new(0),
            passive: AtomicBool::new(false),
            spare: Mutex::new(Vec::with_capacity(SPARE_BUFFERS)),
        }
    }

    /// Returns the tree of the present layout.
    pub(crate) fn tree(&self) -> Arc<Tree> {
        sync::lock(&self.tree).clone()
    }

    /// Locks the tree, to replace it.
    pub(crate) fn lock_tree(&self) -> MutexGuard<'_, Arc<Tree>> {
        sync::lock(&self.tree)
    }

    /// Calls `work` with the tree, and again with its successor if the layout changed meanwhile.
    /// `work` marks or drains.
    ///
    /// No lock is held during `work`, which may wait for threads of a pool. A mark that reaches the
    /// old tree after the frames were moved is made again in the new one. A drain that finds the
    /// old tree already emptied by the move continues in the new one.
    pub(crate) fn with_tree(&self, mut work: impl FnMut(&Tree)) {
        let mut tree = self.tree();
        loop {
            work(&tree);
            let now = self.tree();
            if Arc::ptr_eq(&tree, &now) {
                return;
            }
            tree = now;
        }
    }

    /// Returns the number of dirty sets drained before, and counts one more.
    pub(crate) fn next_number(&self) -> u64 {
        self.drains.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns an empty buffer, that of a finished dirty set if there is one.
    pub(crate) fn buffer(&self) -> RunLists {
        sync::lock(&self.spare).pop().unwrap_or_default()
    }

    pub(crate) fn recycle(&self, mut lists: RunLists) {
        lists.clear();
        let mut spare = sync::lock(&self.spare);
        if spare.len() < SPARE_BUFFERS {
            spare.push(lists);
        }
    }
}
