//! Makes a disk's file durable while its guest uses it, and remembers lost data until the guest
//! knows of it.
//!
//! ```text
//! the guest's FLUSH -> engine -> fdatasync on the disk's own open file ----------+
//! release -> the flush thread -> fdatasync on the disk's own open file --+       |
//! HandOver::flush -> a thread -> fdatasync on a file opened for it ------+       |
//!                                                    failed: data lost --+------>|
//!                                                                                v
//!                                                  answer: the guest's request fails
//! ```
//!
//! Storage may never answer. A flush that the guest did not ask for therefore runs on a thread on
//! which no other work depends, one at a time for each disk. The caller waits for it until a
//! deadline. The thread keeps the file open for as long as it runs.
//!
//! Linux reports once to each open file that data could not be written back. The flusher remembers
//! an error until the guest has seen it. Otherwise the guest's next flush would succeed although
//! data is lost. A guest's flush at the same moment must receive the error too, so the thread of
//! `HandOver::flush` uses an open file of its own. The thread opens that file anew for each flush:
//! a new open file reports only errors that were not reported before, while an older one would
//! repeat an error that the guest has already seen.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::error::DiskError;
use super::file_identity::{FileIdentity, identity_of};
use crate::sandbox::{self, Class};

/// Makes the disk's own file durable on the flush thread, then drops its reference to the disk.
type SyncJob = Box<dyn FnOnce() -> io::Result<()> + Send>;
/// A job for the flush thread.
type FlushJob = (Arc<Flusher>, SyncJob);

/// Makes one disk's file durable; see the module.
#[derive(Debug)]
pub(in crate::devices) struct Flusher {
    disk: String,
    path: PathBuf,
    source: FlushSource,
    state: Mutex<FlushState>,
    ended: Condvar,
    /// The channel to the flush thread, which ends when this is dropped; `None` for a read-only
    /// disk. The device's thread cannot start threads: its sandbox forbids it.
    jobs: Option<Sender<FlushJob>>,
}

/// How the disk's file is opened again.
#[derive(Debug)]
enum FlushSource {
    /// A descriptor that identifies the file, whatever its path leads to by now. It is not open for
    /// reading or writing and holds no lock.
    Descriptor(File),
    /// The identity that the file at the path must have, where there is no /proc.
    Path(FileIdentity),
}

/// The flusher of the file that a disk has now. The disk's file may be exchanged; a holder of
/// this handle does not keep the old file open.
#[derive(Clone, Debug)]
pub(in crate::devices) struct CurrentFlusher(Arc<Mutex<Arc<Flusher>>>);

impl CurrentFlusher {
    pub(super) fn new(flusher: Arc<Flusher>) -> Self {
        Self(Arc::new(Mutex::new(flusher)))
    }

    /// Returns the flusher of the disk's file.
    pub(in crate::devices) fn get(&self) -> Arc<Flusher> {
        self.0.lock().clone()
    }

    /// Replaces the flusher by that of the disk's new file.
    pub(super) fn set(&self, flusher: Arc<Flusher>) {
        *self.0.lock() = flusher;
    }
}

#[derive(Debug, Default)]
struct FlushState {
    /// Whether a thread makes the file durable at the moment.
    in_flight: bool,
    /// The error of the last such thread, an errno.
    last: Option<i32>,
    /// Whether the last flush made nothing durable because it had no thread or no open file.
    skipped: bool,
    /// The error that the guest has not been told of, an errno.
    lost: Option<i32>,
    /// Number of the guest's own flushes that failed and whose failure the guest has seen.
    failures: u64,
}

/// What the success of a guest's request promises about durability.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum DurabilityPromise {
    /// Nothing is promised.
    Nothing,
    /// The data that the request wrote is durable.
    Itself,
    /// Everything written before the request is durable.
    Everything,
}

/// Result of a request, to be delivered to the guest.
#[derive(Debug)]
#[must_use]
pub(super) struct FlushAnswer {
    promise: DurabilityPromise,
    /// Whether the request itself failed.
    request_failed: bool,
    pub(super) result: io::Result<()>,
}

