//! Fuzzes a hostile kernel file. It must be refused with a message, or loaded within memory and not
//! overwritten by the boot information.
#![allow(clippy::unwrap_used, reason = "a failure is the finding")]

use std::io::Cursor;

use driftline_dirty_tracker::{FrameRun, Gfn};
use vm_memory::{Bytes, GuestAddress};

use super::loaded::Loaded;
use super::platform::{DescribedMachine, Entry};
use super::{enter, kernel};
use crate::devices::DevicePlacement;
use crate::memory::{Memory, MemoryOptions};

const MEM_BYTES: u64 = 64 << 20;
/// Bytes of each segment that are compared.
const COMPARED_BYTES: u64 = 64 << 10;

thread_local! {
    static MEMORY: Memory = Memory::new(MEM_BYTES, &MemoryOptions::default()).unwrap();
}

/// Loads the file that follows the first byte, with a command line of a length given by the first
/// byte.
pub fn kernel(bytes: &[u8]) {
    let Some((line, file)) = bytes.split_first() else { return };
    let line = "x".repeat(usize::from(*line) * 16);
    MEMORY.with(|memory| {
        let loaded = match kernel::load("the kernel", &mut Cursor::new(file), memory) {
            Ok(loaded) => loaded,
            Err(e) => return assert!(!e.to_string().is_empty()),
        };
        for &(start, end) in &loaded.segments {
            let first = Gfn::containing(start);
            let run = FrameRun { start: first, count: Gfn::containing(end - 1).0 - first.0 + 1 };
            assert!(start < end && memory.layout().contains(run), "{start:#x}..{end:#x}");
        }
        let before = contents(memory, &loaded);
        let devices = [DevicePlacement { base: 0xd000_0000, irq: 5 }];
        let machine = DescribedMachine { vcpus: 2, devices: &devices, has_keyboard: true };
        let Ok(entry) = enter(machine, memory, &loaded, None, &line) else { return };
        let (Entry::Pvh { rip, .. } | Entry::Linux64 { rip, .. }) = entry;
        assert!(loaded.segments.iter().any(|s| (s.0..s.1).contains(&rip)), "{entry:?}");
        assert!(contents(memory, &loaded) == before, "boot information overwrites the kernel");
    });
}

fn contents(memory: &Memory, loaded: &Loaded) -> Vec<Vec<u8>> {
    let content = |&(start, end): &(u64, u64)| {
        let mut bytes = vec![0; (end - start).min(COMPARED_BYTES) as usize];
        memory.ram().read_slice(&mut bytes, GuestAddress(start)).unwrap();
        bytes
    };
    loaded.segments.iter().map(content).collect()
}
