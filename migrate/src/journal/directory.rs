//! The directory of a host's records, and its site.

use std::io;
use std::path::PathBuf;

use driftline_format::durable::create_dir;
use uuid::Uuid;

use super::boot_and_mount::BootAndMount;
use super::error::{RecordsError, failed};
use super::file::{read_bounded, sweep_staged, write_new};
use crate::protocol::ids::Token;

/// Suffix of a source record's name, after its token.
pub(super) const SOURCE_SUFFIX: &str = ".source.json";

/// Suffix of a prepared record's name, after its token.
pub(super) const PREPARED_SUFFIX: &str = ".prepared.json";

/// Suffix of a decision's name, after its token.
pub(super) const DECISION_SUFFIX: &str = ".destination.json";

/// The directory of one host's hand-over records.
#[derive(Debug, Clone)]
pub struct Records {
    pub(super) dir: PathBuf,
    pub(super) site: Uuid,
    /// The boot and the mount to pretend, in tests.
    #[cfg(test)]
    pub(super) test_boot_and_mount: Option<Option<BootAndMount>>,
}

impl Records {
    /// Opens the directory, and creates it and its site if they do not exist.
    ///
    /// # Errors
    ///
    /// If the directory or its file `site` cannot be created or read.
    pub fn open(dir: impl Into<PathBuf>) -> Result<Self, RecordsError> {
        let dir = dir.into();
        create_dir(&dir).map_err(failed("write", &dir))?;
        sweep_staged(&dir);
        let path = dir.join("site");
        let bytes = match read_bounded(&path)? {
            None => {
                match write_new(&dir, &path, Uuid::new_v4().to_string().as_bytes()) {
                    // Another process has created it.
                    Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                    made => made.map_err(failed("write", &path))?,
                }
                let none = || failed("read", &path)(io::ErrorKind::NotFound.into());
                read_bounded(&path)?.ok_or_else(none)?
            }
            // The name is durable before any record is, because records sync the same directory.
            Some(bytes) => bytes,
        };
        let site = Uuid::parse_str(String::from_utf8_lossy(&bytes).trim())
            .map_err(|e| failed("read", &path)(io::Error::new(io::ErrorKind::InvalidData, e)))?;
        Ok(Self {
            dir,
            site,
            #[cfg(test)]
            test_boot_and_mount: None,
        })
    }

    /// Returns the current boot and mount. Read each time, because a process can outlive a mount.
    pub(super) fn boot_and_mount(&self) -> Option<BootAndMount> {
        #[cfg(test)]
        if let Some(pretended) = self.test_boot_and_mount {
            return pretended;
        }
        BootAndMount::of(&self.dir)
    }

    /// Returns the directory's name, as peers see it.
    pub fn site(&self) -> Uuid {
        self.site
    }

    pub(super) fn source_path(&self, token: Token) -> PathBuf {
        self.dir.join(format!("{token}{SOURCE_SUFFIX}"))
    }

    pub(super) fn decision_path(&self, token: Token) -> PathBuf {
        self.dir.join(format!("{token}{DECISION_SUFFIX}"))
    }

    pub(super) fn prepared_path(&self, token: Token) -> PathBuf {
        self.dir.join(format!("{token}{PREPARED_SUFFIX}"))
    }
}
