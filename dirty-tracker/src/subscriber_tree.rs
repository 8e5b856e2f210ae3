//! A subscriber's tree, with the state that its dirty sets need. A leaf module below `tracker` and
//! `dirty_set`.

use crate::sync::{self, Arc, AtomicBool, AtomicU64, Mutex};
use crate::{FrameRun, Layout, NoMemory, Tree};

/// A subscriber's tree: dirty sets are drained from it and given back to it.
#[derive(Debug)]
pub(crate) struct SubscriberTree {
    pub(crate) name: String,
    pub(crate) layout: Arc<Layout>,
    pub(crate) tree: Tree,
    pub(crate) drains: AtomicU64,
    /// See [`Subscription::set_passive`](crate::Subscription::set_passive).
    pub(crate) passive: AtomicBool,
    /// Buffers of finished dirty sets, for reuse.
    spare: Mutex<Vec<Vec<FrameRun>>>,
}

/// Number of buffers kept for reuse: the usual number of dirty sets that exist at once.
const SPARE_BUFFERS: usize = 4;

impl SubscriberTree {
    pub(crate) fn new(name: String, layout: Arc<Layout>) -> Result<Self, NoMemory> {
        let tree = Tree::new(&layout)?;
        Ok(Self {
            name,
            layout,
            tree,
            drains: AtomicU64::new(0),
            passive: AtomicBool::new(false),
            spare: Mutex::new(Vec::with_capacity(SPARE_BUFFERS)),
        })
    }

    pub(crate) fn give_back(&self, run: FrameRun) {
        if let Ok(bit) = self.layout.bit_of_run(run) {
            self.tree.insert(bit, run.count);
        }
    }

    /// Returns an empty buffer, that of a finished dirty set if there is one.
    pub(crate) fn buffer(&self) -> Vec<FrameRun> {
        sync::lock(&self.spare).pop().unwrap_or_default()
    }

    pub(crate) fn recycle(&self, mut runs: Vec<FrameRun>) {
        runs.clear();
        let mut spare = sync::lock(&self.spare);
        if spare.len() < SPARE_BUFFERS {
            spare.push(runs);
        }
    }
}
