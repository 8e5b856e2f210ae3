//! What a test sees of a guest: its progress and its memory.

use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use vm_memory::{Bytes, GuestAddress};

use super::MemoryGuest;
use crate::blocks::PAGE_BYTES;
use crate::testing::pages::{WrongFrame, WrongMemory, fill, nth_frame};

/// Maximum number of wrong frames listed individually.
const LISTED: usize = 8;

/// Longest wait for writes. Far above what a busy host needs.
const WRITES_LIMIT: Duration = Duration::from_secs(60);

/// Returns all memory of `guest`, slot after slot.
///
/// # Panics
///
/// The guest's layout has a slot that its memory lacks.
pub fn image(guest: &MemoryGuest) -> Vec<u8> {
    let mut all = Vec::new();
    for run in guest.layout.slots().map(|slot| slot.run()) {
        let at = all.len();
        all.resize(at + run.bytes() as usize, 0);
        let read = guest.ram.read_slice(&mut all[at..], GuestAddress(run.start.gpa()));
        assert!(read.is_ok(), "memory has no {run:?}");
    }
    all
}

impl MemoryGuest {
    /// Returns the page writes of all writers since the guest was first started, on any host.
    pub fn writes(&self) -> u64 {
        self.writers.iter().map(|w| w.steps.load(SeqCst)).sum()
    }

    /// Waits until its writers have written `more` pages from now on, however busy the host is.
    ///
    /// # Panics
    ///
    /// They have not within a minute.
    #[track_caller]
    pub fn wait_for_writes(&self, more: u64) {
        let (before, since) = (self.writes(), Instant::now());
        while self.writes() < before + more {
            let written = self.writes() - before;
            assert!(since.elapsed() < WRITES_LIMIT, "{written} pages written, not {more}");
            std::thread::yield_now();
        }
    }

    /// Compares all of memory with what must have been written last; stops the writers meanwhile.
    ///
    /// # Errors
    ///
    /// Memory differs, or a writer found a wrong frame before.
    pub fn verify(&self) -> Result<(), WrongMemory> {
        self.gate.while_parked(|| self.compare())
    }

    fn compare(&self) -> Result<(), WrongMemory> {
        let writer_errors = self.writers.iter().map(|w| w.errors.load(SeqCst)).sum();
        let mut wrong = WrongMemory { frames: 0, first: Vec::new(), writer_errors };
        let (mut page, mut found) = ([0; PAGE_BYTES], [0; PAGE_BYTES]);
        for n in 0..self.layout.frames() {
            let Some(gfn) = nth_frame(&self.layout, n) else { continue };
            let expected = self.generation(n);
            fill(&mut page, gfn, expected);
            let read = self.ram.read_slice(&mut found[..], GuestAddress(gfn.gpa()));
            if read.is_err() || found != page {
                wrong.frames += 1;
                if wrong.first.len() < LISTED {
                    let word = |at| u64::from_le_bytes(std::array::from_fn(|i| found[at + i]));
                    wrong.first.push(WrongFrame {
                        gfn,
                        expected,
                        found_gfn: word(0),
                        found: word(8),
                    });
                }
            }
        }
        if wrong.frames == 0 && writer_errors == 0 { Ok(()) } else { Err(wrong) }
    }

    /// Returns the generation that the `n`-th frame of memory must hold.
    fn generation(&self, n: u64) -> u64 {
        if n >= self.config.working_set || self.writers.is_empty() {
            return 0;
        }
        let of = self.writers.len() as u64;
        let writer = &self.writers[(n % of) as usize];
        writer.sweep.generation(n / of, writer.steps.load(SeqCst))
    }
}
