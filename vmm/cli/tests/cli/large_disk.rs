//! A disk so large that the threads of the pool share the drain of its bitmap, under the sandbox.

use std::fs::File;
use std::process::Stdio;

use serde_json::Value;

use crate::common::script::{DriverScript, MEM_BYTES, ScriptedDevice};
use crate::common::{TestDir, Vmm, driftline, status_field, thread_statuses, wait_for};
use driftline_machine::testing::kvm_or_skip;

/// Twice the bytes for which two threads share a drain. An epoch that ends in the midst of the
/// discards leaves enough to the one before it or to the one after it.
const DISK_GIB: u32 = 64;
const DISK: ScriptedDevice = ScriptedDevice { index: 0, queue: 0, label: "virtio-blk \"disk0\"" };
const BALLOON: ScriptedDevice =
    ScriptedDevice { index: 2, queue: 0, label: "virtio-balloon \"balloon\"" };

/// A thread of the pool.
#[derive(Debug)]
struct PoolThread {
    /// The mode of seccomp; 2 is a filter.
    seccomp: u32,
    /// Number of times that it has waited for work.
    waits: u64,
}

impl PoolThread {
    fn of(status: &str) -> Option<Self> {
        let number = |name| status_field(status, name)?.parse::<u64>().ok();
        let is_pool = status_field(status, "Name:")?.starts_with("pool-");
        let (seccomp, waits) = (number("Seccomp:")?, number("voluntary_ctxt_switches:")?);
        is_pool.then_some(Self { seccomp: seccomp as u32, waits })
    }
}

/// Returns the threads of the pool of `vmm`, which has one for each of the `processors`.
fn pool_threads(vmm: &Vmm<'_>, processors: usize) -> Vec<PoolThread> {
    wait_for("the pool's threads", || {
        let statuses = thread_statuses(vmm.pid());
        let threads: Vec<_> = statuses.iter().filter_map(|s| PoolThread::of(s)).collect();
        (threads.len() == processors).then_some(threads)
    })
}

fn waits(vmm: &Vmm<'_>, processors: usize) -> u64 {
    pool_threads(vmm, processors).iter().map(|thread| thread.waits).sum()
}

/// Starts a guest that discards its whole disk when its balloon is to take 1 MiB, and then does
/// nothing.
fn discarding_guest(tmp: &TestDir) -> Vmm<'_> {
    let mut script = DriverScript::default();
    script.await_config(BALLOON, 0, 256);
    script.discard(DISK, DISK_GIB);
    script.await_config(BALLOON, 0, u32::MAX);
    std::fs::write(tmp.path("kernel"), script.kernel()).unwrap();
    File::create(tmp.path("disk")).unwrap().set_len(u64::from(DISK_GIB) << 30).unwrap();
    let (kernel, disk) = (tmp.text("kernel"), format!("path={}", tmp.text("disk")));
    let memory = MEM_BYTES.to_string();
    Vmm::run(tmp, "a", &["--mem", &memory, "--kernel", &kernel, "--disk", &disk, "--balloon"])
}

#[test]
fn pool_drains_a_large_disk_in_the_sandbox() {
    if !kvm_or_skip("pool_drains_a_large_disk_in_the_sandbox") {
        return;
    }
    let tmp = TestDir::new();
    let mut vmm = discarding_guest(&tmp);
    let processors = std::thread::available_parallelism().unwrap().get();
    let threads = pool_threads(&vmm, processors);
    assert!(threads.iter().all(|thread| thread.seccomp == 2), "{threads:?}");

    let mut run = driftline(&["checkpoint", "--json", "--store", &tmp.text("store")]);
    run.args(["--every", "4s", "--api-sock", &vmm.socket()]);
    run.stdout(File::create(tmp.path("epochs")).unwrap()).stderr(Stdio::null());
    let mut run = run.spawn().unwrap();
    wait_for("the full checkpoint", || tmp.read("epochs").contains('\n').then_some(()));
    let before = waits(&vmm, processors);
    vmm.tell(&["balloon", "--size", "1M"]);
    wait_for("the discards", || tmp.read("a.serial").contains('D').then_some(()));
    let blocks = || {
        let of = |line: &str| {
            let epoch: Value = serde_json::from_str(line).ok()?;
            epoch["disk_blocks"].as_u64()
        };
        tmp.read("epochs").lines().filter_map(of).sum::<u64>()
    };
    let all = u64::from(DISK_GIB) << 18;
    wait_for("checkpoints of all blocks", || (blocks() >= all).then_some(()));
    // With one processor nothing is shared. Otherwise a thread of the pool has been woken. It waits
    // again once it runs out of work: on a busy host some time after the epochs.
    if processors > 1 {
        wait_for("work of the pool", || (waits(&vmm, processors) > before).then_some(()));
    }
    vmm.tell(&["stop"]);
    assert_eq!(vmm.wait(), Some(0), "{}", vmm.stderr());
    run.wait().unwrap();
}
