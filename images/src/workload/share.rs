//! The part of the working set that one vCPU owns: which page comes next, its expected content, and
//! its next content.

use super::pace::MAX_SAVED;
use super::page::{
    GENERATION_WORD, Mismatch, MismatchKind, PageHead, PageMemory, check_body, fill_body,
};
use super::pattern::{
    Generator, Pattern, SWEEP_EVERY, SWEEP_EVERY_PACED, Zipf, generation_after, next_generation,
};
use super::settings::{BodyFill, CheckMode, PayloadRing, PayloadSpec, WriteRate};

/// Distance, in visits, at which a page is prefetched before its visit.
const LOOK_AHEAD: u64 = 8;

/// A run of working-set pages that one vCPU owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Share {
    /// vCPU that owns the share. Its index is in the head of each page.
    pub vcpu: u32,
    /// First page within the working set.
    pub first: u64,
    /// Number of pages.
    pub pages: u64,
}

impl Share {
    /// Returns the share of `vcpu` when `ws_pages` are split as evenly as possible among `vcpus`.
    ///
    /// ```
    /// use driftline_images::workload::Share;
    /// let shares: Vec<_> = (0..3).map(|vcpu| Share::of(10, 3, vcpu)).collect();
    /// assert_eq!(shares.iter().map(|share| share.pages).sum::<u64>(), 10);
    /// assert_eq!(shares[1].first, shares[0].first + shares[0].pages);
    /// ```
    pub fn of(ws_pages: u64, vcpus: u32, vcpu: u32) -> Share {
        let vcpus = u64::from(vcpus.max(1));
        let vcpu_index = u64::from(vcpu);
        let (each, extra) = (ws_pages / vcpus, ws_pages % vcpus);
        Share {
            vcpu,
            first: each * vcpu_index + vcpu_index.min(extra),
            pages: each + u64::from(vcpu_index < extra),
        }
    }
}

/// The loop over one share, with its state between pages.
///
/// Patterns that [need a table](Pattern::needs_table) keep the expected generations in a slice that
/// the caller provides, one entry for each page of the share, zero at the start. The other patterns
/// compute them from the position.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Workload {
    share: Share,
    pattern: Pattern,
    fill: BodyFill,
    check: CheckMode,
    seed: u64,
    generator: Generator,
    zipf: Zipf,
    /// Number of pages that the pattern reaches.
    reach: u64,
    /// Visits of the current pass. With `seq`, `stride` and `once` also the position of the next
    /// visit.
    cursor: u64,
    /// The page that the sweep reads next.
    sweep_cursor: u64,
    sweep_every: u32,
    until_sweep: u32,
    passes: u64,
    pages: u64,
    errors: u64,
    swept: u64,
}

impl Workload {
    /// Creates a workload that has written nothing yet.
    pub fn new(spec: &PayloadSpec, share: Share) -> Self {
        // Reading an entire page takes long where ring 0 is emulated, and at full speed it takes
        // time from the writes.
        let paced = spec.rate != WriteRate::Max && spec.ring == PayloadRing::Three;
        let sweep_every = if paced { SWEEP_EVERY_PACED } else { SWEEP_EVERY };
        let pattern = spec.pattern_of(share.vcpu);
        Workload {
            share,
            pattern,
            fill: spec.fill,
            check: spec.check,
            seed: spec.seed,
            generator: Generator::new(spec.seed, u64::from(share.vcpu)),
            zipf: Zipf::new(share.pages),
            reach: pattern.reach(share.pages),
            cursor: 0,
            sweep_cursor: 0,
            sweep_every,
            until_sweep: sweep_every,
            passes: 0,
            pages: 0,
            errors: 0,
            swept: 0,
        }
    }

    /// Returns the share.
    pub fn share(&self) -> Share {
        self.share
    }

    /// Returns the completed rounds through the share (for `random` and `zipf`: as many visits as
    /// the share has pages).
    pub fn passes(&self) -> u64 {
        self.passes
    }

