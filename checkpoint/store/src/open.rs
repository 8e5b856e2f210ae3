//! Opens a store for reading, for its one writer, or to repair it.

use std::io;
use std::path::Path;

use crate::backend::Backend;
use crate::dir_backend::DirBackend;
use crate::error::{StoreError, is_not_found};
use crate::log::LogFile;
use crate::manifest::{Manifest, is_leftover};
use crate::names::{MANIFEST, Named, log_name, pages_name, parse_name};
use crate::page_file::PageReader;
use crate::quarantine::RenamedFile;
use crate::store::Store;

impl Store {
    /// Opens the store in `dir` for writing, creating it if need be, and removes what a crashed
    /// writer left unfinished.
    ///
    /// # Errors
    ///
    /// [`StoreError::InUse`] if another process, or another `Store` in this one, writes to it.
    pub fn create_or_open(dir: &Path) -> Result<Self, StoreError> {
        let backend = DirBackend::create_or_open(dir).map_err(|e| creating(dir, e))?;
        Self::with_backend(Box::new(backend), true)
    }

    /// Opens a store like [`create_or_open`](Self::create_or_open), and writes to it past the
    /// host's page cache ([`DirBackend::direct`]).
    ///
    /// # Errors
    ///
    /// As [`create_or_open`](Self::create_or_open). Creating files fails later if the file system
    /// has no direct I/O.
    pub fn create_or_open_direct(dir: &Path) -> Result<Self, StoreError> {
        let backend = DirBackend::create_or_open(dir).map_err(|e| creating(dir, e))?;
        Self::with_backend(Box::new(backend.direct()), true)
    }

    /// Opens the store in `dir` for reading; nothing in it needs to be writable. The store shows
    /// the epochs that are retained at each moment, also while another process writes.
    ///
    /// # Errors
    ///
    /// `dir` does not exist or is not a directory.
    pub fn open(dir: &Path) -> Result<Self, StoreError> {
        let backend = DirBackend::open(dir).map_err(|cause| StoreError::Io {
            what: "opening the store",
            path: dir.to_owned(),
            cause,
        })?;
        Self::with_backend(Box::new(backend), false)
    }

    /// Opens a store on something other than a directory.
    ///
    /// # Errors
    ///
    /// As [`create_or_open`](Self::create_or_open) for a writer; a reader opens no file yet.
    pub fn with_backend(backend: Box<dyn Backend>, writable: bool) -> Result<Self, StoreError> {
        let store = Self::new(backend, writable);
        if writable {
            store.lock()?;
        }
        if writable && let Some(manifest) = store.with_repair_hint(store.manifest())? {
            store.remove_leftovers(&store.names()?, &manifest)?;
        }
        Ok(store)
    }

