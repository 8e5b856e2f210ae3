//! The source's record, which says that the guest may be running on the peer.

use std::fs;

use driftline_guest::VmId;
use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;
use uuid::Uuid;

use super::directory::{Records, SOURCE_SUFFIX};
use super::error::{RecordDefect, RecordsError, failed, invalid};
use super::file::{VERSION, json, now_unix_ms, place, read, remove, temporary};
use crate::protocol::ids::Token;

/// The record of a source, from before COMMIT until it is known which host has the guest.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SourceRecord {
    /// The record's version.
    pub version: u32,
    /// The migration.
    pub token: Token,
    /// The guest that may be running on `peer`.
    pub vm_id: VmId,
    /// The destination's address, as the operator gave it.
    pub peer: String,
    /// The destination's site.
    pub site: Uuid,
    /// Time of the record, ms since 1970.
    pub time_unix_ms: u64,
}

/// Migrations of a host that are in doubt.
#[derive(Debug, Default)]
pub struct Pending {
    /// Records of guests that may be running on another host.
    pub records: Vec<SourceRecord>,
    /// Files with the name of such a record that cannot be read as one. Each may be about any
    /// guest.
    pub unreadable: Vec<RecordsError>,
}

/// A source record that is written and synced, but not yet linked to its name. Dropping it removes
/// it.
#[derive(Debug)]
pub(crate) struct StagedSource {
    file: NamedTempFile,
    record: SourceRecord,
}

impl StagedSource {
    /// The migration.
    pub(crate) fn token(&self) -> Token {
        self.record.token
    }
}

/// Proof that a source record is durable, which a guest's commit needs.
#[derive(Debug)]
pub(crate) struct SourceMark {
    record: SourceRecord,
}

impl SourceMark {
    pub(crate) fn record(&self) -> &SourceRecord {
        &self.record
    }
}

impl Records {
    /// Returns the migrations from here that are in doubt: after a crash, guests that may be
    /// running on another host. Unreadable files are listed in the result.
    ///
    /// # Errors
    ///
    /// If the directory cannot be read.
    pub fn pending(&self) -> Result<Pending, RecordsError> {
        let mut pending = Pending::default();
        for entry in fs::read_dir(&self.dir).map_err(failed("read", &self.dir))? {
            let entry = entry.map_err(failed("read", &self.dir))?;
            let name = entry.file_name();
            let Some(stem) = name.to_str().and_then(|n| n.strip_suffix(SOURCE_SUFFIX)) else {
                continue;
            };
            let path = entry.path();
            let read = match Uuid::parse_str(stem) {
                Ok(token) => read(&path, Token(token)),
                Err(_) => Err(invalid(&path, RecordDefect::Name)),
            };
            match read {
                Ok(record) => pending.records.extend(record),
                Err(e) => pending.unreadable.push(e),
            }
        }
        Ok(pending)
    }

    /// Removes the record of a migration whose outcome is known.
    ///
    /// # Errors
    ///
    /// If the file cannot be removed durably.
    pub fn remove_source(&self, token: Token) -> Result<(), RecordsError> {
        let path = self.source_path(token);
        remove(&self.dir, &path).map_err(failed("remove", &path))
    }

    /// Stages the source's record: writes and syncs it without its name. Dropping the result
    /// removes it.
    pub(crate) fn stage_source(
        &self,
        token: Token,
        vm_id: VmId,
        peer: &str,
        site: Uuid,
    ) -> Result<StagedSource, RecordsError> {
        let peer = peer.to_owned();
        let time_unix_ms = now_unix_ms();
        let record = SourceRecord { version: VERSION, token, vm_id, peer, site, time_unix_ms };
        let staged = json(&record).and_then(|bytes| temporary(&self.dir, &bytes));
        let file = staged.map_err(failed("write", &self.source_path(token)))?;
        Ok(StagedSource { file, record })
    }

    /// Links a staged record to its name, durably. After an error the record may exist.
    pub(crate) fn place_source(&self, staged: StagedSource) -> Result<SourceMark, RecordsError> {
        let StagedSource { file, record } = staged;
        let path = self.source_path(record.token);
        place(&self.dir, file, &path).map_err(failed("write", &path))?;
        Ok(SourceMark { record })
    }
}
