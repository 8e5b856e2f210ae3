//! Chooses the page size for memory that is populated ahead of the guest's writes: huge pages, as
//! long as they cost less than the small pages of the same range.
//!
//! Mostly they do: one fault instead of 512. But a host without free huge pages compacts memory to
//! make one. A host that is itself a guest may have returned whole free blocks to its own host and
//! must fetch them again, while small pages come from recently freed memory. A huge page then takes
//! milliseconds, and a migration waits for each. So this module measures both page sizes.
//!
//! The first table of `cargo bench -p driftline-backends --bench huge_pages` compares the choice
//! with each page size alone. The rate of pass 0 in the table "throughput" of
//! `cargo bench -p tests --bench migrate_vs_qemu` includes its effect.

use std::io;
use std::time::Duration;

use parking_lot::Mutex;

use super::backing::{HUGE_PAGE, HugeRanges, populate_piece};

/// A huge page that takes at most this long is used without trying small pages: it costs little
/// more than clearing it does.
const CHEAP_HUGE_PAGE: Duration = Duration::from_micros(300);

/// Ranges that are populated with the cheaper page size before the other is tried again. The number
/// doubles each time the other proves more expensive, up to the maximum. 8 and 128, chosen: a trial
/// that fails costs some milliseconds, so at first a ninth of the ranges pays for trials and later
/// less than a hundredth; a change of the host is noticed after at most 256 MiB.
const FIRST_TRIAL_INTERVAL: u32 = 8;
const MAX_TRIAL_INTERVAL: u32 = 128;

/// The pages with which a range of a huge page's size is populated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum PrefaultPages {
    Huge,
    Small,
}

/// The last measured cost of each page size.
#[derive(Debug)]
struct PrefaultCosts {
    huge: Option<Duration>,
    small: Option<Duration>,
    /// Ranges populated since the more expensive page size was last tried.
    since: u32,
    /// Number of ranges after which the more expensive page size is tried again.
    trial_interval: u32,
}

impl Default for PrefaultCosts {
    fn default() -> Self {
        Self { huge: None, small: None, since: 0, trial_interval: FIRST_TRIAL_INTERVAL }
    }
}

impl PrefaultCosts {
    fn choose(&mut self) -> PrefaultPages {
        let Some(huge) = self.huge.filter(|took| *took > CHEAP_HUGE_PAGE) else {
            return PrefaultPages::Huge;
        };
        let Some(small) = self.small else { return PrefaultPages::Small };
        let (better, worse) = match huge <= small {
            true => (PrefaultPages::Huge, PrefaultPages::Small),
            false => (PrefaultPages::Small, PrefaultPages::Huge),
        };
        self.since += 1;
        if self.since <= self.trial_interval {
            return better;
        }
        self.since = 0;
        self.trial_interval = (self.trial_interval * 2).min(MAX_TRIAL_INTERVAL);
        worse
    }

    fn record(&mut self, pages: PrefaultPages, took: Duration) {
        let huge_was_better = self.huge <= self.small;
        match pages {
            PrefaultPages::Huge => self.huge = Some(took),
            PrefaultPages::Small => self.small = Some(took),
        }
        if (self.huge <= self.small) != huge_was_better {
            (self.since, self.trial_interval) = (0, FIRST_TRIAL_INTERVAL);
        }
    }
}

#[derive(Debug, Default)]
struct PrefaultState {
    costs: PrefaultCosts,
    ranges: HugeRanges,
}

/// Prefaults memory whose page size the options leave open: knows which ranges have huge page
/// advice, and what each page size costs.
#[derive(Debug, Default)]
pub(super) struct AdaptivePrefault(Mutex<PrefaultState>);

impl AdaptivePrefault {
    /// Populates `len` bytes at `start`, part of a mapping of this process, now, on this thread.
    pub(super) fn populate(&self, start: usize, len: usize) -> io::Result<()> {
        let huge = HUGE_PAGE as usize;
        let end = start + len;
        let mut at = start;
        while at < end {
            let next = (at + 1).next_multiple_of(huge).min(end);
            match at.is_multiple_of(huge) && next - at == huge {
                true => self.populate_huge(at)?,
                false => populate_piece(at, next - at)?,
            }
            at = next;
        }
        Ok(())
    }

    /// Populates the range of one huge page.
    fn populate_huge(&self, start: usize) -> io::Result<()> {
        let state = || self.0.lock();
        let pages = {
            let mut state = state();
            match state.costs.choose() {
                PrefaultPages::Huge if state.ranges.prefer(start, HUGE_PAGE as usize) => {
                    PrefaultPages::Huge
                }
                _ => PrefaultPages::Small,
            }
        };
        let begun = thread_cpu_time();
        populate_piece(start, HUGE_PAGE as usize)?;
        let took = thread_cpu_time().saturating_sub(begun);
        tracing::trace!(?pages, ?took, "populated");
        state().costs.record(pages, took);
        Ok(())
    }
}

/// Returns the CPU time of this thread. Time in which other threads run is not part of what pages
/// cost.
fn thread_cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // Not by rustix: its first clock call uses prctl to find the vDSO, which the sandbox denies to
    // these threads.
    // SAFETY: the call writes to `time` alone.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns how many of `count` are huge if each way costs this many microseconds.
    fn huge_of(costs: &mut PrefaultCosts, count: usize, huge: u64, small: u64) -> usize {
        let taken = |_| {
            let pages = costs.choose();
            let us = if pages == PrefaultPages::Huge { huge } else { small };
            costs.record(pages, Duration::from_micros(us));
            pages
        };
        (0..count).map(taken).filter(|pages| *pages == PrefaultPages::Huge).count()
    }

    #[test]
    fn huge_pages_that_cost_little_are_always_taken() {
        assert_eq!(huge_of(&mut PrefaultCosts::default(), 1000, 120, 700), 1000);
    }

    #[test]
    fn expensive_huge_pages_are_seldom_tried() {
        let mut costs = PrefaultCosts::default();
        let of_a_guest = huge_of(&mut costs, 512, 4000, 700);
        assert!((2..=7).contains(&of_a_guest), "{of_a_guest}");
        let later = huge_of(&mut costs, 1280, 4000, 700);
        assert!((9..=11).contains(&later), "{later}");
    }

    #[test]
    fn changed_costs_change_the_choice() {
        let mut costs = PrefaultCosts::default();
        huge_of(&mut costs, 1000, 4000, 700);
        // Huge pages are cheap again: all are huge after the next trial at the latest.
        assert!(huge_of(&mut costs, 1000, 120, 700) >= 1000 - MAX_TRIAL_INTERVAL as usize - 1);
        // Huge pages become expensive again: the choice changes immediately.
        assert!(huge_of(&mut costs, 100, 4000, 700) < 10);
    }

    #[test]
    fn cheaper_page_size_wins_if_both_are_expensive() {
        let mut costs = PrefaultCosts::default();
        let huge = huge_of(&mut costs, 1000, 800, 900);
        assert!(huge > 950, "{huge}");
    }
}