impl Flusher {
    /// Creates the flusher of `file`, the file at `path` of the disk named `disk`.
    pub(super) fn new(
        disk: &str,
        path: &Path,
        file: &File,
        readonly: bool,
    ) -> Result<Arc<Self>, DiskError> {
        let opened = FlushSource::of(file);
        let source =
            opened.map_err(|cause| DiskError::Open { path: path.into(), readonly, cause })?;
        let failed = |cause| DiskError::Thread { id: disk.to_owned(), cause };
        let jobs = if readonly { None } else { Some(start(disk).map_err(failed)?) };
        let (disk, path) = (disk.to_owned(), path.to_owned());
        let (state, ended) = (Mutex::default(), Condvar::new());
        Ok(Arc::new(Self { disk, path, source, state, ended, jobs }))
    }

    fn lock(&self) -> MutexGuard<'_, FlushState> {
        self.state.lock()
    }

    /// Starts a thread that makes durable what was written, unless one is at work already. The
    /// sandbox lets the operator's threads call this.
    pub(in crate::devices) fn begin(self: &Arc<Self>) -> Result<(), DiskError> {
        let failures = {
            let mut state = self.lock();
            if std::mem::replace(&mut state.in_flight, true) {
                return Ok(());
            }
            // Read before the file is opened: both open files report an error that occurs in
            // between.
            state.failures
        };
        let mine = self.clone();
        // The thread opens the file, because opening may wait for the storage, too.
        let spawned =
            sandbox::spawn_late(Class::Block, format!("flush-{}", self.disk), move |narrow| {
                match mine.open_another() {
                    Ok(file) => {
                        narrow();
                        mine.end(Some(failures), file.sync_data());
                    }
                    Err(e) => {
                        let (disk, path) = (&mine.disk, mine.path.display());
                        tracing::warn!(
                            "disk \"{disk}\" is not flushed: its file {path} cannot be opened \
                             again: {e}"
                        );
                        mine.skip();
                    }
                }
            });
        let failed = |cause| {
            self.skip();
            DiskError::Thread { id: self.disk.clone(), cause }
        };
        spawned.map(drop).map_err(failed)
    }

    /// Opens the file again. If that fails, a flush is left to the guest and to the hand-over.
    pub(super) fn open_another(&self) -> io::Result<File> {
        match &self.source {
            FlushSource::Descriptor(path_fd) => open_again(path_fd, 0),
            FlushSource::Path(identity) => open_same(&self.path, identity),
        }
    }

    /// Makes the flush thread call `sync`, which makes the disk's own file durable. No flush may be
    /// in progress.
    pub(super) fn begin_on_own_file(
        self: &Arc<Self>,
        sync: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> Result<(), DiskError> {
        self.lock().in_flight = true;
        let job = (self.clone(), Box::new(sync) as SyncJob);
        let sent = self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok());
        if sent {
            return Ok(());
        }
        self.skip();
        Err(DiskError::FlushEnded { id: self.disk.clone() })
    }

    fn skip(&self) {
        let mut state = self.lock();
        (state.in_flight, state.last, state.skipped) = (false, None, true);
        self.ended.notify_all();
    }

    /// Records that a flush has ended. A flush on another open file passes `failures` as it was
    /// when the flush began. A flush on the disk's own open file passes `None`: the kernel
    /// does not report its error to the guest any more.
    fn end(&self, failures: Option<u64>, result: io::Result<()>) {
        let mut state = self.lock();
        // The guest's own flush has reported the error meanwhile. Its next flush reports any later
        // error.
        let already_reported = failures.is_some_and(|failures| state.failures != failures);
        state.last = result.err().map(|e| errno(&e)).filter(|_| !already_reported);
        state.lost = state.last.or(state.lost);
        (state.in_flight, state.skipped) = (false, false);
        if let Some(errno) = state.last {
            tracing::error!("{}", self.lost_error(errno));
        }
        self.ended.notify_all();
    }

    /// Waits until the flush has ended, or until `deadline`. Returns whether it has ended and made
    /// durable what was written.
    ///
    /// # Errors
    ///
    /// The error that the flush met.
    pub(in crate::devices) fn wait(&self, deadline: Instant) -> Result<bool, DiskError> {
        let mut state = self.lock();
        while state.in_flight {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            self.ended.wait_for(&mut state, left);
        }
        state.last.map_or(Ok(!state.skipped), |errno| Err(self.lost_error(errno)))
    }

    /// Waits until no flush is in progress, whatever its result, or until `deadline`. `begun` is
    /// when the caller began to wait.
    ///
    /// # Errors
    ///
    /// A flush is still in progress at `deadline`.
    pub(super) fn wait_until_idle(
        &self,
        begun: Instant,
        deadline: Instant,
    ) -> Result<(), DiskError> {
        // An error that the flush met is recorded as lost, or the guest knows it.
        let _ = self.wait(deadline);
        if !self.lock().in_flight {
            return Ok(());
        }
        let (id, path) = (self.disk.clone(), self.path.clone());
        Err(DiskError::FlushUnderWay { id, path, waited: begun.elapsed() })
    }

    /// Records that data of the guest is lost and that the guest has not been told.
    pub(super) fn note_lost(&self, e: &io::Error) {
        self.lock().lost = Some(errno(e));
        tracing::error!("{}", self.lost_error(errno(e)));
    }

    /// Returns the error of lost data that the guest has not been told of.
    pub(super) fn lost(&self) -> Option<DiskError> {
        self.lock().lost.map(|errno| self.lost_error(errno))
    }

    /// Returns the answer to a guest's request that ended with `outcome`. A request that promises
    /// durability also reports, once, what was lost before. The caller must pass the answer to
    /// [`note_delivery`](Self::note_delivery).
    pub(super) fn answer(
        &self,
        promise: DurabilityPromise,
        outcome: io::Result<()>,
    ) -> FlushAnswer {
        let request_failed = outcome.is_err();
        let lost = match promise {
            DurabilityPromise::Everything => self.lock().lost.take(),
            // The guest takes the error of a write for an error of its sectors only.
            DurabilityPromise::Itself if !request_failed => self.lock().lost.take(),
            DurabilityPromise::Itself | DurabilityPromise::Nothing => None,
        };
        let lost = lost.map_or(Ok(()), |e| Err(io::Error::from_raw_os_error(e)));
        FlushAnswer { promise, request_failed, result: outcome.and(lost) }
    }

    /// Records whether an answer was `delivered` to the guest. If not, the next answer reports the
    /// lost data.
    pub(super) fn note_delivery(&self, answer: &FlushAnswer, delivered: bool) {
        let Err(e) = &answer.result else { return };
        match (answer.promise, answer.request_failed) {
            (DurabilityPromise::Nothing, _) | (DurabilityPromise::Itself, true) => {}
            (_, request_failed) if delivered => self.lock().failures += u64::from(request_failed),
            _ => {
                let mut state = self.lock();
                state.lost = state.lost.or(Some(errno(e)));
            }
        }
    }

    fn lost_error(&self, errno: i32) -> DiskError {
        let (id, path) = (self.disk.clone(), self.path.clone());
        DiskError::Lost { id, path, cause: io::Error::from_raw_os_error(errno) }
    }
}

