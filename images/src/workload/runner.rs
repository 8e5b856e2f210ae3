//! The loop of one vCPU: ticks of a few page visits each at the configured rate, a line at each
//! interval, and an end.

use super::line::LineBuffer;
use super::pace::{MAX_SAVED, Pacer, TickGap};
use super::page::{Mismatch, PageMemory};
use super::settings::{CheckMode, IdleMode, PayloadSpec, WriteRate, write_pattern, write_size};
use super::share::{Share, Workload};

/// Number of pages visited between two reads of the clock.
pub const BATCH: u64 = 16;
/// The same for a loop that checks nothing while it writes: reading the clock costs as much as
/// several writes.
const BARE_BATCH: u64 = 256;
/// Number of wrong pages that are reported in a line of their own.
pub const ERROR_LINES: u64 = 10;

/// The result of a tick: what the caller does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TickOutcome {
    /// Call `tick` again immediately.
    TickAgain,
    /// Call `tick` at this time, ns; there is nothing to do before.
    SleepUntil(u64),
    /// The loop has ended and printed its last line.
    Done,
}

/// The loop of one vCPU. It has no clock and no console: the caller passes the time in and takes
/// the lines out.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Runner {
    workload: Workload,
    pacer: Pacer,
    gap: TickGap,
    batch: u64,
    idle: IdleMode,
    /// Time until which the loop spins.
    spin_until_ns: u64,
    start_ns: u64,
    report_ns: u64,
    next_report_ns: u64,
    end_ns: u64,
    end_passes: u64,
    error_lines: u64,
    done: bool,
}

impl Runner {
    /// Creates the loop of `vcpu`, one of `vcpus`, beginning at `now_ns`.
    pub fn new(spec: &PayloadSpec, vcpus: u32, vcpu: u32, now_ns: u64) -> Self {
        let seconds = spec.seconds.map(|seconds| seconds.saturating_mul(1_000_000_000));
        let report_ns = spec.report_ms * 1_000_000;
        Runner {
            workload: Workload::new(spec, Share::of(spec.ws_pages(), vcpus, vcpu)),
            pacer: Pacer::new(spec, vcpus, now_ns),
            gap: TickGap::new(now_ns),
            batch: if spec.check == CheckMode::AtEnd { BARE_BATCH } else { BATCH },
            idle: spec.idle,
            spin_until_ns: 0,
            start_ns: now_ns,
            report_ns,
            next_report_ns: now_ns + report_ns,
            end_ns: seconds.map_or(u64::MAX, |length| now_ns.saturating_add(length)),
            end_passes: spec.passes.unwrap_or(u64::MAX),
            error_lines: 0,
            done: false,
        }
    }

    /// Returns the workload, for its counters.
    pub fn workload(&self) -> &Workload {
        &self.workload
    }

    /// Returns whether this can be the loop of `vcpu`, one of `vcpus`, with this specification. A
    /// loop from a file need not be: with other settings or positions a tick may never end.
    pub fn is_state_of(&self, spec: &PayloadSpec, vcpus: u32, vcpu: u32) -> bool {
        let fresh = Runner::new(spec, vcpus, vcpu, 0);
        self.workload.is_state_of(&fresh.workload)
            && self.pacer.is_state_of(&fresh.pacer)
            && (self.batch, self.idle) == (fresh.batch, fresh.idle)
            && (self.report_ns, self.end_passes) == (fresh.report_ns, fresh.end_passes)
            && self.next_report_ns.max(self.spin_until_ns) <= MAX_SAVED
            && self.error_lines <= ERROR_LINES
    }

