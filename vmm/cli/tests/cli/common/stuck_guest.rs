//! Guests with a disk on storage that never answers.

use std::time::{Duration, Instant};

use driftline_machine::testing::{kvm_or_skip, skip};
use rustix::process::Signal;

use super::script::{DriverScript, MEM_BYTES, ScriptedDevice};
use super::stuck_storage::StuckStorage;
use super::{TestDir, Vmm, side_by_side, wait_for};

pub const DISK_BYTES: usize = 1 << 20;
pub const DISK: ScriptedDevice =
    ScriptedDevice { index: 0, queue: 0, label: "virtio-blk \"disk0\"" };
/// Longer than any of the operations takes. A wait for the storage would never end.
const LIMIT: Duration = Duration::from_secs(50);

/// A process with a disk on such storage. The storage is dropped first, because a thread that waits
/// for a flush cannot be killed.
pub struct StuckGuest<'p> {
    pub storage: StuckStorage,
    pub vmm: Vmm<'p>,
}

impl<'p> StuckGuest<'p> {
    /// Starts a guest with such a disk.
    pub fn or_skip(tmp: &'p TestDir, test: &str) -> Option<Self> {
        let storage = storage_or_skip(test)?;
        let guest =
            ["--mem", "32M", "--guest", "payload,ws=1M,rate=1M,burst=8,report=200", "--disk"];
        let vmm = Vmm::run(tmp, "source", &[&guest[..], &[&disk(&storage)]].concat());
        Some(Self { storage, vmm })
    }

    /// Starts a guest that flushes such a disk. The flush does not complete.
    pub fn in_a_flush(tmp: &'p TestDir, test: &str) -> Option<Self> {
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

    pub fn await_stuck(&self, what: &str) {
        wait_for(what, || (self.storage.stuck() > 0).then_some(()));
    }

    /// Waits for the end of the process, which does not wait for the storage. Returns the process's
    /// messages.
    pub fn ends_with(mut self, code: i32) -> String {
        in_time("the end", || await_end(&self.vmm));
        // The exit code is available only once the threads that wait in the kernel have ended, too.
        drop(self.storage);
        assert_eq!(self.vmm.wait(), Some(code), "{}", self.vmm.stderr());
        self.vmm.stderr()
    }
}

/// Runs the cases of a test side by side, or skips it without such storage. The cases only wait,
/// for up to 25 s each: as tests of their own, they would keep the harness's threads from others.
pub fn cases_or_skip<const N: usize>(test: &str, cases: [fn(); N]) {
    if storage_or_skip(test).is_some() {
        side_by_side(cases, |case| case());
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
pub fn await_end(vmm: &Vmm<'_>) {
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

pub fn sigterm(vmm: &Vmm<'_>) {
    vmm.signal(Signal::TERM);
}

pub fn stop(vmm: &Vmm<'_>) {
    vmm.tell(&["stop"]);
}

pub fn disk(storage: &StuckStorage) -> String {
    format!("path={}", storage.disk().display())
}

/// Runs `work`, which must complete within the limit.
pub fn in_time<T>(what: &str, work: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let done = work();
    assert!(began.elapsed() < LIMIT, "{what} took {:?}", began.elapsed());
    done
}