    /// Returns the number of page writes so far.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Returns the number of wrong pages found so far.
    pub fn errors(&self) -> u64 {
        self.errors
    }

    /// Returns the number of whole pages re-read so far, without those re-read before their
    /// rewrite.
    pub fn swept(&self) -> u64 {
        self.swept
    }

    /// Returns the required length of the table of expected generations.
    pub fn table_len(&self) -> usize {
        if self.pattern.needs_table() { self.share.pages as usize } else { 0 }
    }

    /// Returns whether this can be a state of the new workload `fresh`: the settings are the same,
    /// the positions lie in the share, and no counter is about to overflow.
    pub(super) fn is_state_of(&self, fresh: &Workload) -> bool {
        let settings = |w: &Workload| {
            (w.share, w.pattern, w.zipf, w.reach, w.fill, w.check, w.seed, w.sweep_every)
        };
        settings(self) == settings(fresh)
            && self.cursor < self.reach.max(1)
            && self.sweep_cursor < self.reach.max(1)
            && (1..=self.sweep_every).contains(&self.until_sweep)
            && [self.passes, self.pages, self.errors, self.swept].iter().all(|n| *n <= MAX_SAVED)
    }

    /// Visits one page: compares it with its last write, and writes the next generation. After
    /// every [`SWEEP_EVERY`] visits, or [`SWEEP_EVERY_PACED`] of a loop with a rate in ring 3, the
    /// sweep re-reads one more page as a whole. Each wrong page is counted and passed to `report`.
    #[inline(always)]
    pub fn step<M: PageMemory>(
        &mut self,
        memory: &mut M,
        table: &mut [u32],
        report: &mut impl FnMut(&Mismatch),
    ) {
        if self.reach == 0 {
            return;
        }
        let wrong = if matches!(self.pattern, Pattern::Once) && self.passes > 0 {
            self.check_whole(self.cursor, 1, memory)
        } else {
            self.pages += 1;
            let (index, expected, next) = self.next_visit(memory, table);
            self.rewrite(index, expected, next, memory)
        };
        self.record(wrong, report);
        self.advance();
        if self.check == CheckMode::AtEnd {
            return;
        }
        self.until_sweep -= 1;
        if self.until_sweep == 0 {
            self.until_sweep = self.sweep_every;
            let wrong = self.sweep(memory, table);
            self.record(wrong, report);
        }
    }

    #[inline(always)]
    fn record(&mut self, wrong: Option<Mismatch>, report: &mut impl FnMut(&Mismatch)) {
        if let Some(wrong) = wrong {
            self.errors += 1;
            report(&wrong);
        }
    }

    /// Returns the page to write now: its index in the share, its expected and its next generation.
    #[inline(always)]
    fn next_visit<M: PageMemory>(&mut self, memory: &M, table: &mut [u32]) -> (u64, u32, u32) {
        let index = match self.pattern {
            Pattern::Seq | Pattern::Once => self.cursor,
            Pattern::Stride(step) => self.cursor * u64::from(step),
            Pattern::Random => self.generator.below(self.share.pages),
            Pattern::Zipf => self.zipf.draw(&mut self.generator),
        };
        match (self.pattern, table.get_mut(index as usize)) {
            (Pattern::Random | Pattern::Zipf, Some(entry)) => {
                if matches!(self.pattern, Pattern::Random) {
                    let ahead = self.generator.peek(LOOK_AHEAD - 1, self.share.pages);
                    memory.prefetch(self.share.first + ahead);
                }
                let expected = *entry;
                *entry = next_generation(expected);
                (index, expected, *entry)
            }
            _ => {
                let step =
                    if let Pattern::Stride(step) = self.pattern { u64::from(step) } else { 1 };
                let ahead = index + LOOK_AHEAD * step;
                if ahead < self.share.pages {
                    memory.prefetch(self.share.first + ahead);
                }
                (index, generation_after(self.passes), generation_after(self.passes + 1))
            }
        }
    }

