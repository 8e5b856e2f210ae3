//! A survey of a store to which another process writes.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};

use driftline_checkpoint::Checkpointer;
use driftline_store::testing::MemoryDisk;
use driftline_store::{Backend, LockError, Store, StoreFile};

use crate::common::stored::{self, StoreFixture, open, stored};

/// Checkpoints that a writer would otherwise drop during the survey, and whose slots it would
/// reuse.
#[test]
fn surveyed_checkpoints_are_pinned() {
    let StoreFixture { disk, guest, .. } = stored(&[3], 2);
    let mut checkpointer = Checkpointer::new(guest.clone(), open(&disk, true)).unwrap();
    checkpointer.keep(Some(2));
    let mut byte = 100;
    let write_on = move || {
        for _ in 0..4 {
            byte += 1;
            (0..stored::FRAMES).for_each(|gfn| stored::write(&guest, gfn, byte));
            checkpointer.take().unwrap();
        }
    };
    let busy = BusyStore { disk: disk.clone(), writer: Arc::new(Mutex::new(Box::new(write_on))) };
    for _ in 0..4 {
        let store = Store::with_backend(Box::new(busy.clone()), false).unwrap();
        let survey = store.survey().unwrap();
        assert!(survey.is_sound() && survey.sound >= 2, "{survey:?}");
    }
}

type WriterSteps = Arc<Mutex<Box<dyn FnMut() + Send>>>;

/// A disk on which a writer continues whenever a page file is opened.
#[derive(Clone)]
struct BusyStore {
    disk: MemoryDisk,
    writer: WriterSteps,
}

impl fmt::Debug for BusyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.disk.fmt(f)
    }
}

impl Backend for BusyStore {
    fn location(&self) -> &Path {
        self.disk.location()
    }
    fn reopen(&self) -> io::Result<Box<dyn Backend>> {
        Ok(Box::new(self.clone()))
    }
    fn lock(&self) -> Result<(), LockError> {
        Backend::lock(&self.disk)
    }
    fn is_locked(&self) -> io::Result<bool> {
        self.disk.is_locked()
    }
    fn create(&self, name: &str) -> io::Result<Box<dyn StoreFile>> {
        self.disk.create(name)
    }
    fn create_new(&self, name: &str) -> io::Result<Box<dyn StoreFile>> {
        self.disk.create_new(name)
    }
    fn open(&self, name: &str) -> io::Result<Box<dyn StoreFile>> {
        if name.starts_with("pages-") {
            self.writer.lock().unwrap()();
        }
        self.disk.open(name)
    }
    fn open_for_writing(&self, name: &str) -> io::Result<Box<dyn StoreFile>> {
        self.disk.open_for_writing(name)
    }
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.disk.rename(from, to)
    }
    fn link(&self, from: &str, to: &str) -> io::Result<()> {
        self.disk.link(from, to)
    }
    fn remove(&self, name: &str) -> io::Result<()> {
        self.disk.remove(name)
    }
    fn sync_dir(&self) -> io::Result<()> {
        self.disk.sync_dir()
    }
    fn list(&self) -> io::Result<Vec<String>> {
        self.disk.list()
    }
}