/// Starts a disk's flush thread. While idle the thread has no open file, so that dropping a disk
/// closes its file immediately.
fn start(disk: &str) -> io::Result<Sender<FlushJob>> {
    let (jobs, taken) = mpsc::channel::<FlushJob>();
    sandbox::spawn(Class::Block, format!("flush-{disk}"), move || {
        while let Ok((flusher, sync)) = taken.recv() {
            // `sync` drops its reference to the disk before the end is announced: a caller that
            // then drops the disk closes its file.
            let result = sync();
            flusher.end(None, result);
        }
    })?;
    Ok(jobs)
}

fn errno(e: &io::Error) -> i32 {
    e.raw_os_error().unwrap_or(libc::EIO)
}

/// Makes the writes to all disks durable, in parallel. Returns whether that was done within
/// `limit`. A flush that is not done by then continues.
pub(in crate::devices) fn flush_all<'f>(
    flushers: impl Iterator<Item = &'f Arc<Flusher>> + Clone,
    limit: Duration,
) -> Result<bool, DiskError> {
    let deadline = Instant::now() + limit;
    let begun: Vec<_> = flushers.clone().map(Flusher::begin).collect();
    let mut all = Ok(true);
    for (flusher, begun) in flushers.zip(begun) {
        match begun.and_then(|()| flusher.wait(deadline)) {
            Ok(ended) => all = all.map(|done| done && ended),
            Err(e) => all = all.and(Err(e)),
        }
    }
    all
}