    /// Visits the pages that are due, at most [`BATCH`] (more if visits check nothing). `table` is
    /// the workload's table (see [`Workload::table_len`]). `print` receives whole lines with their
    /// newline.
    #[inline(always)]
    pub fn tick<M: PageMemory>(
        &mut self,
        now_ns: u64,
        memory: &mut M,
        table: &mut [u32],
        print: &mut impl FnMut(&[u8]),
    ) -> TickOutcome {
        if self.done {
            return TickOutcome::Done;
        }
        self.gap.tick(now_ns);
        if now_ns < self.spin_until_ns {
            return TickOutcome::TickAgain;
        }
        let due = self.pacer.due(now_ns);
        let now_due = due.min(self.batch);
        let vcpu = self.workload.share().vcpu;
        let error_lines = &mut self.error_lines;
        for _ in 0..now_due {
            self.workload
                .step(memory, table, &mut |wrong| report_mismatch(vcpu, error_lines, wrong, print));
        }
        self.pacer.take(now_due);
        if now_ns >= self.end_ns || self.workload.passes() >= self.end_passes {
            self.done = true;
            self.workload.check_at_end(memory, table, &mut |wrong| {
                report_mismatch(vcpu, &mut self.error_lines, wrong, print);
            });
            self.report(now_ns, print);
            return TickOutcome::Done;
        }
        if now_ns >= self.next_report_ns {
            self.next_report_ns += self.report_ns;
            if self.next_report_ns <= now_ns {
                self.next_report_ns = now_ns + self.report_ns;
            }
            self.report(now_ns, print);
        }
        if due > now_due {
            return TickOutcome::TickAgain;
        }
        let wake_ns = self.pacer.wake_ns(now_ns);
        if wake_ns <= now_ns {
            return TickOutcome::TickAgain;
        }
        if self.idle == IdleMode::Spin {
            self.spin_until_ns = wake_ns;
            return TickOutcome::TickAgain;
        }
        self.gap.sleep_until(wake_ns);
        TickOutcome::SleepUntil(wake_ns)
    }

    /// Records progress while the loop prints, so that printing does not count as a gap.
    #[inline(always)]
    pub fn progress(&mut self, now_ns: u64) {
        self.gap.progress(now_ns);
    }

    #[cold]
    #[inline(never)]
    fn report(&mut self, now_ns: u64, print: &mut impl FnMut(&[u8])) {
        let mut line = LineBuffer::new();
        line.text("payload vcpu=").number(u64::from(self.workload.share().vcpu));
        if self.done {
            line.text(" done");
        }
        line.field("t_ms", now_ns.saturating_sub(self.start_ns) / 1_000_000)
            .field("passes", self.workload.passes())
            .field("pages", self.workload.pages())
            .field("errors", self.workload.errors())
            .field("max_gap_us", self.gap.max_us())
            .field("gap_us", self.gap.take_us())
            .byte(b'\n');
        print(line.as_bytes());
    }
}

/// Prints a line about a wrong page, unless [`ERROR_LINES`] have been printed.
#[cold]
#[inline(never)]
fn report_mismatch(vcpu: u32, lines: &mut u64, wrong: &Mismatch, print: &mut impl FnMut(&[u8])) {
    if *lines == ERROR_LINES {
        return;
    }
    *lines += 1;
    let mut line = LineBuffer::new();
    line.text("payload vcpu=").number(u64::from(vcpu)).text(" error gfn=").hex(wrong.gfn);
    line.text(" kind=").text(wrong.kind.as_str());
    line.field("expected_generation", wrong.expected_generation)
        .field("found_generation", wrong.found_generation)
        .field("word", wrong.word as u64);
    line.text(" expected=").hex(wrong.expected).text(" found=").hex(wrong.found).byte(b'\n');
    print(line.as_bytes());
}

/// Returns the line that vCPU 0 prints before the first page is written.
pub fn ready_line(spec: &PayloadSpec, vcpus: u32) -> LineBuffer {
    let mut line = LineBuffer::new();
    line.text("payload ready").field("vcpus", u64::from(vcpus)).field("ws_pages", spec.ws_pages());
    line.text(" pattern=");
    write_pattern(&mut line, spec.pattern);
    line.text(" rate=");
    match spec.rate {
        WriteRate::Max => _ = line.text("max"),
        WriteRate::BytesPerSecond(rate) => write_size(&mut line, rate),
    }
    line.field("seed", spec.seed).byte(b'\n');
    line
}
