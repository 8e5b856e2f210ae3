//! Owns a process that has a guest: from the start of its API to the guest's end.

use std::fmt::Display;
use std::fs::{Metadata, OpenOptions};
use std::io::{self, IsTerminal};
use std::net::TcpListener;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use checkpoint::durable::create_dir;
use checkpoint::{GuestError, RestoreError, RestoreReport, VmId};
use dirty_tracker::TrackingMode;
use migrate::{Cause, Phase, ReceiveControl, ReceiveError, ReceiveOptions, Received};
use vmm::api::{App, Arriving, Server};
use vmm::backend::{self, Factory, LaunchError};
use vmm::config::{
    Backend, Boot, DEFAULT_RING_ENTRIES, DeviceConfig, DiskConfig, DiskSpec, HostConfig, Identity,
    MAX_SERIAL_BYTES, MacAddr, MachineConfig, NetConfig, NetSpec, ReplaceError, Restored,
    SerialSink, VsockConfig, VsockSpec, guest_span,
};
use vmm::devices::probe_disk;
use vmm::jobs::{Jobs, ShadowError, ShadowMode};
use vmm::latency;
use vmm::machine::EarlyVm;
use vmm::memory::MemoryOptions;
use vmm::sandbox;
use vmm::socket::ListeningSocket;
use vmm::vm::Vm;

use super::args::{DeviceArgs, HostArgs, OnOff, ReceiveArgs, RestoreArgs, RunArgs};
use super::end::{end_in_bounded_time, to_the_end, when_memory_is_lost};
use super::failure::Failure;
use super::output::{bytes, count, print_json, say};
use super::pending::{Settled, Unsettled};
use super::progress::{Receiving, receiving_line};
use super::stored::Stored;
use super::values;

/// `driftline run`, in a process that has `started` then.
pub(super) fn run(args: RunArgs, started: Instant) -> Result<ExitCode, Failure> {
    let mut named = Named::of_devices(&args.disks, args.vsock.as_ref());
    named.read.extend(args.kernel.iter().chain(&args.initrd).cloned());
    let socket = prepare(&args.host, named)?;
    let host = host_config(&args.host, DeviceArgs::default())?;
    let state_dir = args.host.state_dir.clone();
    warn_of_state_dir(&args.host);
    let shadow = args.shadow;
    check_shadow(shadow, args.tracking)?;
    let vm_id = args.id.unwrap_or_else(VmId::random);
    let config = machine_config(args)?;
    check_rings(&config)?;
    let _logged = guest_span(vm_id, &config.identity).entered();
    let mut server = Server::begin()?;
    let vm = backend::launch_as(vm_id, config, &host).map_err(launch_failure)?;
    log_machine(&*vm, &host.memory);
    let jobs = Jobs::new(vm.clone(), state_dir);
    if let Some(mode) = shadow {
        jobs.start_shadow(mode).map_err(shadow_failure)?;
    }
    server.serve(socket, App::new(jobs.clone()))?;
    vm.resume()?;
    // The vCPUs have just been told: what is left of the way to the guest's first instruction is one
    // thread's waking up.
    tracing::info!(boot_us = started.elapsed().as_micros(), "the guest runs");
    to_the_end(vm, jobs, server)
}

