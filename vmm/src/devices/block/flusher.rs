//! Makes a disk's file durable while its guest uses it, and remembers what was lost until the guest knows it.
//!
//! ```text
//! the guest's FLUSH -> engine -> fdatasync on the disk's own open file ---+
//! Guest::flush -> a thread -> fdatasync on this one, opened for it --+    |
//!                                     failed: lost ------------------+--> tell: the guest's request fails
//! ```
//!
//! Linux says once to each open file that data could not be written back. An error that the guest has not seen is kept:
//! were it forgotten, the guest's next flush would succeed although data is lost. So that a flush of the guest's at the
//! same moment hears of it by itself, this has an open file of its own; the lock is not that one's.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::sandbox::{self, Class};

/// See the module.
#[derive(Debug)]
pub(in crate::devices) struct Flusher {
    disk: String,
    path: PathBuf,
    file: File,
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// A thread makes the file durable.
    under_way: bool,
    /// What the last such thread said.
    last: Option<i32>,
    /// The error that the guest has not been told of.
    lost: Option<i32>,
}

impl Flusher {
    /// For `file`, the file at `path` of the disk named `disk`.
    pub(super) fn new(disk: &str, path: &Path, file: &File) -> io::Result<Arc<Self>> {
        let again = File::open(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let file = match again {
            Ok(file) => file,
            // Then the two share what Linux says once.
            Err(e) => {
                tracing::debug!("disk \"{disk}\" is flushed through the file that serves it: {e}");
                file.try_clone()?
            }
        };
        let (disk, path) = (disk.to_owned(), path.to_owned());
        Ok(Arc::new(Self { disk, path, file, state: Mutex::default(), ended: Condvar::new() }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a thread make durable what was written, unless one is at it already.
    pub(in crate::devices) fn begin(self: &Arc<Self>) -> Result<(), String> {
        if std::mem::replace(&mut self.lock().under_way, true) {
            return Ok(());
        }
        let mine = self.clone();
        let spawned = sandbox::spawn(Class::Block, format!("flush-{}", self.disk), move || {
            mine.end(mine.file.sync_data());
        });
        let failed = |e| {
            self.lock().under_way = false;
            self.ended.notify_all();
            format!("no thread flushes disk \"{}\": {e}", self.disk)
        };
        spawned.map(drop).map_err(failed)
    }

    fn end(&self, result: io::Result<()>) {
        if let Err(e) = &result {
            self.note_lost(e);
        }
        let mut state = self.lock();
        state.last = result.err().map(|e| errno(&e));
        state.under_way = false;
        self.ended.notify_all();
    }

    /// Waits for the end of what was begun, until `deadline`; whether it has ended. The error is what it met.
    pub(in crate::devices) fn wait(&self, deadline: Instant) -> Result<bool, String> {
        let mut state = self.lock();
        while state.under_way {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            let waited = self.ended.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.last.map_or(Ok(true), |errno| Err(self.sentence(errno)))
    }

    /// Waits for the end of what was begun, as long as it takes.
    pub(super) fn settle(&self) {
        let mut state = self.lock();
        while state.under_way {
            state = self.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The guest's data is lost, and it has not been told.
    pub(super) fn note_lost(&self, e: &io::Error) {
        self.lock().lost = Some(errno(e));
        tracing::error!("{}", self.sentence(errno(e)));
    }

    /// What the guest has not been told of, in a sentence.
    pub(super) fn lost(&self) -> Option<String> {
        self.lock().lost.map(|errno| self.sentence(errno))
    }

    /// The outcome of a request of the guest's by which it learns whether its data is durable: it is told, this once, of
    /// what was lost.
    pub(super) fn tell(&self, outcome: io::Result<()>) -> io::Result<()> {
        let lost = self.lock().lost.take();
        outcome.and_then(|()| lost.map_or(Ok(()), |e| Err(io::Error::from_raw_os_error(e))))
    }

    fn sentence(&self, errno: i32) -> String {
        let (disk, path) = (&self.disk, self.path.display());
        let why = io::Error::from_raw_os_error(errno);
        format!(
            "disk \"{disk}\": what the guest wrote could not be made durable in \"{path}\": {why}; its next flush fails"
        )
    }
}

fn errno(e: &io::Error) -> i32 {
    e.raw_os_error().unwrap_or(libc::EIO)
}

/// Makes durable what was written to all of them, at the same time; whether that was done within `limit`. What is not done
/// then goes on.
pub(in crate::devices) fn flush_all<'f>(
    flushers: impl Iterator<Item = &'f Arc<Flusher>> + Clone,
    limit: Duration,
) -> Result<bool, String> {
    let deadline = Instant::now() + limit;
    let begun = flushers.clone().map(Flusher::begin).fold(Ok(()), Result::and);
    let mut done = true;
    let mut all = begun;
    for flusher in flushers {
        match flusher.wait(deadline) {
            Ok(ended) => done &= ended,
            Err(e) => all = all.and(Err(e)),
        }
    }
    all.map(|()| done)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::thread;

    use checkpoint::VmId;
    use tempfile::NamedTempFile;

    use super::super::file::DiskFile;
    use super::*;
    use crate::config::DiskConfig;
    use crate::testing::fail_fdatasync;

    fn disk() -> (Arc<DiskFile>, NamedTempFile) {
        let file = NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let disk = DiskConfig {
            id: "d".to_owned(),
            path: file.path().to_owned(),
            readonly: false,
            serial: String::new(),
            bytes: 4096,
            block_bytes: 512,
            identity: None,
        };
        (Arc::new(DiskFile::open(&disk, VmId::random()).unwrap()), file)
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    /// On a thread on which data cannot be made durable.
    fn without_fdatasync<T: Send>(f: impl FnOnce() -> T + Send) -> T {
        let failing = || {
            fail_fdatasync().unwrap();
            f()
        };
        thread::scope(|scope| scope.spawn(failing).join().unwrap())
    }

    fn eio(result: io::Result<()>) {
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EIO));
    }

    #[test]
    fn what_was_lost_is_told_once_and_keeps_the_disk_here_until_then() {
        let (file, temp) = disk();
        let flusher = file.flusher();
        file.lock().unwrap();
        file.file().write_all_at(&[1; 512], 0).unwrap();
        assert_eq!(flush_all([flusher].into_iter(), Duration::from_secs(20)), Ok(true));
        flusher.tell(Ok(())).unwrap();
        let why = without_fdatasync(|| {
            flush_all([flusher].into_iter(), Duration::from_secs(20)).unwrap_err()
        });
        let path = temp.path().display().to_string();
        assert!(
            why.starts_with("disk \"d\": what the guest wrote could not") && why.contains(&path)
        );
        assert_eq!(file.flush_and_unlock().unwrap_err(), why);
        // Also if all is well since.
        assert_eq!(flush_all([flusher].into_iter(), Duration::from_secs(20)), Ok(true));
        assert_eq!(file.flush_and_unlock().unwrap_err(), why);
        eio(flusher.tell(Ok(())));
        flusher.tell(Ok(())).unwrap();
        file.flush_and_unlock().unwrap();
    }

    #[test]
    fn what_the_hand_over_could_not_make_durable_is_told_too() {
        let (file, _temp) = disk();
        file.lock().unwrap();
        let why = without_fdatasync(|| file.flush_and_unlock().unwrap_err());
        assert!(why.starts_with("disk \"d\": what the guest wrote could not"), "{why}");
        eio(file.flusher().tell(Ok(())));
        file.flush_and_unlock().unwrap();
    }

    /// An error that the guest's own request met is what it is told, and the rest with it.
    #[test]
    fn one_failure_of_the_guests_own_is_enough() {
        let (file, _temp) = disk();
        file.flusher().note_lost(&io::Error::from_raw_os_error(libc::EIO));
        let full = file.flusher().tell(Err(io::Error::from_raw_os_error(libc::ENOSPC)));
        assert_eq!(full.unwrap_err().raw_os_error(), Some(libc::ENOSPC));
        file.flusher().tell(Ok(())).unwrap();
    }

    #[test]
    fn a_slow_disk_is_waited_for_so_long_and_the_hand_over_hears_how_it_ended() {
        let (file, _temp) = disk();
        let flusher = file.flusher();
        file.lock().unwrap();
        // As if a thread were at it, which ends below.
        flusher.lock().under_way = true;
        let began = Instant::now();
        let limit = Duration::from_millis(50);
        assert_eq!(flush_all([flusher].into_iter(), limit), Ok(false));
        assert!(began.elapsed() >= limit && began.elapsed() < Duration::from_secs(10));
        thread::scope(|scope| {
            let released = scope.spawn(|| file.flush_and_unlock());
            thread::sleep(limit);
            assert!(!released.is_finished(), "it waits for what may fail");
            flusher.end(Err(io::Error::from_raw_os_error(libc::EIO)));
            released.join().unwrap().unwrap_err();
        });
        flusher.wait(soon()).unwrap_err();
        eio(flusher.tell(Ok(())));
    }
}
