//! Drives `firecracker` through the crate `fctools`: boots a Linux guest with a drive, a tap,
//! vsock, a balloon with statistics and hinting, and metrics in a FIFO, and loads its snapshot into
//! ten clones that run at the same time.
//!
//! The client's `LoadSnapshot` has no `vsock_override`. The paths of the socket and the drive are
//! relative instead, and each process runs in a folder of its own.
//!
//! A fault of the client, with Firecracker as well: `VmShutdownMethod::WriteToSerial` takes the
//! process's pipes, so it fails for a guest whose console is read. The first guest gets `reboot`
//! from here, and the clones from the client.

#[path = "../../host.rs"]
mod host;

use std::ffi::OsString;
use std::fmt::Debug;
use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fctools::extension::metrics::{Metrics, MetricsTask, spawn_metrics_task};
use fctools::process_spawner::DirectProcessSpawner;
use fctools::runtime::{RuntimeTask, tokio::TokioRuntime};
use fctools::vm::api::VmApi;
use fctools::vm::configuration::{InitMethod, VmConfiguration, VmConfigurationData};
use fctools::vm::models::{
    BalloonDevice, BootSource, CreateSnapshot, Drive, DriveCacheType, EntropyDevice, LoggerSystem,
    MachineConfiguration, MetricsSystem, NetworkInterface, NetworkOverride, SnapshotType,
    StartBalloonFreePageHintingRun, UpdateBalloonDevice, VsockDevice,
};
use fctools::vm::shutdown::{VmShutdownAction, VmShutdownMethod};
use fctools::vm::snapshot::{PrepareVmFromSnapshotOptions, VmSnapshot};
use fctools::vm::{Vm, VmState};
use fctools::vmm::arguments::command_modifier::{CommandModifier, NetnsCommandModifier};
use fctools::vmm::arguments::{VmmApiSocket, VmmArguments, VmmLogLevel};
use fctools::vmm::executor::unrestricted::UnrestrictedVmmExecutor;
use fctools::vmm::installation::VmmInstallation;
use fctools::vmm::ownership::VmmOwnershipModel;
use fctools::vmm::resource::system::ResourceSystem;
use fctools::vmm::resource::{CreatedResourceType, MovedResourceType, Resource, ResourceType};
use futures_util::future::join_all;
use futures_util::io::AllowStdIo;
use futures_util::{AsyncRead, StreamExt};

use host::{
    BALLOON_MIB, CLONES, ClientRun, ConsoleFile, LIMIT, TapNamespace, over_vsock, step, wait_for,
};

type FctoolsGuest = Vm<UnrestrictedVmmExecutor, DirectProcessSpawner, TokioRuntime>;
type FctoolsResources = ResourceSystem<DirectProcessSpawner, TokioRuntime>;

/// Runs the process in a folder. The process ends with this program, which the client does not do.
#[derive(Debug)]
struct InFolder(PathBuf);

impl CommandModifier for InFolder {
    fn apply(&self, binary_path: &mut PathBuf, arguments: &mut Vec<OsString>) {
        let program = std::mem::replace(binary_path, "/usr/bin/setpriv".into());
        let words = ["--pdeathsig", "KILL", "env", "-C"].map(OsString::from);
        let folder = [self.0.clone().into_os_string(), program.into_os_string()];
        arguments.splice(0..0, words.into_iter().chain(folder));
    }
}

fn executor(folder: &Path, id: &str, host: &TapNamespace) -> UnrestrictedVmmExecutor {
    let socket = VmmApiSocket::Enabled(folder.join("api.sock"));
    let arguments = VmmArguments::new(socket).log_level(VmmLogLevel::Info).show_log_level();
    UnrestrictedVmmExecutor::new(arguments)
        .id(id.to_owned().try_into().expect("an id"))
        .command_modifier(InFolder(folder.to_owned()))
        .command_modifier(NetnsCommandModifier::new(host.name()))
}

fn resource(
    resources: &mut FctoolsResources,
    path: impl Into<PathBuf>,
    kind: ResourceType,
) -> Resource {
    resources.create_resource(path, kind).expect("the resource system runs")
}