/// `driftline restore`, in a process that has `started` then.
pub(super) fn restore(args: RestoreArgs, started: Instant) -> Result<ExitCode, Failure> {
    if args.devices.disks.iter().any(|disk| disk.copy) {
        return Err(Failure::usage(
            "'copy' of --disk is only for receive-migration; restore writes a disk's content to a file that exists",
        ));
    }
    let mut named = Named::of_devices(&args.devices.disks, args.devices.vsock.as_ref());
    named.read.push(args.store.clone());
    let socket = prepare(&args.host, named)?;
    vmm::exit::set_lost_memory(when_memory_is_lost);
    let mut server = Server::begin()?;
    // Beside the reading of the store, which says what guest it is for.
    let early = EarlyVm::begin();
    let stored = Stored::open(&args.store)?;
    stored.check(args.epoch, args.lazy)?;
    let mut unsettled = Unsettled::of(args.host.state_dir.clone());
    if args.new_id {
        let config = stored.config();
        unsettled.pass_clone(config.map(|config| shared_disks(config, &args.devices.disks)));
    }
    if let Some(vm_id) = stored.owner()? {
        unsettled.refuse(vm_id)?;
    }
    let copies = !args.devices.disks.is_empty();
    let host = host_config(&args.host, args.devices)?;
    let memory = host.memory;
    let restored = Restored { same: args.same_id, name: args.name };
    let host = HostConfig { disks_are_copies: true, restored, ..host };
    let factory = Settled { inner: Factory::new(host).with_early(early), unsettled };
    let restored = stored.restore(args.epoch, args.lazy, &factory);
    let (vm, report) = restored.map_err(restore_failure)?;
    let _logged = guest_span(vm.vm_id(), &vm.machine_config().identity).entered();
    // Filling it took a while, in which its record may have come.
    if let Err(e) = factory.unsettled.refuse(report.vm_id) {
        vm.stop("it may be running elsewhere");
        return Err(after_restore(&report, e));
    }
    log_machine(&*vm, &memory);
    let left_alone = !copies && report.drives == 0;
    for disk in
        vmm::config::disks(&vm.machine_config().devices).filter(|d| left_alone && !d.readonly)
    {
        tracing::warn!(
            "disk \"{}\" is used as {} is now; if that was written to after checkpoint {}, give a copy from \
             then (--disk path=COPY), or the guest will damage it",
            disk.id,
            disk.path.display(),
            report.epoch
        );
    }
    let jobs = Jobs::new(vm.clone(), args.host.state_dir.clone());
    let started_up = server.serve(socket, App::new(jobs.clone()));
    started_up.map_err(|e| after_restore(&report, e.into()))?;
    if let Err(e) = vm.acquire().and_then(|()| vm.resume()) {
        // Perhaps for want of a frame.
        let lost = vm.fetching().and_then(|fetching| fetching.lost);
        let failure = match lost {
            Some(why) => Failure::error(format_args!("its memory cannot be restored: {why}")),
            None => e.into(),
        };
        return Err(after_restore(&report, failure));
    }
    tracing::info!(start_us = started.elapsed().as_micros(), "the guest runs");
    let pages = match report.late_frames {
        0 => format!("{} read", count(report.frames, "page")),
        1 => "1 page follows on demand".to_owned(),
        late => format!("{late} pages follow on demand"),
    };
    let disks = match (report.drives, report.disk_blocks) {
        (0, _) => String::new(),
        (drives, blocks) => {
            format!(", {} written to {drives} of its disks", count(blocks, "block"))
        }
    };
    let of = match args.same_id {
        true => String::new(),
        false => format!(" of {}", report.vm_id),
    };
    say(format_args!(
        "guest {} resumed from checkpoint {}{of} after {:.1} ms; {pages}{disks}",
        vm.vm_id(),
        report.epoch,
        report.time_ms
    ));
    to_the_end(vm, jobs, server)
}

/// What became of a guest that was refused: until COMMIT its source keeps it, whatever this process
/// does.
const NOT_RECEIVED: &str = "no guest was received, and none runs here";

