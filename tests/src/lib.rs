//! The harness of the whole-system tests: `driftline` processes, the lines their guests print, and
//! a proxy between them that counts messages.
//!
//! A test owns a [`ScratchDir`] folder; every process that it starts lives in it and is killed, by its
//! own pid, when the test lets go of it.
#![allow(clippy::expect_used, clippy::panic, reason = "a harness fails by saying what it expected")]

mod guest;
mod linux;
mod load;
mod network;
mod process;
mod proxy;
mod stolen;

pub use guest::GuestConsole;
pub use linux::{CheckerProgress, EchoClient, LinuxImage, assert_clean};
pub use load::GuestLoad;
pub use network::{GUEST, Namespace, Network, PEER};
pub use process::{Driftline, ScratchDir, driftline, json_of, run_cli};
pub use proxy::{CutAction, Direction, LaterConnections, MigrationProxy};
pub use stolen::StolenTime;

use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

/// Longest wait for anything that should happen soon; far more than it takes on a busy machine.
pub const SOON: Duration = Duration::from_secs(30);

/// Asks `what` every few milliseconds until it answers; fails the test with `awaited` after
/// `limit`.
pub fn wait_for<T>(awaited: &str, limit: Duration, mut what: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = what() {
            return found;
        }
        assert!(start.elapsed() < limit, "after {limit:?} still no {awaited}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// How often a repeated test repeats: `full` times with `DRIFTLINE_FULL=1`, else `short` times.
pub fn repeats(short: usize, full: usize) -> usize {
    match std::env::var("DRIFTLINE_FULL") {
        Ok(v) if v == "1" => full,
        _ => short,
    }
}

/// Holds back other tests of the same binary that load the whole machine, until dropped.
pub fn one_at_a_time() -> MutexGuard<'static, ()> {
    static MACHINE: Mutex<()> = Mutex::new(());
    MACHINE.lock()
}
