//! Lazy restore, tested against the kernel.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn, PAGE_SIZE};
use driftline_guest::{GuestRam, PageSource, PageSourceError};
use driftline_store::StoreError;
use vm_memory::{Bytes, GuestAddress};

use super::lazy_restore::RestoreOwner;
use super::{Backing, Discarder, FrameError, HugePages, Memory, MemoryOptions};
use crate::fail_point;

const SOON: Duration = Duration::from_secs(20);
const BYTES: u64 = (3 << 30) + (16 << 20);

fn run(start: u64, count: u64) -> FrameRun {
    FrameRun { start: Gfn(start), count }
}

/// Returns the stored content of frame `gfn`.
fn content(gfn: u64) -> u8 {
    (gfn % 251) as u8 + 1
}

/// A page source whose reads wait until the test allows them.
struct FakePageSource {
    frames: FrameSet,
    first: Vec<FrameRun>,
    /// Each read waits for one message. Once the sender is dropped, reads do not wait.
    gate: Receiver<()>,
    damaged: Option<Gfn>,
    calls: Arc<Mutex<SourceCalls>>,
}

/// The calls that [`FakePageSource`] received.
#[derive(Default)]
struct SourceCalls {
    reads: Vec<FrameRun>,
    /// The first touches that each `finish` call received.
    faulted: Vec<Vec<FrameRun>>,
}

impl FakePageSource {
    /// Creates a source without a recorded working set.
    fn without_working_set(frames: FrameSet, gate: Receiver<()>) -> Self {
        Self { frames, first: Vec::new(), gate, damaged: None, calls: Arc::default() }
    }
}

impl PageSource for FakePageSource {
    fn epoch(&self) -> u64 {
        7
    }

    fn frames(&self) -> &FrameSet {
        &self.frames
    }

    fn working_set(&self) -> &[FrameRun] {
        &self.first
    }

    fn finish(&mut self, faulted: &[FrameRun]) {
        self.calls.lock().unwrap().faulted.push(faulted.to_vec());
    }

    fn read(&mut self, run: FrameRun, contents: &mut [u8]) -> Result<(), PageSourceError> {
        assert!(self.frames.contains_run(run), "{run:?} was never stored");
        self.calls.lock().unwrap().reads.push(run);
        let _ = self.gate.recv();
        for (gfn, page) in run.frames().zip(contents.chunks_exact_mut(PAGE_SIZE as usize)) {
            if self.damaged == Some(gfn) {
                return Err(PageSourceError::new(StoreError::NoEpoch {
                    dir: "a store".into(),
                    epoch: Some(7),
                }));
            }
            page.fill(content(gfn.0));
        }
        Ok(())
    }
}

/// Receives the report of a lost frame.
struct LossReports {
    lost: mpsc::Sender<String>,
    ended: AtomicBool,
}

impl RestoreOwner for LossReports {
    fn lost(&self, why: String) {
        self.ended.store(true, Ordering::Relaxed);
        let _ = self.lost.send(why);
    }

    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    fn restores_vcpus(&self) -> bool {
        false
    }

    fn runs(&self) -> bool {
        true
    }
}

fn option_sets() -> impl Iterator<Item = MemoryOptions> {
    let pages = [Some(HugePages::None), Some(HugePages::Thp)];
    [Backing::Anon, Backing::Memfd].into_iter().flat_map(move |backing| {
        pages.map(|huge_pages| MemoryOptions { backing, huge_pages, prefault: false })
    })
}

