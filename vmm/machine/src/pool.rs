//! The process's pool of threads, rayon's global one. It shares passes over the bitmaps of large
//! guests and drives, and prefaults memory.
//!
//! rayon would start the pool at its first use. That use may be in a pause of the guest, or on a
//! thread whose filter allows no new threads, and a failure to start would then be a panic. So the
//! code that will need the pool starts it earlier, while the thread that builds the machine can
//! report an error.

use std::io;
use std::sync::OnceLock;

use rayon::{ThreadPoolBuildError, ThreadPoolBuilder};

use crate::signals;

/// Bytes of guest memory, or of a drive, from which on the tracker shares its passes between the
/// threads of the pool.
pub(crate) const SHARED_FROM: u64 = 32 << 30;

/// The outcome of starting the pool, once that was tried.
static POOL: OnceLock<Result<(), ThreadPoolBuildError>> = OnceLock::new();

/// Starts the pool unless it exists: as many threads as the caller may use processors. They have
/// the caller's restrictions and own nothing.
///
/// # Errors
///
/// A thread cannot be started.
pub(crate) fn start() -> io::Result<()> {
    let started = POOL.get_or_init(|| {
        let pool = ThreadPoolBuilder::new()
            .thread_name(|index| format!("pool-{index}"))
            .start_handler(|_| signals::block());
        match pool.build_global() {
            // An error without a cause means that the process had a pool before.
            Err(e) if std::error::Error::source(&e).is_none() => Ok(()),
            built => built,
        }
    });
    match started {
        Ok(()) => Ok(()),
        Err(e) => Err(io::Error::other(e)),
    }
}

/// Calls `work` on each thread of the pool, if it was started, and waits. Returns the first error.
///
/// # Errors
///
/// Those of `work`.
pub(crate) fn on_each_thread<E: Send>(work: impl Fn() -> Result<(), E> + Sync) -> Result<(), E> {
    match POOL.get() {
        Some(Ok(())) => rayon::broadcast(|_| work()).into_iter().collect(),
        Some(Err(_)) | None => Ok(()),
    }
}