impl FlushSource {
    fn of(file: &File) -> io::Result<Self> {
        match open_again(file, libc::O_PATH) {
            // There is no /proc.
            Err(e) if e.kind() == io::ErrorKind::NotFound => identity_of(file).map(Self::Path),
            opened => opened.map(Self::Descriptor),
        }
    }
}

/// Opens the file at `path` for reading if it still is the one with this identity.
fn open_same(path: &Path, expected: &FileIdentity) -> io::Result<File> {
    // Another file may be a FIFO by now.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    match identity_of(&file)? == *expected {
        true => Ok(file),
        false => Err(io::Error::other("another file is there by now")),
    }
}

/// Opens the file behind `file` once more, for reading and with `flags`.
fn open_again(file: &File, flags: i32) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    OpenOptions::new().read(true).custom_flags(flags).open(path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::thread;

    use driftline_guest::VmId;
    use tempfile::NamedTempFile;

    use super::super::file::DiskFile;
    use super::*;
    use crate::testing::{disk as disk_config, fail_fdatasync, soon};

    fn disk() -> (Arc<DiskFile>, NamedTempFile) {
        let file = NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let disk = disk_config("d", file.path(), 4096);
        (Arc::new(DiskFile::open(&disk, VmId::random()).unwrap()), file)
    }

    /// A guest's flush that ended with `outcome`, and whose answer the guest has received.
    fn flush_of_guest(flusher: &Flusher, outcome: io::Result<()>) -> io::Result<()> {
        let answer = flusher.answer(DurabilityPromise::Everything, outcome);
        flusher.note_delivery(&answer, true);
        answer.result
    }

    fn hand_over(file: &Arc<DiskFile>) -> Result<(), DiskError> {
        file.flush_and_unlock(soon())
    }

    #[test]
    fn path_leads_only_to_the_same_file() {
        let (file, temp) = disk();
        let identity = &identity_of(file.file()).unwrap();
        assert_eq!(open_same(temp.path(), identity).unwrap().metadata().unwrap().len(), 4096);
        let elsewhere = temp.path().with_extension("moved");
        std::fs::rename(temp.path(), &elsewhere).unwrap();
        assert_eq!(open_same(temp.path(), identity).unwrap_err().kind(), io::ErrorKind::NotFound);
        std::fs::write(temp.path(), "another").unwrap();
        let why = open_same(temp.path(), identity).unwrap_err().to_string();
        assert_eq!(why, "another file is there by now");
        std::fs::remove_file(elsewhere).unwrap();
    }

    /// Runs `f` on a thread that cannot make data durable.
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
    fn lost_data_blocks_release_until_reported_once() {
        let (file, temp) = disk();
        let flusher = file.flusher();
        file.lock().unwrap();
        file.file().write_all_at(&[1; 512], 0).unwrap();
        assert!(flush_all([flusher].into_iter(), Duration::from_secs(20)).unwrap());
        flush_of_guest(flusher, Ok(())).unwrap();
        let why = without_fdatasync(|| {
            flush_all([flusher].into_iter(), Duration::from_secs(20)).unwrap_err().to_string()
        });
        let path = temp.path().display().to_string();
        assert!(
            why.starts_with("disk \"d\": writes of the guest could not") && why.contains(&path)
        );
        assert_eq!(hand_over(&file).unwrap_err().to_string(), why);
        // The loss is still reported after a later flush has succeeded.
        assert!(flush_all([flusher].into_iter(), Duration::from_secs(20)).unwrap());
        assert_eq!(hand_over(&file).unwrap_err().to_string(), why);
        eio(flush_of_guest(flusher, Ok(())));
        flush_of_guest(flusher, Ok(())).unwrap();
        hand_over(&file).unwrap();
    }

    #[test]
    fn failed_flush_at_hand_over_is_reported() {
        // The flush thread is started on that thread and inherits its restrictions.
        let (file, _temp) = without_fdatasync(disk);
        file.lock().unwrap();
        let why = hand_over(&file).unwrap_err().to_string();
        assert!(why.starts_with("disk \"d\": writes of the guest could not"), "{why}");
        eio(flush_of_guest(file.flusher(), Ok(())));
    }

    /// The guest is told the error of its own request; this also covers the lost data.
    #[test]
    fn guests_own_failed_flush_reports_earlier_loss() {
        let (file, _temp) = disk();
        file.flusher().note_lost(&io::Error::from_raw_os_error(libc::EIO));
        let full = Err(io::Error::from_raw_os_error(libc::ENOSPC));
        let full = flush_of_guest(file.flusher(), full);
        assert_eq!(full.unwrap_err().raw_os_error(), Some(libc::ENOSPC));
        flush_of_guest(file.flusher(), Ok(())).unwrap();
    }

    #[test]
    fn release_waits_for_a_flush_until_its_deadline() {
        let (file, _temp) = disk();
        let flusher = file.flusher();
        file.lock().unwrap();
        // As if a thread were flushing; it ends below.
        flusher.lock().in_flight = true;
        let began = Instant::now();
        let limit = Duration::from_millis(50);
        assert!(!flush_all([flusher].into_iter(), limit).unwrap());
        assert!(began.elapsed() >= limit && began.elapsed() < Duration::from_secs(10));
        thread::scope(|scope| {
            let why = file.flush_and_unlock(Instant::now() + limit).unwrap_err().to_string();
            assert!(why.starts_with("disk \"d\": ") && why.contains("durable in"), "{why}");
            assert!(why.contains("ms: the storage is stuck"), "{why}");
            let released = scope.spawn(|| hand_over(&file));
            thread::sleep(limit);
            assert!(!released.is_finished(), "it waits for what may fail");
            flusher.end(Some(0), Err(io::Error::from_raw_os_error(libc::EIO)));
            released.join().unwrap().unwrap_err();
        });
        eio(flush_of_guest(flusher, Ok(())));
    }

    #[test]
    fn error_seen_by_guest_is_not_lost_again() {
        let (file, _temp) = disk();
        let flusher = file.flusher();
        let eio_again = || Err(io::Error::from_raw_os_error(libc::EIO));
        for (own, delivered, lost) in
            [(true, true, false), (true, false, true), (false, true, true)]
        {
            let before = flusher.lock().failures;
            flusher.lock().in_flight = true;
            let outcome = if own { eio_again() } else { Ok(()) };
            let answer = flusher.answer(DurabilityPromise::Everything, outcome);
            flusher.note_delivery(&answer, delivered);
            flusher.end(Some(before), eio_again());
            assert_eq!(flusher.lost().is_some(), lost, "own {own}, delivered {delivered}");
            assert_eq!(flusher.wait(soon()).is_err(), lost);
            let _ = flush_of_guest(flusher, Ok(()));
        }
    }

    #[test]
    fn failed_write_does_not_report_earlier_loss() {
        let (file, _temp) = disk();
        let flusher = file.flusher();
        let eio_now = || io::Error::from_raw_os_error(libc::EIO);
        flusher.note_lost(&eio_now());
        for promise in [DurabilityPromise::Itself, DurabilityPromise::Nothing] {
            let answer = flusher.answer(promise, Err(eio_now()));
            flusher.note_delivery(&answer, true);
            assert!(flusher.lost().is_some(), "{promise:?}");
        }
        let answer = flusher.answer(DurabilityPromise::Itself, Ok(()));
        flusher.note_delivery(&answer, false);
        assert!(flusher.lost().is_some(), "it was not delivered");
        let answer = flusher.answer(DurabilityPromise::Itself, Ok(()));
        flusher.note_delivery(&answer, true);
        eio(answer.result);
        assert!(flusher.lost().is_none());
        // Data without a promise of durability is not lost.
        let answer = flusher.answer(DurabilityPromise::Itself, Err(eio_now()));
        flusher.note_delivery(&answer, false);
        assert!(flusher.lost().is_none());
    }
}