    #[inline(always)]
    fn rewrite<M: PageMemory>(
        &mut self,
        index: u64,
        expected_generation: u32,
        next_generation: u32,
        memory: &mut M,
    ) -> Option<Mismatch> {
        let page = self.share.first + index;
        if self.check == CheckMode::AtEnd && expected_generation != 0 {
            memory.write_u64(page, GENERATION_WORD, u64::from(next_generation));
            memory.wrote(page);
            return None;
        }
        let gfn = memory.gfn(page);
        let expected = PageHead::expected(self.seed, gfn, expected_generation, self.share.vcpu);
        let found = PageHead::read(memory, page);
        if expected_generation == 0 && self.fill == BodyFill::Random {
            fill_body(memory, page, self.seed, gfn);
        }
        PageHead::expected(self.seed, gfn, next_generation, self.share.vcpu).write(memory, page);
        memory.wrote(page);
        if expected.matches(&found) {
            return None;
        }
        Some(expected.diagnose(&found, self.seed, gfn))
    }

    #[inline(always)]
    fn advance(&mut self) {
        self.cursor += 1;
        if self.cursor == self.reach {
            self.cursor = 0;
            self.passes += 1;
        }
    }

    /// Re-reads the next page of the background sweep that has ever been written.
    #[inline(never)]
    fn sweep<M: PageMemory>(&mut self, memory: &M, table: &[u32]) -> Option<Mismatch> {
        let position = self.sweep_cursor;
        self.sweep_cursor = if position + 1 == self.reach { 0 } else { position + 1 };
        let (index, generation) = self.generation_at(position, table);
        // Pages that were never written are skipped: reading one would make the host back it with
        // memory.
        if generation == 0 {
            return None;
        }
        self.check_whole(index, generation, memory)
    }

    /// Checks the head of every page once, for a workload that does not check while it writes.
    #[inline(never)]
    pub fn check_at_end<M: PageMemory>(
        &mut self,
        memory: &M,
        table: &[u32],
        report: &mut impl FnMut(&Mismatch),
    ) {
        if self.check != CheckMode::AtEnd {
            return;
        }
        for position in 0..self.reach {
            let (index, generation) = self.generation_at(position, table);
            // Visits after the first one changed only the word of the generation.
            let page = self.share.first + index;
            let gfn = memory.gfn(page);
            let first = generation.min(1);
            let expected = PageHead {
                generation: u64::from(generation),
                ..PageHead::expected(self.seed, gfn, first, self.share.vcpu)
            };
            let found = PageHead::read(memory, page);
            self.swept += 1;
            if !expected.matches(&found) {
                self.record(Some(expected.diagnose(&found, self.seed, gfn)), report);
            }
        }
    }

    /// Returns the index and the present generation of the page that the pattern visits at this
    /// position of a pass.
    fn generation_at(&self, position: u64, table: &[u32]) -> (u64, u32) {
        let index = match self.pattern {
            Pattern::Stride(step) => position * u64::from(step),
            _ => position,
        };
        let generation = match self.pattern {
            Pattern::Random | Pattern::Zipf => table.get(index as usize).copied().unwrap_or(0),
            Pattern::Once if self.passes > 0 => 1,
            _ => generation_after(self.passes + u64::from(position < self.cursor)),
        };
        (index, generation)
    }

    /// Compares all 512 words of a page with their expected values.
    fn check_whole<M: PageMemory>(
        &mut self,
        index: u64,
        generation: u32,
        memory: &M,
    ) -> Option<Mismatch> {
        self.swept += 1;
        let page = self.share.first + index;
        let gfn = memory.gfn(page);
        let expected = PageHead::expected(self.seed, gfn, generation, self.share.vcpu);
        let found = PageHead::read(memory, page);
        if !expected.matches(&found) {
            return Some(expected.diagnose(&found, self.seed, gfn));
        }
        let (word, wanted, actual) =
            check_body(memory, page, self.seed, gfn, self.fill == BodyFill::Random)?;
        Some(Mismatch {
            gfn,
            kind: MismatchKind::Body,
            expected_generation: expected.generation,
            found_generation: found.generation,
            word,
            expected: wanted,
            found: actual,
        })
    }
}