/// Returns memory with a lazy restore of `frames`, the sender that allows reads (one message for
/// each read, or dropping it for all), and the receiver of losses.
#[allow(clippy::type_complexity)]
fn restoring(
    test: &str,
    options: &MemoryOptions,
    frames: &[FrameRun],
    damaged: Option<u64>,
) -> Option<(Memory, mpsc::Sender<()>, Receiver<String>)> {
    let memory = Memory::new(BYTES, options).unwrap();
    let ((open, gate), (report, lost)) = (mpsc::channel(), mpsc::channel());
    let source = FakePageSource {
        frames: frames.iter().copied().collect(),
        first: vec![run(0x10_0000, 3), run(1, 1)],
        gate,
        damaged: damaged.map(Gfn),
        calls: Arc::default(),
    };
    let owner = LossReports { lost: report, ended: AtomicBool::new(false) };
    let back = memory.fetch_lazily(Box::new(source), Box::new(owner));
    if back.unwrap().is_some() {
        crate::testing::skip(test, "this host has no userfaultfd for missing pages");
        return None;
    }
    Some((memory, open, lost))
}

fn byte(ram: &GuestRam, gfn: u64) -> u8 {
    ram.read_obj(GuestAddress(Gfn(gfn).gpa() + 4095)).unwrap()
}

