//! The harness of the whole-system tests: `driftline` processes, the lines that their guests print,
//! and a proxy between two processes that counts messages.
//!
//! A test owns a [`ScratchDir`], which has the files of every process that the test starts.
//! Dropping a process kills it, by its own pid.
#![allow(clippy::expect_used, clippy::panic, reason = "a harness fails by saying what it expected")]

mod guest;
mod linux;
mod load;
mod network;
mod openapi;
mod page_handler;
mod process;
mod proxy;
mod raw_http;
mod serving;
mod stolen;
mod usage;

pub use driftline_guest::testing::repeats;
pub use guest::GuestConsole;
pub use linux::{
    CheckerProgress, EchoClient, LINUX_CMDLINE, LinuxImage, assert_clean, checker_value, has_booted,
};
pub use load::GuestLoad;
pub use network::{GUEST, Namespace, Network, PEER};
pub use openapi::{ApiDocument, DocumentedOperation, examples};
pub use page_handler::{HandlerCounts, HandlerProcess};
pub use process::{Driftline, ScratchDir, StopsLatest, driftline, json_of, run_cli};
pub use proxy::{CutAction, Direction, LaterConnections, MigrationProxy};
pub use raw_http::{RawConnection, RawReply};
pub use serving::ServingProcess;
pub use stolen::StolenTime;
pub use usage::{assert_no_growth, lasting_usage};

use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

/// Time limit for what should happen soon; far more than it takes on a busy machine.
pub const SOON: Duration = Duration::from_secs(30);

/// Calls `what` every 5 ms until it returns a value. Fails the test after `limit` with a message
/// that names `awaited`.
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

/// Locks out other tests of the same binary that load the whole machine, until dropped.
pub fn one_at_a_time() -> MutexGuard<'static, ()> {
    static MACHINE: Mutex<()> = Mutex::new(());
    MACHINE.lock()
}
