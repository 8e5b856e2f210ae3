//! The destination's records: its vote (prepared record) and its decision.

use std::fs;
use std::io;
use std::path::Path;

use driftline_format::durable::sync_dir;
use driftline_guest::{LogLimit, VmId};
use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;
use uuid::Uuid;

use super::boot_and_mount::BootAndMount;
use super::directory::Records;
use super::error::{RecordsError, failed};
use super::file::{VERSION, json, now_unix_ms, read, remove, sync_removed, temporary, unlink};
use crate::protocol::decision::Decision;
use crate::protocol::ids::{Secret, Token};

#[derive(Serialize, Deserialize)]
struct DestinationRecord {
    version: u32,
    token: Token,
    vm_id: Option<VmId>,
    decision: Decision,
    time_unix_ms: u64,
}

#[derive(Serialize, Deserialize)]
pub(super) struct PreparedRecord {
    version: u32,
    token: Token,
    vm_id: VmId,
    /// The secret of the migration, which a question about it must carry.
    secret: Secret,
    /// The boot of [`BootAndMount`]; null on a host without a boot id.
    boot: Option<Uuid>,
    /// The mount of [`BootAndMount`].
    mount: Option<u64>,
    time_unix_ms: u64,
}

impl PreparedRecord {
    /// Whether no decision about this guest can have been lost. Either the record was made in this
    /// boot and on this mount, or it names no boot: then the decision was durable before the guest
    /// ran.
    pub(super) fn decision_would_stand(&self, present: Option<BootAndMount>) -> bool {
        let recorded = self.boot.map(|boot| BootAndMount { boot, mount: self.mount });
        recorded.is_none() || recorded == present
    }
}

/// A decision that is written and synced, but not yet linked to its name. Dropping it removes it.
#[derive(Debug)]
pub(crate) struct StagedDecision {
    pub(super) file: NamedTempFile,
    token: Token,
    decision: Decision,
}

/// Proof that a prepared record is durable, without which READY must not be sent. The file is
/// locked while its process lives.
#[derive(Debug)]
pub(crate) struct PreparedMark {
    _lock: fs::File,
    /// Whether the guest may run before the decision to run it is durable.
    pub(super) names_boot: bool,
}

fn decision_json(token: Token, vm_id: Option<VmId>, decision: Decision) -> io::Result<Vec<u8>> {
    let time_unix_ms = now_unix_ms();
    json(&DestinationRecord { version: VERSION, token, vm_id, decision, time_unix_ms })
}

impl Records {
    /// Returns the decision about a token, made by any process of this site.
    pub(crate) fn decision(&self, token: Token) -> Result<Option<Decision>, RecordsError> {
        let record: Option<DestinationRecord> = read(&self.decision_path(token), token)?;
        Ok(record.map(|r| r.decision))
    }

    /// Decides about a token durably, unless a decision exists. Returns the recorded decision.
    pub(crate) fn decide(
        &self,
        token: Token,
        vm_id: Option<VmId>,
        decision: Decision,
    ) -> Result<Decision, RecordsError> {
        self.decide_by(self.stage(token, vm_id, decision)?)
    }

    /// Stages a decision: writes and syncs it without its name, so that it does not count yet.
    pub(crate) fn stage(
        &self,
        token: Token,
        vm_id: Option<VmId>,
        decision: Decision,
    ) -> Result<StagedDecision, RecordsError> {
        let staged = decision_json(token, vm_id, decision)
            .and_then(|bytes| temporary(&self.dir, &bytes))
            .map_err(failed("write", &self.decision_path(token)));
        Ok(StagedDecision { file: staged?, token, decision })
    }

    /// Decides as [`decide`](Self::decide), with a staged decision.
    pub(crate) fn decide_by(&self, staged: StagedDecision) -> Result<Decision, RecordsError> {
        let (path, decision) = (self.decision_path(staged.token), staged.decision);
        if let Some(recorded) = self.link(staged)? {
            return Ok(recorded);
        }
        self.keep_decision(&path, decision, sync_dir(&self.dir)).map_err(failed("write", &path))
    }

