//! Files that appear under their names when they are complete and durable, or not at all.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use driftline_store::{Backend, DirBackend, StoreError, StoreFile};

use super::error::SnapshotError;

/// Prefix of the names of unfinished files.
const UNFINISHED: &str = "driftline-snapshot.tmp-";

/// A name in a directory, for a file of a snapshot.
#[derive(Debug)]
pub struct SnapshotFile {
    backend: Box<dyn Backend>,
    /// Device and inode of its directory, which many paths may lead to.
    dir: (u64, u64),
    name: String,
}

impl SnapshotFile {
    /// Returns the file at `path`, which need not exist; its directory must. If a symbolic link has
    /// that name, returns the file that it leads to.
    ///
    /// # Errors
    ///
    /// The directory does not exist, the path is not UTF-8, or a file of another kind has the name.
    pub fn at(path: &Path) -> Result<Self, SnapshotError> {
        let io = |cause| StoreError::Io { what: "opening", path: path.to_owned(), cause };
        let path = match fs::symlink_metadata(path) {
            Ok(found) if found.is_symlink() => &fs::canonicalize(path).map_err(io)?,
            _ => path,
        };
        let wrong = |why| SnapshotError::Name { path: path.to_owned(), why };
        let name = path.file_name().ok_or_else(|| wrong("it has no file name"))?;
        let name = name.to_str().ok_or_else(|| wrong("its name is not UTF-8"))?;
        if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
            return Err(wrong("it is not a regular file"));
        }
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
        let dir = dir.unwrap_or(Path::new("."));
        let backend = DirBackend::open(dir).map_err(io)?;
        let found = fs::metadata(dir).map_err(io)?;
        let dir = (found.dev(), found.ino());
        Ok(Self { backend: Box::new(backend), dir, name: name.to_owned() })
    }

    /// Returns the file `name` of `backend`. All backends count as one directory.
    #[cfg(test)]
    pub(super) fn with_backend(backend: Box<dyn Backend>, name: &str) -> Self {
        Self { backend, dir: (0, 0), name: name.to_owned() }
    }

    /// Returns whether both are the same name in the same directory, however their paths are
    /// spelled.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.dir == other.dir && self.name == other.name
    }

    /// Returns its path.
    pub fn path(&self) -> PathBuf {
        self.backend.location().join(&self.name)
    }

    /// Returns whether it exists.
    pub(super) fn exists(&self) -> Result<bool, StoreError> {
        match self.backend.open(&self.name) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            other => other.map(|_| true).map_err(|e| self.io("opening", e)),
        }
    }

    /// Opens it for writing, if it exists.
    pub(super) fn open(&self) -> Result<Option<Box<dyn StoreFile>>, StoreError> {
        match self.backend.open_for_writing(&self.name) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            other => other.map(Some).map_err(|e| self.io("opening", e)),
        }
    }

    /// Returns an error of an operation on it.
    pub(super) fn io(&self, what: &'static str, cause: io::Error) -> StoreError {
        StoreError::Io { what, path: self.path(), cause }
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), StoreError> {
        self.backend.rename(from, to).map_err(|e| self.io("renaming", self.explained(e)))
    }

    /// Returns `cause`, why a file is not created or does not get its name, with what its directory
    /// must allow.
    fn explained(&self, cause: io::Error) -> io::Error {
        let dir = self.backend.location().display();
        let why = match cause.kind() {
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => format!(
                "the file is created in {dir} under another name and then renamed: make that \
                 directory writable, or name a file in another one"
            ),
            io::ErrorKind::ResourceBusy => format!(
                "a file is mounted at that name in {dir}, and a snapshot replaces it: mount the \
                 directory instead, or name another file"
            ),
            _ => return cause,
        };
        io::Error::new(cause.kind(), format!("{cause}: {why}"))
    }

    fn sync_dir(&self) -> Result<(), StoreError> {
        let path = self.backend.location().to_owned();
        let failed = |cause| StoreError::Io { what: "syncing", path, cause };
        self.backend.sync_dir().map_err(failed)
    }
}

/// Returns a name that no other file of this process has.
fn unfinished_name() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    format!("{UNFINISHED}{}-{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// A file that is being written. Drop removes it, unless it was published.
pub(super) struct UnfinishedFile<'t> {
    target: &'t SnapshotFile,
    /// `None` once it was published.
    name: Option<String>,
    pub(super) file: Box<dyn StoreFile>,
}

impl<'t> UnfinishedFile<'t> {
    /// Creates an empty file in the directory of `target`.
    pub(super) fn new(target: &'t SnapshotFile) -> Result<Self, StoreError> {
        loop {
            let name = unfinished_name();
            match target.backend.create_new(&name) {
                // Left by a crash, or by a process of another PID namespace.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(target.io("creating", target.explained(e))),
                Ok(file) => return Ok(Self { target, name: Some(name), file }),
            }
        }
    }

    /// Makes its content durable.
    pub(super) fn sync(&self) -> Result<(), StoreError> {
        self.file.sync().map_err(|e| self.target.io("syncing", e))
    }

    /// Gives it the name of its target, durably, in place of the file that had the name.
    pub(super) fn publish(&mut self) -> Result<(), StoreError> {
        if let Some(name) = &self.name {
            self.target.rename(name, &self.target.name)?;
        }
        self.name = None;
        self.target.sync_dir()
    }

    /// Returns whether the target's name is known to be another file's.
    pub(super) fn is_unpublished(&self) -> bool {
        match self.target.open() {
            Ok(None) => true,
            Ok(Some(there)) => matches!(
                (there.identity(), self.file.identity()),
                (Ok(there), Ok(this)) if there != this
            ),
            Err(_) => false,
        }
    }
}

impl Drop for UnfinishedFile<'_> {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            let _ = self.target.backend.remove(name);
        }
    }
}

/// A file of an earlier snapshot whose name was taken from it. Drop removes it.
pub(super) struct WithdrawnFile<'t> {
    target: &'t SnapshotFile,
    name: Option<String>,
}

impl<'t> WithdrawnFile<'t> {
    /// Takes the name from `target`, durably, if there is such a file.
    pub(super) fn new(target: &'t SnapshotFile) -> Result<Self, StoreError> {
        if !target.exists()? {
            return Ok(Self { target, name: None });
        }
        let name = unfinished_name();
        // A rename that fails may have taken effect.
        let renamed = target.rename(&target.name, &name).and_then(|()| target.sync_dir());
        let withdrawn = Self { target, name: Some(name) };
        match renamed {
            Ok(()) => Ok(withdrawn),
            Err(e) => {
                withdrawn.put_back();
                Err(e)
            }
        }
    }

    /// Gives the file its name again.
    pub(super) fn put_back(mut self) {
        let Some(name) = self.name.take() else { return };
        match self.target.backend.rename(&name, &self.target.name) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                let path = self.target.path();
                tracing::error!("renaming {name} back to {} failed: {e}", path.display());
            }
            _ => {}
        }
    }
}

impl Drop for WithdrawnFile<'_> {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            let _ = self.target.backend.remove(name);
        }
    }
}
