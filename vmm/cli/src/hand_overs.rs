//! Owns the hand-over records that a crash left behind. While a record exists, its guest may be
//! running elsewhere, and only the operator can decide that it is not (I7).

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use driftline_guest::{
    DriveHead, GuestError, GuestFactory, GuestWithCopies, Lifecycle, Origin, SharedGuest, VmId,
};
use driftline_machine::config::DiskConfig;
use driftline_migrate::{Pending, Records, RecordsError, Resolution, SourceRecord};
use serde_json::{Value, json};

use super::args::ResolveArgs;
use super::failure::Failure;
use super::output::{print_json, print_message};

/// The hand-overs of this host that are in doubt.
pub(super) struct PendingHandOvers {
    state_dir: PathBuf,
    clone: CloneDisks,
}

/// Which disks of the original the guest would use if it is a clone.
enum CloneDisks {
    NotAClone,
    /// The checkpoint's configuration cannot be read.
    Unknown,
    Known(Vec<DiskConfig>),
}

impl PendingHandOvers {
    /// Creates the check for the records in `state_dir`.
    pub(super) fn of(state_dir: PathBuf) -> Self {
        Self { state_dir, clone: CloneDisks::NotAClone }
    }

    /// Allows the guest to run as a clone, unless it would use disks of the original (`shared`, if
    /// they are known).
    pub(super) fn allow_clone(&mut self, shared: Option<Vec<DiskConfig>>) {
        self.clone = shared.map_or(CloneDisks::Unknown, CloneDisks::Known);
    }

    /// Refuses the guest `vm_id`, or a guest restored from it, if it may be running at the peer of
    /// a hand-over.
    pub(super) fn refuse(&self, vm_id: VmId) -> Result<(), HandOverDoubt> {
        let clone = match &self.clone {
            CloneDisks::NotAClone => CloneHint::NewId,
            CloneDisks::Unknown => CloneHint::UnknownDisks,
            CloneDisks::Known(shared) => match shared.first() {
                None => return Ok(()),
                Some(disk) => CloneHint::CopyOf { id: disk.id.clone(), path: disk.path.clone() },
            },
        };
        let dir = &self.state_dir;
        let (_, Pending { records, unreadable }) = pending(dir)?;
        if let Some(record) = records.into_iter().find(|record| record.vm_id == vm_id) {
            let record = Box::new(record);
            return Err(HandOverDoubt::Pending { record, dir: dir.clone(), clone });
        }
        match unreadable.into_iter().next() {
            None => Ok(()),
            Some(cause) => Err(HandOverDoubt::Unreadable { vm_id, clone, cause }),
        }
    }
}

/// Why a guest may be running on another host, and must not run here.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandOverDoubt {
    /// The directory of the records cannot be examined.
    #[error("cannot look for hand-over records in {}: {cause}", dir.display())]
    Hidden {
        dir: PathBuf,
        #[source]
        cause: io::Error,
    },
    /// The directory of the records cannot be read.
    #[error(transparent)]
    Records(#[from] RecordsError),
    /// The guest has been handed over, or may have been.
    #[error(
        "{}; resolve it with `driftline resolve --state-dir {} --vm {} --run` or `--discard`; \
         {clone}",
        describe(record), dir.display(), record.vm_id
    )]
    Pending { record: Box<SourceRecord>, dir: PathBuf, clone: CloneHint },
    /// A record of a hand-over may be about the guest.
    #[error(
        "{cause}; it may say that guest {vm_id} runs on another host: repair it, or remove it if \
         you know that no other host runs this guest; {clone}"
    )]
    Unreadable {
        vm_id: VmId,
        clone: CloneHint,
        #[source]
        cause: RecordsError,
    },
}

/// How a clone can run although its original is in doubt.
#[derive(Debug)]
pub(super) enum CloneHint {
    /// The guest is not to be a clone so far.
    NewId,
    /// The clone may use disks of the original.
    UnknownDisks,
    /// The clone would use this disk of the original.
    CopyOf { id: String, path: PathBuf },
}

