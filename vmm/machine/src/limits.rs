//! Limits: of a guest's size, and of the files that this process may have open at a time, of which
//! each connection of a socket device is one.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Least guest memory: 16 MiB.
pub const MIN_MEM_BYTES: u64 = 16 << 20;
/// Most guest memory: 16 TiB. A bound for hostile configurations, not for the design.
pub const MAX_MEM_BYTES: u64 = 16 << 40;
/// Most vCPUs.
pub const MAX_VCPUS: u8 = 32;

/// Lets the process open as many files as it may allow itself. To be called once, at the start.
pub fn raise_open_files() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return;
    }
    if let Err(e) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::debug!("this process keeps to {current:?} open files: {e}");
    }
}

/// How many files the process may have open.
pub(crate) fn open_files() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}
