//! Ends the process at once, without waiting for any of its threads: after a second request to end
//! it, and when a guest whose memory is lost does not end by itself.
//!
//! [`now`] first undoes what would outlive the process: the settings of its terminal, and the files
//! of the sockets at which it listens.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use crate::terminal;

/// Upper bound on waiting for a thread that adds or removes a socket, which takes microseconds.
const LOCK_LIMIT: Duration = Duration::from_millis(100);

/// A socket file of this process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct SocketFile {
    pub(crate) path: PathBuf,
    /// Device and inode, so that a successor's file is left alone.
    pub(crate) identity: (u64, u64),
}

impl SocketFile {
    /// Removes the file, unless another one has its name by now.
    pub(crate) fn remove(&self) -> std::io::Result<()> {
        match fs::symlink_metadata(&self.path) {
            Ok(m) if (m.dev(), m.ino()) == self.identity => match fs::remove_file(&self.path) {
                // Another process has, in this moment.
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
                removed => removed,
            },
            _ => Ok(()),
        }
    }
}

/// Those at which this process listens.
static SOCKETS: Mutex<Vec<SocketFile>> = Mutex::new(Vec::new());
static LOST_MEMORY: OnceLock<fn(&str)> = OnceLock::new();

/// Has `socket` removed by [`now`].
pub(crate) fn add(socket: SocketFile) {
    SOCKETS.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(socket);
}

/// `socket` is removed already.
pub(crate) fn forget(socket: &SocketFile) {
    let mut sockets = SOCKETS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    sockets.retain(|other| other != socket);
}

/// Ends the process with `code`.
pub fn now(code: i32) -> ! {
    // Nobody can be told of a failure.
    let _ = terminal::restore();
    let until = Instant::now() + LOCK_LIMIT;
    loop {
        if let Ok(sockets) = SOCKETS.try_lock() {
            // What cannot be removed is replaced by the next process that listens there.
            sockets.iter().for_each(|socket| _ = socket.remove());
            break;
        }
        if Instant::now() >= until {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    // It says why.
    crate::log::flush();
    std::process::exit(code)
}

/// Sets what is called when a page of the guest's memory cannot be fetched: for a process that has
/// one guest, which cannot go on. Only the first counts. It must not wait for the guest.
pub fn set_lost_memory(told: fn(&str)) {
    let _ = LOST_MEMORY.set(told);
}

/// A page of the guest's memory cannot be fetched, for the reason `why`.
pub(crate) fn lost_memory(why: &str) {
    if let Some(told) = LOST_MEMORY.get() {
        told(why);
    }
}