impl fmt::Display for CloneHint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NewId => f.write_str("for a clone with an id of its own, use --new-id"),
            Self::UnknownDisks => f.write_str(
                "its clone must not use its disks, and the checkpoint's configuration, which names \
                 them, cannot be read: clone another checkpoint",
            ),
            Self::CopyOf { id, path } => write!(
                f,
                "its clone must not use its disk \"{id}\" ({}): give it a copy with --disk \
                 path=COPY,id={id}",
                path.display()
            ),
        }
    }
}

/// Builds only guests that have no pending hand-over. The check runs once the guest's disks are
/// locked and before anything is written to them. The previous owner of the locks has released them
/// by then, and wrote its record before that.
pub(super) struct CheckedFactory<F> {
    pub(super) inner: F,
    pub(super) pending_hand_overs: PendingHandOvers,
}

impl<F: GuestFactory> CheckedFactory<F> {
    fn check(&self, vm_id: VmId, guest: Arc<F::Guest>) -> Result<Arc<F::Guest>, GuestError> {
        if let Err(e) = self.pending_hand_overs.refuse(vm_id) {
            guest.stop("it may be running elsewhere");
            return Err(GuestError::System { what: "starting it here", cause: e.into() });
        }
        Ok(guest)
    }
}

impl<F: GuestFactory> GuestFactory for CheckedFactory<F> {
    type Guest = F::Guest;

    fn create_with_copies(
        &self,
        vm_id: VmId,
        config: &[u8],
        drives: &[DriveHead],
    ) -> Result<GuestWithCopies<F::Guest>, GuestError> {
        let (guest, copies) = self.inner.create_with_copies(vm_id, config, drives)?;
        Ok((self.check(vm_id, guest)?, copies))
    }

    fn create_on(
        &self,
        vm_id: VmId,
        config: &[u8],
        shared: &SharedGuest,
    ) -> Result<Arc<F::Guest>, GuestError> {
        self.check(vm_id, self.inner.create_on(vm_id, config, shared)?)
    }

    fn create_with_drives(
        &self,
        from: &Origin,
        config: &[u8],
        drives: &[DriveHead],
    ) -> Result<GuestWithCopies<F::Guest>, GuestError> {
        let (guest, drives) = self.inner.create_with_drives(from, config, drives)?;
        Ok((self.check(from.vm_id, guest)?, drives))
    }
}

