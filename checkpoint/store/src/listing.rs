//! Lists what is in a store.

use std::io;

use driftline_guest::{GuestIdentity, VmId};

use crate::epoch_info::EpochInfo;
use crate::error::{StoreError, is_not_found};
use crate::limits::SECTOR;
use crate::log::{LogFile, Tail};
use crate::manifest::{Manifest, is_leftover};
use crate::names::{Named, log_name, parse_name};
use crate::store::Store;

/// Number of attempts to open a log, each of which finds that a writer has just replaced it. A
/// writer cannot be that fast: it writes and syncs a new log in the time of one attempt.
const MAX_OPEN_ATTEMPTS: u32 = 100;

/// The content of a store's directory.
#[derive(Debug, Default)]
pub struct Listing {
    /// Retained epochs, ascending: those before any damage of the log.
    pub epochs: Vec<EpochInfo>,
    /// Damage of the log.
    pub damaged: Vec<StoreError>,
    /// Files, and the end of the log, that a crash left unfinished or that are being written now.
    pub unfinished: Vec<String>,
    /// Files that do not belong to a store; never touched.
    pub foreign: Vec<String>,
    /// Files that [`repair`](Store::repair) replaced and kept under other names. The operator may
    /// remove them.
    pub quarantined: Vec<String>,
}

impl Store {
    /// Returns the guest whose epochs the store is for; `None` if no epoch was ever begun. Reads
    /// only the manifest, of a hundred bytes.
    ///
    /// # Errors
    ///
    /// The manifest is damaged or cannot be read.
    pub fn owner(&self) -> Result<Option<VmId>, StoreError> {
        Ok(self.manifest()?.map(|manifest| manifest.vm_id))
    }

    /// Returns the retained epochs, ascending. Reads the log; only [`verify`](Self::verify) and a
    /// restore check the contents of frames.
    ///
    /// # Errors
    ///
    /// The damage of the log, if there is any, or the system's errors.
    pub fn epochs(&self) -> Result<Vec<EpochInfo>, StoreError> {
        let listing = self.list()?;
        match listing.damaged.into_iter().next() {
            Some(e) => Err(e),
            None => Ok(listing.epochs),
        }
    }

    /// Lists everything in the directory. Costs as much as [`epochs`](Self::epochs).
    ///
    /// # Errors
    ///
    /// An error of the system. Damage is part of the listing.
    pub fn list(&self) -> Result<Listing, StoreError> {
        let mut listing = Listing::default();
        let opened = match self.open_log() {
            Err(e @ StoreError::Damaged { .. }) => {
                listing.damaged.push(e);
                None
            }
            other => other?,
        };
        let manifest = opened.as_ref().map(|(manifest, _)| *manifest);
        for name in self.names()? {
            match parse_name(&name) {
                Named::Foreign => listing.foreign.push(name),
                Named::Quarantined(_) => listing.quarantined.push(name),
                // A damaged manifest does not tell whether other files are unfinished.
                _ if listing.damaged.is_empty() && is_leftover(&name, manifest.as_ref()) => {
                    listing.unfinished.push(name);
                }
                _ => {}
            }
        }
        if let Some((manifest, log)) = opened {
            listing.epochs = log.kept().iter().map(|g| g.info).collect();
            match log.tail {
                Tail::Clean => {}
                Tail::Torn(at) => {
                    listing
                        .unfinished
                        .push(format!("{} from byte {at} on", log_name(manifest.files.log)));
                }
                Tail::Damaged(e, _) => listing.damaged.push(e),
            }
        }
        listing.unfinished.sort_unstable();
        listing.foreign.sort_unstable();
        listing.quarantined.sort_unstable();
        Ok(listing)
    }

    /// Returns the manifest and the log that it names; `None` if there is nothing yet.
    pub(crate) fn open_log(&self) -> Result<Option<(Manifest, LogFile)>, StoreError> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            let Some(manifest) = self.manifest()? else { return self.without_manifest() };
            match LogFile::open(self, manifest.files.log) {
                // A writer has just begun another log.
                Err(e) if is_not_found(&e) => {
                    if self.manifest()? == Some(manifest) {
                        return Err(self.missing_log(log_name(manifest.files.log))?);
                    }
                    if attempts == MAX_OPEN_ATTEMPTS {
                        return Err(e);
                    }
                }
                Err(e) => return Err(e),
                Ok(log) => {
                    log.check_owner(manifest.vm_id)?;
                    return Ok(Some((manifest, log)));
                }
            }
        }
    }

    /// Returns the error for a log that the manifest names and that is missing.
    fn missing_log(&self, name: String) -> Result<StoreError, StoreError> {
        let (dir, names) = (self.dir(), self.names()?);
        Ok(match names.iter().any(|name| matches!(parse_name(name), Named::Log(_))) {
            true => StoreError::NotThere { dir, file: name },
            false => StoreError::NoLog { dir, log: Some(name) },
        })
    }

    /// Checks a directory without a manifest, which may have files of a store that was never
    /// finished. A log that is longer than its header has epochs, or had some, whatever is damaged
    /// in it.
    fn without_manifest<T>(&self) -> Result<Option<T>, StoreError> {
        for name in self.names()? {
            let Named::Log(_) = parse_name(&name) else { continue };
            let len = match self.backend().open(&name).and_then(|file| file.len()) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                len => len.map_err(|e| self.not_read("reading", &name, e))?,
            };
            if len > SECTOR as u64 && self.manifest()?.is_none() {
                return Err(StoreError::NoManifest { log: self.path(&name) });
            }
        }
        Ok(None)
    }

    /// Fails if `guest` may not continue the store: it has epochs of another guest, or its last
    /// epoch is of another line.
    ///
    /// # Errors
    ///
    /// [`StoreError::OtherVm`] for another guest, [`StoreError::OtherLine`] for another line.
    pub fn check_line(&self, guest: &dyn GuestIdentity) -> Result<(), StoreError> {
        let last = self.open_log()?.and_then(|(_, log)| log.epochs.last().map(|g| g.info));
        last.map_or(Ok(()), |last| self.check_follows(&last.origin(), guest))
    }
}