/// `driftline receive-migration`.
pub(super) fn receive(args: ReceiveArgs) -> Result<ExitCode, Failure> {
    check_state_dir(&args.host)?;
    let named = Named::of_devices(&args.devices.disks, args.devices.vsock.as_ref());
    let socket = prepare(&args.host, named)?;
    let listening = TcpListener::bind(&args.address).and_then(|l| Ok((l.local_addr()?, l)));
    let (address, listener) = listening
        .map_err(|e| Failure::error(format_args!("cannot listen on tcp:{}: {e}", args.address)))?;
    let control = ReceiveControl::new();
    let give_up = control.clone();
    let watched = control.clone();
    say(format_args!("waiting for a migration on tcp:{address}"));
    let arriving = move || {
        let progress = watched.progress();
        Arriving { words: receiving_line(&progress), progress }
    };
    // Until COMMIT the guest can be refused, which is made durable first if the source has heard
    // PREPARED; from COMMIT on it is this host's (I7).
    let stopped = Arc::new(OnceLock::new());
    let reason = stopped.clone();
    let app = App::waiting(arriving, move |why| {
        let _ = reason.set(why.replacen("interrupted", "stopped", 1));
        let cancelled = give_up.cancel().map_err(|_| {
            "its source has handed the guest over to this process, which has not taken it over in \
             time: stop it again"
                .to_owned()
        });
        cancelled.map(|()| end_in_bounded_time(0, NOT_RECEIVED))
    });
    let server = Server::start(socket, app.clone())?;
    let host = host_config(&args.host, args.devices)?;
    let memory = host.memory;
    let factory = Factory::new(host);
    let options = ReceiveOptions {
        linger: args.linger,
        once: args.once,
        ..ReceiveOptions::new(&args.host.state_dir)
    };
    let showing = Receiving::show(&control);
    let received = migrate::receive(listener, &factory, &options, &control);
    drop(showing);
    let Received { guest: vm, report, responder } = received.map_err(|e| {
        end_in_bounded_time(0, NOT_RECEIVED);
        receive_failure(e, stopped.get().map(String::as_str))
    })?;
    let _logged = guest_span(vm.vm_id(), &vm.machine_config().identity).entered();
    log_machine(&*vm, &memory);
    let jobs = Jobs::new(vm.clone(), args.host.state_dir);
    jobs.keep_responder(responder);
    app.provide(jobs.clone());
    drop(app);
    if report.disk_bytes > 0 {
        say(format_args!("{} of its disks came along", bytes(report.disk_bytes)));
    }
    say(format_args!(
        "guest {} has arrived and {}: {} in {:.1} ms, taken over in {:.1} ms",
        report.vm_id,
        if report.running { "runs" } else { "is paused, as it was" },
        count(report.passes.into(), "pass"),
        report.total_time_ms,
        report.take_over_ms
    ));
    if args.json {
        print_json(&report)?;
    }
    to_the_end(vm, jobs, server)
}

/// Disks of `config` that a guest may write to and that its clone, which is given `specs`, would
/// use too.
fn shared_disks(config: MachineConfig, specs: &[DiskSpec]) -> Vec<DiskConfig> {
    let host = HostConfig { disks: specs.to_vec(), ..HostConfig::default() };
    let original: Vec<DiskConfig> = vmm::config::disks(&config.devices).cloned().collect();
    // What cannot be replaced so is refused once the clone is built.
    let Ok(clone) = config.on_host(&host) else { return Vec::new() };
    let clones: Vec<&DiskConfig> = vmm::config::disks(&clone.devices).collect();
    let is_used = |disk: &DiskConfig| clones.iter().any(|own| same_file(&own.path, &disk.path));
    original.into_iter().filter(|disk| !disk.readonly && is_used(disk)).collect()
}

/// Whether two paths lead to one file, or to one block device.
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

/// Logs what a guest has: memory and devices.
fn log_machine(vm: &dyn Vm, memory: &MemoryOptions) {
    let config = vm.machine_config();
    tracing::info!(
        vcpus = config.vcpus,
        backing = %memory.backing,
        hugepages = memory.huge_pages.map(|kind| kind.to_string()),
        prefault = memory.prefault,
        tracking = %config.tracking,
        backend = %config.backend,
        "guest {} with {} of memory",
        vm.vm_id(),
        bytes(config.mem_bytes)
    );
    for device in &config.devices {
        tracing::info!("device {device:?}");
    }
}

/// Files that a command names besides those that all have.
struct Named {
    /// To be read.
    read: Vec<PathBuf>,
    /// To be written to.
    write: Vec<PathBuf>,
    /// Sockets to listen at.
    sockets: Vec<PathBuf>,
}

impl Named {
    fn of_devices(disks: &[DiskSpec], vsock: Option<&VsockSpec>) -> Self {
        let (read, write): (Vec<_>, Vec<_>) =
            disks.iter().partition(|disk| disk.readonly && !disk.copy);
        let paths = |disks: Vec<&DiskSpec>| disks.into_iter().map(place).collect();
        let sockets = vsock.iter().map(|vsock| vsock.uds.clone()).collect();
        Self { read: paths(read), write: paths(write), sockets }
    }
}

