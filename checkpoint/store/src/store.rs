//! The [`Store`]: its backend, its write lock, and errors that name its files.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use driftline_guest::{GuestIdentity, Origin};

use crate::backend::{Backend, LOCK_FILE, LockError, StoreFile};
use crate::error::StoreError;
use crate::pause_gate::PauseGate;
use crate::unreadable::{FAILED_READ_LIMIT, UnreadableUnits};

/// A directory of epochs.
///
/// ```
/// use driftline_store::Store;
/// let dir = tempfile::tempdir()?;
/// let store = Store::create_or_open(dir.path())?;
/// assert!(store.epochs()?.is_empty());
/// let second = Store::create_or_open(dir.path()).unwrap_err().to_string();
/// assert!(second.contains(&format!("in use by process {}", std::process::id())));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Store {
    backend: Box<dyn Backend>,
    writable: bool,
    pause_gate: PauseGate,
    /// Limit of the total time spent on failing reads, for each file.
    failed_read_limit: Duration,
}

impl Store {
    /// Returns a store on `backend`, without looking at any of its files.
    pub(crate) fn new(backend: Box<dyn Backend>, writable: bool) -> Self {
        Self {
            backend,
            writable,
            pause_gate: PauseGate::default(),
            failed_read_limit: FAILED_READ_LIMIT,
        }
    }

    pub(crate) fn sync_dir(&self) -> Result<(), StoreError> {
        self.backend.sync_dir().map_err(|e| self.io_dir("syncing", e))
    }

    /// Returns the store's location.
    pub fn location(&self) -> &Path {
        self.backend.location()
    }

    /// Creates a file that does not exist yet.
    pub(crate) fn create_new(&self, name: &str) -> Result<Box<dyn StoreFile>, StoreError> {
        self.backend.create_new(name).map_err(|e| self.io("creating", name, e))
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// Returns the gate that is closed while the guest is paused for an epoch of this store: store
    /// work that can wait yields meanwhile.
    pub fn pause_gate(&self) -> &PauseGate {
        &self.pause_gate
    }

    /// Returns the state of failed reads for a reader of one file, none of which has been read yet.
    /// `guesses` is set by a reader that salvages.
    pub(crate) fn unreadable(&self, guesses: bool) -> UnreadableUnits {
        UnreadableUnits::new(self.failed_read_limit, guesses)
    }

    /// Sets the limit of the total time spent on failing reads, for each file.
    #[cfg(feature = "testing")]
    pub fn set_failed_read_limit(&mut self, failed_read_limit: Duration) {
        self.failed_read_limit = failed_read_limit;
    }

    /// Returns whether this is the store's writer.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Takes the write lock.
    ///
    /// # Errors
    ///
    /// [`StoreError::InUse`] with the holder's process id, if another process or handle has the
    /// lock.
    pub fn lock(&self) -> Result<(), StoreError> {
        self.backend.lock().map_err(|e| match e {
            LockError::Held { pid } => StoreError::InUse { dir: self.dir(), pid },
            LockError::Io(e) => self.io("locking", LOCK_FILE, e),
        })
    }

    /// Fails if another process could write to the store too: the lock was removed or replaced.
    ///
    /// # Errors
    ///
    /// [`StoreError::LockLost`], or an error of the system.
    pub fn check_lock(&self) -> Result<(), StoreError> {
        match self.backend.is_locked() {
            Ok(true) => Ok(()),
            Ok(false) => Err(StoreError::LockLost { dir: self.dir() }),
            Err(e) => Err(self.io("checking", LOCK_FILE, e)),
        }
    }

    /// Fails if `file` is no longer the file with the name `name`.
    pub(crate) fn check_file(&self, name: &str, file: &dyn StoreFile) -> Result<(), StoreError> {
        let there = self.backend.open(name).and_then(|there| there.identity());
        match (there, file.identity()) {
            (Ok(there), Ok(ours)) if there == ours => Ok(()),
            (Err(e), _) if e.kind() != io::ErrorKind::NotFound => {
                Err(self.not_read("opening", name, e))
            }
            _ => Err(StoreError::Replaced { file: self.path(name) }),
        }
    }

    /// Fails if an epoch of `guest` cannot follow the epoch `last`.
    pub(crate) fn check_follows(
        &self,
        last: &Origin,
        guest: &dyn GuestIdentity,
    ) -> Result<(), StoreError> {
        let (dir, asked, line) = (self.dir(), guest.vm_id(), guest.line());
        if last.vm_id != asked {
            return Err(StoreError::OtherVm { dir, stored: last.vm_id, asked });
        }
        if !line.follows(last) {
            let (last, from) = (last.epoch, line.from.map(|from| from.epoch));
            return Err(StoreError::OtherLine { dir, asked, last, from });
        }
        Ok(())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.location().join(name)
    }

    pub(crate) fn dir(&self) -> PathBuf {
        self.location().to_owned()
    }

    pub(crate) fn io(&self, what: &'static str, name: &str, cause: io::Error) -> StoreError {
        StoreError::Io { what, path: self.path(name), cause }
    }

    /// Returns the error of opening or reading the manifest, a log or a page file.
    pub(crate) fn not_read(&self, what: &'static str, name: &str, cause: io::Error) -> StoreError {
        StoreError::not_read(what, self.path(name), cause)
    }

    pub(crate) fn io_dir(&self, what: &'static str, cause: io::Error) -> StoreError {
        StoreError::Io { what, path: self.dir(), cause }
    }

    pub(crate) fn no_epoch(&self, epoch: Option<u64>) -> StoreError {
        StoreError::NoEpoch { dir: self.dir(), epoch }
    }

    pub(crate) fn names(&self) -> Result<Vec<String>, StoreError> {
        self.backend.list().map_err(|e| self.io_dir("listing", e))
    }
}
