//! Shared parts of the commands that own a guest: the process's setup before there is a guest, and
//! the host's part of the guest's configuration.

use std::fmt::Display;
use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use driftline_control::api::Listeners;
use driftline_format::durable::create_dir;
use driftline_guest::GuestError;
use driftline_machine::config::{DiskSpec, HostConfig, ReplaceError, SerialSink, VsockSpec};
use driftline_machine::memory::MemoryOptions;
use driftline_machine::pm_qos;
use driftline_machine::sandbox;
use driftline_machine::socket::ListeningSocket;
use driftline_machine::vm::Vm;
use rustix::fs::OFlags;

use super::args::{DeviceArgs, HostArgs};
use super::failure::Failure;
use super::notify;
use super::output::{bytes, print_message};
use super::paths::directory_of;

/// Logs the guest's memory and devices.
pub(super) fn log_machine(vm: &dyn Vm, memory: &MemoryOptions) {
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

/// Files that a command names in addition to those of every command.
pub(super) struct NamedFiles {
    /// Files to read.
    pub(super) read: Vec<PathBuf>,
    /// Files to write.
    write: Vec<PathBuf>,
    /// Sockets to listen on.
    pub(super) sockets: Vec<PathBuf>,
}

impl NamedFiles {
    pub(super) fn of_devices(disks: &[DiskSpec], vsock: Option<&VsockSpec>) -> Self {
        let (read, write): (Vec<_>, Vec<_>) =
            disks.iter().partition(|disk| disk.readonly && !disk.copy);
        let paths = |disks: Vec<&DiskSpec>| disks.into_iter().map(place).collect();
        let sockets = vsock.iter().map(|vsock| vsock.uds.clone()).collect();
        Self { read: paths(read), write: paths(write), sockets }
    }
}

/// Returns the path that the sandbox must allow for a disk: its file, or, for a copy, the directory
/// in which the file is created and, if its guest does not arrive, removed.
fn place(disk: &DiskSpec) -> PathBuf {
    let place = if disk.copy { directory_of(&disk.path) } else { disk.path.as_path() };
    place.to_owned()
}

/// A process in its sandbox, which has no threads of its own yet.
pub(super) struct Confined {
    listeners: Listeners,
    /// The address of the metrics' listener.
    metrics: Option<SocketAddr>,
    awake: io::Result<File>,
    options: sandbox::SandboxOptions,
}

/// Prepares the process before there is a guest: ties it to its parent, connects to the service
/// manager, opens its listeners, whose names and ports may be taken, enters the sandbox and starts
/// the threads that every such process has. Returns the listeners.
pub(super) fn prepare(host: &HostArgs, named: NamedFiles) -> Result<Listeners, Failure> {
    confine(host, named)?.start_threads(host)
}

/// The first half of [`prepare`], for a caller that has a thread of its own to start before others.
pub(super) fn confine(host: &HostArgs, named: NamedFiles) -> Result<Confined, Failure> {
    if host.die_with_parent {
        let kill = Some(rustix::process::Signal::KILL);
        rustix::process::set_parent_process_death_signal(kill)?;
    }
    notify::connect();
    let api = host.api_sock.as_deref().map(ListeningSocket::bind).transpose()?;
    let metrics = host.metrics_listen.map(listen_for_metrics).transpose()?;
    let (metrics, address) = metrics.unzip();
    let listeners = Listeners { api, metrics, ..Listeners::default() };
    Ok(Confined { metrics: address, ..enter(host, named, listeners)? })
}

/// Does the same as [`prepare`] in a process that continues another one, whose listeners it gets.
pub(super) fn prepare_to_continue(host: &HostArgs, named: NamedFiles) -> Result<(), Failure> {
    notify::connect();
    enter(host, named, Listeners::default())?.start_threads(host).map(drop)
}

/// Enters the sandbox with `listeners`.
fn enter(host: &HostArgs, named: NamedFiles, listeners: Listeners) -> Result<Confined, Failure> {
    let awake = pm_qos::open();
    let options = restrictions(host, named)?;
    enter_sandbox(&options)?;
    Ok(Confined { listeners, metrics: None, awake, options })
}

impl Confined {
    /// The second half of [`prepare`].
    pub(super) fn start_threads(self, host: &HostArgs) -> Result<Listeners, Failure> {
        let Self { listeners, metrics, awake, options } = self;
        driftline_machine::log_thread::start()?;
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
        if let Some(address) = metrics {
            log_metrics(address, host);
        }
        if let Err(e) = awake.and_then(pm_qos::start) {
            tracing::debug!("{}: {e}: hand-overs take a little longer", pm_qos::DEVICE);
        }
        Ok(listeners)
    }
}

/// Listens for collectors of metrics. Returns the address with the port that it got.
fn listen_for_metrics(address: SocketAddr) -> Result<(TcpListener, SocketAddr), Failure> {
    let listening = TcpListener::bind(address).and_then(|listener| {
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok((listener, address))
    });
    listening.map_err(|e| {
        Failure::error(format_args!(
            "cannot listen on {address} for metrics: {e}; name another address with \
             --metrics-listen, or port 0 for any free one"
        ))
    })
}

fn log_metrics(address: SocketAddr, host: &HostArgs) {
    match host.metrics_listen.is_some_and(|requested| requested.port() == 0) {
        // Nothing else says which port was free.
        true => print_message(format_args!("metrics on http://{address}/metrics")),
        false => tracing::info!("metrics on http://{address}/metrics"),
    }
    if !address.ip().is_loopback() {
        tracing::warn!(
            "the metrics on {address} have no authentication and no encryption: every host that \
             reaches it can read them; use --metrics-listen 127.0.0.1:{}, or a firewall",
            address.port()
        );
    }
}

/// Creates the state directory, if necessary, and verifies it with a temporary file.
pub(super) fn check_state_dir(host: &HostArgs) -> Result<(), Failure> {
    let dir = &host.state_dir;
    let usable = create_dir(dir).and_then(|()| tempfile::tempfile_in(dir).map(drop));
    usable.map_err(|e| {
        Failure::error(format_args!(
            "cannot write to the state directory {}: {e}; name another with --state-dir",
            dir.display()
        ))
    })
}

/// Does the same as [`check_state_dir`] for a guest that needs the directory only if it is
/// migrated: a failure is only a warning.
pub(super) fn warn_of_state_dir(host: &HostArgs) {
    if let Err(e) = check_state_dir(host) {
        tracing::warn!(
            "{}; this guest cannot be migrated until it is started again with one",
            e.message()
        );
    }
}

/// Returns the restrictions of the process.
fn restrictions(host: &HostArgs, named: NamedFiles) -> Result<sandbox::SandboxOptions, Failure> {
    let NamedFiles { read, mut write, mut sockets } = named;
    sockets.extend(host.api_sock.clone());
    // The sandbox can allow only paths that exist.
    if let SerialSink::File(path) = &host.serial {
        // An error is reported where the file is opened for use. A FIFO may have no reader.
        let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
        let _ = OpenOptions::new().create(true).append(true).custom_flags(flags).open(path);
        write.push(path.clone());
    }
    if !host.allow_path.is_empty() {
        create_dir(&host.state_dir)?;
    }
    write.push(host.state_dir.clone());
    Ok(sandbox::SandboxOptions {
        seccomp: !host.no_seccomp,
        landlock: !host.no_landlock,
        read,
        write,
        sockets,
        allowed: host.allow_path.clone(),
    })
}

/// Restricts the process. The caller is the main thread, before it starts others.
pub(super) fn enter_sandbox(options: &sandbox::SandboxOptions) -> Result<(), Failure> {
    sandbox::start(options).map_err(|e| match e {
        sandbox::StartError::Seccomp(_) => Failure::host_lacks(e),
        _ => Failure::error(e),
    })
}

/// Returns the host's part of the configuration. Device paths become absolute, because the guest's
/// configuration contains them and may be used elsewhere.
pub(super) fn host_config(host: &HostArgs, devices: DeviceArgs) -> io::Result<HostConfig> {
    if host.serial == SerialSink::Stdio && io::stdin().is_terminal() {
        print_message("the guest has the terminal; Ctrl-A x ends the guest");
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
    Ok(HostConfig { serial, memory, disks, nets, vsock, ..HostConfig::default() })
}

/// Returns the failure for a guest that cannot be created here, classified by the `cause` of `e`:
/// the host lacks a feature, the command line gives devices that the guest does not have, or
/// neither.
pub(super) fn guest_failure(cause: &GuestError, e: &impl Display) -> Failure {
    match cause {
        GuestError::Unsupported { .. } => Failure::host_lacks(e),
        GuestError::System { cause, .. } if cause.is::<ReplaceError>() => Failure::usage(e),
        _ => Failure::error(e),
    }
}

#[cfg(test)]
mod tests {
    use super::super::args::RestoreArgs;
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Restore {
        #[command(flatten)]
        args: RestoreArgs,
    }

    #[test]
    fn device_paths_are_made_absolute() {
        let line = "restore --store s --serial null --disk path=copy.img --vsock uds=v";
        let args = Restore::try_parse_from(line.split(' ')).unwrap().args;
        let config = host_config(&args.host, args.devices).unwrap();
        let here = std::env::current_dir().unwrap();
        assert_eq!(config.disks[0].path, here.join("copy.img"));
        assert_eq!(config.vsock.unwrap().uds, here.join("v"));
    }
}
