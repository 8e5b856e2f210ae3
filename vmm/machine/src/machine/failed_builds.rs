//! Verifies that a build that fails at any step leaves no thread, open file, mapping or socket
//! behind. The test runs in its own process, whose threads and files no other test changes.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use driftline_guest::testing::threads;
use driftline_guest::{DriveHead, GuestError, GuestFactory, VmId};

use super::{BuildOptions, EarlyVm, KvmMachine, MachineFactory};
use crate::config::{
    BalloonConfig, DeviceConfig, HostConfig, MacAddr, MachineConfig, NetConfig, RngConfig,
    SerialSink, VsockConfig,
};
use crate::fail_point;
use crate::memory::{Backing, MemoryOptions};
use crate::testing::{Elf, TestTap, kernel_config, kvm_or_skip, run_in_child, skip};
use crate::tracking::TrackingMode;

/// Larger than any other mapping of the process.
const MEM_BYTES: u64 = 1 << 30;
const DISK_BYTES: u64 = 1 << 20;
const RING_ENTRIES: u32 = 1024;
/// Limit for the end of threads that are not joined, and of io_uring's threads.
const SOON: Duration = Duration::from_secs(60);

/// The points that some build must reach. The list ensures that no step loses its fail point.
const POINTS: [&str; 21] = [
    "COM1",
    "CPUID",
    "KVM_CREATE_VCPU",
    "MSRs",
    "balloon",
    "collector",
    "dirty source",
    "disk",
    "interrupt controllers",
    "irqfd",
    "kernel",
    "kvm_run",
    "memory",
    "memory slots",
    "opener",
    "rng",
    "serial",
    "supervisor",
    "tracking mode",
    "vcpu1",
    "vsock",
];
/// The points of a network interface, which needs a tap.
const TAP_POINTS: [&str; 3] = ["net", "tap offloads", "tap queue"];
/// Queue pairs of that interface. Each has its own step.
const TAP_QUEUES: u8 = 2;

/// The system resources that this process holds.
#[derive(PartialEq, Eq, Debug)]
struct ProcessResources {
    threads: Vec<String>,
    files: Vec<String>,
    /// Mappings of guest memory, KVM and io_uring.
    mappings: Vec<String>,
    /// Files of the test's directory: sockets, and copies of disks.
    folder: Vec<PathBuf>,
}

fn resources(folder: &Path) -> ProcessResources {
    let entries = |dir: &Path| {
        let mut paths: Vec<PathBuf> =
            fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
        paths.sort();
        paths
    };
    // Entries that vanished since the directory was read are skipped.
    let comm = |task: PathBuf| fs::read_to_string(task.join("comm")).ok();
    let link = |fd: PathBuf| Some(fs::read_link(fd).ok()?.display().to_string());
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let all = |paths: Vec<PathBuf>, read: &dyn Fn(PathBuf) -> Option<String>| {
        let mut all: Vec<String> = paths.into_iter().filter_map(read).collect();
        all.sort();
        all
    };
    ProcessResources {
        threads: all(threads(|_| true), &comm),
        files: all(entries(Path::new("/proc/self/fd")), &link),
        mappings: maps.lines().filter(|line| is_of_a_machine(line)).map(str::to_owned).collect(),
        folder: entries(folder),
    }
}

fn is_of_a_machine(line: &str) -> bool {
    let (range, _) = line.split_once(' ').unwrap();
    let (start, end) = range.split_once('-').unwrap();
    let [start, end] = [start, end].map(|address| u64::from_str_radix(address, 16).unwrap());
    let names = ["driftline-memory", "kvm", "io_uring"];
    end - start >= MEM_BYTES || names.iter().any(|name| line.contains(name))
}

