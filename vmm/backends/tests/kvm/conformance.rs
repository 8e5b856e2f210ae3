//! One test for all dirty sources. A copy of a guest's memory is updated only with the frames that
//! the source reports. Whenever the guest is paused the copy must equal the memory, however
//! harvests, pauses, and starts and ends of tracking interleave. Further tests verify the test
//! itself: it detects a source that loses frames, and so does the guest.

use std::sync::Arc;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{FrameRun, Gfn, PAGE_SIZE, Subscription};
use driftline_guest::{Clock, DirtyLog, GuestContents, Lifecycle, Paused, RunState};
use driftline_images::PayloadMessage;
use driftline_machine::config::{DEFAULT_RING_ENTRIES, HostConfig, MachineConfig};
use driftline_machine::machine::KvmMachine;
use driftline_machine::memory::{Backing, HugePages, MemoryOptions};
use driftline_machine::testing::full;
use driftline_machine::tracking::TrackingMode;
use driftline_machine::vm::Vm;
use vm_memory::{Bytes, GuestAddress};

use crate::harness::*;
use crate::state::move_to_new_on;
use crate::tracking::modes;

/// Harvests of each source: in the long form, and in a default run.
const HARVESTS: (u32, u32) = (10_000, 60);
/// With this seed a default run restarts tracking three times, and compares seven times.
const SEED: u64 = 47;

/// A machine and a copy of its memory.
struct MirroredMachine {
    machine: Arc<KvmMachine>,
    subscription: Option<Subscription>,
    copy: Vec<u8>,
    /// Number of frames copied because they were reported.
    reported: u64,
}

impl MirroredMachine {
    fn new(machine: Arc<KvmMachine>) -> Self {
        let copy = vec![0; machine.machine_config().mem_bytes as usize];
        let mut new = Self { machine, subscription: None, copy, reported: 0 };
        new.begin();
        new
    }

    /// Starts tracking, then copies all memory.
    fn begin(&mut self) {
        self.subscription = None;
        self.subscription = Some(self.machine.subscribe("test").unwrap());
        self.take(FrameRun { start: Gfn(0), count: self.copy.len() as u64 / PAGE_SIZE });
    }

    fn take(&mut self, run: FrameRun) {
        let (at, len) = (run.start.gpa() as usize, run.bytes() as usize);
        let frames = &mut self.copy[at..at + len];
        self.machine.ram().read_slice(frames, GuestAddress(at as u64)).unwrap();
    }

    fn harvest(&mut self) {
        self.machine.collect().unwrap();
        let epoch = self.subscription.as_mut().unwrap().drain();
        self.reported += epoch.frames();
        epoch.runs().for_each(|run| self.take(run));
        epoch.commit();
    }

    /// Returns the frames in which the copy differs, after a pause and a final harvest.
    fn lost_frames(&mut self) -> Vec<u64> {
        let machine = self.machine.clone();
        let paused = Paused::new(&*machine).unwrap();
        self.harvest();
        let mut now = vec![0; self.copy.len()];
        machine.ram().read_slice(&mut now, GuestAddress(0)).unwrap();
        let frames = now.chunks(PAGE_SIZE as usize).zip(self.copy.chunks(PAGE_SIZE as usize));
        let lost = (0u64..).zip(frames).filter(|(_, (a, b))| a != b).map(|(gfn, _)| gfn).collect();
        paused.resume().unwrap();
        lost
    }
}

/// Harvests at random until `harvests` are done or a frame is lost. Returns the lost frames and the
/// number of reported ones. After one harvest in `looks`, and before each restart of tracking, the
/// guest is paused and the copy compared with its memory. Gives up after `limit`.
fn harvest_at_random(
    machine: Arc<KvmMachine>,
    seed: u64,
    (harvests, limit): (u32, Duration),
    looks: u64,
) -> (Vec<u64>, u64) {
    let (mut chance, mut copied) = (SeededRandom(seed), MirroredMachine::new(machine.clone()));
    let begun = Instant::now();
    if machine.run_state() == RunState::Paused {
        machine.resume().unwrap();
    }
    for harvest in 0..harvests {
        if begun.elapsed() > limit {
            println!("given up after {harvest} harvests");
            break;
        }
        match chance.below(100) {
            0..45 => std::thread::sleep(Duration::from_micros(chance.below(3000))),
            // Tracking ends. Sometimes the collector notices before tracking starts again.
            99 => {
                // A restart copies all memory and would hide a lost frame.
                let lost = copied.lost_frames();
                if !lost.is_empty() {
                    return (lost, copied.reported);
                }
                copied.subscription = None;
                std::thread::sleep(Duration::from_millis(chance.below(80)));
                copied.begin();
            }
            _ => {}
        }
        copied.harvest();
        if chance.below(looks) == 0 || harvest + 1 == harvests {
            let lost = copied.lost_frames();
            if !lost.is_empty() {
                return (lost, copied.reported);
            }
        }
    }
    (Vec::new(), copied.reported)
}

