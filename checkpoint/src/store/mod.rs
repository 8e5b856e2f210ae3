//! The epoch store: a directory with one file for each epoch, published whole or not at all.
//!
//! Bytes, names and the order of syncs are in `FORMAT.md`. A [`Store`] is either open for reading,
//! by anyone at any time, or open for one writer, which holds the directory's lock.

mod backend;
mod error;
mod reader;
mod records;
#[cfg(feature = "testing")]
mod reseal;
mod verify;
mod writer;

use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

pub use backend::{Backend, DirBackend, LOCK_FILE, LockError, StoreFile};
pub use error::{Damage, StoreError};
pub(crate) use reader::{EpochReader, Peeked, Record, peek};
pub use records::ParentLink;
#[cfg(feature = "testing")]
pub use reseal::reseal;
pub use verify::VerifyReport;
pub(crate) use verify::{check_layout, check_link, check_vm};
pub(crate) use writer::{EpochWriter, Published};

use crate::VmId;

const PREFIX: &str = "epoch-";
const SUFFIX: &str = ".dl";
const TEMPORARY: &str = ".dl.tmp";
const DIGITS: usize = 20;

/// The name of an epoch's file.
pub(crate) fn file_name(epoch: u64) -> String {
    format!("{PREFIX}{epoch:0DIGITS$}{SUFFIX}")
}

/// Its name until all of it is durable.
pub(crate) fn temporary_name(epoch: u64) -> String {
    format!("{PREFIX}{epoch:0DIGITS$}{TEMPORARY}")
}

/// What a name in the directory stands for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Named {
    Epoch(u64),
    Temporary(u64),
    Lock,
    Foreign,
}

fn parse_name(name: &str) -> Named {
    if name == LOCK_FILE {
        return Named::Lock;
    }
    let number = |digits: &str| {
        let plain = digits.len() == DIGITS && digits.bytes().all(|b| b.is_ascii_digit());
        digits.parse().ok().filter(|&n: &u64| plain && n > 0)
    };
    let Some(rest) = name.strip_prefix(PREFIX) else { return Named::Foreign };
    if let Some(n) = rest.strip_suffix(SUFFIX).and_then(number) {
        return Named::Epoch(n);
    }
    rest.strip_suffix(TEMPORARY).and_then(number).map_or(Named::Foreign, Named::Temporary)
}

/// One stored epoch, as it describes itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct EpochInfo {
    /// Its number, from 1 on, ascending in time.
    pub epoch: u64,
    /// Whose epoch it is.
    pub vm_id: VmId,
    /// The epoch that it builds on.
    pub parent: Option<u64>,
    /// Whether it stands alone.
    pub full: bool,
    /// Frames in it, those of zeros included.
    pub frames: u64,
    /// Frames of zeros, stored without contents.
    pub zero_frames: u64,
    /// Bytes of its file.
    pub bytes: u64,
    /// When it was begun: milliseconds since 1970, by the host's clock.
    pub created_unix_ms: u64,
}

/// What is in a store's directory.
#[derive(Debug, Default)]
pub struct Listing {
    /// Epochs whose front and trailer are sound, ascending.
    pub epochs: Vec<EpochInfo>,
    /// What is wrong with each of the others, ascending.
    pub damaged: Vec<StoreError>,
    /// Files of epochs that were never finished: left over by a crash, or being written now.
    pub unfinished: Vec<String>,
    /// Files that have no place in a store; never touched.
    pub foreign: Vec<String>,
}

/// A directory of epochs.
///
/// ```
/// use checkpoint::Store;
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
}

impl Store {
    /// Opens the store in `dir` for writing, creating it if need be, and removes what a crashed
    /// writer left unfinished.
    ///
    /// Fails if another process, or another `Store` in this one, writes to it.
    pub fn create_or_open(dir: &Path) -> Result<Self, StoreError> {
        let backend = DirBackend::create_or_open(dir).map_err(|cause| StoreError::Io {
            what: "creating the store",
            path: dir.to_owned(),
            cause,
        })?;
        Self::with_backend(Box::new(backend), true)
    }

    /// Opens the store in `dir` for reading. Sees the epochs that are published at each moment,
    /// also while another process writes.
    pub fn open(dir: &Path) -> Result<Self, StoreError> {
        let backend = DirBackend::open(dir).map_err(|cause| StoreError::Io {
            what: "opening the store",
            path: dir.to_owned(),
            cause,
        })?;
        Self::with_backend(Box::new(backend), false)
    }

