//! Owns `driftline store`: looking at a store without a guest.

use std::io;
use std::path::Path;
use std::process::ExitCode;

use checkpoint::{EpochInfo, Listing, Store};
use serde_json::json;
use vmm::config::Identity;

use super::args::{ExportArgs, ExportFormat, StoreArgs, StoreCommand};
use super::failure::Failure;
use super::output::{self, print, print_json, say};
use super::stored::Stored;

/// `driftline store`.
pub(super) fn store(command: &StoreCommand) -> Result<ExitCode, Failure> {
    match command {
        StoreCommand::Ls(args) => list(args),
        StoreCommand::Verify(args) => verify(args),
        StoreCommand::Compact(args) => compact(args),
        StoreCommand::Export(args) => export(args),
    }
}

fn compact(args: &StoreArgs) -> Result<ExitCode, Failure> {
    // A store that is not there is not made.
    if Store::open(&args.store)?.epochs()?.is_empty() {
        return Err(Failure::error(format_args!("{} holds no epochs", args.store.display())));
    }
    let report = Store::create_or_open(&args.store)?.compact()?;
    if args.json {
        print_json(&report)?;
    } else {
        print(format_args!(
            "{} epochs in {}, which took {}",
            report.epochs,
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
    let path = &args.output;
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
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
    // It has its name only once it is whole.
    let file = tempfile::NamedTempFile::new_in(dir).map_err(refused)?;
    let report = match args.format {
        ExportFormat::Raw => store.export_raw(args.epoch, file.as_file(), path)?,
        ExportFormat::ElfCore => vmm::export::elf_core(&store, args.epoch, file.as_file(), path)?,
        ExportFormat::DriftlineZstd => store.export_archive(args.epoch, file.as_file(), path)?,
    };
    let kept = if args.force { file.persist(path) } else { file.persist_noclobber(path) };
    kept.map_err(|e| refused(e.error))?;
    checkpoint::durable::sync_dir(dir).map_err(refused)?;
    if args.json {
        print_json(&report)?;
    } else {
        if report.drives > 0 {
            say(format_args!(
                "{} of the guest's disks are in epoch {} and not in this file, which has memory alone",
                report.drives, report.epoch
            ));
        }
        print(format_args!(
            "memory of guest {} at epoch {}: {} frames in {} of {}",
            report.vm_id,
            report.epoch,
            report.frames,
            output::bytes(report.bytes),
            path.display()
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn list(args: &StoreArgs) -> Result<ExitCode, Failure> {
    let stored = Stored::open(&args.store)?;
    let (listing, identity) = (stored.list()?, stored.identity());
    if args.json {
        let damaged: Vec<String> = listing.damaged.iter().map(ToString::to_string).collect();
        print_json(&json!({
            "vm_id": listing.epochs.last().map(|last| last.vm_id),
            "name": identity.as_ref().and_then(|identity| identity.name.as_ref()),
            "lineage": identity.as_ref().and_then(|identity| identity.lineage),
            "epochs": listing.epochs,
            "damaged": damaged,
            "unfinished": listing.unfinished,
            "foreign": listing.foreign,
        }))?;
    } else {
        print(listing_table(&args.store, &listing, identity.as_ref()))?;
    }
    match listing.damaged.as_slice() {
        [] => Ok(ExitCode::SUCCESS),
        [first, ..] => Err(Failure::error(format_args!("damaged: {first}"))),
    }
}

fn listing_table(dir: &Path, listing: &Listing, identity: Option<&Identity>) -> String {
    let Some(first) = listing.epochs.first() else {
        return format!("{} holds no epochs", dir.display());
    };
    let name = identity.and_then(|identity| identity.name.as_ref());
    let name = name.map_or(String::new(), |name| format!(" \"{name}\""));
    let lineage = identity.and_then(|identity| identity.lineage);
    let lineage = lineage.map_or(String::new(), |lineage| format!(", which began as {lineage}"));
    let mut lines =
        vec![format!("{} holds epochs of guest {}{name}{lineage}", dir.display(), first.vm_id)];
    lines.push(format!(
        "{:>8}  {:>8}  {:>10}  {:>10}  {:>9}",
        "epoch", "parent", "frames", "zero", "size"
    ));
    lines.extend(listing.epochs.iter().map(epoch_row));
    lines.extend(listing.unfinished.iter().map(|what| format!("{what}: never finished")));
    lines.extend(listing.foreign.iter().map(|name| format!("{name}: not a part of the store")));
    lines.join("\n")
}

fn epoch_row(info: &EpochInfo) -> String {
    let parent = info.parent.map_or("full".to_owned(), |p| p.to_string());
    let size = output::bytes(info.bytes);
    format!(
        "{:>8}  {parent:>8}  {:>10}  {:>10}  {size:>9}",
        info.epoch, info.frames, info.zero_frames
    )
}

fn verify(args: &StoreArgs) -> Result<ExitCode, Failure> {
    let store = Stored::open(&args.store)?;
    let report = store.verify(|epoch, outcome| match outcome {
        Ok(info) => tracing::info!(epoch, frames = info.frames, "sound"),
        Err(e) => say(format_args!("epoch {epoch} is damaged: {e}")),
    });
    let report = report
        .map_err(|e| Failure::error(format_args!("{} is damaged: {e}", args.store.display())))?;
    if args.json {
        print_json(&report)?;
    } else {
        print(format_args!(
            "{} epochs are sound: {} frames, {} read",
            report.epochs,
            report.frames,
            output::bytes(report.read_bytes)
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}
