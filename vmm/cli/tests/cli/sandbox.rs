//! The sandbox of a process that has a guest, from the operator's point of view. The permissions of
//! each class of threads are tested next to the tables, in `vmm/machine/src/sandbox`.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::time::{Duration, Instant};

use crate::common::latest_process::LatestProcess;
use crate::common::{
    TIMEOUT, TestDir, Vmm, echo, fail, output, receiver, status_field, text, thread_statuses,
    wait_for,
};
use driftline_machine::testing::kvm_or_skip;

const GUEST: &[&str] = &[
    "--backend",
    "threads",
    "--mem",
    "64M",
    "--guest",
    "payload,ws=1M,rate=1M,burst=8,report=200",
];
const KVM_GUEST: &[&str] = &["--mem", "64M", "--guest", "payload,ws=1M,rate=1M,burst=8,report=200"];

/// Number of filters on each thread of a process, by thread name.
type FilterCounts = BTreeMap<String, u32>;

fn filters(pid: u32) -> FilterCounts {
    let of = |status: &String| {
        let count = status_field(status, "Seccomp_filters:")?.parse().ok()?;
        Some((status_field(status, "Name:")?.to_owned(), count))
    };
    thread_statuses(pid).iter().filter_map(of).collect()
}

/// Waits until the threads of a process have filters that `are_expected` accepts.
fn await_filters(pid: u32, are_expected: impl Fn(&FilterCounts) -> bool) {
    let end = Instant::now() + TIMEOUT;
    loop {
        let filters = filters(pid);
        if are_expected(&filters) {
            return;
        }
        assert!(Instant::now() < end, "{filters:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn guest_threads_have_more_filters() {
    let tmp = TestDir::new();
    let vmm = Vmm::run(&tmp, "a", GUEST);
    await_filters(vmm.pid(), |filters| {
        let [worker, main] = ["worker-0", "driftline"].map(|name| filters.get(name).copied());
        let all_have_some = filters.len() >= 4 && filters.values().all(|n| *n > 1);
        all_have_some && main.is_some() && worker > main
    });
    assert_eq!(vmm.stderr(), "", "a complete sandbox needs no message");
}

/// If the main thread already has a signal pending, the kernel delivers the next one to any thread
/// that does not block it. A second SIGTERM would then end the process, and the guest with it.
#[test]
fn guest_threads_block_process_signals() {
    if !kvm_or_skip("guest_threads_block_process_signals") {
        return;
    }
    let tmp = TestDir::new();
    let vmm = Vmm::run(&tmp, "a", KVM_GUEST);
    let blocked = |number: i32| 1u64 << (number - 1);
    let takers = wait_for("four threads that take no signals", || {
        let (mut blocking, mut takers) = (0, 0);
        for status in thread_statuses(vmm.pid()) {
            let field = |name| status_field(&status, name).unwrap_or_default();
            let mask = u64::from_str_radix(field("SigBlk:"), 16).unwrap_or(0);
            let both = blocked(libc::SIGTERM) | blocked(libc::SIGINT);
            match field("Name:") {
                "serial" | "vcpu0" | "supervisor" | "collector" => {
                    assert_eq!(mask & blocked(libc::SIGSYS), 0, "SIGSYS is blocked: {status}");
                    blocking += usize::from(mask & both == both);
                }
                _ => takers += usize::from(mask & blocked(libc::SIGTERM) == 0),
            }
        }
        (blocking == 4).then_some(takers)
    });
    assert!(takers > 0, "no thread takes SIGTERM");
}

#[test]
fn without_a_sandbox_the_operator_is_warned() {
    let tmp = TestDir::new();
    let vmm = Vmm::run(&tmp, "a", &[GUEST, &["--no-seccomp", "--no-landlock"][..]].concat());
    await_filters(vmm.pid(), |filters| filters.len() >= 4 && filters.values().all(|n| *n == 0));
    let stderr = vmm.stderr();
    assert!(stderr.contains("--no-seccomp: the process can make all system calls"), "{stderr}");
    assert!(
        stderr.contains("--no-landlock: the process can reach all files of its user"),
        "{stderr}"
    );
}

#[test]
fn stores_need_an_allowed_path() {
    let tmp = TestDir::new();
    std::fs::create_dir(tmp.path("stores")).unwrap();
    let (allowed, other) = (tmp.text("stores"), tmp.text("other"));
    let mut vmm = Vmm::run(&tmp, "a", &[GUEST, &["--allow-path", &allowed][..]].concat());
    vmm.tell(&["checkpoint", "--store", &format!("{allowed}/one")]);
    let stderr = vmm.refuse(4, &["checkpoint", "--store", &other]);
    assert!(stderr.contains(&format!("does not allow writes to {other}")), "{stderr}");
    assert!(!tmp.path("other").exists());
    vmm.tell(&["stop"]);
    assert_eq!(vmm.wait(), Some(0));
    assert!(!tmp.path("a.sock").exists(), "it removes its own socket");

    let missing = tmp.text("missing");
    let stderr = fail(1, &[&["run"], GUEST, &["--allow-path", &missing]].concat());
    assert!(stderr.contains(&format!("--allow-path {missing}: it does not exist")), "{stderr}");
}

#[test]
fn system_directories_hold_no_stores() {
    let tmp = TestDir::new();
    let vmm = Vmm::run(&tmp, "a", GUEST);
    let stderr = vmm.refuse(4, &["checkpoint", "--store", "/etc/driftline-store"]);
    assert!(stderr.contains("restart the guest with --allow-path"), "{stderr}");
    vmm.tell(&["checkpoint", "--store", &tmp.text("store")]);
}

/// Starts a guest with a disk and a socket in `tmp`.
fn with_devices<'p>(tmp: &'p TestDir, more: &[&str]) -> Vmm<'p> {
    std::fs::File::create(tmp.path("disk")).unwrap().set_len(1 << 20).unwrap();
    let disk = format!("path={}", tmp.text("disk"));
    let vsock = format!("cid=3,uds={}", tmp.text("vsock"));
    Vmm::run(tmp, "a", &[KVM_GUEST, &["--disk", &disk, "--vsock", &vsock], more].concat())
}