    /// Removes files that the manifest does not name. It first checks that the files that the
    /// manifest does name are the store's: a manifest from a backup may name files that are
    /// missing, and then the others are all that there is.
    fn remove_leftovers(&self, names: &[String], manifest: &Manifest) -> Result<(), StoreError> {
        let leftovers = names.iter().filter(|name| is_leftover(name, Some(manifest)));
        let leftovers: Vec<&String> = leftovers.collect();
        if leftovers.is_empty() {
            return Ok(());
        }
        let has_content =
            |name: &&String| matches!(parse_name(name), Named::Log(_) | Named::Pages(_));
        if leftovers.iter().any(has_content) {
            self.with_repair_hint(self.check_named(manifest))?;
        }
        // The directory is synced first: otherwise a crash may bring back the manifest before this
        // one, which names some of these files.
        self.sync_dir()?;
        let mut quarantined = Vec::new();
        self.quarantine(names, manifest, &mut quarantined)?;
        for RenamedFile { from, to } in &quarantined {
            tracing::info!("{from} is kept as {to}: a repair that was killed has replaced it");
        }
        for name in
            leftovers.into_iter().filter(|name| quarantined.iter().all(|a| a.from != **name))
        {
            tracing::info!(name, "removing an unfinished file");
            match self.backend().remove(name) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                // The process that writes such a file has no lock, and may have renamed it by now.
                Err(e) if parse_name(name) == Named::WorkingSetNew => {
                    tracing::debug!("{name} stays: {e}");
                }
                other => other.map_err(|e| self.io("removing", name, e))?,
            }
        }
        self.sync_dir()
    }

    /// Fails if the manifest names a log or page file that is missing, or whose header is not this
    /// store's.
    fn check_named(&self, manifest: &Manifest) -> Result<(), StoreError> {
        let Manifest { vm_id, files } = *manifest;
        let log = LogFile::check_header(self, files.log, vm_id);
        let pages = PageReader::open(self, files.pages, vm_id).map(drop);
        for (checked, file) in [(log, log_name(files.log)), (pages, pages_name(files.pages))] {
            checked.map_err(|e| match is_not_found(&e) {
                true => StoreError::NotThere { dir: self.dir(), file },
                false => e,
            })?;
        }
        Ok(())
    }

    /// Opens the store in `dir` to [repair](Self::repair) it.
    ///
    /// # Errors
    ///
    /// [`StoreError::InUse`] if another process, or another `Store` in this one, writes to it;
    /// [`StoreError::NotAStore`] if no file there is a store's.
    pub fn open_to_repair(dir: &Path) -> Result<Self, StoreError> {
        let opening =
            |cause| StoreError::Io { what: "opening the store", path: dir.to_owned(), cause };
        Self::with_backend_to_repair(Box::new(DirBackend::open(dir).map_err(opening)?))
    }

    /// Opens a store to repair it, like [`open_to_repair`](Self::open_to_repair), on something
    /// other than a directory.
    ///
    /// # Errors
    ///
    /// As [`open_to_repair`](Self::open_to_repair).
    pub fn with_backend_to_repair(backend: Box<dyn Backend>) -> Result<Self, StoreError> {
        let store = Self::new(backend, true);
        store.check_is_store()?;
        store.lock()?;
        Ok(store)
    }

    /// Fails if the directory has no file of a store.
    ///
    /// # Errors
    ///
    /// [`StoreError::NotAStore`], or an error of the system.
    pub fn check_is_store(&self) -> Result<(), StoreError> {
        let is_part = |name: &String| {
            matches!(parse_name(name), Named::Manifest | Named::Log(_) | Named::Pages(_))
        };
        match self.names()?.iter().any(is_part) {
            true => Ok(()),
            false => Err(StoreError::NotAStore { dir: self.dir() }),
        }
    }

    /// Locks the store's page file against other writers until it is closed. Returns it with the
    /// manifest, and with the log as read after the lock; `None` if the store has no files yet.
    pub(super) fn open_locked(
        &self,
    ) -> Result<Option<(PageReader, Manifest, LogFile)>, StoreError> {
        let Some(before) = self.with_repair_hint(self.manifest())? else {
            // There may be a log whose manifest is lost.
            return self.open_log().map(|_| None);
        };
        let locked = PageReader::open_locked(self, before.files.pages)?;
        match self.with_repair_hint(self.open_log())? {
            Some((manifest, log)) if manifest.files.pages == before.files.pages => {
                Ok(Some((locked, manifest, log)))
            }
            _ => Err(StoreError::Replaced { file: self.path(MANIFEST) }),
        }
    }

    /// Adds the repair command to damage that keeps a writer from the store.
    pub(super) fn with_repair_hint<T>(
        &self,
        found: Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        found.map_err(|e| match e.is_damage() {
            true => StoreError::NeedsRepair { dir: self.dir(), epoch: None, cause: Box::new(e) },
            false => e,
        })
    }
}

fn creating(dir: &Path, cause: io::Error) -> StoreError {
    StoreError::Io { what: "creating the store", path: dir.to_owned(), cause }
}
