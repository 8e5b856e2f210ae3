//! Drives `firecracker` through the crate `firecracker-rs-sdk`: boots a Linux guest with two
//! drives, a tap, vsock and a balloon, and loads its snapshot into ten clones that run at the same
//! time.
//!
//! Faults of the client, with Firecracker as well:
//! - It reads an answer in pieces of 64 bytes until one is shorter, so an answer whose length is a
//!   multiple of 64 never ends. Therefore no page with numbers that vary is read here, such as
//!   the statistics of the balloon: the guest tells its memory.
//! - `CacheType::WriteBack` is sent as `WriteBack`, which is refused: drives have the default.
//! - A rate limiter's bandwidth is sent as `banwidth`, which is refused: there is none.
//! - `SnapshotLoadParams` has no overrides: the event [`LoadWithOverrides`] adds them.
//! - The process and its exit status are private: [`ended`] waits for it by its id.

#[path = "../../host.rs"]
mod host;

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;

use firecracker_rs_sdk::events::{EventTrait, RequestTrait, ResponseTrait};
use firecracker_rs_sdk::firecracker::FirecrackerOption;
use firecracker_rs_sdk::instance::Instance;
use firecracker_rs_sdk::models::{
    ActionType, BackendType, Balloon, BalloonUpdate, BootSource, Drive, Empty, EntropyDevice,
    InstanceState, LogLevel, Logger, MachineConfiguration, MemoryBackend, Metrics,
    NetworkInterface, PartialDrive, SnapshotCreateParams, SnapshotLoadParams, SnapshotType, Vsock,
};
use rustix::process::{Pid, WaitId, WaitIdOptions, WaitIdStatus, waitid};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde_json::{Value, json};

use host::{BALLOON_MIB, CLONES, ClientRun, ConsoleFile, TapNamespace, over_vsock, step, wait_for};

/// Size of the drive of which the guest gets a larger one while it runs, in sectors.
const SECTORS: [u64; 2] = [2048, 6144];

/// Clones have sockets and taps of their own, and a folder of their own, in which they find their
/// copy of the drive.
struct LoadWithOverrides(Value);

impl RequestTrait for LoadWithOverrides {
    type Payload = Value;

    fn method(&self) -> &'static str {
        "PUT"
    }

    fn path(&self) -> String {
        "/snapshot/load".to_owned()
    }

    fn payload(&self) -> &Value {
        &self.0
    }
}

impl ResponseTrait for LoadWithOverrides {
    type Payload = Empty;
}

impl EventTrait for LoadWithOverrides {}

/// Starts a process in `folder` and in the namespace `host`.
fn start(run: &ClientRun, host: &TapNamespace, folder: &Path, id: &str, stdin: &Path) -> Instance {
    // The child has this thread's folder and namespace.
    std::env::set_current_dir(folder).expect("a folder");
    let namespace = File::open(Path::new("/run/netns").join(host.name())).expect("a namespace");
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
        .expect("root enters");
    let mut instance = FirecrackerOption::new(&run.firecracker)
        .api_sock(folder.join("api.sock"))
        .id(id)
        .stdin(stdin)
        .stdout(folder.join("console"))
        .stderr(folder.join("stderr"))
        .build()
        .expect("files for its streams");
    instance.start_vmm().expect("the process listens");
    let logger = Logger {
        level: Some(LogLevel::Info),
        log_path: folder.join("log"),
        show_level: Some(true),
        show_log_origin: None,
        module: None,
    };
    instance.put_logger(&logger).expect("PUT /logger");
    let info = instance.describe_instance().expect("GET /");
    assert_eq!((info.id.as_str(), info.state), (id, InstanceState::NotStarted));
    instance
}

fn drive(drive_id: &str, path_on_host: impl Into<PathBuf>, is_root_device: bool) -> Drive {
    Drive {
        drive_id: drive_id.to_owned(),
        partuuid: None,
        is_root_device,
        cache_type: None,
        is_read_only: !is_root_device,
        path_on_host: path_on_host.into(),
        rate_limiter: None,
        io_engine: None,
        socket: None,
    }
}

