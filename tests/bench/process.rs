//! Processes that a bench measures.

use std::fs;
use std::path::Path;
use std::time::Duration;

use tests::{GuestConsole, SOON};

/// Clock ticks in a second in `/proc`: 100 on every architecture that KVM runs on.
const USER_HZ: f64 = 100.0;

/// Processor times of a source and a destination.
pub struct CpuTimes {
    pids: [u32; 2],
    cpu_s: [f64; 2],
}

impl CpuTimes {
    pub fn of(pids: [u32; 2]) -> Self {
        Self { pids, cpu_s: pids.map(cpu_s) }
    }

    /// Returns the seconds since then.
    pub fn since(&self) -> [f64; 2] {
        let now = self.pids.map(cpu_s);
        [now[0] - self.cpu_s[0], now[1] - self.cpu_s[1]]
    }
}

/// Waits until the guest has completed a pass over its working set.
pub fn wait_for_pass(console: &GuestConsole, vcpus: u32) {
    console.wait_first_pass(vcpus, Duration::from_secs(120));
    console.wait_reports(vcpus, 1, SOON);
}

/// Returns whether a child has ended and has not been waited for.
pub fn has_ended(pid: u32) -> bool {
    stat(pid).first().is_none_or(|state| state == "Z")
}

/// Returns the fields of a process's `stat` after its name; the state is the first.
fn stat(pid: u32) -> Vec<String> {
    let path = Path::new("/proc").join(pid.to_string()).join("stat");
    let stat = fs::read_to_string(path).unwrap_or_default();
    // The name, in parentheses, may contain anything.
    let fields = stat.rsplit(')').next().unwrap_or("");
    fields.split_whitespace().map(str::to_owned).collect()
}

/// Returns the user and system time of a process with its threads, in seconds.
fn cpu_s(pid: u32) -> f64 {
    let fields = stat(pid);
    let ticks = |at: usize| fields.get(at).and_then(|f| f.parse::<f64>().ok()).unwrap_or(f64::NAN);
    (ticks(11) + ticks(12)) / USER_HZ
}