fn on(console: &SerialLog, memory: MemoryOptions) -> HostConfig {
    HostConfig { memory, ..console.host() }
}

/// Returns the kinds of memory that make a difference to a source.
fn memories(mode: TrackingMode) -> Vec<MemoryOptions> {
    let plain = MemoryOptions { huge_pages: Some(HugePages::None), ..MemoryOptions::default() };
    match mode {
        TrackingMode::UserfaultWp => vec![
            plain,
            MemoryOptions { huge_pages: Some(HugePages::Thp), ..plain },
            MemoryOptions { backing: Backing::Memfd, ..plain },
        ],
        _ => vec![MemoryOptions::default()],
    }
}

/// Minimum number of reported frames: fewer would prove little.
const LEAST_REPORTED: u64 = 1000;

/// Tests one source, with each ring size and kind of memory that makes a difference to it. A guest
/// in privilege ring 0 overruns the smallest dirty ring, on hosts that emulate ring 0. The other
/// sources have room for all frames, and must lose none of that guest's frames.
fn loses_no_frame(test: &str, mode: TrackingMode) {
    if !kvm_or_skip(test) || !modes().contains(&mode) {
        return;
    }
    // A comparison costs as much as a hundred harvests. A comparison detects a lost page unless the
    // page has been written and reported again meanwhile.
    let (harvests, looks) = if full() { (HARVESTS.0, 64) } else { (HARVESTS.1, 16) };
    let usual = DEFAULT_RING_ENTRIES;
    let rings = match mode {
        TrackingMode::DirtyRing => {
            let smallest = smallest_ring(&payload("payload,ws=16M"));
            vec![(usual, 3), (smallest, 3), (smallest, 0)]
        }
        _ => vec![(usual, 3), (usual, 0)],
    };
    for memory in memories(mode) {
        for &(ring_entries, ring) in &rings {
            let console = SerialLog::new();
            let spec = format!("payload,ws=24M,rate=400M,pattern=random,ring={ring}");
            // The payload's pages end at 40 MiB, and a comparison reads all memory.
            let (vcpus, mem_bytes) = (2, 48 * MIB);
            let config =
                MachineConfig { tracking: mode, ring_entries, vcpus, mem_bytes, ..payload(&spec) };
            let machine = boot(config, &on(&console, memory)).unwrap();
            let begun = Instant::now();
            let what = format!("{mode}, rings of {ring_entries}, guest in ring {ring}, {memory:?}");
            let mut reported = 0;
            // On a busy host a guest whose ring 0 is emulated writes little during these harvests.
            while reported <= LEAST_REPORTED && begun.elapsed() < Duration::from_secs(60) {
                let (lost, more) =
                    harvest_at_random(machine.clone(), SEED, (harvests, Duration::MAX), looks);
                assert!(lost.is_empty(), "{what}: lost {} frames: {lost:x?}", lost.len());
                reported += more;
            }
            let overruns = machine.info().ring_overruns;
            println!("{what}: {reported} frames, {overruns} overruns, {:?}", begun.elapsed());
            assert!(reported > LEAST_REPORTED, "{what}: only {reported} frames were reported");
            if (mode, ring) == (TrackingMode::DirtyRing, 0) && overruns == 0 {
                let why = "of overruns: this host has none, its KVM runs ring 0 itself";
                driftline_machine::testing::skip(test, why);
            }
            console.wait_for_reports(2, 1);
            machine.stop("it has shown enough");
            console.assert_no_errors();
        }
    }
}

#[test]
fn rings_lose_no_frame_however_harvested() {
    loses_no_frame("rings_lose_no_frame_however_harvested", TrackingMode::DirtyRing);
}

#[test]
fn bitmaps_lose_no_frame_however_harvested() {
    loses_no_frame("bitmaps_lose_no_frame_however_harvested", TrackingMode::DirtyBitmap);
}

#[test]
fn manual_bitmaps_lose_no_frame_however_harvested() {
    let test = "manual_bitmaps_lose_no_frame_however_harvested";
    loses_no_frame(test, TrackingMode::DirtyBitmapManual);
}

#[test]
fn userfaultfd_loses_no_frame_however_harvested() {
    loses_no_frame("userfaultfd_loses_no_frame_however_harvested", TrackingMode::UserfaultWp);
}

#[cfg(debug_assertions)]
fn losing(console: &SerialLog, one_in: u64) -> HostConfig {
    HostConfig { loses_one_in: std::num::NonZeroU64::new(one_in), ..console.host() }
}

