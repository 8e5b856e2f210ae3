//! What a process uses.

use std::fs;

/// What a process uses at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProcessUsage {
    /// Number of threads, as the kernel counts them.
    pub threads: usize,
    /// Number of file descriptors.
    pub files: usize,
    /// Resident memory, in KiB.
    pub resident_kib: u64,
    /// Resident anonymous memory, in KiB: without a guest's memory if that is a memory file.
    pub anonymous_kib: u64,
}

impl ProcessUsage {
    /// Returns what a process uses now. `None` once it has ended.
    pub fn of(pid: u32) -> Option<Self> {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let figure = |name: &str| -> Option<u64> {
            let figure = status.lines().find_map(|line| line.strip_prefix(name))?;
            figure.split_whitespace().next()?.parse().ok()
        };
        Some(Self {
            threads: figure("Threads:")? as usize,
            files: fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count(),
            resident_kib: figure("VmRSS:")?,
            anonymous_kib: figure("RssAnon:")?,
        })
    }
}

/// Returns the only child of a process's first thread.
pub fn only_child(pid: u32) -> Option<u32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    children.trim().parse().ok()
}