fn wait_until_complete(memory: &Memory) {
    let since = Instant::now();
    while memory.fetching().unwrap().time.is_none() {
        assert!(since.elapsed() < SOON, "{:?}", memory.fetching());
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(memory.fetching().unwrap().left, 0);
}

/// Waits until this thread, which touches a missing frame, waits in the kernel.
fn wait_until_blocked(thread: i32) {
    let since = Instant::now();
    let state = || {
        let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap();
        stat.rsplit(") ").next().and_then(|rest| rest.chars().next())
    };
    // Twenty times in a row: before its page fault the thread may wait shortly for something else,
    // such as other threads that map memory.
    let mut blocked = 0;
    while blocked < 20 {
        blocked = if state() == Some('R') { 0 } else { blocked + 1 };
        assert!(since.elapsed() < SOON, "the thread does not wait");
        thread::sleep(Duration::from_millis(1));
    }
}

/// In both slots: single frames, neighbours of frames that are not stored, and the last of each
/// slot.
const FRAMES: [FrameRun; 4] =
    [run_const(5000, 300), run_const(6000, 1), run_const(0xb_ff80, 0x80), run_const(0x10_0000, 4)];

const fn run_const(start: u64, count: u64) -> FrameRun {
    FrameRun { start: Gfn(start), count }
}

#[test]
fn touched_frame_has_its_stored_content() {
    for options in option_sets() {
        let name = "touched_frame_has_its_stored_content";
        let Some((memory, open, _lost)) = restoring(name, &options, &FRAMES, None) else { return };
        let (done, finished) = mpsc::channel();
        for (gfn, stored) in [(5100, true), (0xb_ffff, true), (4999, false), (0x10_0004, false)] {
            let (ram, done) = (memory.ram().clone(), done.clone());
            thread::spawn(move || {
                // A write before the frame has arrived keeps the rest of its content.
                ram.write_obj(9u8, GuestAddress(Gfn(gfn).gpa())).unwrap();
                done.send((gfn, stored, byte(&ram, gfn))).unwrap();
            });
        }
        thread::sleep(Duration::from_millis(20));
        // Zeros need no read of the store, so they may have been present before the first stored
        // frames.
        let early: Vec<(u64, bool, u8)> = finished.try_iter().collect();
        assert!(early.iter().all(|(_, stored, _)| !stored), "{early:?} {options:?}");
        drop(open);
        let others = (early.len()..4).map(|_| finished.recv_timeout(SOON).unwrap());
        for (gfn, stored, found) in early.iter().copied().chain(others) {
            assert_eq!(found, if stored { content(gfn) } else { 0 }, "{gfn:#x} {options:?}");
        }
        wait_until_complete(&memory);
        for gfn in FRAMES.iter().flat_map(|run| run.frames()) {
            assert_eq!(byte(memory.ram(), gfn.0), content(gfn.0), "{gfn:?} {options:?}");
        }
        assert_eq!(memory.ram().read_obj::<u8>(GuestAddress(Gfn(5100).gpa())).unwrap(), 9);
        let fetching = memory.fetching().unwrap();
        assert_eq!(fetching.fetched, FRAMES.iter().map(|run| run.count).sum::<u64>());
        let faulted: Vec<u64> = fetching.faulted.iter().map(|run| run.start.0).collect();
        assert!(faulted.iter().all(|gfn| [5100, 0xb_ffff].contains(gfn)), "{faulted:x?}");
        // The restore is complete: memory can be write-protected as any other.
        assert!(memory.write_protection().unwrap().is_some());
    }
}

#[test]
fn frames_not_yet_fetched_count_as_populated() {
    for options in option_sets().filter(|o| o.huge_pages == Some(HugePages::None)) {
        let name = "frames_not_yet_fetched_count_as_populated";
        let Some((memory, open, _lost)) = restoring(name, &options, &FRAMES, None) else { return };
        assert_eq!(memory.resident().unwrap(), FRAMES, "{options:?}");
        let frame = |n: u64| (0..n).for_each(|_| open.send(()).unwrap());
        frame(3);
        assert_eq!(memory.resident().unwrap(), FRAMES, "{options:?}");
        drop(open);
        wait_until_complete(&memory);
        assert_eq!(memory.resident().unwrap(), FRAMES, "{options:?}");
    }
}

#[test]
fn lost_frame_is_reported_and_others_arrive() {
    for options in option_sets() {
        let name = "lost_frame_is_reported_and_others_arrive";
        let Some((memory, open, lost)) = restoring(name, &options, &FRAMES, Some(5070)) else {
            return;
        };
        drop(open);
        let why = lost.recv_timeout(SOON).unwrap();
        assert!(why.contains("a store") && why.contains('7'), "{why}");
        wait_until_complete(&memory);
        for gfn in [5000, 5069, 5071, 5299, 6000, 0xb_ffff, 0x10_0003] {
            assert_eq!(byte(memory.ram(), gfn), content(gfn), "{options:?}");
        }
        assert_eq!(lost.try_iter().count(), 0, "one report");
    }
}

#[test]
fn frame_discarded_before_arrival_stays_zero() {
    for options in option_sets().filter(|o| o.huge_pages == Some(HugePages::None)) {
        let name = "frame_discarded_before_arrival_stays_zero";
        let Some((memory, open, _lost)) = restoring(name, &options, &FRAMES, None) else { return };
        let mut writes = memory.tracker().subscribe("test").unwrap();
        let mut discarder = Discarder::open(memory.protected_frames().clone()).unwrap();
        // The frames that are being fetched lie elsewhere.
        assert_eq!(discarder.discard(memory.ram(), run(5290, 5)).unwrap(), 5);
        // Frames that a failed discard has dropped from the restore are marked as well.
        let failing = || discarder.discard(memory.ram(), run(5280, 3));
        fail_point::run(Some(0), failing).0.unwrap_err();
        let marked: Vec<FrameRun> = writes.drain().runs().collect();
        drop(open);
        wait_until_complete(&memory);
        assert_eq!(marked, [run(5280, 3), run(5290, 5)], "{options:?}");
        for gfn in (5280..5283).chain(5290..5295) {
            assert_eq!(byte(memory.ram(), gfn), 0, "{gfn} {options:?}");
        }
        assert_eq!(
            (byte(memory.ram(), 5289), byte(memory.ram(), 5295)),
            (content(5289), content(5295))
        );
    }
}

#[test]
fn no_thread_reads_zeros_for_missing_frames() {
    for options in option_sets() {
        let name = "no_thread_reads_zeros_for_missing_frames";
        let Some((memory, open, _lost)) = restoring(name, &options, &FRAMES, None) else { return };
        let (_open, gate) = mpsc::channel();
        let again = FakePageSource::without_working_set(FrameSet::new(), gate);
        let owner = LossReports { lost: mpsc::channel().0, ended: AtomicBool::new(false) };
        let refused = memory.fetch_lazily(Box::new(again), Box::new(owner));
        assert!(matches!(refused, Err(FrameError::System { .. })), "{options:?}");
        let (ram, (done, finished)) = (memory.ram().clone(), mpsc::channel());
        // This is the last frame that is fetched; the thread that waits for it is left behind.
        thread::spawn(move || done.send(byte(&ram, 0x10_0003)));
        let opening = thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            drop(open);
        });
        drop(memory);
        opening.join().unwrap();
        // It was fetched before the end, or it never arrives.
        let found = finished.recv_timeout(Duration::from_millis(50));
        assert!(found.is_err() || found == Ok(content(0x10_0003)), "{found:?} {options:?}");
    }
}

