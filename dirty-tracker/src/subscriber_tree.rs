//! One subscriber's tree, with what its dirty sets need to come from it and to return to it.

use crate::sync::{self, Arc, AtomicBool, AtomicU64, Mutex};
use crate::{FrameRun, Layout, NoMemory, Tree};

/// One subscriber's tree, where its epochs come from and return to.
#[derive(Debug)]
pub(crate) struct SubscriberTree {
    pub(crate) name: String,
    pub(crate) layout: Arc<Layout>,
    pub(crate) tree: Tree,
    pub(crate) epochs: AtomicU64,
    /// See [`Subscription::set_passive`](crate::Subscription::set_passive).
    pub(crate) passive: AtomicBool,
    /// Buffers of settled epochs, for the next ones.
    spare: Mutex<Vec<Vec<FrameRun>>>,
}

/// Buffers kept for reuse: as many as epochs are usually under way at once.
const SPARE_BUFFERS: usize = 4;

impl SubscriberTree {
    pub(crate) fn new(name: String, layout: Arc<Layout>) -> Result<Self, NoMemory> {
        let tree = Tree::new(&layout)?;
        Ok(Self {
            name,
            layout,
            tree,
            epochs: AtomicU64::new(0),
            passive: AtomicBool::new(false),
            spare: Mutex::new(Vec::with_capacity(SPARE_BUFFERS)),
        })
    }

    pub(crate) fn give_back(&self, run: FrameRun) {
        if let Ok(bit) = self.layout.bit_of_run(run) {
            self.tree.insert(bit, run.count);
        }
    }

    /// An empty buffer, a settled epoch's if there is one.
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