/// What of a disk is to be let through: its file, or the directory in which it is made, and removed if its guest does not come.
fn place(disk: &DiskSpec) -> PathBuf {
    match disk.path.parent().filter(|_| disk.copy) {
        None => disk.path.clone(),
        Some(parent) if parent.as_os_str().is_empty() => ".".into(),
        Some(parent) => parent.to_owned(),
    }
}

/// What comes before any guest: the tie to the parent, the socket, whose name may be taken, and the sandbox,
/// before there are threads.
fn prepare(host: &HostArgs, named: Named) -> Result<Option<ListeningSocket>, Failure> {
    if host.die_with_parent {
        let kill = Some(rustix::process::Signal::KILL);
        rustix::process::set_parent_process_death_signal(kill)?;
    }
    let socket = host.api_sock.as_deref().map(ListeningSocket::bind).transpose()?;
    let awake = latency::open();
    let options = restrictions(host, named)?;
    sandbox::start(&options).map_err(sandbox_failure)?;
    vmm::log::go_to_background()?;
    tracing::info!(
        seccomp = options.seccomp,
        landlock = options.landlock,
        allowed = ?options.allowed,
        "sandbox"
    );
    match &host.api_sock {
        Some(path) => tracing::info!("API socket {}", path.display()),
        None => tracing::info!("no API socket: --api-sock was not given"),
    }
    if let Err(e) = awake.and_then(latency::start) {
        tracing::debug!("{}: {e}: hand-overs take a little longer", latency::DEVICE);
    }
    Ok(socket)
}

/// Creates the state directory, if need be, and a file in it for a moment.
fn check_state_dir(host: &HostArgs) -> Result<(), Failure> {
    let dir = &host.state_dir;
    let usable = create_dir(dir).and_then(|()| tempfile::tempfile_in(dir).map(drop));
    usable.map_err(|e| {
        Failure::error(format_args!(
            "cannot write to the state directory {}: {e}; name another with --state-dir",
            dir.display()
        ))
    })
}

/// As [`check_state_dir`], for a guest that needs it only if it is migrated.
fn warn_of_state_dir(host: &HostArgs) {
    if let Err(e) = check_state_dir(host) {
        tracing::warn!(
            "{}; this guest cannot be migrated until it is started again with one",
            e.message()
        );
    }
}

/// What the process is to be restricted to.
fn restrictions(host: &HostArgs, named: Named) -> Result<sandbox::Options, Failure> {
    let Named { read, mut write, mut sockets } = named;
    sockets.extend(host.api_sock.clone());
    // Only what is there can be let through.
    if let SerialSink::File(path) = &host.serial {
        // Its own error is said where it is opened to be used.
        let _ = OpenOptions::new().create(true).append(true).open(path);
        write.push(path.clone());
    }
    if !host.allow_path.is_empty() {
        create_dir(&host.state_dir)?;
    }
    write.push(host.state_dir.clone());
    Ok(sandbox::Options {
        seccomp: !host.no_seccomp,
        landlock: !host.no_landlock,
        read,
        write,
        sockets,
        allowed: host.allow_path.clone(),
    })
}

fn sandbox_failure(e: sandbox::StartError) -> Failure {
    match e {
        sandbox::StartError::Seccomp(_) => Failure::host_lacks(e),
        _ => Failure::error(e),
    }
}

/// Paths of devices become absolute: they go into the guest's configuration, and with it elsewhere.
fn host_config(host: &HostArgs, devices: DeviceArgs) -> io::Result<HostConfig> {
    if host.serial == SerialSink::Stdio && io::stdin().is_terminal() {
        say("the terminal is the guest's; Ctrl-A x ends it");
    }
    let memory = MemoryOptions {
        backing: host.memory_backing,
        huge_pages: host.hugepages,
        prefault: host.prefault,
    };
    let DeviceArgs { mut disks, nets, mut vsock } = devices;
    for path in disks.iter_mut().map(|d| &mut d.path).chain(vsock.iter_mut().map(|v| &mut v.uds)) {
        *path = std::path::absolute(&*path)?;
    }
    let serial = host.serial.clone();
    let (disks_are_copies, copied, written_over) = (false, Vec::new(), Vec::new());
    Ok(HostConfig {
        serial,
        memory,
        disks,
        disks_are_copies,
        nets,
        vsock,
        copied,
        written_over,
        restored: Restored::default(),
        #[cfg(all(feature = "broken-source", debug_assertions))]
        loses_one_in: loses_one_in(),
    })
}