#[test]
fn hanging_storage_does_not_keep_the_memory() {
    let options = MemoryOptions::default();
    let name = "hanging_storage_does_not_keep_the_memory";
    let Some((memory, open, _lost)) = restoring(name, &options, &FRAMES, None) else { return };
    let (done, dropped) = mpsc::channel();
    thread::spawn(move || {
        drop(memory);
        done.send(()).unwrap();
    });
    // No message is sent, so no read returns.
    dropped.recv_timeout(SOON).unwrap();
    drop(open);
}

#[test]
fn prefaulted_memory_has_no_lazy_restore() {
    for options in option_sets().map(|o| MemoryOptions { prefault: true, ..o }) {
        let memory = Memory::new(64 << 20, &options).unwrap();
        let (_open, gate) = mpsc::channel();
        let frames = [run(5, 5)].into_iter().collect();
        let source = FakePageSource::without_working_set(frames, gate);
        let owner = LossReports { lost: mpsc::channel().0, ended: AtomicBool::new(false) };
        assert!(memory.fetch_lazily(Box::new(source), Box::new(owner)).unwrap().is_some());
    }
}

#[test]
fn recorded_working_set_is_fetched_first() {
    for options in option_sets() {
        let name = "recorded_working_set_is_fetched_first";
        let memory = Memory::new(BYTES, &options).unwrap();
        let ((open, gate), (report, _lost)) = (mpsc::channel(), mpsc::channel());
        let frames = FRAMES.into_iter().collect();
        // A short run, frames without content, and a run longer than one fetch takes.
        let first = vec![run(0xb_ffc0, 1), run(1, 1), run(6000, 1), run(5100, 200)];
        let source = FakePageSource { first, ..FakePageSource::without_working_set(frames, gate) };
        let calls = source.calls.clone();
        let owner = LossReports { lost: report, ended: AtomicBool::new(false) };
        if memory.fetch_lazily(Box::new(source), Box::new(owner)).unwrap().is_some() {
            return crate::testing::skip(name, "this host has no userfaultfd for missing pages");
        }
        let (ram, (id, started)) = (memory.ram().clone(), mpsc::channel());
        let reader = thread::spawn(move || {
            id.send(rustix::thread::gettid().as_raw_pid()).unwrap();
            byte(&ram, 0x10_0003)
        });
        // The first read waits for a message, so the fault is second.
        wait_until_blocked(started.recv().unwrap());
        drop(open);
        assert_eq!(reader.join().unwrap(), content(0x10_0003), "{options:?}");
        wait_until_complete(&memory);
        let fetching = memory.fetching().unwrap();
        drop(memory);
        let calls = calls.lock().unwrap();
        // Includes the neighbours that are fetched along.
        let mut expected = vec![run(0xb_ffc0, 16), run(6000, 1), run(5100, 64)];
        let mut reads = calls.reads.clone();
        let (faulted, waited) = (vec![run(0x10_0003, 1)], run(0x10_0003, 1));
        assert_eq!(fetching.faulted, faulted, "{options:?}");
        assert_eq!(calls.faulted, [faulted], "one call {options:?}");
        let at = reads.iter().position(|read| *read == waited).unwrap();
        assert!(at <= 1, "{reads:?} {options:?}");
        reads.remove(at);
        // Then all remaining frames, ascending.
        expected.extend([run(5000, 64), run(5064, 36)]);
        assert_eq!(reads[..5], expected, "{options:?}");
        assert_eq!(fetching.prefetched, 16 + 1 + 64);
    }
}