    /// A store on something other than a directory.
    pub fn with_backend(backend: Box<dyn Backend>, writable: bool) -> Result<Self, StoreError> {
        let store = Self { backend, writable };
        if writable {
            store.lock()?;
            let mut removed = false;
            for name in store.names()? {
                if let Named::Temporary(epoch) = parse_name(&name) {
                    tracing::info!(epoch, "removing an epoch that was never finished");
                    store.backend.remove(&name).map_err(|e| store.io("removing", &name, e))?;
                    removed = true;
                }
            }
            if removed {
                store.backend.sync_dir().map_err(|e| store.io_dir("syncing", e))?;
            }
        }
        Ok(store)
    }

    /// Where it is.
    pub fn location(&self) -> &Path {
        self.backend.location()
    }

    /// The store's epochs, ascending; an error if any of them is damaged so that it cannot even be
    /// described. Costs three small reads an epoch; contents are only checked by
    /// [`verify`](Self::verify) and [`restore`](crate::restore()).
    pub fn epochs(&self) -> Result<Vec<EpochInfo>, StoreError> {
        let listing = self.list()?;
        match listing.damaged.into_iter().next() {
            Some(e) => Err(e),
            None => Ok(listing.epochs),
        }
    }

    /// Everything in the directory. Costs as much as [`epochs`](Self::epochs).
    pub fn list(&self) -> Result<Listing, StoreError> {
        let mut listing = Listing::default();
        let mut epochs = Vec::new();
        for name in self.names()? {
            match parse_name(&name) {
                Named::Epoch(n) => epochs.push(n),
                Named::Temporary(_) => listing.unfinished.push(name),
                Named::Foreign => listing.foreign.push(name),
                Named::Lock => {}
            }
        }
        epochs.sort_unstable();
        listing.unfinished.sort_unstable();
        listing.foreign.sort_unstable();
        for epoch in epochs {
            match peek(self, epoch) {
                Ok((info, _)) => listing.epochs.push(info),
                Err(e) => listing.damaged.push(e),
            }
        }
        Ok(listing)
    }

    /// The numbers of all published epochs, ascending, whatever is in their files.
    pub(crate) fn numbers(&self) -> Result<Vec<u64>, StoreError> {
        let mut numbers: Vec<u64> = self
            .names()?
            .iter()
            .filter_map(|name| match parse_name(name) {
                Named::Epoch(n) => Some(n),
                _ => None,
            })
            .collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// Whether an epoch's file is there; what is in it nobody looks at.
    pub(crate) fn find(&self, epoch: u64) -> Result<(), StoreError> {
        match self.backend.open(&file_name(epoch)) {
            Ok(_) => Ok(()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Err(self.no_epoch(Some(epoch))),
            Err(e) => Err(self.io("opening", &file_name(epoch), e)),
        }
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    pub(crate) fn is_writable(&self) -> bool {
        self.writable
    }

    /// Takes the lock, or says who has it.
    pub(crate) fn lock(&self) -> Result<(), StoreError> {
        self.backend.lock().map_err(|e| match e {
            LockError::Held { pid } => StoreError::InUse { dir: self.dir(), pid },
            LockError::Io(e) => self.io("locking", LOCK_FILE, e),
        })
    }

    /// Refuses to write on where another process could write too.
    pub(crate) fn check_lock(&self) -> Result<(), StoreError> {
        match self.backend.is_locked() {
            Ok(true) => Ok(()),
            Ok(false) => Err(StoreError::LockLost { dir: self.dir() }),
            Err(e) => Err(self.io("looking at", LOCK_FILE, e)),
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.location().join(name)
    }

    pub(crate) fn epoch_path(&self, epoch: u64) -> PathBuf {
        self.path(&file_name(epoch))
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

    fn names(&self) -> Result<Vec<String>, StoreError> {
        self.backend.list().map_err(|e| self.io_dir("listing", e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_sort_like_numbers_and_nothing_else_is_one() {
        assert_eq!(file_name(42), "epoch-00000000000000000042.dl");
        assert_eq!(parse_name(&file_name(u64::MAX)), Named::Epoch(u64::MAX));
        assert_eq!(parse_name(&temporary_name(7)), Named::Temporary(7));
        assert!(file_name(9) < file_name(10));
        for foreign in [
            "epoch-42.dl",
            "epoch-00000000000000000000.dl",
            "epoch-99999999999999999999.dl",
            "epoch-+0000000000000000042.dl",
            "epoch-00000000000000000042.dl.bak",
            "notes.txt",
            "",
        ] {
            assert_eq!(parse_name(foreign), Named::Foreign, "{foreign}");
        }
    }
}
