//! Owns the hand-over records that a crash left behind: while one exists, its guest may be running
//! elsewhere, and only the operator can say that it is not (I7).

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use checkpoint::VmId;
use migrate::{Pending, Records, SourceRecord};

use super::args::ResolveArgs;
use super::failure::Failure;
use super::output::say;

/// Refuses a guest that may be running at the peer of an unsettled hand-over.
pub(super) fn refuse_if_pending(dir: &Path, vm_id: VmId) -> Result<(), Failure> {
    let (_, Pending { records, unreadable }) = pending(dir)?;
    if let Some(record) = records.into_iter().find(|record| record.vm_id == vm_id) {
        return Err(Failure::error(format_args!(
            "{}; settle it with `driftline resolve --state-dir {} --vm {vm_id} --run` or `--discard`",
            tale(&record),
            dir.display()
        )));
    }
    match unreadable.into_iter().next() {
        None => Ok(()),
        Some(e) => Err(Failure::error(format_args!(
            "{e}; it may say that guest {vm_id} runs elsewhere: mend it, or remove it if you know that \
             no other host runs this guest"
        ))),
    }
}

/// `driftline resolve --state-dir`.
pub(super) fn resolve(dir: &Path, args: &ResolveArgs) -> Result<ExitCode, Failure> {
    let (records, Pending { records: mut found, unreadable }) = pending(dir)?;
    for e in &unreadable {
        say(e);
    }
    let asked = |record: &SourceRecord| match &args.vm {
        None => true,
        Some(id) => record.vm_id.to_string() == *id,
    };
    found.retain(asked);
    let first = found.first().map(|record| record.vm_id);
    let (Some(records), Some(vm_id)) = (records, first) else {
        return Err(Failure::error(format_args!(
            "there is nothing to resolve: {} has no record of {}",
            dir.display(),
            args.vm
                .as_deref()
                .map_or("an unsettled hand-over".to_owned(), |id| format!("guest {id}"))
        )));
    };
    if found.iter().any(|record| record.vm_id != vm_id) {
        let guests: Vec<String> = found.iter().map(|record| record.vm_id.to_string()).collect();
        return Err(Failure::error(format_args!(
            "several guests may be running elsewhere; say which with --vm: {}",
            guests.join(", ")
        )));
    }
    for record in &found {
        say(tale(record));
        if args.action.run {
            say(format_args!(
                "run: `driftline restore` may run the guest here. You assert that {} does not run it \
                 and never will, and that no driftline here still has it; if one does, two run",
                record.peer
            ));
        } else {
            say(format_args!(
                "discard: the guest is that of {}. If it does not run there, what it did since its \
                 last checkpoint is lost",
                record.peer
            ));
        }
        records.settle(record.token)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The unsettled records of a directory. One that does not exist has none, and is not made.
fn pending(dir: &Path) -> Result<(Option<Records>, Pending), Failure> {
    if !dir.try_exists().map_err(|e| {
        Failure::error(format_args!("cannot look for hand-over records in {}: {e}", dir.display()))
    })? {
        return Ok((None, Pending::default()));
    }
    let records = Records::open(dir)?;
    let found = records.pending()?;
    Ok((Some(records), found))
}

fn tale(record: &SourceRecord) -> String {
    let since = UNIX_EPOCH.checked_add(Duration::from_millis(record.time_unix_ms));
    let ago = since.and_then(|since| SystemTime::now().duration_since(since).ok());
    format!(
        "guest {} may be running at {} since {} s ago",
        record.vm_id,
        record.peer,
        ago.unwrap_or_default().as_secs()
    )
}
