//! Takes epochs of the test guest without a checkpointer.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::sync::Arc;

use driftline_dirty_tracker::{FrameRun, Gfn, PAGE_SIZE, Subscription};
use driftline_guest::testing::MemoryGuest;
use driftline_guest::{DirtyLog, DriveHead, GuestContents, Paused, data_runs, read_blocks};
use vm_memory::{Bytes, GuestAddress};

use crate::address::of_object;
use crate::committer::Committer;
use crate::epoch_writer::EpochWriter;
use crate::store::Store;

/// A drive whose writes are tracked.
struct TrackedDrive {
    head: DriveHead,
    file: File,
    subscription: Subscription,
}

/// A process that writes epochs of a guest to a store.
pub(crate) struct EpochTaker {
    guest: Arc<MemoryGuest>,
    committer: Committer,
    memory: Subscription,
    drives: Vec<TrackedDrive>,
    /// Epoch before this one; `None` before the first, which is full.
    parent: Option<u64>,
}

impl EpochTaker {
    /// Opens or creates the store's files, and begins to track the guest's writes.
    pub(crate) fn new(guest: Arc<MemoryGuest>, store: Store) -> Self {
        let store = Arc::new(store);
        let committer = match Committer::open(&store, &*guest).unwrap() {
            Some(open) => open,
            None => Committer::create(&store, &*guest).unwrap(),
        };
        let memory = guest.subscribe("taken").unwrap();
        let drives = guest.drives().into_iter().map(|drive| TrackedDrive {
            head: drive.head(),
            file: drive.open().unwrap(),
            subscription: drive.subscribe("taken").unwrap().unwrap(),
        });
        Self { drives: drives.collect(), guest, committer, memory, parent: None }
    }

    /// Takes one epoch in a pause, and returns when it is durable.
    pub(crate) fn take(&mut self) {
        let Self { guest, committer, memory, drives, parent } = self;
        let epoch = committer.last().unwrap_or(0) + 1;
        let heads = drives.iter().map(|drive| drive.head.clone()).collect();
        let pages = committer.pages().clone();
        let mut file = EpochWriter::new(pages, epoch, &**guest, *parent, heads).unwrap();
        let (paused, sections) = Paused::saving(&**guest).unwrap();
        let full = parent.is_none();
        let changed = paused.drain(memory).unwrap();
        let runs: Vec<FrameRun> =
            if full { guest.populated().unwrap() } else { changed.runs().collect() };
        for gfn in runs.iter().flat_map(|run| run.frames()) {
            let mut page = [0; PAGE_SIZE as usize];
            guest.ram().read_slice(&mut page, GuestAddress(gfn.gpa())).unwrap();
            file.frames([FrameRun { start: gfn, count: 1 }].into_iter(), &page, full).unwrap();
        }
        changed.commit();
        for (object, TrackedDrive { head, file: from, subscription }) in (1..).zip(drives) {
            let changed = subscription.drain();
            let runs: Vec<FrameRun> = match full {
                true => data_runs(from, head.bytes).unwrap(),
                false => changed.runs().collect(),
            };
            for block in runs.iter().flat_map(|run| run.frames()) {
                let mut page = [0; PAGE_SIZE as usize];
                read_blocks(from, head.bytes, block, &mut page).unwrap();
                let run = of_object(object, FrameRun { start: Gfn(block.0), count: 1 });
                file.frames([run].into_iter(), &page, full).unwrap();
            }
            changed.commit();
        }
        for section in sections.unwrap() {
            file.section(&section).unwrap();
        }
        paused.resume().unwrap();
        committer.commit(file.finish()).unwrap();
        *parent = Some(epoch);
    }
}
