//! Storage that never answers: neither a request nor the end of the process waits for it.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::common::script::{DriverScript, MEM_BYTES, ScriptedDevice};
use crate::common::stuck_storage::StuckStorage;
use crate::common::{
    TestDir, Vmm, attack, driftline, fail, receiver, side_by_side, text, wait_for,
};
use driftline_images::PayloadReport;
use driftline_machine::testing::{kvm_or_skip, skip};
use rustix::process::{Pid, Signal, kill_process};

const DISK_BYTES: usize = 1 << 20;
pub const DISK: ScriptedDevice =
    ScriptedDevice { index: 0, queue: 0, label: "virtio-blk \"disk0\"" };
/// Longer than any of the operations takes. A wait for the storage would never end.
const LIMIT: Duration = Duration::from_secs(50);

/// A process with a disk on such storage. The storage is dropped first, because a thread that waits
/// for a flush cannot be killed.
struct StuckGuest<'p> {
    storage: StuckStorage,
    vmm: Vmm<'p>,
}

impl<'p> StuckGuest<'p> {
    /// Starts a guest with such a disk.
    fn or_skip(tmp: &'p TestDir, test: &str) -> Option<Self> {
        let storage = storage_or_skip(test)?;
        let guest = ["--mem", "32M", "--guest", "payload,ws=1M,rate=8M,report=200", "--disk"];
        let vmm = Vmm::run(tmp, "source", &[&guest[..], &[&disk(&storage)]].concat());
        Some(Self { storage, vmm })
    }

    /// Starts a guest that flushes such a disk. The flush does not complete.
    fn in_a_flush(tmp: &'p TestDir, test: &str) -> Option<Self> {
        let storage = storage_or_skip(test)?;
        let mut script = DriverScript::default();
        script.flush(DISK);
        std::fs::write(tmp.path("kernel"), script.kernel()).unwrap();
        let (kernel, memory) = (tmp.text("kernel"), MEM_BYTES.to_string());
        let guest = ["--mem", &memory, "--kernel", &kernel, "--disk", &disk(&storage)];
        storage.answer_only(0);
        let vmm = Vmm::run(tmp, "source", &guest);
        wait_for("the guest's flush", || (storage.stuck() > 0).then_some(()));
        Some(Self { storage, vmm })
    }

    fn await_stuck(&self, what: &str) {
        wait_for(what, || (self.storage.stuck() > 0).then_some(()));
    }

    /// Waits for the end of the process, which does not wait for the storage. Returns the process's
    /// messages.
    fn ends_with(mut self, code: i32) -> String {
        in_time("the end", || await_end(&self.vmm));
        // The exit code is available only once the threads that wait in the kernel have ended, too.
        drop(self.storage);
        assert_eq!(self.vmm.wait(), Some(code), "{}", self.vmm.stderr());
        self.vmm.stderr()
    }
}

pub fn storage_or_skip(test: &str) -> Option<StuckStorage> {
    if !kvm_or_skip(test) {
        return None;
    }
    StuckStorage::new(DISK_BYTES).inspect_err(|why| skip(test, why)).ok()
}

/// Waits until the whole process has ended, except for threads that wait in the kernel for the
/// storage: these cannot be killed.
fn await_end(vmm: &Vmm<'_>) {
    let has_ended = |stat: String| {
        let state = stat.rsplit_once(") ").map(|(_, rest)| rest.starts_with(['Z', 'X', 'D']));
        state.unwrap_or(true)
    };
    let tasks = format!("/proc/{}/task", vmm.pid());
    wait_for("the end", || {
        let tasks = std::fs::read_dir(&tasks).into_iter().flatten().flatten();
        let mut stats = tasks.map(|task| std::fs::read_to_string(task.path().join("stat")));
        stats.all(|stat| has_ended(stat.unwrap_or_default())).then_some(())
    });
}

fn sigterm(vmm: &Vmm<'_>) {
    vmm.signal(Signal::TERM);
}

fn stop(vmm: &Vmm<'_>) {
    vmm.tell(&["stop"]);
}

fn disk(storage: &StuckStorage) -> String {
    format!("path={}", storage.disk().display())
}

/// Runs `work`, which must complete within the limit.
fn in_time<T>(what: &str, work: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let done = work();
    assert!(began.elapsed() < LIMIT, "{what} took {:?}", began.elapsed());
    done
}