/// `driftline resolve --state-dir`.
pub(super) fn resolve(dir: &Path, args: &ResolveArgs) -> Result<ExitCode, Failure> {
    if dir.try_exists().is_ok_and(|exists| !exists) {
        return Err(Failure::error(format_args!(
            "the state directory {} does not exist: give the --state-dir that the guest's VMM had",
            dir.display()
        )));
    }
    let (records, Pending { records: mut found, unreadable }) = pending(dir)?;
    for e in &unreadable {
        print_message(e);
    }
    found.retain(|record| args.vm.is_none_or(|id| record.vm_id == id));
    let first = found.first().map(|record| record.vm_id);
    let (Some(records), Some(vm_id)) = (records, first) else {
        return Err(Failure::error(format_args!(
            "no migration is in doubt: {} has no record of {}",
            dir.display(),
            args.vm.map_or("a pending hand-over".to_owned(), |id| format!("guest {id}"))
        )));
    };
    if found.iter().any(|record| record.vm_id != vm_id) {
        let guests: Vec<String> = found.iter().map(|record| record.vm_id.to_string()).collect();
        return Err(Failure::error(format_args!(
            "several guests may be running elsewhere; say which with --vm: {}",
            guests.join(", ")
        )));
    }
    let action = if args.action.run { Resolution::Run } else { Resolution::Discard };
    for record in &found {
        print_message(describe(record));
        if action == Resolution::Run {
            print_message(format_args!(
                "run: `driftline restore` may run the guest here. You assert that {} does not run \
                 it and never will, and that no process here still has it; if one does, the guest \
                 runs twice",
                record.peer
            ));
        } else {
            print_message(format_args!(
                "discard: the guest belongs to {}. If it does not run there, what it did since its \
                 last checkpoint is lost",
                record.peer
            ));
        }
        records.remove_source(record.token)?;
    }
    if args.json {
        let peers: Vec<&str> = found.iter().map(|record| record.peer.as_str()).collect();
        print_json(&resolved(action, vm_id, &peers))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the object of `resolve --json`: the decision about a guest that may be running at
/// `peers`.
pub(super) fn resolved(action: Resolution, vm_id: VmId, peers: &[&str]) -> Value {
    json!({ "action": action, "vm_id": vm_id, "peers": peers })
}

/// Returns the records of pending hand-overs in a directory. A directory that does not exist has
/// none, and is not created.
fn pending(dir: &Path) -> Result<(Option<Records>, Pending), HandOverDoubt> {
    let hidden = |cause| HandOverDoubt::Hidden { dir: dir.to_owned(), cause };
    if !dir.try_exists().map_err(hidden)? {
        return Ok((None, Pending::default()));
    }
    let records = Records::open(dir)?;
    let found = records.pending()?;
    Ok((Some(records), found))
}

fn describe(record: &SourceRecord) -> String {
    let since = UNIX_EPOCH.checked_add(Duration::from_millis(record.time_unix_ms));
    let ago = since.and_then(|since| SystemTime::now().duration_since(since).ok());
    format!(
        "guest {} may be running at {}: its hand-over began {} s ago",
        record.vm_id,
        record.peer,
        ago.unwrap_or_default().as_secs()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use driftline_backends::Factory;
    use driftline_machine::config::{BackendKind, HostConfig, SerialSink};
    use driftline_machine::testing::payload_config;

    #[test]
    fn guest_in_doubt_is_not_built() {
        let dir = tempfile::tempdir().unwrap();
        let config = payload_config(BackendKind::Threads);
        let host = HostConfig { serial: SerialSink::Null, ..Default::default() };
        let state_dir = dir.path().join("state");
        let pending_hand_overs = PendingHandOvers::of(state_dir.clone());
        let factory = CheckedFactory { inner: Factory::new(host), pending_hand_overs };
        let (id, config) = (VmId::random(), config.encode());
        let messages = || {
            let whole = factory.create(id, &config).map(drop);
            let line = driftline_guest::LineId::random();
            let from = Origin { vm_id: id, epoch: 1, created_unix_ms: 1, line };
            let with_drives = factory.create_with_drives(&from, &config, &[]).map(drop);
            [whole, with_drives].map(|built| built.err().map(|e| e.to_string()))
        };
        assert_eq!(messages(), [None, None]);
        std::fs::create_dir(&state_dir).unwrap();
        std::fs::write(state_dir.join(format!("{}.source.json", VmId::random())), "{").unwrap();
        for messages in messages().map(Option::unwrap) {
            assert!(messages.starts_with("starting it here failed: cannot read"), "{messages}");
        }
    }

    #[test]
    fn refused_clone_is_not_told_new_id() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(format!("{}.source.json", VmId::random())), "{").unwrap();
        let mut pending = PendingHandOvers::of(dir.path().to_owned());
        let refusal = |pending: &PendingHandOvers| {
            pending.refuse(VmId::random()).map_err(|doubt| doubt.to_string())
        };
        assert!(refusal(&pending).unwrap_err().ends_with("use --new-id"));
        pending.allow_clone(None);
        let doubt = refusal(&pending).unwrap_err();
        assert!(doubt.contains("which names them, cannot be read"), "{doubt}");
        pending.allow_clone(Some(Vec::new()));
        assert_eq!(refusal(&pending), Ok(()));
    }
}