/// Whether this guest's source is to lose frames, which nobody should find out from the result alone.
#[cfg(all(feature = "broken-source", debug_assertions))]
fn loses_one_in() -> Option<std::num::NonZeroU64> {
    const NAME: &str = "DRIFTLINE_LOSES_ONE_IN";
    let asked = std::env::var(NAME).ok()?;
    let one_in = asked.parse().ok();
    match one_in {
        Some(n) => say(format_args!(
            "THIS BUILD IS FOR TESTS: of {n} pages that the guest writes one is lost ({NAME})"
        )),
        None => say(format_args!(
            "this build is for tests; {NAME} is \"{asked}\", which is not a number, so no page is lost"
        )),
    }
    one_in
}

fn machine_config(args: RunArgs) -> Result<MachineConfig, Failure> {
    let boot = match (args.guest, args.kernel) {
        (Some(spec), _) => Boot::Payload(spec),
        (None, Some(kernel)) => {
            let (initrd, cmdline) = (args.initrd, args.cmdline.unwrap_or_default());
            Boot::Kernel { kernel, initrd, cmdline, bare: args.bare_cmdline }
        }
        // clap has one of them required.
        (None, None) => return Err(Failure::error("neither --kernel nor --guest was given")),
    };
    let mut devices = Vec::new();
    for (disk, i) in args.disks.into_iter().zip(0..) {
        devices.push(DeviceConfig::Disk(disk_config(disk, i)?));
    }
    for (net, i) in args.nets.into_iter().zip(0..) {
        devices.push(DeviceConfig::Net(net_config(net, i)));
    }
    if let Some(vsock) = args.vsock {
        devices.push(DeviceConfig::Vsock(vsock_config(vsock)?));
    }
    // The payload has no drivers, and the threads backend no devices.
    let has_drivers = args.backend == Backend::Kvm && matches!(boot, Boot::Kernel { .. });
    if args.rng == OnOff::On && has_drivers {
        devices.push(DeviceConfig::Rng);
    }
    devices.extend(args.balloon.map(DeviceConfig::Balloon));
    Ok(MachineConfig {
        identity: Identity::booted(args.name),
        mem_bytes: args.mem,
        vcpus: args.vcpus,
        tracking: args.tracking,
        ring_entries: args.ring_entries,
        backend: args.backend,
        boot,
        cpu: args.cpu,
        devices,
    })
}

/// The disk of a new guest, number `i` of its disks: as large as its file.
fn disk_config(spec: DiskSpec, i: u32) -> Result<DiskConfig, Failure> {
    let DiskSpec { path, readonly, id, serial, any_identity, copy } = spec;
    if any_identity || copy {
        let what = if copy { "copy" } else { "identity=any" };
        return Err(Failure::usage(format_args!(
            "'{what}' of --disk is only for receive-migration, where a guest arrives with its disks"
        )));
    }
    let (bytes, block_bytes) = probe_disk(&path, readonly).map_err(Failure::error)?;
    // The file may be looked for from another working directory, after a restore.
    let path = std::path::absolute(path)?;
    let id = id.unwrap_or_else(|| format!("disk{i}"));
    Ok(DiskConfig {
        serial: serial.unwrap_or_else(|| default_serial(&id)),
        id,
        path,
        readonly,
        bytes,
        block_bytes,
        // Noted once it is open.
        identity: None,
    })
}

/// The network interface of a new guest, number `i` of them.
fn net_config(spec: NetSpec, i: u32) -> NetConfig {
    let NetSpec { tap, mac, id, queues } = spec;
    NetConfig {
        id: id.unwrap_or_else(|| format!("net{i}")),
        tap,
        mac: mac.unwrap_or_else(MacAddr::random),
        queues: queues.unwrap_or(1),
    }
}

fn vsock_config(spec: VsockSpec) -> Result<VsockConfig, Failure> {
    let cid = spec.cid.ok_or_else(|| {
        Failure::usage("the vsock of a new guest needs a context ID: cid=N is missing")
    })?;
    Ok(VsockConfig { cid, uds: std::path::absolute(spec.uds)? })
}