fn configure(instance: &mut Instance, run: &ClientRun, folder: &Path) {
    let machine = MachineConfiguration {
        cpu_template: None,
        smt: Some(false),
        mem_size_mib: 128,
        track_dirty_pages: Some(true),
        vcpu_count: 1,
        huge_pages: None,
    };
    instance.put_machine_configuration(&machine).expect("PUT /machine-config");
    let boot = BootSource {
        boot_args: Some(host::BOOT_ARGS.to_owned()),
        initrd_path: Some(run.image("initramfs.cpio")),
        kernel_image_path: run.image("vmlinux"),
    };
    instance.put_guest_boot_source(&boot).expect("PUT /boot-source");
    run.disk(&folder.join("disk"));
    let other = folder.join("other");
    host::sized_file(&other, SECTORS[0] * 512);
    instance.put_guest_drive_by_id(&drive("root", "disk", true)).expect("PUT /drives/root");
    instance.put_guest_drive_by_id(&drive("other", other, false)).expect("PUT /drives/other");
    let interface = NetworkInterface {
        guest_mac: Some(host::GUEST_MAC.to_owned()),
        host_dev_name: "tap0".into(),
        iface_id: "eth0".to_owned(),
        rx_rate_limiter: None,
        tx_rate_limiter: None,
    };
    let put = instance.put_guest_network_interface_by_id(&interface);
    put.expect("PUT /network-interfaces/eth0");
    let vsock = Vsock { guest_cid: 3, uds_path: folder.join("vsock"), vsock_id: None };
    instance.put_guest_vsock(&vsock).expect("PUT /vsock");
    // Without deflate_on_oom the guest's memory is smaller by the balloon.
    let balloon =
        Balloon { amount_mib: 0, deflate_on_oom: false, stats_polling_interval_s: Some(1) };
    instance.put_balloon(&balloon).expect("PUT /balloon");
    let entropy = EntropyDevice { rate_limiter: None };
    instance.put_entropy_device(&entropy).expect("PUT /entropy");
    let metrics = Metrics { metrics_path: folder.join("metrics") };
    instance.put_metrics(&metrics).expect("PUT /metrics");
}

fn fifo(path: &Path) -> File {
    let made = Command::new("mkfifo").arg(path).status();
    assert!(made.expect("mkfifo runs").success());
    // For both, because either alone waits for the other side.
    OpenOptions::new().read(true).write(true).open(path).expect("a FIFO")
}

/// Returns what the guest's shell prints for a command that is written to `input`.
fn shell(console: &ConsoleFile, input: &mut File, command: &str) -> String {
    let outputs = || {
        let text = console.text();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let found = whole.lines().filter_map(|line| line.strip_prefix("[output] "));
        found.map(|output| output.trim_end().to_owned()).collect::<Vec<_>>()
    };
    let before = outputs().len();
    // The console shows the command, too.
    writeln!(input, "echo; echo \"[out\"\"put] $({command})\"").expect("it reads");
    wait_for("output of the shell", || outputs().into_iter().nth(before))
}

fn use_drive(instance: &mut Instance, console: &ConsoleFile, input: &mut File, folder: &Path) {
    let sectors = |input: &mut File| shell(console, input, "cat /sys/block/vdb/size");
    assert_eq!(sectors(input), SECTORS[0].to_string());
    let larger = folder.join("larger");
    host::sized_file(&larger, SECTORS[1] * 512);
    let drive = PartialDrive {
        drive_id: "other".to_owned(),
        path_on_host: Some(larger),
        rate_limiter: None,
    };
    instance.patch_guest_drive_by_id(&drive).expect("PATCH /drives/other");
    assert_eq!(sectors(input), SECTORS[1].to_string());
    step("the guest has a larger drive");
}

fn use_balloon(instance: &mut Instance, console: &ConsoleFile, input: &mut File) {
    let mut memory_kib = || {
        let total = "sed -n 's/^MemTotal: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo";
        shell(console, input, total).parse::<u64>().expect("a number")
    };
    let smaller = memory_kib() - u64::from(BALLOON_MIB) * 1024;
    let update = BalloonUpdate { amount_mib: BALLOON_MIB.into() };
    instance.patch_balloon(&update).expect("PATCH /balloon");
    let balloon = instance.describe_balloon_config().expect("GET /balloon");
    assert_eq!(balloon.amount_mib, i64::from(BALLOON_MIB));
    wait_for("inflated balloon", || (memory_kib() == smaller).then_some(()));
    step(format_args!("the guest has {smaller} KiB with a balloon of {BALLOON_MIB} MiB"));
}

fn read_metrics(instance: &mut Instance, metrics: File) {
    instance.create_sync_action(ActionType::FlushMetrics).expect("FlushMetrics");
    let mut lines = BufReader::new(metrics).lines();
    let mut drives = 0;
    // The first line may be from the start of the process.
    while drives == 0 {
        let line = lines.next().expect("no end").expect("a line of metrics");
        let line: Value = serde_json::from_str(&line).expect("a line of JSON");
        drives = line["put_api_requests"]["drive_count"].as_u64().expect("a count");
    }
    assert_eq!(drives, 2);
    step("the FIFO has a line of metrics");
}

/// Loads the snapshot of `first` and resumes the guest.
fn load(run: &ClientRun, host: &TapNamespace, first: &Path, tap: &str) -> Instance {
    let folder = run.folder(tap);
    host::copy_disk(&first.join("disk"), &folder.join("disk"));
    let mut instance = start(run, host, &folder, tap, Path::new("/dev/null"));
    let backend =
        MemoryBackend { backend_type: BackendType::File, backend_path: first.join("snapshot.mem") };
    let params = SnapshotLoadParams {
        enable_diff_snapshots: None,
        mem_file_path: None,
        mem_backend: Some(backend),
        resume_vm: Some(true),
        snapshot_path: first.join("snapshot"),
    };
    let mut params = serde_json::to_value(params).expect("the crate's types are JSON");
    params["network_overrides"] = json!([{ "iface_id": "eth0", "host_dev_name": tap }]);
    params["vsock_override"] = json!({ "uds_path": folder.join("vsock") });
    instance.event(LoadWithOverrides(params)).expect("PUT /snapshot/load");
    let info = instance.describe_instance().expect("GET /");
    assert_eq!(info.state, InstanceState::Running, "{tap}");
    instance
}