/// Waits until this process holds exactly what it held before.
#[track_caller]
fn wait_for_nothing_left(folder: &Path, before: &ProcessResources, after: &str) {
    let end = Instant::now() + SOON;
    while resources(folder) != *before {
        if Instant::now() >= end {
            assert_eq!(resources(folder), *before, "not released after {after}");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A way to build a machine.
struct BuildCase {
    name: &'static str,
    tracking: TrackingMode,
    memory: MemoryOptions,
    build: fn(MachineConfig, &HostConfig) -> Result<Arc<KvmMachine>, GuestError>,
}

/// Returns every entry point of the build, over all dirty sources and both kinds of memory.
fn cases() -> [BuildCase; 4] {
    let memfd = MemoryOptions { backing: Backing::Memfd, ..Default::default() };
    [
        BuildCase {
            name: "a new guest",
            tracking: TrackingMode::DirtyRing,
            memory: MemoryOptions::default(),
            build: |config, host| Ok(KvmMachine::launch(config, host)?),
        },
        BuildCase {
            name: "a guest to be received",
            tracking: TrackingMode::DirtyBitmapManual,
            memory: memfd,
            build: |config, host| {
                let drives = [DriveHead { id: "disk".into(), bytes: DISK_BYTES, readonly: false }];
                let DeviceConfig::Disk(disk) = &config.devices[0] else { unreachable!() };
                let copy = format!("path={},id=disk,copy", disk.path.display()).parse().unwrap();
                let factory = MachineFactory::new(HostConfig { disks: vec![copy], ..host.clone() });
                let made = factory.create_with_copies(VmId::random(), &config.encode(), &drives);
                made.map(|(machine, _)| machine)
            },
        },
        BuildCase {
            name: "a guest to be restored, in a VM that was begun before",
            tracking: TrackingMode::DirtyBitmap,
            memory: memfd,
            build: |config, host| {
                let early = Some(EarlyVm::begin());
                let options = BuildOptions { early, ..BuildOptions::empty() };
                Ok(KvmMachine::build(VmId::random(), config, host, options)?)
            },
        },
        BuildCase {
            name: "a guest to be restored",
            tracking: TrackingMode::UserfaultWp,
            memory: MemoryOptions::default(),
            build: |config, host| {
                Ok(KvmMachine::build(VmId::random(), config, host, BuildOptions::empty())?)
            },
        },
    ]
}

/// Returns the configuration for this way of building, with an interface if `tap` is not empty.
fn config(dir: &Path, case: &BuildCase, tap: &str) -> MachineConfig {
    let is_copied = case.name == "a guest to be received";
    let disk = dir.join(if is_copied { "copy" } else { "disk" });
    let mut devices = vec![
        DeviceConfig::Disk(crate::testing::disk("disk", &disk, DISK_BYTES)),
        DeviceConfig::Rng(RngConfig::default()),
        DeviceConfig::Vsock(VsockConfig { cid: 3, uds: dir.join("vsock") }),
        DeviceConfig::Balloon(BalloonConfig::default()),
    ];
    if !tap.is_empty() {
        devices.push(DeviceConfig::Net(NetConfig {
            id: "net".to_owned(),
            tap: tap.to_owned(),
            mac: MacAddr::random(),
            queues: TAP_QUEUES,
            mtu: None,
            limits: Default::default(),
            metadata: None,
        }));
    }
    MachineConfig {
        mem_bytes: MEM_BYTES,
        vcpus: 2,
        tracking: case.tracking,
        ring_entries: RING_ENTRIES,
        devices,
        ..kernel_config(&dir.join("kernel"))
    }
}

/// Builds one machine, then makes the build fail at each point. Returns the names of all points.
fn fail_everywhere(dir: &Path, case: &BuildCase, tap: &str) -> Vec<String> {
    let host = HostConfig { serial: SerialSink::Stdio, memory: case.memory, ..Default::default() };
    let before = resources(dir);
    assert_eq!(before.mappings, [""; 0]);
    let (machine, points) = fail_point::run(None, || (case.build)(config(dir, case, tap), &host));
    let machine = machine.unwrap_or_else(|e| panic!("{}: {e}", case.name));
    let built = resources(dir);
    assert!(built.threads.len() >= before.threads.len() + 8, "{built:?}");
    assert!(built.files.len() > before.files.len(), "{built:?}");
    assert!(built.mappings.len() >= 4, "{built:?}");
    drop(machine);
    wait_for_nothing_left(dir, &before, case.name);
    assert!(!points.is_empty());
    for (at, point) in points.iter().enumerate() {
        let what = format!("{}: point {at} of {}, \"{point}\"", case.name, points.len());
        let (made, passed) =
            fail_point::run(Some(at), || (case.build)(config(dir, case, tap), &host));
        let why = made.err().unwrap_or_else(|| panic!("{what}: it did not fail")).to_string();
        assert!(why.contains(&format!("fail point {point}")), "{what}: {why}");
        assert_eq!(passed, points[..=at], "{what}: the build continued");
        wait_for_nothing_left(dir, &before, &what);
    }
    points
}

#[test]
fn failed_build_leaves_nothing_behind() {
    /// Set in the child process to the name of its tap, or empty.
    const CHILD: &str = "FAILS_TO_BUILD";
    const TEST: &str = "failed_build_leaves_nothing_behind";
    if !kvm_or_skip(TEST) {
        return;
    }
    let Ok(tap) = std::env::var(CHILD) else {
        let tap = TestTap::multi_queue("fb");
        if let Err(why) = &tap {
            skip(TEST, &format!("without a network interface: {why}"));
        }
        let name = format!("machine::failed_builds::{TEST}");
        let tap = tap.as_ref().map_or("", |tap| &tap.0);
        return run_in_child(&name, CHILD, tap, Stdio::null());
    };
    let dir = tempfile::tempdir().unwrap();
    // hlt; jmp $-1
    fs::write(dir.path().join("kernel"), Elf::new(&[0xf4, 0xeb, 0xfd]).bytes()).unwrap();
    fs::File::create(dir.path().join("disk")).unwrap().set_len(DISK_BYTES).unwrap();
    let mut reached = BTreeSet::new();
    for case in cases() {
        reached.extend(fail_everywhere(dir.path(), &case, &tap));
    }
    let tap_points = TAP_POINTS.into_iter().filter(|_| !tap.is_empty());
    let points = POINTS.into_iter().chain(tap_points);
    let missing: Vec<_> = points.filter(|point| !reached.contains(*point)).collect();
    assert!(missing.is_empty(), "{missing:?} are not among {reached:?}");
}