    /// Decides as [`decide_by`](Self::decide_by), but does not sync a decision whose prepared
    /// record names a boot. Until [`sync`](Self::sync) such a decision is visible to the host's
    /// processes only; after a crash of the host the prepared record answers in its place.
    pub(crate) fn decide_prepared(
        &self,
        staged: StagedDecision,
        prepared: &PreparedMark,
    ) -> Result<Decision, RecordsError> {
        if !prepared.names_boot {
            return self.decide_by(staged);
        }
        let decision = staged.decision;
        Ok(self.link(staged)?.unwrap_or(decision))
    }

    /// Links a decision to its name, or returns the durable decision that has the name already.
    fn link(&self, staged: StagedDecision) -> Result<Option<Decision>, RecordsError> {
        let StagedDecision { file, token, decision: _ } = staged;
        let path = self.decision_path(token);
        match file.persist_noclobber(&path).map_err(|e| e.error) {
            Ok(_) => Ok(None),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                // The other process may not have synced its file yet, and an answer that depends
                // on it must survive a crash.
                sync_dir(&self.dir).map_err(failed("read", &path))?;
                let recorded = self.decision(token)?;
                recorded
                    .ok_or_else(|| failed("read", &path)(io::ErrorKind::NotFound.into()))
                    .map(Some)
            }
            Err(e) => Err(failed("write", &path)(e)),
        }
    }

    /// Makes a decision durable.
    pub(crate) fn sync(&self, token: Token) -> Result<(), RecordsError> {
        sync_dir(&self.dir).map_err(failed("write", &self.decision_path(token)))
    }

    /// Whether a question about a migration may be answered: its prepared record has this secret,
    /// or no such record exists.
    pub(crate) fn accepts(&self, token: Token, secret: &Secret) -> Result<bool, RecordsError> {
        let record: Option<PreparedRecord> = read(&self.prepared_path(token), token)?;
        Ok(record.is_none_or(|record| record.secret.is(secret)))
    }

    /// Makes the prepared record of a guest durable.
    pub(crate) fn prepare(
        &self,
        token: Token,
        vm_id: VmId,
        secret: Secret,
    ) -> Result<PreparedMark, RecordsError> {
        let present = self.boot_and_mount();
        let (boot, mount) = (present.map(|now| now.boot), present.and_then(|now| now.mount));
        let path = self.prepared_path(token);
        let time_unix_ms = now_unix_ms();
        let version = VERSION;
        let record = PreparedRecord { version, token, vm_id, secret, boot, mount, time_unix_ms };
        let file = json(&record).and_then(|bytes| {
            let file = temporary(&self.dir, &bytes)?;
            // The kernel releases the lock when this process ends.
            file.as_file().try_lock()?;
            let file = file.persist_noclobber(&path).map_err(|e| e.error)?;
            sync_dir(&self.dir).inspect_err(|_| {
                // The record may exist, and no other process would remove it.
                let _ = fs::remove_file(&path);
            })?;
            Ok(file)
        });
        let _lock = file.map_err(failed("write", &path))?;
        Ok(PreparedMark { _lock, names_boot: boot.is_some() })
    }

    /// Removes the prepared record of a guest for which COMMIT can no longer arrive. The removal
    /// need not be durable, because no source will ask.
    pub(crate) fn withdraw(&self, token: Token, _prepared: PreparedMark) {
        let path = self.prepared_path(token);
        if let Err(e) = fs::remove_file(&path) {
            tracing::warn!(%token, "{}", failed("remove", &path)(e));
        }
    }

    /// Decides about a token that the calling process does not know.
    ///
    /// If a process of this site prepared the guest and none has decided, this stores `discarded`
    /// durably. If a decision may have been lost, because the host crashed or the directory was
    /// remounted since, it returns `committed` and stores nothing. A token without a prepared
    /// record is `discarded`, and nothing is stored: its guest was never prepared here.
    pub(crate) fn decide_unknown(&self, token: Token) -> Result<Decision, RecordsError> {
        // The prepared record is read first. While its source may ask, the record is removed only
        // if its guest never ran, or after a durable decision.
        let prepared = read(&self.prepared_path(token), token)?;
        self.decide_after_reading(token, prepared)
    }

    /// Performs [`decide_unknown`](Self::decide_unknown) after the prepared record was read.
    pub(super) fn decide_after_reading(
        &self,
        token: Token,
        mut prepared: Option<PreparedRecord>,
    ) -> Result<Decision, RecordsError> {
        let mut decision = self.decision(token)?;
        if prepared.is_some() && decision.is_none() {
            // A prepared record is removed before its decision. If the record still exists, no
            // decision had been removed.
            prepared = read(&self.prepared_path(token), token)?;
            if prepared.is_none() {
                decision = self.decision(token)?;
            }
        }
        let Some(prepared) = prepared.filter(|_| decision.is_none()) else {
            if decision.is_some() {
                // Another process may have made the decision and not synced it yet.
                self.sync(token)?;
            }
            return Ok(decision.unwrap_or(Decision::Discarded));
        };
        if !prepared.decision_would_stand(self.boot_and_mount()) {
            static LIMIT: LogLimit = LogLimit::new();
            if let Some(unshown) = LIMIT.admit() {
                tracing::warn!(
                    %token,
                    unshown,
                    "its guest was prepared here in another boot, or on another mount of {}, and \
                     may have run: its source stays in doubt until the operator resolves that",
                    self.dir.display()
                );
            }
            return Ok(Decision::Committed);
        }
        self.decide(token, Some(prepared.vm_id), Decision::Discarded)
    }

    /// Returns a linked decision if the directory was `synced`; otherwise removes a `committed`.
    pub(super) fn keep_decision(
        &self,
        path: &Path,
        decision: Decision,
        synced: io::Result<()>,
    ) -> io::Result<Decision> {
        if synced.is_err() && decision == Decision::Committed {
            // The decision may not survive a crash, and the guest will not run, so no process may
            // read it. A `discarded` stays: another process may have synced it and answered the
            // source by it.
            let _ = remove(&self.dir, path);
        }
        synced.map(|()| decision)
    }

    /// Replaces this process's own `committed` by `discarded`, because the guest never ran.
    pub(crate) fn overturn(&self, token: Token, vm_id: VmId) -> Result<(), RecordsError> {
        let path = self.decision_path(token);
        decision_json(token, Some(vm_id), Decision::Discarded)
            .and_then(|bytes| temporary(&self.dir, &bytes))
            .and_then(|file| file.persist(&path).map_err(|e| e.error))
            .and_then(|_| sync_dir(&self.dir))
            .map_err(failed("write", &path))
    }

    /// Removes a decision for which no source will ask again, and the prepared record of this
    /// process's guest.
    pub(crate) fn forget_decision(
        &self,
        token: Token,
        prepared: Option<PreparedMark>,
    ) -> Result<(), RecordsError> {
        match prepared {
            Some(_mark) => self.remove_both(token),
            None => {
                let path = self.decision_path(token);
                remove(&self.dir, &path).map_err(failed("remove", &path))
            }
        }
    }

    /// Removes a prepared record durably, and then the decision.
    ///
    /// A crash in between leaves the decision, which answers as before. The other order would leave
    /// a prepared record without a decision: its answer, *committed*, could never be corrected.
    fn remove_both(&self, token: Token) -> Result<(), RecordsError> {
        // Also synced if another process has removed the file, because it may not have synced.
        for path in [self.prepared_path(token), self.decision_path(token)] {
            unlink(&path).and_then(|_| sync_removed(&self.dir)).map_err(failed("remove", &path))?;
        }
        Ok(())
    }
}