fn run_clones(run: &ClientRun, first: &Path) {
    let taps: Vec<String> = (1..=CLONES).map(|i| format!("tap{i}")).collect();
    let hosts: Vec<TapNamespace> = taps.iter().map(|tap| TapNamespace::with_tap(tap)).collect();
    let clones: Vec<Instance> =
        taps.iter().zip(&hosts).map(|(tap, host)| load(run, host, first, tap)).collect();
    step(format_args!("{CLONES} clones run"));
    for over_tap in [true, false] {
        let to = |tap: &str| match over_tap {
            true => host::OVER_TAP.to_owned(),
            false => over_vsock(&first.with_file_name(tap).join("vsock")),
        };
        let echoes = taps.iter().zip(&hosts).map(|(tap, host)| run.echo(host, &to(tap)));
        let echoes: Vec<_> = echoes.collect();
        echoes.into_iter().for_each(host::EchoPeer::finish);
    }
    for (clone, tap) in clones.into_iter().zip(&taps) {
        let socket = first.with_file_name(tap).join("api.sock");
        let pid = pid_of(&clone);
        assert!(socket.exists(), "the client removes it");
        // The client sends SIGTERM and removes the socket.
        drop(clone);
        let status = ended(pid, WaitIdOptions::empty());
        assert_eq!(status.terminating_signal(), Some(15), "{tap}: {status:?}");
        assert!(!socket.exists(), "the client has removed it");
    }
    step(format_args!("{CLONES} clones have ended by SIGTERM"));
}

fn pid_of(instance: &Instance) -> Pid {
    let pid = instance.firecracker_pid().and_then(|pid| pid.try_into().ok());
    pid.and_then(Pid::from_raw).expect("a process")
}

/// Waits for the end of a process, whose status remains for others with `NOWAIT`.
fn ended(pid: Pid, more: WaitIdOptions) -> WaitIdStatus {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | more;
    wait_for("end of the process", || waitid(WaitId::Pid(pid), options).expect("a child of ours"))
}

fn main() {
    let run = ClientRun::from_args();
    let host = TapNamespace::with_tap("tap0");
    let folder = run.folder("first");
    let metrics = fifo(&folder.join("metrics"));
    let mut input = fifo(&folder.join("stdin"));
    let mut first = start(&run, &host, &folder, "first", &folder.join("stdin"));
    let version = first.get_firecracker_version().expect("GET /version").firecracker_version;
    step(format_args!("firecracker {version} listens"));
    configure(&mut first, &run, &folder);
    first.start().expect("InstanceStart");
    let console = ConsoleFile::at(folder.join("console"));
    console.await_boot();
    run.echo(&host, host::OVER_TAP).finish();
    run.echo(&host, &over_vsock(&folder.join("vsock"))).finish();
    use_balloon(&mut first, &console, &mut input);
    read_metrics(&mut first, metrics);
    let machine = first.get_machine_configuration().expect("GET /machine-config");
    assert_eq!((machine.mem_size_mib, machine.track_dirty_pages), (128, Some(true)));

    console.await_flushed(0);
    first.pause().expect("PATCH /vm");
    let info = first.describe_instance().expect("GET /");
    assert_eq!(info.state, InstanceState::Paused);
    let create = SnapshotCreateParams {
        mem_file_path: folder.join("snapshot.mem"),
        snapshot_path: folder.join("snapshot"),
        snapshot_type: Some(SnapshotType::Full),
        version: None,
    };
    first.create_snapshot(&create).expect("PUT /snapshot/create");
    step("the guest is paused and has a snapshot");
    run_clones(&run, &folder);

    first.resume().expect("PATCH /vm");
    let flushed = console.await_flushed(console.await_flushed(0));
    step("the guest runs again");
    // Driftline saves no guest after this change; Firecracker does.
    use_drive(&mut first, &console, &mut input, &folder);
    // The guest's kernel has no driver of a keyboard: only the answer is seen.
    first.stop().expect("SendCtrlAltDel");
    input.write_all(b"reboot\n").expect("it reads");
    let pid = pid_of(&first);
    let status = ended(pid, WaitIdOptions::NOWAIT);
    assert_eq!(status.exit_status(), Some(0), "{status:?}");
    assert!(folder.join("api.sock").exists(), "the client removes it");
    let log = std::fs::read_to_string(folder.join("log")).expect("a log");
    assert!(log.contains("[first:"), "{log}");
    drop(first);
    ended(pid, WaitIdOptions::empty());
    step("the guest has ended its process");
    run.verify_disk(&folder.join("disk"), flushed);
}
