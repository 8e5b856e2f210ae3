//! A store: what it lies on, who may write to it, and errors that name its files.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use driftline_guest::{Guest, Origin};

use crate::backend::{Backend, LOCK_FILE, LockError, StoreFile};
use crate::error::StoreError;
use crate::pause_gate::Calm;
use crate::unreadable::{PATIENCE, Unreadable};

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
    calm: Calm,
    /// Time that reads of each file may take which fail.
    patience: Duration,
}

impl Store {
    /// A store on `backend`, nothing of which has been looked at.
    pub(crate) fn new(backend: Box<dyn Backend>, writable: bool) -> Self {
        Self { backend, writable, calm: Calm::default(), patience: PATIENCE }
    }

    pub(crate) fn sync_dir(&self) -> Result<(), StoreError> {
        self.backend.sync_dir().map_err(|e| self.io_dir("syncing", e))
    }

    /// Where it is.
    pub fn location(&self) -> &Path {
        self.backend.location()
    }

    /// Makes a file that is not there yet.
    pub(crate) fn create_new(&self, name: &str) -> Result<Box<dyn StoreFile>, StoreError> {
        self.backend.create_new(name).map_err(|e| self.io("creating", name, e))
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// Held while the guest stands for an epoch that goes through this one: work on the store that
    /// can wait does.
    pub fn calm(&self) -> &Calm {
        &self.calm
    }

    /// For a reader of a file, none of which has been read; one that `guesses` salvages.
    pub(crate) fn unreadable(&self, guesses: bool) -> Unreadable {
        Unreadable::new(self.patience, guesses)
    }

    /// Bounds the time that reads may take which fail, for each file.
    #[cfg(feature = "testing")]
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Whether this is the one that may write to it.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Takes the lock, or says who has it.
    pub fn lock(&self) -> Result<(), StoreError> {
        self.backend.lock().map_err(|e| match e {
            LockError::Held { pid } => StoreError::InUse { dir: self.dir(), pid },
            LockError::Io(e) => self.io("locking", LOCK_FILE, e),
        })
    }

    /// Refuses to write on where another process could write too.
    pub fn check_lock(&self) -> Result<(), StoreError> {
        match self.backend.is_locked() {
            Ok(true) => Ok(()),
            Ok(false) => Err(StoreError::LockLost { dir: self.dir() }),
            Err(e) => Err(self.io("looking at", LOCK_FILE, e)),
        }
    }

    /// Refuses to write to a file that is no longer the one under its name.
    pub(crate) fn check_file(&self, name: &str, file: &dyn StoreFile) -> Result<(), StoreError> {
        let there = self.backend.open(name).and_then(|there| there.identity());
        match (there, file.identity()) {
            (Ok(there), Ok(ours)) if there == ours => Ok(()),
            (Err(e), _) if e.kind() != io::ErrorKind::NotFound => Err(self.io("opening", name, e)),
            _ => Err(StoreError::Replaced { file: self.path(name) }),
        }
    }

    /// Refuses to put an epoch of `guest` right behind `last`.
    pub(crate) fn check_follows(&self, last: &Origin, guest: &dyn Guest) -> Result<(), StoreError> {
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
