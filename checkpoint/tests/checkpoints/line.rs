//! Which guest's checkpoints may follow which in a store.

use std::sync::Arc;

use driftline_checkpoint::Checkpointer;
use driftline_guest::testing::{MemoryConfig, MemoryGuest};
use driftline_guest::{Line, Origin, VmId};
use driftline_store::{Store, StoreError};

struct LineStore {
    dir: tempfile::TempDir,
    vm_id: VmId,
}

impl LineStore {
    fn guest(&self, line: Line) -> Arc<MemoryGuest> {
        MemoryGuest::of_line(self.vm_id, line, MemoryConfig::still()).unwrap()
    }

    /// Takes one epoch of a guest of this line.
    fn take(&self, line: Line) -> Result<Origin, StoreError> {
        let store = Store::create_or_open(self.dir.path())?;
        Checkpointer::new(self.guest(line), store)?.take().unwrap();
        Ok(Store::open(self.dir.path())?.epochs()?.last().unwrap().origin())
    }
}

#[test]
fn a_store_takes_one_line_only() {
    let store_dir = LineStore { dir: tempfile::tempdir().unwrap(), vm_id: VmId::random() };
    let line = Line::begin();
    let first = store_dir.take(line).unwrap();
    let second = store_dir.take(line).unwrap();
    assert_eq!((first.epoch, second.epoch, second.line), (1, 2, line.own));
    let refused = |line| match store_dir.take(line) {
        Err(StoreError::OtherLine { last, from, .. }) => (last, from),
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(Line::begin()), (2, None));
    assert_eq!(refused(Line::after(first)), (2, Some(1)));
    // A checkpoint with the same number from another store.
    let other = Origin { created_unix_ms: second.created_unix_ms + 1, ..second };
    assert_eq!(refused(Line::after(other)), (2, Some(2)));
    let (on, late) = (Line::after(second), Line::after(second));
    assert_eq!(store_dir.take(on).unwrap().epoch, 3);
    assert_eq!(store_dir.take(on).unwrap().epoch, 4);
    assert_eq!(refused(late), (4, Some(2)));
    assert_eq!(refused(line), (4, None));
}
