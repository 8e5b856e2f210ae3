//! The process of a guest that changes its process.

use std::fs;

use driftline_machine::testing::ProcessUsage;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::{Vmm, wait_for};

/// Threads and descriptors that the clients of a test may have in its guest's process.
const CLIENTS: usize = 4;
/// Bound of the growth of a process's own memory from the first process to the last, in KiB.
const GROWTH_KIB: u64 = 4096;

/// The latest process of a guest, which is not a child of the test. Killed when dropped.
pub struct LatestProcess<'p>(&'p Vmm<'p>);

impl<'p> LatestProcess<'p> {
    pub fn of(vmm: &'p Vmm<'p>) -> Self {
        Self(vmm)
    }

    pub fn pid(&self) -> u32 {
        self.0.info().unwrap()["pid"].as_u64().unwrap() as u32
    }

    /// Replaces the process. Returns the report.
    pub fn upgrade(&self) -> Value {
        let before = self.pid();
        let report: Value = serde_json::from_str(&self.0.tell(&["upgrade", "--json"])).unwrap();
        assert_eq!(report["status"], "completed", "{report}");
        let now = self.pid();
        assert!(now != before && report["pid"] == now, "{report}: {before}, {now}");
        report
    }

    /// Returns what the process uses now.
    pub fn usage(&self) -> ProcessUsage {
        ProcessUsage::of(self.pid()).unwrap()
    }

    /// Waits until the process has about the threads, the descriptors and the memory of `before`.
    /// Clients' requests and connections have some, too.
    pub fn await_usage(&self, before: ProcessUsage) {
        wait_for("the usage before", || {
            let now = self.usage();
            let is_as_before = now.threads <= before.threads + CLIENTS
                && now.files <= before.files + CLIENTS
                && now.anonymous_kib <= before.anonymous_kib + GROWTH_KIB;
            is_as_before.then_some(())
        });
    }
}

impl Drop for LatestProcess<'_> {
    fn drop(&mut self) {
        let pid = self.0.info().and_then(|info| info["pid"].as_i64());
        let pid = pid.and_then(|pid| Pid::from_raw(pid as i32));
        let _ = pid.map(|pid| kill_process(pid, Signal::KILL));
    }
}

/// Returns whether a process runs. One that has ended and was not waited for does not.
pub fn is_running(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// Returns how many checkpoints the guest's first run has taken. The run must not have ended.
pub fn taken_by_first_run(vmm: &Vmm<'_>) -> u64 {
    let page: Value =
        serde_json::from_str(&vmm.tell(&["checkpoint", "--status", "--json"])).unwrap();
    assert!(page["job"] == 1 && page["running"] == true, "{page}");
    page["achieved"]["taken"].as_u64().unwrap()
}
