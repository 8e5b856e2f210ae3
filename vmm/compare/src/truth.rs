//! Determines which pages a payload guest has written, by reading its memory while it is paused:
//! each page of the working set counts its writes.

use std::num::TryFromIntError;
use std::sync::atomic::{AtomicU64, Ordering};

use driftline_dirty_tracker::{FrameRun, Gfn, PAGE_SIZE};
use driftline_guest::{Guest, GuestRam};
use driftline_images::workload::{PAGE_WORDS, STAMP_WORD, Segment, Share, WorkingSetPlacement};
use driftline_images::{PayloadSpec, PayloadSpecError};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryError, VolatileMemory};

/// Index of the word in a page that counts its writes.
const GENERATION: usize = 1;

/// Number of pages of each vCPU's share that are read to estimate how much of the share has been
/// written.
const SAMPLES: u64 = 32;

/// The reason why a guest's pages cannot be compared with the reports.
#[derive(Debug, thiserror::Error)]
pub(super) enum TruthError {
    /// The payload's spec is invalid.
    #[error(transparent)]
    Spec(#[from] PayloadSpecError),
    /// Guest memory is too small for the working set.
    #[error("its working set of {wanted} pages does not fit: memory has room for {available}")]
    Misfit {
        /// Pages of the working set.
        wanted: u64,
        /// Pages that guest memory has for it.
        available: u64,
    },
    /// The working set is too large for this process.
    #[error("its working set is too large: {0}")]
    TooLarge(#[from] TryFromIntError),
    /// Guest memory cannot be read.
    #[error("its working set cannot be read: {0}")]
    Memory(#[from] GuestMemoryError),
}

/// The pages' content at the last check, and the reports since then.
pub(super) struct GroundTruth {
    spec: PayloadSpec,
    segments: Vec<Segment>,
    /// Generation and stamp of each page of the working set at the last check.
    last_content: Vec<[u64; 2]>,
    reported: Vec<bool>,
    /// Number of reported frames outside the working set.
    beside: u64,
}

/// Comparison of reports and writes between two checks. Frames are counted once per check. A check
/// is strict if exactly one epoch lies between it and the previous one; the count is then once per
/// epoch. With more epochs, one report of a page hides that another was lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Audit {
    /// Number of checks.
    pub(super) checks: u64,
    /// Number of page writes.
    pub(super) writes: u64,
    /// Number of pages written.
    pub(super) written: u64,
    /// Number of frames reported, including those outside the working set.
    pub(super) reported: u64,
    /// Number of pages written and not reported.
    pub(super) missed: u64,
    /// Number of pages of the working set reported and not written. Each vCPU may cause one: it
    /// stopped between two stores, of which the first changed nothing.
    pub(super) extra: u64,
    /// Number of reported frames outside the working set, such as stacks, tables and clocks.
    /// Nothing is known of their writes.
    pub(super) beside: u64,
}

impl Audit {
    /// Adds the counts of `other`.
    pub(super) fn add(&mut self, other: &Audit) {
        self.checks += other.checks;
        self.writes += other.writes;
        self.written += other.written;
        self.reported += other.reported;
        self.missed += other.missed;
        self.extra += other.extra;
        self.beside += other.beside;
    }

    /// Counts one page, given its content at the last check, its content now, and whether it was
    /// reported.
    fn add_page(&mut self, before: [u64; 2], now: [u64; 2], reported: bool) {
        let written = before != now;
        // Generations wrap past 0, because 0 means never written.
        let wrapped = if now[0] < before[0] { u64::from(u32::MAX) } else { 0 };
        self.writes += now[0].saturating_add(wrapped).saturating_sub(before[0]);
        self.written += u64::from(written);
        self.reported += u64::from(reported);
        self.missed += u64::from(written && !reported);
        self.extra += u64::from(reported && !written);
    }
}

impl GroundTruth {
    /// Prepares the comparison for a guest that runs `spec`.
    ///
    /// # Errors
    ///
    /// The spec is invalid, or its working set does not fit into guest memory.
    pub(super) fn new(spec: &str, guest: &dyn Guest) -> Result<Self, TruthError> {
        let spec: PayloadSpec = spec.parse()?;
        let ram = guest.layout().slots().map(|s| (s.base.gpa(), s.run().bytes()));
        let placement = WorkingSetPlacement::new(&spec, ram)
            .map_err(|e| TruthError::Misfit { wanted: e.wanted, available: e.available })?;
        let pages = usize::try_from(spec.ws_pages())?;
        Ok(Self {
            spec,
            segments: placement.segments().to_vec(),
            last_content: vec![[0; 2]; pages],
            reported: vec![false; pages],
            beside: 0,
        })
    }

    /// Returns the frames of the working set.
    pub(super) fn frames(&self) -> impl Iterator<Item = FrameRun> {
        self.segments.iter().map(|s| FrameRun { start: Gfn(s.gfn), count: s.pages })
    }

    /// Estimates from a sample of pages what share of its working set, between 0 and 1, the guest
    /// has written.
    pub(super) fn written_share(&self, ram: &GuestRam, vcpus: u8) -> f64 {
        let (mut written, mut sampled) = (0u32, 0u32);
        for vcpu in 0..u32::from(vcpus) {
            let share = Share::of(self.spec.ws_pages(), u32::from(vcpus), vcpu);
            let pattern = self.spec.pattern_of(vcpu);
            let reach = pattern.reach(share.pages);
            let step = share.pages.checked_div(reach).unwrap_or(1).max(1);
            let samples = reach.min(SAMPLES);
            for sample in 1..=samples {
                let place = reach * sample / samples - 1;
                sampled += 1;
                written += u32::from(self.word(ram, share.first + place * step, GENERATION) != 0);
            }
        }
        if sampled == 0 { 1.0 } else { f64::from(written) / f64::from(sampled) }
    }

    fn word(&self, ram: &GuestRam, page: u64, word: usize) -> u64 {
        let segment = self.segments.iter().find(|s| page.wrapping_sub(s.first) < s.pages);
        let Some(s) = segment else { return 0 };
        let at = GuestAddress((s.gfn + page - s.first) * PAGE_SIZE + word as u64 * 8);
        let slice = ram.get_slice(at, 8);
        // A page that does not exist was never written.
        let word = slice.and_then(|s| {
            s.get_atomic_ref::<AtomicU64>(0).map(|w| w.load(Ordering::Relaxed)).map_err(Into::into)
        });
        word.unwrap_or(0)
    }

    /// Records that these frames were reported as dirty.
    pub(super) fn report(&mut self, runs: impl Iterator<Item = FrameRun>) {
        for run in runs {
            let mut inside = 0;
            for s in &self.segments {
                let start = run.start.0.max(s.gfn);
                let end = run.end().min(Gfn(s.gfn + s.pages)).0;
                for gfn in start..end {
                    if let Some(page) = self.reported.get_mut((s.first + gfn - s.gfn) as usize) {
                        *page = true;
                    }
                    inside += 1;
                }
            }
            self.beside += run.count - inside;
        }
    }

    /// Reads all pages of the working set of a paused guest, and compares them with the reports
    /// since the last check.
    ///
    /// # Errors
    ///
    /// Guest memory cannot be read.
    pub(super) fn check(&mut self, ram: &GuestRam) -> Result<Audit, TruthError> {
        let mut audit =
            Audit { checks: 1, beside: self.beside, reported: self.beside, ..Audit::default() };
        for s in &self.segments {
            let bytes = usize::try_from(s.pages * PAGE_SIZE)?;
            let slice = ram.get_slice(GuestAddress(s.gfn * PAGE_SIZE), bytes)?;
            let range = s.first as usize..(s.first + s.pages) as usize;
            let contents = self.last_content.get_mut(range.clone()).unwrap_or_default();
            let reported = self.reported.get_mut(range).unwrap_or_default();
            for (page, (last, reported)) in contents.iter_mut().zip(reported).enumerate() {
                let word = |word: usize| {
                    let at = (page * PAGE_WORDS + word) * 8;
                    slice.get_atomic_ref::<AtomicU64>(at).map_or(0, |w| w.load(Ordering::Relaxed))
                };
                let now = [word(GENERATION), word(STAMP_WORD)];
                let before = std::mem::replace(last, now);
                audit.add_page(before, now, std::mem::take(reported));
            }
        }
        self.beside = 0;
        Ok(audit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_is_judged_by_content_and_reports() {
        let counts = |before, now, reported| {
            let mut audit = Audit::default();
            audit.add_page(before, now, reported);
            (audit.writes, audit.written, audit.missed, audit.extra)
        };
        assert_eq!(counts([1, 7], [4, 9], true), (3, 1, 0, 0));
        assert_eq!(counts([1, 7], [4, 9], false), (3, 1, 1, 0), "a lost frame is missed");
        assert_eq!(counts([4, 9], [4, 9], true), (0, 0, 0, 1));
        assert_eq!(counts([4, 9], [4, 9], false), (0, 0, 0, 0));
        assert_eq!(counts([4, 9], [4, 8], false), (0, 1, 1, 0), "the end of a visit is a write");
        assert_eq!(counts([u64::from(u32::MAX), 1], [1, 2], true), (1, 1, 0, 0));
    }
}