/// A disk's name, as far as there is room for it.
fn default_serial(id: &str) -> String {
    id.chars().take(MAX_SERIAL_BYTES).collect()
}

fn launch_failure(e: LaunchError) -> Failure {
    if e.host_lacks() { Failure::host_lacks(e) } else { Failure::error(e) }
}

/// Why no guest was received, in a process that was `stopped` so, if it was.
fn receive_failure(e: ReceiveError, stopped: Option<&str>) -> Failure {
    match e.cause {
        Cause::Cancelled if matches!(e.phase, Phase::Waiting) => {
            let stopped = stopped.unwrap_or("stopped");
            Failure::error(format_args!("{stopped} before a guest arrived"))
        }
        Cause::Cancelled => Failure::error(format_args!(
            "the receiver was stopped before its guest had arrived ({}): the guest stays at its source",
            e.phase
        )),
        Cause::Guest(ref cause) => guest_failure(cause, &e),
        _ => Failure::error(e),
    }
}

/// A guest that cannot be had here, by the cause of `e`: the host lacks something, devices are
/// given that it has not, or neither.
fn guest_failure(cause: &GuestError, e: &impl Display) -> Failure {
    match cause {
        GuestError::Unsupported { .. } => Failure::host_lacks(e),
        GuestError::System { cause, .. } if cause.is::<ReplaceError>() => Failure::usage(e),
        _ => Failure::error(e),
    }
}

fn restore_failure(e: RestoreError) -> Failure {
    match e {
        RestoreError::Guest { ref cause, .. } => guest_failure(cause, &e),
        _ => Failure::error(e),
    }
}

/// Why a restored guest does not run, and what has become of its disks by then.
fn after_restore(report: &RestoreReport, why: Failure) -> Failure {
    let epoch = report.epoch;
    match report.drives {
        0 => why.behind("nothing was started: "),
        _ => why.behind(format_args!(
            "the guest does not run, but its disks were overwritten with their content at checkpoint {epoch}: "
        )),
    }
}

/// Refuses rings that are larger than this host's KVM has. Those of the default size all hosts
/// have.
fn check_rings(config: &MachineConfig) -> Result<(), Failure> {
    let rings = (config.backend, config.tracking) == (Backend::Kvm, TrackingMode::DirtyRing);
    if !rings || config.ring_entries == DEFAULT_RING_ENTRIES {
        return Ok(());
    }
    match values::most_ring_entries() {
        Some(most) if most < config.ring_entries => Err(Failure::host_lacks(format_args!(
            "this host's KVM supports at most {most} dirty-ring entries per vCPU (--ring-entries)"
        ))),
        _ => Ok(()),
    }
}

/// What cannot be compared is said before there is a guest.
fn check_shadow(shadow: Option<ShadowMode>, tracking: TrackingMode) -> Result<(), Failure> {
    match (shadow, tracking) {
        (Some(shadow), TrackingMode::None) => Err(Failure::usage(format_args!(
            "--shadow {shadow} has nothing to compare with: --tracking none reports no pages"
        ))),
        (Some(ShadowMode::UserfaultWp), TrackingMode::UserfaultWp) => Err(Failure::usage(
            "--shadow userfault-wp cannot stand beside --tracking userfault-wp: a memory has one userfaultfd at most; \
             --shadow compare can",
        )),
        _ => Ok(()),
    }
}

fn shadow_failure(e: ShadowError) -> Failure {
    match e {
        ShadowError::HostLacks(_) => Failure::host_lacks(e),
        _ => Failure::error(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Restore {
        #[command(flatten)]
        args: RestoreArgs,
    }

    #[test]
    fn a_guest_takes_no_relative_path_with_it() {
        let line = "restore --store s --serial null --disk path=copy.img --vsock uds=v";
        let args = Restore::try_parse_from(line.split(' ')).unwrap().args;
        let config = host_config(&args.host, args.devices).unwrap();
        let here = std::env::current_dir().unwrap();
        assert_eq!(config.disks[0].path, here.join("copy.img"));
        assert_eq!(config.vsock.unwrap().uds, here.join("v"));
    }
}
