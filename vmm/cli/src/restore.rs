//! `driftline restore`: runs a guest from a checkpoint.

use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use driftline_backends::Factory;
use driftline_checkpoint::{RestoreError, RestoreReport};
use driftline_control::api::{App, Server};
use driftline_control::jobs::Jobs;
use driftline_machine::config::{
    DiskConfig, DiskSpec, HostConfig, MachineConfig, Restored, guest_span,
};
use driftline_machine::machine::EarlyVm;
use driftline_machine::schedule;
use driftline_machine::vm::Vm;

use super::args::RestoreArgs;
use super::checkpoint_source::CheckpointSource;
use super::end::{end_without_memory, run_to_end};
use super::failure::Failure;
use super::hand_overs::{CheckedFactory, PendingHandOvers};
use super::notify;
use super::output::{count, print_message};
use super::process_line::process_line;
use super::setup::{NamedFiles, confine, guest_failure, host_config, log_machine};

/// `driftline restore`, in a process that started at `started`.
pub(super) fn restore(args: RestoreArgs, started: Instant) -> Result<ExitCode, Failure> {
    if args.devices.disks.iter().any(|disk| disk.copy) {
        return Err(Failure::usage(
            "'copy' of --disk is only for receive-migration; restore writes a disk's content to a \
             file that exists",
        ));
    }
    let mut named = NamedFiles::of_devices(&args.devices.disks, args.devices.vsock.as_ref());
    named.read.push(args.store.clone());
    schedule::default_slices();
    let confined = confine(&args.host, named)?;
    // The kernel needs a millisecond to create a VM. Meanwhile the other threads start, and the
    // store is read, which describes the guest.
    let early = EarlyVm::begin();
    let listeners = confined.start_threads(&args.host)?;
    driftline_machine::exit::set_lost_memory(end_without_memory);
    let mut server = Server::begin()?;
    let source = CheckpointSource::open(&args.store)?;
    source.check(args.checkpoint, args.lazy)?;
    let pending_hand_overs = check_hand_overs(&args, &source)?;
    let given: Vec<PathBuf> = args.devices.disks.iter().map(|disk| disk.path.clone()).collect();
    let host = host_config(&args.host, args.devices)?;
    let memory = host.memory;
    let restored = Restored { same: args.same_id, name: args.name };
    let host = HostConfig { disks_are_copies: true, restored, ..host };
    let factory =
        CheckedFactory { inner: Factory::new(host).with_early(early), pending_hand_overs };
    let restored = source.restore(args.checkpoint, args.lazy, &factory);
    schedule::short_slices();
    let (vm, report) = restored.map_err(|e| restore_failure(e, &source))?;
    let _logged = guest_span(vm.vm_id(), &vm.machine_config().identity).entered();
    // Restoring took a while, in which a hand-over record may have appeared.
    if let Err(e) = factory.pending_hand_overs.refuse(report.vm_id) {
        vm.stop("it may be running elsewhere");
        return Err(after_restore(&report, e.into()));
    }
    log_machine(&*vm, &memory);
    if report.drives == 0 {
        warn_of_current_disks(&*vm, report.epoch, &given);
    }
    let jobs = Jobs::new(vm.clone(), args.host.state_dir.clone());
    let app = App::new(jobs.clone());
    app.set_process_line(process_line(&args.host));
    let served = server.serve(listeners, app);
    served.map_err(|e| after_restore(&report, e.into()))?;
    resume(&*vm, &source).map_err(|e| after_restore(&report, e))?;
    tracing::info!(start_us = started.elapsed().as_micros(), "the guest runs");
    notify::ready(format_args!("guest {} runs", vm.vm_id()));
    let of = match args.same_id {
        true => String::new(),
        false => format!(" of {}", report.vm_id),
    };
    print_message(format_args!("guest {} resumed from {}", vm.vm_id(), describe(&report, &of)));
    run_to_end(vm, jobs, server, None)
}

/// Refuses a guest that may be running elsewhere, as far as that is known before it is built.
/// Returns the check for later.
fn check_hand_overs(
    args: &RestoreArgs,
    source: &CheckpointSource,
) -> Result<PendingHandOvers, Failure> {
    let mut pending = PendingHandOvers::of(args.host.state_dir.clone());
    if args.new_id {
        let config = source.config();
        pending.allow_clone(config.map(|config| shared_disks(config, &args.devices.disks)));
    }
    if let Some(vm_id) = source.owner().map_err(|e| source.failure(e))? {
        pending.refuse(vm_id)?;
    }
    Ok(pending)
}