#[test]
fn hand_over_fails_where_a_flush_hangs() {
    // The flush before the pause is answered and the one in the hand-over is not, or not even the
    // first is.
    side_by_side([1, 0], |answered| {
        let tmp = TestDir::new();
        let test = "hand_over_fails_where_a_flush_hangs";
        let Some(mut world) = StuckGuest::or_skip(&tmp, test) else { return };
        let StuckGuest { storage, vmm } = &mut world;
        storage.answer_only(answered);
        let (_receiver, address) = receiver(&tmp, "destination", &["--disk", &disk(storage)]);
        let stderr = in_time("a migration", || vmm.refuse(4, &["send-migration", &address]));
        assert!(stderr.contains("disk \"disk0\"") && stderr.contains("durable"), "{stderr}");
        assert!(storage.stuck() > 0, "no flush hung");
        assert_eq!(vmm.state(), "running");
        let before = vmm.reports();
        vmm.await_progress(1, &before);
        // No other guest gets the disk while its flush is in progress (I7).
        let guest = ["run", "--serial", "null", "--mem", "32M", "--guest", "payload,ws=1M"];
        let stderr = fail(1, &[&guest[..], &["--disk", &disk(storage)]].concat());
        assert!(stderr.contains("in use by another"), "{stderr}");
        in_time("a pause", || vmm.tell(&["pause"]));
        in_time("a resume", || vmm.tell(&["resume"]));
        in_time("a stop", || stop(vmm));
        world.ends_with(0);
    });
}

/// The disk is one hole, so that the first pass reads nothing of it. The guest writes zeros to it,
/// which the last pass reads.
#[test]
fn guest_continues_where_the_last_pass_hangs() {
    let tmp = TestDir::new();
    let Some(storage) = storage_or_skip("guest_continues_where_the_last_pass_hangs") else {
        return;
    };
    let mut script = DriverScript::default();
    script.write_zeros_forever(DISK, 1000);
    std::fs::write(tmp.path("kernel"), script.kernel()).unwrap();
    let (kernel, memory) = (tmp.text("kernel"), MEM_BYTES.to_string());
    // Content that takes the first pass a second, in which the guest writes even on a slow host.
    let content: Vec<u8> = (0..1 << 18).flat_map(u32::to_le_bytes).collect();
    std::fs::write(tmp.path("initrd"), content).unwrap();
    let (initrd, disk_of_guest) = (tmp.text("initrd"), disk(&storage));
    let guest = [
        &["--mem", &memory, "--kernel", &kernel][..],
        &["--initrd", &initrd, "--disk", &disk_of_guest],
    ];
    let vmm = Vmm::run(&tmp, "source", &guest.concat());
    let world = StuckGuest { storage, vmm };
    let StuckGuest { storage, vmm } = &world;
    let copy = format!("path={},id=disk0,copy", tmp.text("copy"));
    let (_receiver, to) = receiver(&tmp, "destination", &["--disk", &copy]);
    storage.answer_only_reads(0);
    // The pause follows the first pass, even on a host so slow that a second one would shorten it.
    let limit = ["--timeout-s", "0", "--timeout-strategy", "switchover"];
    let send = ["send-migration", &to, "--copy-disks", "--max-bandwidth", "1M"];
    let send = [&send[..], &limit].concat();
    let stderr = in_time("a migration", || vmm.refuse(4, &send));
    let why = "failed (in switch-over): copying disk \"disk0\" failed: reading it: its storage has";
    assert!(stderr.contains(why), "{stderr}");
    assert!(stderr.contains("the guest continues here"), "{stderr}");
    assert_eq!((vmm.state().as_str(), storage.stuck()), ("running", 1));
    // The guest's next write waits for the page that is being read.
    storage.answer_only_writes(0);
    storage.fail_reads_that_wait();
    wait_for("the guest's next write", || (storage.stuck() == 1).then_some(()));
    in_time("a stop", || stop(vmm));
    world.ends_with(0);
}

#[test]
fn sigterm_ends_a_process_whose_flush_hangs() {
    let tmp = TestDir::new();
    let Some(world) = StuckGuest::or_skip(&tmp, "sigterm_ends_a_process_whose_flush_hangs") else {
        return;
    };
    let StuckGuest { storage, vmm } = &world;
    storage.answer_only(1);
    let (_receiver, address) = receiver(&tmp, "destination", &["--disk", &disk(storage)]);
    let socket = vmm.socket();
    let mut sending =
        driftline(&["send-migration", &address, "--api-sock", &socket]).spawn().unwrap();
    world.await_stuck("the flush in the hand-over");
    sigterm(vmm);
    world.ends_with(0);
    assert_ne!(sending.wait().unwrap().code(), Some(0), "it did not move");
}

