//! Time: how many page writes the rate allows, until when to sleep, and the longest gap.

use super::page::PAGE_SIZE;
use super::settings::{PayloadSpec, WriteRate};

/// Length of the slices in which the vCPU sleeps when its rate allows it.
pub const SLICE_NS: u64 = 1_000_000;
/// Longest sleep, however low the rate.
const LONGEST_SLEEP_NS: u64 = 50_000_000;
/// Page writes that were missed longer ago than this are not made up for.
const LONGEST_DEBT_NS: u64 = 100_000_000;
/// Latest time, in nanoseconds, and highest count of anything else, in a loop from a file. No loop
/// gets there by itself, and it leaves room for the loop to continue.
pub(super) const MAX_SAVED: u64 = 1 << 62;
/// One page in the unit of credit, bytes a second times nanoseconds.
const PAGE_CREDIT: u64 = PAGE_SIZE * 1_000_000_000;

/// Grants page writes at an exact rate: a remainder of one slice counts in the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Pacer {
    /// Bytes a second; 0 means no limit.
    rate: u64,
    /// Pages that are written in one burst.
    burst: u64,
    credit: u64,
    last_ns: u64,
    slice_end_ns: u64,
}

impl Pacer {
    /// Creates the pacer of one of `vcpus` vCPUs, which share the rate evenly.
    pub fn new(spec: &PayloadSpec, vcpus: u32, now_ns: u64) -> Self {
        let rate = match spec.rate {
            WriteRate::Max => 0,
            WriteRate::BytesPerSecond(rate) => (rate / u64::from(vcpus.max(1))).max(1),
        };
        Pacer { rate, burst: spec.burst, credit: 0, last_ns: now_ns, slice_end_ns: now_ns }
    }

    /// Returns how many pages may be written now.
    #[inline(always)]
    pub fn due(&mut self, now_ns: u64) -> u64 {
        if self.rate == 0 {
            return u64::MAX;
        }
        let elapsed = now_ns.saturating_sub(self.last_ns).min(LONGEST_DEBT_NS);
        self.last_ns = self.last_ns.max(now_ns);
        // A rate is at most 2^36, so neither product nor sum can overflow.
        self.credit = (self.credit + elapsed * self.rate).min(self.most_credit());
        self.credit / PAGE_CREDIT
    }

    #[inline(always)]
    fn most_credit(&self) -> u64 {
        (self.rate * LONGEST_DEBT_NS).max(self.burst * PAGE_CREDIT)
    }

    /// Returns whether this can be a state of the new pacer `fresh`.
    pub(super) fn is_state_of(&self, fresh: &Pacer) -> bool {
        (self.rate, self.burst) == (fresh.rate, fresh.burst)
            && self.credit <= self.most_credit()
            && self.last_ns.max(self.slice_end_ns) <= MAX_SAVED
    }

    /// Records `pages` written, at most as many as were due.
    #[inline(always)]
    pub fn take(&mut self, pages: u64) {
        if self.rate != 0 {
            self.credit -= pages * PAGE_CREDIT;
        }
    }

    /// Returns when to wake once nothing is due: at the end of the slice, or when a burst is due.
    pub fn wake_ns(&mut self, now_ns: u64) -> u64 {
        let missing = (self.burst * PAGE_CREDIT).saturating_sub(self.credit);
        let due_ns = self.last_ns + missing.div_ceil(self.rate.max(1));
        let next = self.slice_end_ns + SLICE_NS;
        let slice_end = if next > now_ns { next } else { now_ns + SLICE_NS };
        let wake = due_ns.max(slice_end).min(now_ns + LONGEST_SLEEP_NS);
        self.slice_end_ns = wake;
        wake
    }
}

/// The longest time without progress of one loop, without intended sleep. Ticks and printed bytes
/// are progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TickGap {
    due_ns: u64,
    since_line_ns: u64,
    max_ns: u64,
}

impl TickGap {
    /// Starts counting at `now_ns`.
    pub fn new(now_ns: u64) -> Self {
        TickGap { due_ns: now_ns, since_line_ns: 0, max_ns: 0 }
    }

    /// Records a tick. The time since the last tick, or since the requested wake time, counts.
    #[inline(always)]
    pub fn tick(&mut self, now_ns: u64) {
        let gap = now_ns.saturating_sub(self.due_ns);
        self.due_ns = now_ns;
        if gap > self.since_line_ns {
            self.since_line_ns = gap;
            self.max_ns = self.max_ns.max(gap);
        }
    }

    /// Records progress between two ticks, such as a printed byte: as [`tick`](Self::tick), except
    /// that an intended sleep whose end has not come is kept.
    #[inline(always)]
    pub fn progress(&mut self, now_ns: u64) {
        if now_ns > self.due_ns {
            self.tick(now_ns);
        }
    }

    /// Records that the loop sleeps until `wake_ns`. A late wake-up counts, the sleep itself does
    /// not.
    #[inline(always)]
    pub fn sleep_until(&mut self, wake_ns: u64) {
        self.due_ns = self.due_ns.max(wake_ns);
    }

    /// Returns the longest gap so far, in microseconds.
    pub fn max_us(&self) -> u64 {
        self.max_ns / 1_000
    }

    /// Returns the longest gap since the last call, in microseconds.
    pub fn take_us(&mut self) -> u64 {
        core::mem::take(&mut self.since_line_ns) / 1_000
    }
}