fn configuration(
    run: &ClientRun,
    folder: &Path,
    resources: &mut FctoolsResources,
) -> VmConfigurationData {
    let moved = ResourceType::Moved(MovedResourceType::Copied);
    let mut moved = |path: PathBuf| resource(resources, path, moved);
    let boot_source = BootSource {
        kernel_image: moved(run.image("vmlinux")),
        boot_args: Some(host::BOOT_ARGS.to_owned()),
        initrd: Some(moved(run.image("initramfs.cpio"))),
    };
    let drive = Drive {
        drive_id: "root".to_owned(),
        is_root_device: true,
        cache_type: Some(DriveCacheType::Writeback),
        partuuid: None,
        is_read_only: Some(false),
        block: Some(moved("disk".into())),
        rate_limiter: None,
        io_engine: None,
        socket: None,
    };
    let interface = NetworkInterface {
        iface_id: "eth0".to_owned(),
        host_dev_name: "tap0".to_owned(),
        guest_mac: Some(host::GUEST_MAC.to_owned()),
        rx_rate_limiter: None,
        tx_rate_limiter: None,
    };
    let balloon = BalloonDevice {
        amount_mib: 0,
        deflate_on_oom: true,
        stats_polling_interval_s: Some(1),
        free_page_reporting: Some(false),
        free_page_hinting: Some(true),
    };
    let created = |kind| ResourceType::Created(kind);
    let logger = LoggerSystem {
        logs: Some(resource(resources, folder.join("log"), created(CreatedResourceType::File))),
        ..LoggerSystem::default()
    };
    let metrics = MetricsSystem {
        metrics: resource(resources, folder.join("metrics"), created(CreatedResourceType::Fifo)),
    };
    let uds = resource(resources, "vsock", ResourceType::Produced);
    VmConfigurationData {
        boot_source,
        drives: vec![drive],
        pmem_devices: Vec::new(),
        machine_configuration: MachineConfiguration {
            vcpu_count: 1,
            mem_size_mib: 128,
            smt: Some(false),
            track_dirty_pages: Some(false),
            huge_pages: None,
        },
        cpu_template: None,
        network_interfaces: vec![interface],
        balloon_device: Some(balloon),
        vsock_device: Some(VsockDevice { guest_cid: 3, uds }),
        logger_system: Some(logger),
        metrics_system: Some(metrics),
        memory_hotplug_configuration: None,
        mmds_configuration: None,
        entropy_device: Some(EntropyDevice::default()),
    }
}

/// Prepares the first guest. This process runs in the guest's folder, too, because the client
/// removes the files that it knows by relative paths.
async fn prepare(run: &ClientRun, folder: &Path, host: &TapNamespace) -> FctoolsGuest {
    std::env::set_current_dir(folder).expect("a folder");
    run.disk(Path::new("disk"));
    let shared = VmmOwnershipModel::Shared;
    let mut resources = ResourceSystem::new(DirectProcessSpawner, TokioRuntime, shared);
    let data = configuration(run, folder, &mut resources);
    let configuration = VmConfiguration::New { init_method: InitMethod::ViaApiCalls, data };
    // Neither jailer nor editor is used.
    let firecracker = run.firecracker.as_path();
    let installation = VmmInstallation::new(firecracker, firecracker, firecracker);
    let executor = executor(folder, "first", host);
    Vm::prepare(executor, resources, installation, configuration).await.expect("resources")
}

/// Writes the guest's console into a file.
fn keep_console(stdout: impl AsyncRead + Send + 'static, path: PathBuf) -> ConsoleFile {
    let mut file = AllowStdIo::new(File::create(&path).expect("a file"));
    tokio::spawn(async move { futures_util::io::copy(stdout, &mut file).await });
    ConsoleFile::at(path)
}

/// Returns the first metrics that `wanted` accepts: those of other times may come before.
async fn metrics(
    task: &mut MetricsTask<TokioRuntime>,
    wanted: impl Fn(&Metrics) -> bool,
) -> Metrics {
    let found = async {
        loop {
            let metrics = task.receiver.next().await.expect("metrics as the client knows them");
            if wanted(&metrics) {
                return metrics;
            }
        }
    };
    tokio::time::timeout(LIMIT, found).await.expect("metrics in the FIFO")
}

