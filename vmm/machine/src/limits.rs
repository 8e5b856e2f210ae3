//! Limits of a guest's size, and of the files that this process may have open at a time. Each
//! connection of a vsock device is one open file.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Minimum guest memory in bytes: 16 MiB.
pub const MIN_MEM_BYTES: u64 = 16 << 20;
/// Maximum guest memory in bytes: 16 TiB. It bounds hostile configurations, not the design.
pub const MAX_MEM_BYTES: u64 = 16 << 40;
/// Maximum number of vCPUs.
pub const MAX_VCPUS: u8 = 32;

/// Raises the limit of open files to the hard limit. Call it once, at the start.
pub fn raise_open_files() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return;
    }
    if let Err(e) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::debug!("the limit of open files stays at {current:?}: {e}");
    }
}

/// Returns how many files the process may have open.
pub(crate) fn open_files() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}
