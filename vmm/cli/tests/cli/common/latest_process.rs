//! The process of a guest that changes its process.

use std::fs;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::{Vmm, status_field, wait_for};

/// Threads and descriptors that the clients of a test may have in its guest's process.
const CLIENTS: usize = 4;

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

    /// Returns how many threads and descriptors the process has.
    pub fn resources(&self) -> (usize, usize) {
        let proc = format!("/proc/{}", self.pid());
        let status = fs::read_to_string(format!("{proc}/status")).unwrap();
        let files = fs::read_dir(format!("{proc}/fd")).unwrap().count();
        (status_field(&status, "Threads:").unwrap().parse().unwrap(), files)
    }

    /// Waits until the process has about the threads and descriptors of `before`. Clients' requests
    /// and connections have some, too.
    pub fn await_resources(&self, before: (usize, usize)) {
        wait_for("the resources before", || {
            let now = self.resources();
            (now.0 <= before.0 + CLIENTS && now.1 <= before.1 + CLIENTS).then_some(())
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
