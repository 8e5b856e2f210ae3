//! Memory of a guest, and the check that every frame whose content a device changes is in the tree.

use std::sync::Arc;

use driftline_dirty_tracker::{Gfn, Layout, PAGE_SIZE, Slot, SlotId, Subscription};
use vm_memory::{Bytes, GuestAddress};

use crate::memory::{Backing, HugePages, Memory, MemoryOptions};

/// Start address and size in bytes of the two slots. The memory between them is unmapped.
const SLOTS: [(u64, u64); 2] = [(0, 0x4_0000), (0x10_0000, 0x1_0000)];
/// Of the frames that the device has not marked, a check reads one in this many, different ones
/// each time. Reading all of them after every step would take most of a fuzzer's time.
const ONE_IN: u64 = 8;
const ZEROS: [u8; PAGE_SIZE as usize] = [0; PAGE_SIZE as usize];

thread_local! {
    /// Created once per thread, because mapping costs more than a whole run.
    static ANON: Arc<Memory> = Arc::new(map(Backing::Anon));
    static MEMFD: Arc<Memory> = Arc::new(map(Backing::Memfd));
}

fn map(backing: Backing) -> Memory {
    let slot = |(i, (base, bytes)): (u32, (u64, u64))| Slot {
        id: SlotId(i),
        base: Gfn::containing(base),
        frames: bytes / PAGE_SIZE,
    };
    let layout = Layout::new((0..).zip(SLOTS).map(slot)).unwrap();
    let options = MemoryOptions { backing, huge_pages: Some(HugePages::None), prefault: false };
    Memory::of_layout(layout, &options).unwrap()
}

/// Sets all memory of a slot to zero and returns the zeros.
fn clear(memory: &Memory, base: u64, bytes: u64) -> Vec<u8> {
    let mut frame = [0; PAGE_SIZE as usize];
    for at in (base..base + bytes).step_by(frame.len()) {
        memory.ram().read_slice(&mut frame, GuestAddress(at)).unwrap();
        if frame != ZEROS {
            memory.ram().write_slice(&ZEROS, GuestAddress(at)).unwrap();
        }
    }
    vec![0; bytes as usize]
}

/// Memory of a guest. See the module documentation.
pub(super) struct FuzzMemory {
    memory: Arc<Memory>,
    /// Content of the slots at the last check, plus the driver's own writes since.
    before: Vec<Vec<u8>>,
    writes: Subscription,
    /// Frames that the device has marked since the last check.
    marked: Vec<Gfn>,
    /// Number of checks so far.
    checks: u64,
}

impl FuzzMemory {
    /// Returns memory that is all zero.
    pub(super) fn new(backing: Backing) -> Self {
        let memory = match backing {
            Backing::Anon => ANON.with(Arc::clone),
            Backing::Memfd => MEMFD.with(Arc::clone),
        };
        let before = SLOTS.iter().map(|(base, bytes)| clear(&memory, *base, *bytes)).collect();
        let writes = memory.tracker().subscribe("fuzz").unwrap();
        Self { memory, before, writes, marked: Vec::new(), checks: 0 }
    }

    pub(super) fn memory(&self) -> &Memory {
        &self.memory
    }

    fn take_marks(&mut self) {
        let epoch = self.writes.drain();
        self.marked.extend(epoch.runs().flat_map(|run| (run.start.0..run.end().0).map(Gfn)));
        epoch.commit();
    }

    /// Writes as the driver does. Bytes outside memory are skipped.
    pub(super) fn write(&mut self, addr: u64, bytes: &[u8]) {
        // Keep the device's marks apart from those of this write.
        self.take_marks();
        for ((base, len), before) in SLOTS.iter().zip(&mut self.before) {
            let Some(at) = addr.checked_sub(*base).filter(|at| at < len) else { continue };
            let bytes = &bytes[..bytes.len().min((len - at) as usize)];
            self.memory.ram().write_slice(bytes, GuestAddress(addr)).unwrap();
            before[at as usize..][..bytes.len()].copy_from_slice(bytes);
        }
        self.writes.drain().commit();
    }

    /// Checks that the device has changed only frames that it has marked. Nothing may be in flight.
    /// Returns whether anything has changed. Of the unmarked frames, only some are read.
    pub(super) fn check(&mut self) -> bool {
        self.checks += 1;
        let turn = self.checks % ONE_IN;
        self.check_those(|gfn| gfn.0 % ONE_IN == turn)
    }

    /// Checks like [`check`](Self::check), but reads all frames.
    pub(super) fn check_all(&mut self) -> bool {
        self.check_those(|_| true)
    }

    fn check_those(&mut self, unmarked: impl Fn(Gfn) -> bool) -> bool {
        self.take_marks();
        let mut any = false;
        let mut now = ZEROS;
        for ((base, _), before) in SLOTS.iter().zip(&mut self.before) {
            for (gfn, before) in (base / PAGE_SIZE..).map(Gfn).zip(before.chunks_mut(now.len())) {
                let marked = self.marked.contains(&gfn);
                if !marked && !unmarked(gfn) {
                    continue;
                }
                self.memory.ram().read_slice(&mut now, GuestAddress(gfn.gpa())).unwrap();
                if now != before {
                    assert!(marked, "frame {:#x} changed unmarked", gfn.0);
                    before.copy_from_slice(&now);
                    any = true;
                }
            }
        }
        self.marked.clear();
        any
    }
}
