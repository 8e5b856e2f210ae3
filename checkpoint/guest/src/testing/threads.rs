//! Threads of a test's process.

use std::fs;
use std::path::PathBuf;

/// Returns the directories in `/proc` of the threads of this process whose names `are_meant`
/// accepts.
///
/// The kernel ends a listing of `/proc/self/task` early if the thread that it has listed last ends
/// meanwhile, so two listings in a row must agree.
#[must_use]
pub fn threads(are_meant: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let list = || {
        let all = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
        // A thread that has ended meanwhile has no name.
        let meant = |task: &PathBuf| {
            fs::read_to_string(task.join("comm")).is_ok_and(|name| are_meant(name.trim_end()))
        };
        all.map(|task| task.path()).filter(meant).collect::<Vec<_>>()
    };
    let mut last = list();
    loop {
        let now = list();
        if now == last {
            return now;
        }
        last = now;
    }
}
