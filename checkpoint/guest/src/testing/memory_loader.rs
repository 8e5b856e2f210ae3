//! Fills the memory of a test guest, and tells the guest while this is in progress.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use driftline_dirty_tracker::FrameRun;
use vm_memory::{Bytes, GuestAddress};

use super::faults::{Faults, Op};
use crate::contents::GuestRam;
use crate::error::GuestError;
use crate::populate::MemoryLoader;

/// Memory that is being filled: nothing else may touch it.
pub(super) struct TestMemoryLoader {
    ram: GuestRam,
    filling: Arc<AtomicBool>,
    faults: Arc<Faults>,
}

impl TestMemoryLoader {
    pub(super) fn begin(ram: GuestRam, filling: Arc<AtomicBool>, faults: Arc<Faults>) -> Self {
        filling.store(true, SeqCst);
        Self { ram, filling, faults }
    }
}

impl MemoryLoader for TestMemoryLoader {
    fn fill(&self, run: FrameRun, contents: &[u8]) -> Result<(), GuestError> {
        self.faults.check(Op::LoadMemory, "filling memory")?;
        let written = self.ram.write_slice(contents, GuestAddress(run.start.gpa()));
        written.map_err(|e| GuestError::System { what: "filling memory", cause: e.into() })
    }

    fn available(&self) -> u64 {
        u64::MAX
    }
}

impl Drop for TestMemoryLoader {
    fn drop(&mut self) {
        self.filling.store(false, SeqCst);
    }
}
