//! Ends the process immediately, without waiting for any of its threads: after a second request to
//! end it, and when a guest with lost memory does not end by itself.
//!
//! [`now`] first undoes what would outlive the process: it restores the terminal's settings and
//! removes the files of the sockets at which the process listens.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::terminal;

/// Limit on waiting for a thread that adds or removes a socket, which takes microseconds.
const LOCK_LIMIT: Duration = Duration::from_millis(100);

/// The file of a listening socket.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SocketFile {
    /// The absolute path.
    pub path: PathBuf,
    /// Device and inode number. They ensure that a successor's file is not removed.
    pub identity: (u64, u64),
}

impl SocketFile {
    /// Returns the socket's file at `path`, if there is one.
    pub(crate) fn at(path: &Path) -> std::io::Result<Option<Self>> {
        let path = std::path::absolute(path)?;
        Ok(match fs::symlink_metadata(&path) {
            Ok(m) if m.file_type().is_socket() => Some(Self { path, identity: (m.dev(), m.ino()) }),
            _ => None,
        })
    }

    /// Removes the file, unless another file has its name by now.
    pub(crate) fn remove(&self) -> std::io::Result<()> {
        match fs::symlink_metadata(&self.path) {
            Ok(m) if (m.dev(), m.ino()) == self.identity => match fs::remove_file(&self.path) {
                // Another process has removed it since the check.
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
                removed => removed,
            },
            _ => Ok(()),
        }
    }
}

/// The sockets at which this process listens.
static SOCKETS: Mutex<Vec<SocketFile>> = Mutex::new(Vec::new());
static LOST_MEMORY: OnceLock<fn(&str)> = OnceLock::new();

/// Ends the process by the signal that has asked for it.
type EndBySignal = fn(i32) -> !;

static END_BY_SIGNAL: OnceLock<EndBySignal> = OnceLock::new();
/// The signal that has asked for the end; 0 if there is none.
static SIGNAL: AtomicI32 = AtomicI32::new(0);

/// Makes [`now`] call `end` once a signal has asked for the end of the process. Only the first call
/// takes effect.
pub fn set_end_by_signal(end: fn(i32) -> !) {
    let _ = END_BY_SIGNAL.set(end);
}

/// Records the signal that asks for the end of the process. Only the first one counts.
pub fn note_signal(signal: i32) {
    let _ = SIGNAL.compare_exchange(0, signal, Ordering::Relaxed, Ordering::Relaxed);
}

/// Registers `socket` for removal by [`now`].
pub(crate) fn add(socket: SocketFile) {
    SOCKETS.lock().push(socket);
}

/// Unregisters `socket`, which its owner removes.
pub(crate) fn forget(socket: &SocketFile) {
    let mut sockets = SOCKETS.lock();
    sockets.retain(|other| other != socket);
}

/// Ends the process with `code`, or as [`set_end_by_signal`] says.
pub fn now(code: i32) -> ! {
    // A failure cannot be reported any more.
    let _ = terminal::restore();
    let until = Instant::now() + LOCK_LIMIT;
    loop {
        if let Some(sockets) = SOCKETS.try_lock() {
            // The next process that listens there replaces a file that cannot be removed.
            sockets.iter().for_each(|socket| _ = socket.remove());
            break;
        }
        if Instant::now() >= until {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    // The log says why the process ends.
    crate::log::flush();
    match (END_BY_SIGNAL.get(), SIGNAL.load(Ordering::Relaxed)) {
        (Some(end), signal) if signal != 0 => end(signal),
        _ => std::process::exit(code),
    }
}

/// Sets the function to call when a page of the guest's memory cannot be fetched. It is for a
/// process with one guest, which then cannot continue. Only the first call takes effect. The
/// function must not wait for the guest.
pub fn set_lost_memory(report: fn(&str)) {
    let _ = LOST_MEMORY.set(report);
}

/// Reports that a page of the guest's memory cannot be fetched, for the reason `why`.
pub(crate) fn lost_memory(why: &str) {
    if let Some(report) = LOST_MEMORY.get() {
        report(why);
    }
}