#[test]
fn requests_fail_in_hanging_flush() {
    side_by_side([(1, "pause"), (4, "checkpoint")], |(code, request)| {
        let tmp = TestDir::new();
        let test = "requests_fail_in_hanging_flush";
        let Some(world) = StuckGuest::in_a_flush(&tmp, test) else { return };
        let (vmm, store) = (&world.vmm, tmp.text("store"));
        let to_store = ["--store", &store];
        let options: &[&str] = if request == "checkpoint" { &to_store } else { &[] };
        let refused = || vmm.refuse(code, &[&[request], options].concat());
        let stderr = in_time(request, refused);
        assert!(stderr.contains("\"disk0\""), "{stderr}");
        assert_eq!(vmm.state(), "running");
    });
}

#[test]
fn run_in_hanging_flush_can_be_ended() {
    let tmp = TestDir::new();
    let test = "run_in_hanging_flush_can_be_ended";
    let Some(world) = StuckGuest::in_a_flush(&tmp, test) else { return };
    let (vmm, store) = (&world.vmm, tmp.text("store"));
    // A run whose checkpoints wait for the disk ends with the checkpoint in progress.
    vmm.tell(&["checkpoint", "--store", &store, "--every", "1ms", "--detach"]);
    let stderr = vmm.refuse(1, &["checkpoint", "--stop", "--timeout", "1s"]);
    assert!(stderr.contains("has not ended within 1s"), "{stderr}");
    in_time("the end of the run", || vmm.tell(&["checkpoint", "--stop", "--timeout", "60s"]));
    assert_eq!(vmm.state(), "running");
}

#[test]
fn guest_in_hanging_flush_can_be_stopped() {
    // A checkpoint of the run waits for the disk, too.
    let stop_in_a_run: fn(&Vmm<'_>, &str) = |vmm, store| {
        vmm.tell(&["checkpoint", "--store", store, "--every", "1ms", "--detach"]);
        in_time("a stop", || stop(vmm));
    };
    side_by_side([stop_in_a_run, |vmm, _| sigterm(vmm)], |way| {
        let tmp = TestDir::new();
        let test = "guest_in_hanging_flush_can_be_stopped";
        let Some(world) = StuckGuest::in_a_flush(&tmp, test) else { return };
        way(&world.vmm, &tmp.text("store"));
        let stderr = world.ends_with(0);
        assert!(stderr.contains("\"disk0\""), "{stderr}");
    });
}

#[test]
fn second_interrupt_ends_a_command_that_waits() {
    let tmp = TestDir::new();
    let test = "second_interrupt_ends_a_command_that_waits";
    let Some(world) = StuckGuest::in_a_flush(&tmp, test) else { return };
    let vmm = &world.vmm;
    let (store, socket) = (tmp.text("store"), vmm.socket());
    let run = ["checkpoint", "--store", &store, "--every", "1ms", "--api-sock", &socket];
    let mut run = driftline(&run);
    run.stdout(Stdio::null()).stderr(File::create(tmp.path("run.err")).unwrap());
    let mut run = run.spawn().unwrap();
    // The next checkpoint waits for the disk, too.
    wait_for("a failed checkpoint", || tmp.read("run.err").contains("disk0").then_some(()));
    let interrupt = |message: &str| {
        kill_process(Pid::from_child(&run), Signal::INT).unwrap();
        wait_for(message, || tmp.read("run.err").contains(message).then_some(()));
    };
    interrupt("stopping after the current checkpoint");
    in_time("the second interrupt", || interrupt("interrupted before the checkpoint run"));
    assert_eq!(run.wait().unwrap().code(), Some(1));
}

/// Sends a request and disconnects before the answer. Returns true if the server immediately
/// refuses the request because too many others are being answered.
fn leave(vmm: &Vmm<'_>, head: &str, body: &str) -> bool {
    let mut stream = UnixStream::connect(vmm.socket()).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
    let length = body.len();
    // The connection may have been displaced already.
    let _ = write!(stream, "{head} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n{body}");
    let mut begin = [0; 12];
    stream.read_exact(&mut begin).is_ok() && begin.ends_with(b"503")
}

/// Maximum number of threads that answer requests, plus an allowance for threads that come and go.
const ANSWERING: usize = 64 + 2 * 16 + 16;

