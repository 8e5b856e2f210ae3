//! Removal of records that dead processes left.

use std::collections::HashSet;
use std::fs;

use uuid::Uuid;

use super::boot_and_mount::BootAndMount;
use super::destination::PreparedRecord;
use super::directory::{DECISION_SUFFIX, PREPARED_SUFFIX, Records};
use super::error::RecordsError;
use super::file::{read, sync_removed, unlink};
use crate::protocol::decision::Decision;
use crate::protocol::ids::Token;

/// Records of a migration that are no longer needed for an answer.
struct RemovableRecords {
    token: Token,
    decision: Option<Decision>,
}

impl Records {
    /// Removes records that dead processes left, if every answer stays the same:
    ///
    /// | prepared record | decision | removed |
    /// | --- | --- | --- |
    /// | its process has died | none, and none can have been lost | the prepared record: its guest never ran |
    /// | its process has died | `discarded` | both: without them the answer is also *discarded* |
    /// | its process has died | `committed` | the prepared record, once the decision is durable |
    /// | none | `discarded` | the decision: without it the answer is also *discarded* |
    ///
    /// Costs at most two syncs of the directory. The next sweep retries a failed removal, and
    /// removes a decision that has reappeared after a crash.
    pub(crate) fn sweep(&self) {
        let (now, mut tokens) = (self.boot_and_mount(), HashSet::new());
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let name = name.to_str().unwrap_or_default();
            let stem = [PREPARED_SUFFIX, DECISION_SUFFIX].iter().find_map(|s| name.strip_suffix(s));
            tokens.extend(stem.and_then(|stem| Uuid::parse_str(stem).ok()).map(Token));
        }
        let removable = tokens.into_iter().filter_map(|token| self.removable(token, now).ok()?);
        let removable: Vec<RemovableRecords> = removable.collect();
        if removable.is_empty() {
            return;
        }
        let committed = removable.iter().any(|of| of.decision == Some(Decision::Committed));
        if committed && sync_removed(&self.dir).is_err() {
            return;
        }
        let mut discarded = Vec::new();
        for RemovableRecords { token, decision } in removable {
            if unlink(&self.prepared_path(token)).is_ok() && decision == Some(Decision::Discarded) {
                discarded.push(token);
            }
        }
        // In this order for the reason given at `remove_both`.
        if sync_removed(&self.dir).is_ok() {
            for token in discarded {
                let _ = unlink(&self.decision_path(token));
            }
        }
    }

    /// Returns the records of a migration that [`sweep`](Self::sweep) removes by its table.
    fn removable(
        &self,
        token: Token,
        present: Option<BootAndMount>,
    ) -> Result<Option<RemovableRecords>, RecordsError> {
        let path = self.prepared_path(token);
        let Some(record) = read::<PreparedRecord>(&path, token)? else {
            // The prepared record is looked for again, because another process may have made one
            // and decided since.
            let decision = self.decision(token)?;
            let none = read::<PreparedRecord>(&path, token)?.is_none();
            let is_removable = decision == Some(Decision::Discarded) && none;
            return Ok(is_removable.then_some(RemovableRecords { token, decision }));
        };
        // The lock is checked before the decision is read: a dead process decides no more.
        let has_died = fs::File::open(&path).is_ok_and(|file| file.try_lock().is_ok());
        if !has_died {
            return Ok(None);
        }
        let decision = self.decision(token)?;
        let is_removable = decision.is_some() || record.decision_would_stand(present);
        Ok(is_removable.then_some(RemovableRecords { token, decision }))
    }
}