/// A build without debug assertions has no source that loses frames, and no test calls this.
#[cfg(not(debug_assertions))]
fn losing(console: &SerialLog, _: u64) -> HostConfig {
    console.host()
}

/// Returns whether a source that loses frames exists. Reports the skipped test if not.
fn can_lose(test: &str) -> bool {
    if !cfg!(debug_assertions) {
        driftline_machine::testing::skip(test, "a release build has no source that loses frames");
    }
    cfg!(debug_assertions)
}

#[test]
fn source_that_loses_frames_is_detected() {
    if !can_lose("source_that_loses_frames_is_detected")
        || !kvm_or_skip("source_that_loses_frames_is_detected")
    {
        return;
    }
    for mode in modes() {
        // To reach a million frames quickly: fewer comparisons, and a guest that returns to a page
        // only after a comparison.
        let (one_in, looks, spec, limit) = match full() {
            true => (1_000_000, 128, "payload,ws=40M,rate=max", Duration::from_secs(3600)),
            false => (2_000, 16, "payload,ws=24M,rate=max,pattern=random", LONG),
        };
        let (console, begun) = (SerialLog::new(), Instant::now());
        let config = MachineConfig { tracking: mode, vcpus: 2, ..payload(spec) };
        let machine = boot(config, &losing(&console, one_in)).unwrap();
        let (lost, reported) = harvest_at_random(machine.clone(), 42, (1_000_000, limit), looks);
        println!("{mode}: lost {lost:x?} of {reported}, {:?}", begun.elapsed());
        assert!(
            !lost.is_empty(),
            "{mode}: one in {one_in} of {reported} frames is lost, and none is missing"
        );
        machine.stop("it has shown enough");
    }
}

/// Moves of a guest to machines that lose frames.
#[derive(Clone, Copy)]
struct LossyMoves {
    /// One frame in this many is lost.
    one_in: u64,
    /// The guest's run time between two moves.
    between: Duration,
    /// Limit on finding the loss.
    limit: Duration,
}

impl LossyMoves {
    /// In the long form many moves lose nothing: only a frame's last report before the pause
    /// matters.
    fn of_the_payload() -> Self {
        let (one_in, between, limit) = match full() {
            true => (1_000_000, Duration::from_millis(5), Duration::from_secs(1800)),
            false => (50, Duration::from_millis(300), LONG),
        };
        Self { one_in, between, limit }
    }
}

#[test]
fn payload_detects_lost_frames() {
    const TEST: &str = "payload_detects_lost_frames";
    if !can_lose(TEST) || !kvm_or_skip(TEST) {
        return;
    }
    let moves = LossyMoves::of_the_payload();
    let spec = match full() {
        true => "payload,ws=24M,rate=max,pattern=random",
        false => "payload,ws=4M,rate=64M,pattern=random",
    };
    for mode in modes() {
        let begun = Instant::now();
        while !loss_is_found(mode, spec, moves, begun + moves.limit) {}
        println!("{mode}: found after {:?}", begun.elapsed());
    }
}

/// Time without a report after which a guest counts as hung.
const HUNG: Duration = Duration::from_secs(20);

/// Moves a guest to a new machine every `between`, until the guest detects a lost frame. Each
/// machine loses one in `one_in` frames. Returns whether the guest detects the loss: it may also
/// lose what it needs to run, and then it hangs or ends. Fails at `end`.
fn loss_is_found(
    mode: TrackingMode,
    spec: &str,
    LossyMoves { one_in, between, .. }: LossyMoves,
    end: Instant,
) -> bool {
    let console = SerialLog::new();
    let config = MachineConfig { tracking: mode, vcpus: 2, ..payload(spec) };
    let mut machine = boot(config, &losing(&console, one_in)).unwrap();
    machine.resume().unwrap();
    console.wait_for("start", |text| text.contains("payload ready"));
    // For a lost frame the new machine has older content. The guest's check of each page detects
    // it.
    let finds = |line: &str| match PayloadMessage::parse(line) {
        Some(PayloadMessage::Report(report)) => report.errors > 0,
        Some(PayloadMessage::Ready { .. } | PayloadMessage::Io(_)) | None => false,
        Some(_) => true,
    };
    let (mut length, mut since) = (0, Instant::now());
    loop {
        std::thread::sleep(between);
        let text = console.text();
        if text.len() > length {
            (length, since) = (text.len(), Instant::now());
        }
        let found = text.lines().any(finds);
        assert!(found || Instant::now() < end, "{mode}: nothing found:\n{text}");
        let has_ended = machine.run_state() == RunState::Stopped;
        if found || has_ended || since.elapsed() > HUNG {
            machine.stop("the guest is no longer needed");
            return found;
        }
        let new = move_to_new_on(&machine, losing(&console, one_in), Clock::Advance);
        new.resume().unwrap();
        machine = new;
    }
}
