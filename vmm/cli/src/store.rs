//! Owns `driftline store`: operations on a store without a guest.

use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use driftline_machine::config::Identity;
use driftline_store::{EpochInfo, Listing, Store, Survey};
use serde_json::json;

use super::args::{ExportArgs, ExportFormat, RepairArgs, StoreArgs, StoreCommand};
use super::checkpoint_source::{CheckpointSource, repair_command, store_failure};
use super::failure::Failure;
use super::output::{self, print, print_json, print_message};
use super::paths::directory_of;

/// `driftline store`.
pub(super) fn store(command: &StoreCommand) -> Result<ExitCode, Failure> {
    match command {
        StoreCommand::Ls(args) => list(args),
        StoreCommand::Verify(args) => verify(args),
        StoreCommand::Repair(args) => repair(args),
        StoreCommand::Compact(args) => compact(args),
        StoreCommand::Export(args) => export(args),
    }
}

fn compact(args: &StoreArgs) -> Result<ExitCode, Failure> {
    // A store that does not exist is not created.
    let store = Store::open(&args.store)?;
    store.check_is_store()?;
    let failure = |e| store_failure(&args.store, e);
    if store.epochs().map_err(failure)?.is_empty() {
        return Err(Failure::error(format_args!("{} holds no checkpoints", args.store.display())));
    }
    let report = Store::create_or_open(&args.store)?.compact().map_err(failure)?;
    if args.json {
        print_json(&report)?;
    } else {
        print(format_args!(
            "{} in {}, {} before",
            output::count(report.epochs, "checkpoint"),
            output::bytes(report.after_bytes),
            output::bytes(report.before_bytes)
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn export(args: &ExportArgs) -> Result<ExitCode, Failure> {
    if args.store.is_file() {
        return Err(Failure::error(format_args!(
            "{} is a file, and a store is a directory: an archive is not exported again",
            args.store.display()
        )));
    }
    let store = Store::open(&args.store)?;
    store.check_is_store()?;
    let path = &args.output;
    let dir = directory_of(path);
    let refused = |e: io::Error| {
        let why = match e.kind() {
            io::ErrorKind::AlreadyExists => "it exists; --force overwrites it".to_owned(),
            io::ErrorKind::NotFound => format!("the directory {} does not exist", dir.display()),
            _ => e.to_string(),
        };
        Failure::error(format_args!("cannot write {}: {why}", path.display()))
    };
    if path.is_dir() {
        return Err(refused(io::ErrorKind::IsADirectory.into()));
    }
    if !args.force && path.exists() {
        return Err(refused(io::ErrorKind::AlreadyExists.into()));
    }
    // The file receives its name only once it is complete.
    let file = tempfile::NamedTempFile::new_in(dir).map_err(refused)?;
    let report = match args.format {
        ExportFormat::Raw => store.export_raw(args.checkpoint, file.as_file(), path),
        ExportFormat::ElfCore => {
            driftline_machine::export::elf_core(&store, args.checkpoint, file.as_file(), path)
        }
        ExportFormat::DriftlineZstd => store.export_archive(args.checkpoint, file.as_file(), path),
    };
    let report = report.map_err(|e| store_failure(&args.store, e))?;
    let renamed = if args.force { file.persist(path) } else { file.persist_noclobber(path) };
    renamed.map_err(|e| refused(e.error))?;
    driftline_format::durable::sync_dir(dir).map_err(refused)?;
    if args.json {
        print_json(&report)?;
    } else {
        if report.drives > 0 {
            print_message(format_args!(
                "{} of the guest in checkpoint {} {} not in this file, which has memory alone",
                output::count(report.drives.into(), "disk"),
                report.epoch,
                if report.drives == 1 { "is" } else { "are" }
            ));
        }
        print(format_args!(
            "memory of guest {} at checkpoint {}: {} in {} of {}",
            report.vm_id,
            report.epoch,
            output::count(report.frames, "page"),
            output::bytes(report.bytes),
            path.display()
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn list(args: &StoreArgs) -> Result<ExitCode, Failure> {
    let source = CheckpointSource::open(&args.store)?;
    let listing = source.list().map_err(|e| source.failure(e))?;
    let identity = source.identity();
    let listed = args.json.then(|| {
        let damaged: Vec<String> = listing.damaged.iter().map(ToString::to_string).collect();
        json!({
            "vm_id": listing.epochs.last().map(|last| last.vm_id),
            "name": identity.as_ref().and_then(|identity| identity.name.as_ref()),
            "lineage": identity.as_ref().and_then(|identity| identity.lineage),
            "checkpoints": listing.epochs,
            "damaged": damaged,
            "unfinished": listing.unfinished,
            "foreign": listing.foreign,
            "quarantined": listing.quarantined,
        })
    });
    let failure = listing.damaged.first().map(|first| {
        Failure::error(format_args!("damaged: {first}. {}", repair_command(&args.store)))
    });
    match (&listed, failure) {
        (Some(listed), None) => print_json(listed)?,
        // One object contains both.
        (Some(listed), Some(failure)) => return Err(failure.with(listed)),
        (None, failure) => {
            print(listing_table(&args.store, &listing, identity.as_ref()))?;
            failure.map_or(Ok(()), Err)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn listing_table(dir: &Path, listing: &Listing, identity: Option<&Identity>) -> String {
    let name = identity.and_then(|identity| identity.name.as_ref());
    let name = name.map_or(String::new(), |name| format!(" \"{name}\""));
    let lineage = identity.and_then(|identity| identity.lineage);
    let lineage = lineage.map_or(String::new(), |lineage| format!(", which began as {lineage}"));
    let mut lines = match listing.epochs.first() {
        None => vec![format!("{} holds no checkpoints", dir.display())],
        Some(first) => {
            let (dir, id) = (dir.display(), first.vm_id);
            let title = format!("{dir} holds checkpoints of guest {id}{name}{lineage}");
            vec![title, HEADINGS.to_owned()]
        }
    };
    let now_ms =
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_millis() as u64);
    lines.extend(listing.epochs.iter().map(|info| epoch_row(info, now_ms)));
    lines.extend(listing.unfinished.iter().map(|what| format!("{what}: never finished")));
    lines.extend(listing.quarantined.iter().map(|name| format!("{name}: quarantined by a repair")));
    lines.extend(listing.foreign.iter().map(|name| format!("{name}: not a part of the store")));
    lines.join("\n")
}

const HEADINGS: &str =
    "  number  taken                   age  kind          pages       size  disks";

fn epoch_row(info: &EpochInfo, now_ms: u64) -> String {
    let taken = driftline_machine::local_time(info.created_unix_ms);
    let age = age(now_ms.saturating_sub(info.created_unix_ms) / 1000);
    let kind = if info.full { "full" } else { "changes" };
    let size = output::bytes(info.bytes);
    format!(
        "{:>8}  {taken:<19}  {age:>6}  {kind:<7}  {:>10}  {size:>9}  {:>5}",
        info.epoch, info.frames, info.drives
    )
}

/// Formats a duration in its largest unit.
fn age(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        3600..86_400 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

/// Reports on stderr what is damaged in a store, and why.
fn print_damage(survey: &Survey) {
    for checkpoint in &survey.checkpoints {
        let Some(damage) = &checkpoint.damage else { continue };
        match checkpoint.epoch {
            Some(epoch) => match checkpoint.last {
                Some(last) => print_message(format_args!(
                    "checkpoints {epoch} to {last} are damaged: {damage}"
                )),
                None => print_message(format_args!("checkpoint {epoch} is damaged: {damage}")),
            },
            None => print_message(format_args!("a checkpoint is damaged: {damage}")),
        }
    }
    for damage in &survey.damage {
        print_message(format_args!("damaged, which costs no checkpoint: {damage}"));
    }
}

/// Ends a command that has found damage and has not repaired it.
fn is_damaged(dir: &Path, survey: &Survey, json: bool) -> Result<ExitCode, Failure> {
    if !json {
        print_damage(survey);
        print_message(repair_command(dir));
    }
    Err(Failure::error(survey.verdict()).with(survey))
}

fn verify(args: &StoreArgs) -> Result<ExitCode, Failure> {
    let source = CheckpointSource::open(&args.store)?;
    let report = source.verify(|epoch, outcome| {
        if let Ok(info) = outcome {
            tracing::info!(checkpoint = epoch, pages = info.frames, "sound");
        }
    });
    let report = match (report, &source) {
        (Ok(report), _) => report,
        (Err(e), CheckpointSource::Store(store)) => match store.survey() {
            Ok(survey) if !survey.is_sound() => return is_damaged(&args.store, &survey, args.json),
            _ => return Err(store_failure(&args.store, e)),
        },
        (Err(e), CheckpointSource::Archive(_)) => {
            return Err(Failure::error(format_args!("{} is damaged: {e}", args.store.display())));
        }
    };
    if args.json {
        print_json(&report)?;
    } else {
        print(format_args!(
            "{}, {} read\n{}",
            output::count(report.frames, "page"),
            output::bytes(report.read_bytes),
            report.verdict()
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn repair(args: &RepairArgs) -> Result<ExitCode, Failure> {
    if args.dry_run {
        let survey = Store::open(&args.store)?.survey()?;
        if !survey.is_sound() {
            return is_damaged(&args.store, &survey, args.json);
        }
        if args.json {
            print_json(&survey)?;
        } else {
            print(survey.verdict())?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let report = Store::open_to_repair(&args.store)?.repair()?;
    let is_lost = report.survey.checkpoints.iter().any(|c| c.damage.is_some());
    let code = if is_lost { ExitCode::FAILURE } else { ExitCode::SUCCESS };
    if args.json {
        print_json(&report)?;
        return Ok(code);
    }
    print_damage(&report.survey);
    if report.repaired {
        print_message(format_args!(
            "repaired {}; what was replaced is in {}: remove it when it is no longer needed",
            args.store.display(),
            report.quarantined.join(", ")
        ));
    }
    print(report.survey.verdict())?;
    Ok(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let info = EpochInfo {
            epoch: 27,
            vm_id: driftline_guest::VmId::random(),
            parent: None,
            full: true,
            frames: 8234,
            zero_frames: 0,
            bytes: 33 << 20,
            drives: 2,
            created_unix_ms: 1_700_000_000_000,
            line: driftline_guest::LineId::random(),
        };
        let row = epoch_row(&info, 1_700_000_000_000 + 200_000);
        assert!(row.contains("  3 min  full") && row.ends_with("33 MiB      2"), "{row}");
        assert_eq!(row.len(), HEADINGS.len());
        assert_eq!([0, 59, 61, 7200, 200_000].map(age), ["0 s", "59 s", "1 min", "2 h", "2 d"]);
    }
}
