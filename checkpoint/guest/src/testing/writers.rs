//! The threads that write the guest's memory, and how they are stopped between two writes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use driftline_dirty_tracker::Layout;
use parking_lot::{Condvar, Mutex, MutexGuard};
use vm_memory::{Bytes, GuestAddress};

use super::pages::{PageSweep, fill, nth_frame};
use super::write_protection::FrameProtectionState;
use crate::blocks::PAGE_BYTES;
use crate::contents::GuestRam;
use crate::error::RunState;

/// Requested state of the writers, and the number of them that are parked.
#[derive(Debug)]
struct WriterControl {
    want: RunState,
    /// Number of callers that park the writers for a moment, whatever `want` is.
    parkers: usize,
    parked: usize,
}

impl WriterControl {
    fn writers_park(&self) -> bool {
        self.want == RunState::Paused || (self.want == RunState::Running && self.parkers > 0)
    }
}

/// The gate at which writers stop between two writes.
#[derive(Debug)]
pub(super) struct WriterGate {
    writers: usize,
    control: Mutex<WriterControl>,
    changed: Condvar,
    /// Whether to stop at the gate; checked before every write.
    halt: AtomicBool,
    /// Writes per second that each writer may make; 0 means no limit. See
    /// `WriteThrottle::throttle`.
    limit: AtomicU64,
}

impl WriterGate {
    /// Creates a closed gate for `writers` threads.
    pub(super) fn new(writers: usize) -> Self {
        let control = Mutex::new(WriterControl { want: RunState::Paused, parkers: 0, parked: 0 });
        let (halt, limit) = (AtomicBool::new(true), AtomicU64::new(0));
        Self { writers, control, changed: Condvar::new(), halt, limit }
    }

    /// Limits each writer to `writes_per_s`.
    pub(super) fn throttle(&self, writes_per_s: Option<u64>) {
        let control = self.lock();
        self.limit.store(writes_per_s.map_or(0, |most| most.max(1)), Ordering::SeqCst);
        self.changed.notify_all();
        drop(control);
    }

    pub(super) fn throttled(&self) -> Option<u64> {
        Some(self.limit.load(Ordering::SeqCst)).filter(|most| *most > 0)
    }

    fn lock(&self) -> MutexGuard<'_, WriterControl> {
        self.control.lock()
    }

    pub(super) fn state(&self) -> RunState {
        self.lock().want
    }

    /// Notifies the writers of a change and waits until those that must park have parked.
    fn apply(&self, mut control: MutexGuard<'_, WriterControl>) {
        let halt = control.want != RunState::Running || control.parkers > 0;
        self.halt.store(halt, Ordering::SeqCst);
        self.changed.notify_all();
        while control.writers_park() && control.parked < self.writers {
            self.changed.wait(&mut control);
        }
    }

    /// Sets what the writers are to do and returns what they did before. On return, writers that
    /// must not run are parked. A stopped gate stays stopped.
    pub(super) fn set(&self, want: RunState) -> RunState {
        let mut control = self.lock();
        let before = control.want;
        if before != RunState::Stopped {
            control.want = want;
            self.apply(control);
        }
        before
    }

    /// Runs `act` while no writer writes, without changing what the writers are to do.
    pub(super) fn while_parked<T>(&self, act: impl FnOnce() -> T) -> T {
        let mut control = self.lock();
        control.parkers += 1;
        self.apply(control);
        let result = act();
        let mut control = self.lock();
        control.parkers -= 1;
        self.apply(control);
        result
    }

    /// Parks the calling writer while it must not run; returns `false` when it must end.
    fn pass(&self) -> bool {
        let mut control = self.lock();
        if control.writers_park() {
            control.parked += 1;
            self.changed.notify_all();
            while control.writers_park() {
                self.changed.wait(&mut control);
            }
            control.parked -= 1;
        }
        control.want == RunState::Running
    }

    /// Sleeps for `time`, or less if the gate changes.
    fn nap(&self, time: Duration) {
        let mut control = self.lock();
        if control.want == RunState::Running && control.parkers == 0 {
            self.changed.wait_for(&mut control, time);
        }
    }
}

/// One writer's part of the working set and its progress.
#[derive(Debug)]
pub(super) struct PageWriter {
    pub(super) index: u64,
    /// It owns every `of`-th frame of the working set.
    pub(super) of: u64,
    pub(super) sweep: PageSweep,
    /// Writes made. Set from outside only while the writer is parked.
    pub(super) steps: AtomicU64,
    /// Frames that it found wrong before it overwrote them.
    pub(super) errors: AtomicU64,
    /// Writes per second; 0 is as fast as possible.
    pub(super) rate: u32,
    /// Time for which it was throttled, ns.
    pub(super) throttled_ns: AtomicU64,
}

/// Writes between two reads of the clock, if the rate is limited.
const BATCH: u64 = 8;

impl PageWriter {
    /// The thread's body: writes until the gate is stopped.
    pub(super) fn run(
        &self,
        gate: &WriterGate,
        layout: &Arc<Layout>,
        ram: &GuestRam,
        protected: &FrameProtectionState,
    ) {
        let mut pages = (Box::new([0; PAGE_BYTES]), Box::new([0; PAGE_BYTES]));
        while gate.pass() {
            let (since, first) = (Instant::now(), self.steps.load(Ordering::SeqCst));
            while !gate.halt.load(Ordering::SeqCst) {
                let step = self.steps.load(Ordering::SeqCst);
                self.write(step, layout, (ram, protected), &mut pages.0, &mut pages.1);
                self.steps.store(step + 1, Ordering::SeqCst);
                let done = step + 1 - first;
                if self.rate > 0 && done.is_multiple_of(BATCH) {
                    let due = Duration::from_secs_f64(done as f64 / f64::from(self.rate));
                    let early = due.saturating_sub(since.elapsed());
                    if !early.is_zero() {
                        gate.nap(early);
                    }
                }
                self.wait_for_throttle(gate);
            }
        }
    }

    /// Waits for the minimum duration of the write just made under the throttle.
    fn wait_for_throttle(&self, gate: &WriterGate) {
        if let Some(most) = gate.throttled() {
            let since = Instant::now();
            gate.nap(Duration::from_secs_f64(1.0 / most as f64));
            self.throttled_ns.fetch_add(since.elapsed().as_nanos() as u64, Ordering::SeqCst);
        }
    }

    fn write(
        &self,
        step: u64,
        layout: &Layout,
        (ram, protected): (&GuestRam, &FrameProtectionState),
        page: &mut [u8; PAGE_BYTES],
        seen: &mut [u8; PAGE_BYTES],
    ) {
        let (index, generation) = self.sweep.step(step);
        let Some(gfn) = nth_frame(layout, index * self.of + self.index) else { return };
        let at = GuestAddress(gfn.gpa());
        fill(page, gfn, generation - 1);
        let read = ram.read_slice(&mut seen[..], at);
        if read.is_err() || seen != page {
            self.errors.fetch_add(1, Ordering::SeqCst);
        }
        fill(page, gfn, generation);
        protected.wait(gfn);
        if ram.write_slice(&page[..], at).is_err() {
            self.errors.fetch_add(1, Ordering::SeqCst);
        }
    }
}