async fn use_balloon(first: &mut FctoolsGuest) {
    let update = UpdateBalloonDevice { amount_mib: BALLOON_MIB };
    first.update_balloon_device(update).await.expect("PATCH /balloon");
    let statistics = poll(async || {
        let statistics = first.get_balloon_statistics().await.expect("GET /balloon/statistics");
        let inflated = statistics.actual_mib == u32::from(BALLOON_MIB);
        (inflated && statistics.free_memory.is_some()).then_some(statistics)
    });
    let statistics = statistics.await;
    step(format_args!("the balloon has {} MiB: {statistics:?}", statistics.actual_mib));
    let run = StartBalloonFreePageHintingRun { acknowledge_on_stop: true };
    first.start_balloon_free_page_hinting_run(run).await.expect("PATCH /balloon/hinting/start");
    let done = poll(async || {
        let status = first.get_balloon_free_page_hinting_run_status().await;
        let status = status.expect("GET /balloon/hinting/status");
        (status.host_cmd == 1 && status.guest_cmd == Some(0)).then_some(())
    });
    done.await;
    first.stop_balloon_free_page_hinting_run().await.expect("PATCH /balloon/hinting/stop");
    step("the guest has hinted its free pages");
}

/// As [`wait_for`], for a client's calls.
async fn poll<T>(mut what: impl AsyncFnMut() -> Option<T>) -> T {
    let found = async {
        loop {
            match what().await {
                Some(found) => return found,
                None => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    };
    tokio::time::timeout(LIMIT, found).await.expect("what is awaited")
}

async fn snapshot(first: &mut FctoolsGuest, folder: &Path) -> VmSnapshot {
    first.pause().await.expect("PATCH /vm");
    assert!(first.get_info().await.expect("GET /").is_paused);
    let resources = first.get_resource_system_mut();
    let create = CreateSnapshot {
        snapshot_type: Some(SnapshotType::Full),
        snapshot: resource(resources, folder.join("snapshot"), ResourceType::Produced),
        mem_file: resource(resources, folder.join("snapshot.mem"), ResourceType::Produced),
    };
    let mut snapshot = first.create_snapshot(create).await.expect("PUT /snapshot/create");
    // The clones write no log and no metrics into files of the first guest.
    snapshot.configuration_data.logger_system = None;
    snapshot.configuration_data.metrics_system = None;
    step("the guest is paused and has a snapshot");
    snapshot
}

async fn load(
    run: &ClientRun,
    first: &mut FctoolsGuest,
    of: &VmSnapshot,
    host: &TapNamespace,
    tap: &str,
) -> FctoolsGuest {
    let folder = run.folder(tap);
    host::copy_disk(Path::new("disk"), &folder.join("disk"));
    let options = PrepareVmFromSnapshotOptions {
        executor: executor(&folder, tap, host),
        process_spawner: DirectProcessSpawner,
        runtime: TokioRuntime,
        moved_resource_type: MovedResourceType::Copied,
        ownership_model: VmmOwnershipModel::Shared,
        track_dirty_pages: Some(true),
        resume_vm: Some(true),
        network_overrides: vec![NetworkOverride {
            iface_id: "eth0".to_owned(),
            host_dev_name: tap.to_owned(),
        }],
    };
    of.clone().prepare_vm(first, options).await.expect("the snapshot's files")
}

async fn run_clones(run: &ClientRun, first: &mut FctoolsGuest, of: &VmSnapshot, folder: &Path) {
    let taps: Vec<String> = (1..=CLONES).map(|i| format!("tap{i}")).collect();
    let hosts: Vec<TapNamespace> = taps.iter().map(|tap| TapNamespace::with_tap(tap)).collect();
    let mut clones = Vec::new();
    for (tap, host) in taps.iter().zip(&hosts) {
        clones.push(load(run, first, of, host, tap).await);
    }
    for started in join_all(clones.iter_mut().map(|clone| clone.start(LIMIT))).await {
        started.expect("PUT /snapshot/load");
    }
    for (clone, tap) in clones.iter_mut().zip(&taps) {
        let info = clone.get_info().await.expect("GET /");
        assert_eq!((info.id.as_str(), info.is_paused), (tap.as_str(), false));
    }
    step(format_args!("{CLONES} clones run"));
    for over_tap in [true, false] {
        let to = |tap: &str| match over_tap {
            true => host::OVER_TAP.to_owned(),
            false => over_vsock(&folder.with_file_name(tap).join("vsock")),
        };
        let echoes = taps.iter().zip(&hosts).map(|(tap, host)| run.echo(host, &to(tap)));
        let echoes: Vec<_> = echoes.collect();
        echoes.into_iter().for_each(host::EchoPeer::finish);
    }
    // The last one is killed.
    let methods = (1..CLONES).map(|_| VmShutdownMethod::WriteToSerial(b"reboot\n".to_vec()));
    let methods = methods.chain([VmShutdownMethod::PauseThenKill]);
    let ends = clones.iter_mut().zip(methods).map(async |(clone, method)| {
        let graceful = method != VmShutdownMethod::PauseThenKill;
        let action = VmShutdownAction { method, timeout: Some(LIMIT), graceful };
        let outcome = clone.shutdown([action]).await.expect("it ends");
        let status = outcome.exit_status;
        assert_eq!(outcome.is_fully_graceful(), graceful, "{status}");
        assert!(graceful || status.signal() == Some(9), "{status}");
        clone.cleanup().await.expect("its socket");
    });
    join_all(ends).await;
    step(format_args!("{} clones have ended by themselves, and one by SIGKILL", CLONES - 1));
}

#[tokio::main]
async fn main() {
    let run = ClientRun::from_args();
    let host = TapNamespace::with_tap("tap0");
    let folder = run.folder("first");
    let mut first = prepare(&run, &folder, &host).await;
    let mut task = spawn_metrics_task(folder.join("metrics"), 100, TokioRuntime);
    assert_eq!(first.get_state(), VmState::NotStarted);
    first.start(LIMIT).await.expect("InstanceStart");
    let version = first.get_firecracker_version().await.expect("GET /version");
    step(format_args!("firecracker {version} has started a guest"));
    let pipes = first.take_pipes().expect("pipes");
    let console = keep_console(pipes.stdout, folder.join("console"));
    console.await_boot();
    run.echo(&host, host::OVER_TAP).finish();
    run.echo(&host, &over_vsock(&folder.join("vsock"))).finish();
    use_balloon(&mut first).await;
    first.flush_metrics().await.expect("FlushMetrics");
    let flushed = metrics(&mut task, |metrics| metrics.net.rx_packets_count > 0).await;
    step(format_args!("the FIFO has metrics: {:?}", flushed.balloon));
    let machine = first.get_machine_configuration().await.expect("GET /machine-config");
    assert_eq!((machine.vcpu_count, machine.mem_size_mib), (1, 128));

    console.await_flushed(0);
    let of = snapshot(&mut first, &folder).await;
    run_clones(&run, &mut first, &of, &folder).await;

    first.resume().await.expect("PATCH /vm");
    let flushed = console.await_flushed(console.await_flushed(0));
    step("the guest runs again");
    let mut input = pipes.stdin;
    let typed = futures_util::AsyncWriteExt::write_all(&mut input, b"reboot\n");
    typed.await.expect("it reads");
    let state = wait_for("end of the process", || {
        let state = first.get_state();
        (state != VmState::Running).then_some(state)
    });
    assert_eq!(state, VmState::Exited);
    // The process writes metrics when it ends. Then nothing writes to the FIFO.
    let last = tokio::time::timeout(LIMIT, task.receiver.by_ref().collect::<Vec<_>>()).await;
    assert!(!last.expect("the FIFO ends").is_empty(), "the process wrote no last metrics");
    let read = task.task.join().await.expect("the client's task ends");
    assert!(read.is_ok(), "{read:?}");
    step("the guest has ended its process");
    run.verify_disk(Path::new("disk"), flushed);
    // The client fails if the process has removed a socket or a file.
    first.cleanup().await.expect("files of the guest");
    assert!(!folder.join("api.sock").exists() && !folder.join("metrics").exists());
}