#[test]
fn abandoned_requests_keep_no_operator_out() {
    let tmp = TestDir::new();
    let test = "abandoned_requests_keep_no_operator_out";
    let Some(world) = StuckGuest::in_a_flush(&tmp, test) else { return };
    let vmm = &world.vmm;
    let before = vmm.resources().threads;
    // A watchdog whose timeout is shorter than a pause that waits for a disk.
    let began = Instant::now();
    let (mut sent, mut most, mut refused) = (0, 0, false);
    while sent < 700 || began.elapsed() < attack() {
        refused |= leave(vmm, "PATCH /vm", r#"{"state":"Paused"}"#);
        sent += 1;
        most = most.max(vmm.resources().threads);
    }
    assert!(refused, "{sent} pauses were under way simultaneously");
    assert!(most <= before + ANSWERING, "{most} threads, {before} before");
    // A request for the guest's state is answered despite the pauses.
    assert_eq!(vmm.state(), "running");
    sigterm(vmm);
    wait_for("the guest's end", || vmm.stderr().contains("a device has not").then_some(()));
    world.ends_with(0);
}

#[test]
fn stops_that_wait_are_bounded() {
    let tmp = TestDir::new();
    let Some(world) = StuckGuest::in_a_flush(&tmp, "stops_that_wait_are_bounded") else { return };
    let vmm = &world.vmm;
    let before = vmm.resources().threads;
    // The first request waits for the flush, and the others wait for the first.
    wait_for("a refusal", || {
        let refused = leave(vmm, "POST /stop", "");
        let now = vmm.resources().threads;
        assert!(now <= before + ANSWERING, "{now} threads, {before} before");
        refused.then_some(())
    });
    assert!(vmm.info().is_some(), "stops have places of their own");
    world.ends_with(0);
}

/// The source's wait times out before the take-over does, and the source asks for the outcome.
#[test]
fn receiver_in_hanging_take_over_can_be_stopped() {
    let test = "receiver_in_hanging_take_over_can_be_stopped";
    let ways: [fn(&Vmm<'_>); 2] = [stop, sigterm];
    side_by_side(ways, |way| {
        if !kvm_or_skip(test) {
            return;
        }
        let storage = StuckStorage::without_locks(DISK_BYTES);
        let Ok(storage) = storage.inspect_err(|why| skip(test, why)) else { return };
        let tmp = TestDir::new();
        std::fs::write(tmp.path("own"), vec![7; DISK_BYTES]).unwrap();
        let own = format!("path={}", tmp.text("own"));
        let guest = ["--mem", "32M", "--guest", "payload,ws=1M,rate=8M,report=200", "--disk", &own];
        let source = Vmm::run(&tmp, "source", &guest);
        let before = source.await_progress(1, &[]);
        let there = format!("{},id=disk0,identity=any", disk(&storage));
        // Longer than this test takes: the source's question ends the wait.
        let receive = ["--disk", &there, "--answer-timeout", "600s"];
        let (vmm, to) = receiver(&tmp, "receiving", &receive);
        let receiver = StuckGuest { storage, vmm };
        let socket = source.socket();
        let send = ["send-migration", &to, "--api-sock", &socket];
        let sending = driftline(&send).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
        receiver.await_stuck("a lock that hangs");
        in_time("a stop", || way(&receiver.vmm));
        let stderr = receiver.ends_with(1);
        assert!(stderr.contains("virtio-blk \"disk0\" did not acquire its files"), "{stderr}");
        assert!(!stderr.contains("does not end yet"), "{stderr}");
        // Otherwise the migration stays in doubt.
        let runs = || (source.state() == "running").then_some(());
        wait_for("the guest at its source", runs);
        let sent = sending.unwrap().wait_with_output().unwrap();
        let sent = (sent.status.code(), text(&sent.stderr));
        assert_eq!(sent.0, Some(4), "{}", sent.1);
        assert!(sent.1.contains("the guest continues here"), "{}", sent.1);
        source.await_progress(1, &before);
    });
}

/// A guest with its own disk, and a receiver whose copy of the disk is on such storage.
struct StuckCopy<'p> {
    source: Vmm<'p>,
    before: Vec<PayloadReport>,
    receiver: StuckGuest<'p>,
    to: String,
}

impl<'p> StuckCopy<'p> {
    /// Starts both. The storage answers no write, and whatever else `stuck` configures.
    fn or_skip(tmp: &'p TestDir, test: &str, stuck: impl Fn(&StuckStorage)) -> Option<Self> {
        let storage = storage_or_skip(test)?;
        std::fs::write(tmp.path("own"), vec![7; DISK_BYTES]).unwrap();
        let own = format!("path={}", tmp.text("own"));
        let guest = ["--mem", "32M", "--guest", "payload,ws=1M,rate=8M,report=200", "--disk", &own];
        let source = Vmm::run(tmp, "source", &guest);
        storage.answer_only_writes(0);
        stuck(&storage);
        let before = source.await_progress(1, &[]);
        let copy = format!("{},id=disk0,copy", disk(&storage));
        let (vmm, to) = receiver(tmp, "receiving", &["--disk", &copy]);
        Some(Self { source, before, receiver: StuckGuest { storage, vmm }, to })
    }

    fn send(&self) -> Child {
        let socket = self.source.socket();
        let send = ["send-migration", &self.to, "--copy-disks", "--api-sock", &socket];
        driftline(&send).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// Checks that the receiver ends, the sender fails, and the guest continues at its source.
    /// Returns the receiver's messages.
    fn ends(self, sending: Option<Child>) -> String {
        let Self { source, before, receiver, .. } = self;
        let stderr = receiver.ends_with(1);
        if let Some(sending) = sending {
            let sent = sending.wait_with_output().unwrap();
            assert_eq!(sent.status.code(), Some(4), "{}", text(&sent.stderr));
        }
        assert_eq!(source.state(), "running");
        source.await_progress(1, &before);
        stderr
    }
}

#[test]
fn receiver_refuses_where_writes_to_a_copy_hang() {
    let tmp = TestDir::new();
    let test = "receiver_refuses_where_writes_to_a_copy_hang";
    let Some(copying) = StuckCopy::or_skip(&tmp, test, |_| {}) else { return };
    let (source, receiving) = (&copying.source, &copying.receiver.vmm);
    let send = ["send-migration", &copying.to, "--copy-disks"];
    let stderr = in_time("a migration", || source.refuse(4, &send));
    assert!(stderr.contains("copying disk \"disk0\" failed: writing its copy: "), "{stderr}");
    assert!(stderr.contains("the guest continues here"), "{stderr}");
    assert!(copying.receiver.storage.stuck() > 0, "no write hung");
    wait_for("the receiver to wait on", || {
        receiving.stderr().contains("waiting for another source").then_some(())
    });
    stop(receiving);
    let stderr = copying.ends(None);
    assert!(stderr.contains("copying disk \"disk0\" failed"), "{stderr}");
}

#[test]
fn receiver_whose_copy_hangs_can_be_stopped() {
    let ways: [fn(&Vmm<'_>); 2] = [stop, sigterm];
    side_by_side(ways, |way| {
        let tmp = TestDir::new();
        let test = "receiver_whose_copy_hangs_can_be_stopped";
        let Some(copying) = StuckCopy::or_skip(&tmp, test, |_| {}) else { return };
        let sending = copying.send();
        copying.receiver.await_stuck("a write that hangs");
        way(&copying.receiver.vmm);
        copying.ends(Some(sending));
    });
}

#[test]
fn receiver_in_hanging_flush_can_be_stopped() {
    let tmp = TestDir::new();
    let test = "receiver_in_hanging_flush_can_be_stopped";
    // The file's size is made durable before anything arrives, so the thread that builds the guest
    // hangs.
    let flushes = |storage: &StuckStorage| storage.answer_only(0);
    let Some(copying) = StuckCopy::or_skip(&tmp, test, flushes) else { return };
    let sending = copying.send();
    copying.receiver.await_stuck("a flush that hangs");
    stop(&copying.receiver.vmm);
    let stderr = copying.ends(Some(sending));
    assert!(stderr.contains("stopped over the API before a guest arrived"), "{stderr}");
}

#[test]
fn sigterm_ends_a_restore_whose_writes_hang() {
    let test = "sigterm_ends_a_restore_whose_writes_hang";
    let tmp = TestDir::new();
    let Some(storage) = storage_or_skip(test) else { return };
    std::fs::write(tmp.path("own"), vec![7; DISK_BYTES]).unwrap();
    let (own, store) = (format!("path={}", tmp.text("own")), tmp.text("store"));
    let guest = ["--mem", "32M", "--guest", "payload,ws=1M,rate=8M,report=200", "--disk", &own];
    let source = Vmm::run(&tmp, "source", &guest);
    source.tell(&["checkpoint", "--store", &store]);
    storage.answer_only_writes(0);
    let disk = disk(&storage);
    let restore = ["restore", "--store", &store, "--disk", &disk];
    let restored = StuckGuest { storage, vmm: Vmm::start(&tmp, "restored", &restore) };
    restored.await_stuck("a write that hangs");
    sigterm(&restored.vmm);
    await_end(&restored.vmm);
}