/// Warns that the disks of a guest from checkpoint `epoch` have their current content, except those
/// in the files `given`.
fn warn_of_current_disks(vm: &dyn Vm, epoch: u64, given: &[PathBuf]) {
    let disks = driftline_machine::config::disks(&vm.machine_config().devices);
    let is_given = |disk: &DiskConfig| given.iter().any(|path| same_file(path, &disk.path));
    for disk in disks.filter(|disk| !disk.readonly && !is_given(disk)) {
        tracing::warn!(
            "disk \"{}\" has the current content of {}: if that has changed since checkpoint \
             {epoch}, the guest will damage it; give a copy from that checkpoint with --disk \
             path=COPY",
            disk.id,
            disk.path.display()
        );
    }
}

/// Acquires the guest's disks and resumes its vCPUs.
fn resume(vm: &dyn Vm, source: &CheckpointSource) -> Result<(), Failure> {
    vm.acquire().and_then(|()| vm.resume()).map_err(|e| {
        // The cause may be a lost frame.
        match vm.fetching().and_then(|fetching| fetching.lost) {
            Some(why) => Failure::error(format_args!(
                "its memory cannot be restored: {why}{}",
                source.repair_hint()
            )),
            None => e.into(),
        }
    })
}

/// Describes a restore. `of` names the guest in the checkpoint if it is another one.
fn describe(report: &RestoreReport, of: &str) -> String {
    let pages = match report.unfetched_frames {
        0 => format!("{} read", count(report.frames, "page")),
        1 => "1 page follows on demand".to_owned(),
        pages => format!("{pages} pages follow on demand"),
    };
    let disks = match (report.drives, report.disk_blocks) {
        (0, _) => String::new(),
        (drives, blocks) => {
            format!(", {} written to {drives} of its disks", count(blocks, "block"))
        }
    };
    format!("checkpoint {}{of} after {:.1} ms; {pages}{disks}", report.epoch, report.time_ms)
}

/// Returns the disks of `config` that its guest may write to and that a clone with the disks
/// `specs` would use, too.
fn shared_disks(config: MachineConfig, specs: &[DiskSpec]) -> Vec<DiskConfig> {
    let host = HostConfig { disks: specs.to_vec(), ..HostConfig::default() };
    let original: Vec<DiskConfig> =
        driftline_machine::config::disks(&config.devices).cloned().collect();
    // Specs that cannot replace the disks are refused once the clone is built.
    let Ok(clone) = config.on_host(&host) else { return Vec::new() };
    let clones: Vec<&DiskConfig> = driftline_machine::config::disks(&clone.devices).collect();
    let is_used = |disk: &DiskConfig| clones.iter().any(|own| same_file(&own.path, &disk.path));
    original.into_iter().filter(|disk| !disk.readonly && is_used(disk)).collect()
}

/// Returns whether two paths lead to the same file or the same block device.
fn same_file(one: &Path, other: &Path) -> bool {
    let device = |m: &Metadata| m.file_type().is_block_device().then(|| m.rdev());
    match (one.metadata(), other.metadata()) {
        (Ok(a), Ok(b)) => {
            (a.dev(), a.ino()) == (b.dev(), b.ino())
                || (device(&a).is_some() && device(&a) == device(&b))
        }
        _ => one == other,
    }
}

fn restore_failure(e: RestoreError, source: &CheckpointSource) -> Failure {
    match e {
        RestoreError::Store(e) => source.failure(e),
        RestoreError::Lost { .. } => Failure::error(e).followed_by(&source.repair_hint()),
        RestoreError::Guest { ref cause, .. } => guest_failure(cause, &e),
        _ => Failure::error(e),
    }
}

/// Returns the failure of a restored guest that does not run, with the state of its disks by then.
fn after_restore(report: &RestoreReport, why: Failure) -> Failure {
    let epoch = report.epoch;
    match report.drives {
        0 => why.prefixed("nothing was started: "),
        _ => why.prefixed(format_args!(
            "the guest does not run, but its disks were overwritten with their content at \
             checkpoint {epoch}: "
        )),
    }
}