/// Returns whether these are the filters of a guest with a disk and a socket.
fn are_of_devices(filters: &FilterCounts) -> bool {
    let narrow = ["vcpu0", "supervisor", "collector", "serial", "virtio-disk0", "virtio-vsock"];
    let wide = ["driftline", "control", "opener"];
    let have = |names: &[&str], n| names.iter().all(|name| filters.get(*name) == Some(&n));
    have(&narrow, 3) && have(&wide, 2)
}

#[test]
fn next_process_of_a_guest_has_its_filters() {
    if !kvm_or_skip("next_process_of_a_guest_has_its_filters") {
        return;
    }
    let tmp = TestDir::new();
    let vmm = with_devices(&tmp, &["--memory-backing", "memfd"]);
    let latest = LatestProcess::of(&vmm);
    for _ in 0..2 {
        latest.upgrade();
        await_filters(latest.pid(), are_of_devices);
    }
}

#[test]
fn device_threads_have_more_filters_than_opener() {
    if !kvm_or_skip("device_threads_have_more_filters_than_opener") {
        return;
    }
    let tmp = TestDir::new();
    let mut vmm = with_devices(&tmp, &[]);
    await_filters(vmm.pid(), are_of_devices);
    std::os::unix::net::UnixStream::connect(tmp.path("vsock")).unwrap();
    vmm.tell(&["stop"]);
    assert_eq!(vmm.wait(), Some(0));
    assert!(!tmp.path("vsock").exists(), "it removes the sockets that it made");
}

#[test]
fn typed_input_reaches_interrupt_driven_guest() {
    if !kvm_or_skip("typed_input_reaches_interrupt_driven_guest") {
        return;
    }
    let tmp = TestDir::new();
    let (vmm, mut input, mut output) = echo::start(&tmp, &[]);
    input.write_all(b"typed").unwrap();
    let mut echoed = [0; 5];
    let read = output.read_exact(&mut echoed);
    assert!(read.is_ok(), "{}", vmm.stderr());
    assert_eq!(text(&echoed), "typed");
}

#[test]
fn arriving_guest_uses_only_named_files() {
    if !kvm_or_skip("arriving_guest_uses_only_named_files") {
        return;
    }
    let tmp = TestDir::new();
    std::fs::create_dir(tmp.path("stores")).unwrap();
    let (stores, store) = (tmp.text("stores"), tmp.text("stores/one"));
    let allow = ["--allow-path", &stores];
    let mut source = with_devices(&tmp, &allow);
    source.tell(&["checkpoint", "--store", &store, "--disks", "external"]);

    let (mut narrow, to) = receiver(&tmp, "narrow", &allow);
    let stderr = source.refuse(4, &["send-migration", &to]);
    assert!(
        stderr.contains("disk\" cannot be opened") && stderr.contains("--allow-path"),
        "{stderr}"
    );
    narrow.kill();
    source.await_progress(1, &[]);

    let disk = format!("path={}", tmp.text("disk"));
    let vsock = format!("uds={}", tmp.text("vsock"));
    let named = ["--disk", &disk, "--vsock", &vsock];
    let (mut destination, to) = receiver(&tmp, "destination", &[&allow[..], &named].concat());
    source.tell(&["send-migration", &to]);
    assert_eq!(source.wait(), Some(0), "{}", source.stderr());
    destination.await_api();
    destination.await_progress(1, &[]);
    destination.kill();

    let state = tmp.text("state");
    let restore = ["restore", "--store", &store, "--state-dir", &state, "--allow-path"];
    let out = output(&[&restore[..], &[&tmp.text("state"), "--serial", "null"]].concat());
    let stderr = text(&out.stderr);
    assert!(
        !out.status.success()
            && stderr.contains("name the file when the VMM starts (--disk, --vsock)"),
        "{stderr}"
    );
    let restore = ["restore", "--store", &store, "--allow-path", &tmp.text("state")];
    let mut restored = Vmm::start(&tmp, "restored", &[&restore[..], &named].concat());
    restored.await_api();
    restored.await_progress(1, &[]);
    let two = tmp.text("two");
    let stderr = restored.refuse(4, &["checkpoint", "--store", &two, "--disks", "external"]);
    assert!(stderr.contains("sandbox does not allow writes"), "{stderr}");
}
