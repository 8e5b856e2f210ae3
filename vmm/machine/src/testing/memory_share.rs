//! Resident memory of processes that share some of it.

use std::io;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::process_usage::only_child;

/// Attempts, one per ms, to find the process that an upgrade starts.
const NEXT_ATTEMPTS: usize = 10_000;

/// Returns a process's share of resident memory (PSS), in KiB. `None` once it has ended.
pub fn share_kib(pid: u32) -> Option<u64> {
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    line.trim().trim_end_matches(" kB").parse().ok()
}

/// Returns the resident memory of both processes together, in KiB. `None` if one has ended, or if
/// the shares are changing: they are not read at the same moment, and one grows as the other falls.
fn together_kib([one, other]: [u32; 2]) -> Option<u64> {
    let before = share_kib(one)?;
    let both = before + share_kib(other)?;
    (share_kib(one)?.abs_diff(before) < 2 << 10).then_some(both)
}

/// Runs `work`. Returns its result, and the most memory that the processes had together meanwhile,
/// in KiB; `None` if that was never read.
pub fn most_together<T>(pids: [u32; 2], work: impl FnOnce() -> T) -> (T, Option<u64>) {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let sampler = scope.spawn(|| {
            let mut most = None;
            while !over.load(Ordering::SeqCst) {
                most = most.max(together_kib(pids));
                std::thread::sleep(Duration::from_millis(1));
            }
            most
        });
        let result = work();
        over.store(true, Ordering::SeqCst);
        (result, sampler.join().unwrap_or_default())
    })
}

/// Runs `upgrade`, a command whose only child takes over the guest of process `previous`. Returns
/// its output, and the most memory that both processes had together meanwhile, in KiB; `None` if
/// that was never read.
///
/// # Errors
///
/// The command cannot be started, or starts no process.
pub fn most_in_upgrade(previous: u32, mut upgrade: Command) -> io::Result<(Output, Option<u64>)> {
    let mut upgrade = upgrade.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let next = (0..NEXT_ATTEMPTS).find_map(|_| {
        std::thread::sleep(Duration::from_millis(1));
        only_child(upgrade.id())
    });
    let Some(next) = next else {
        upgrade.kill()?;
        upgrade.wait()?;
        return Err(io::ErrorKind::NotFound.into());
    };
    let (output, most) = most_together([previous, next], || upgrade.wait_with_output());
    Ok((output?, most))
}
