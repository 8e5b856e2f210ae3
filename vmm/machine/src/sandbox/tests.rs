//! Each class in a process of its own: allowed calls succeed, and forbidden calls end the process.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};

use syscalls::Sysno;

use super::*;
use crate::config::{
    BackendKind, BalloonConfig, DeviceConfig, MacAddr, MachineConfig, NetConfig, RngConfig,
    VsockConfig,
};
use crate::devices::{DeviceSet, Drive};
use crate::testing::{TestTap, payload_config};
use driftline_guest::NextHost;

/// Environment variable that selects the act of a copy of this test binary:
/// `<class>:<act>`.
const ACT: &str = "DRIFTLINE_SANDBOX_ACT";

/// Environment variable that restricts every thread of this test binary that is started with a
/// class.
const EVERYWHERE: &str = "DRIFTLINE_SANDBOX_EVERYWHERE";
/// Environment variable that names a tap, for the act that needs one.
const TAP: &str = "DRIFTLINE_SANDBOX_TAP";

/// Applies [`EVERYWHERE`] before the first thread that is to be restricted.
pub(super) fn start_everywhere() {
    if std::env::var_os(EVERYWHERE).is_some() {
        STARTED.get_or_init(|| {
            native::report_violations().unwrap();
            let filters = Some(Filters::compile().unwrap());
            Started { filters, landlock: landlock_offered().is_some(), allowed: RwLock::default() }
        });
    }
}

/// Runs one act on a thread of `class`, in a process with a sandbox.
fn act(class: &str, act: &str) -> Output {
    child_of(class, act).output().unwrap()
}

fn child_of(class: &str, act: &str) -> Command {
    let mut me = Command::new(std::env::current_exe().unwrap());
    me.args(["--exact", "sandbox::tests::child", "--nocapture", "--test-threads=1"]);
    me.env(ACT, format!("{class}:{act}"));
    me
}

#[track_caller]
fn assert_killed(class: &str, name: &str, call: Sysno) {
    let out = act(class, name);
    let output = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.signal(), Some(libc::SIGSYS), "{class}: {name}: {output}");
    let line = format!("made system call {} ({call}", call.id());
    assert!(output.contains(&line), "{class}: {name}: {output}");
    assert!(output.contains(&format!("driftline: thread {class} ")), "{output}");
}

#[track_caller]
fn done(class: &str, name: &str) {
    did(&act(class, name), &format!("{class}: {name}"));
}

#[track_caller]
fn did(out: &Output, what: &str) {
    let output = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{what}: {} {output}", out.status);
    assert!(String::from_utf8_lossy(&out.stdout).contains("did it"), "{what}: {output}");
}

/// Performs the act that the environment names, if any.
#[test]
fn child() {
    let Ok(selected) = std::env::var(ACT) else { return };
    let (class, name) = selected.split_once(':').unwrap();
    let (class, name) = (class.to_owned(), name.to_owned());
    let name = match name.strip_prefix("coded-") {
        None => name,
        Some(rest) => {
            crate::fatal_signals::install("a-1", &[(libc::SIGSYS, 148)]).unwrap();
            rest.to_owned()
        }
    };
    let dir = std::env::temp_dir();
    let strict = name.starts_with("outside");
    let options = SandboxOptions {
        seccomp: !name.ends_with("by-landlock"),
        landlock: true,
        allowed: if strict { vec![dir.join("driftline-sandbox-allowed")] } else { Vec::new() },
        write: if name == "closing" { vec!["/".into()] } else { Vec::new() },
        ..SandboxOptions::default()
    };
    std::fs::create_dir_all(dir.join("driftline-sandbox-allowed")).unwrap();
    // As main does: all threads that are started from here on inherit the restrictions.
    let thread = std::thread::Builder::new().name("process".to_owned());
    let thread = thread.spawn(move || {
        if name.ends_with("without-landlock") {
            take_landlock_away();
        }
        // Warnings go to standard output.
        tracing_subscriber::fmt().init();
        start(&options).unwrap();
        match Class::ALL.into_iter().find(|c| format!("{c:?}") == class) {
            None => perform(&name),
            Some(class_of_thread) => {
                spawn(class_of_thread, class, move || perform(&name)).unwrap().join().unwrap()
            }
        }
    });
    thread.unwrap().join().unwrap();
    println!("did it");
}

/// Makes landlock look unsupported to this thread.
fn take_landlock_away() {
    use seccompiler::{SeccompAction, SeccompFilter, TargetArch};
    let call = (Sysno::landlock_create_ruleset.id().into(), Vec::new());
    let none = SeccompAction::Errno(libc::ENOSYS as u32);
    let rules = [call].into_iter().collect();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, none, TargetArch::x86_64);
    let program: seccompiler::BpfProgram = filter.unwrap().try_into().unwrap();
    seccompiler::apply_filter(&program).unwrap();
}

/// Returns the forbidden call that an act makes, if it is one of these.
fn forbidden_call(name: &str) -> Option<(Sysno, [i64; 3])> {
    use Sysno::*;
    Some(match name {
        "open" => (openat, [i64::from(libc::AT_FDCWD), 0, 0]),
        "exec" => (execve, [0, 0, 0]),
        "ptrace" => (ptrace, [0, 0, 0]),
        "mount" => (mount, [0, 0, 0]),
        "socket" => (socket, [libc::AF_INET.into(), libc::SOCK_STREAM.into(), 0]),
        "unix" => (socket, [libc::AF_UNIX.into(), libc::SOCK_STREAM.into(), 0]),
        "packet" => (socket, [libc::AF_PACKET.into(), libc::SOCK_RAW.into(), 0]),
        "fork" => (clone, [libc::SIGCHLD.into(), 0, 0]),
        "kill" => (kill, [1, 0, 0]),
        // A new limit at an address whose low half is zero.
        "limit" => (prlimit64, [0, libc::RLIMIT_NOFILE.into(), 1 << 32]),
        "code" => (mprotect, [0, 4096, libc::PROT_EXEC.into()]),
        // KVM_CREATE_VM, and TIOCSTI, which injects input into a terminal.
        "create-vm" => (ioctl, [-1, 0xae01, 0]),
        "type" => (ioctl, [0, 0x5412, 0]),
        "handler" => (rt_sigaction, [libc::SIGSYS.into(), 0, 0]),
        "uring" => (io_uring_setup, [1, 0, 0]),
        "uring-register" => (io_uring_register, [-1, 0, 0]),
        "connect" => (connect, [-1, 0, 0]),
        "accept" => (accept4, [-1, 0, 0]),
        "timer" => (timerfd_settime, [-1, 0, 0]),
        "space" => (fallocate, [-1, 0, 0]),
        "data" => (pread64, [-1, 0, 0]),
        // TUNSETIFF.
        "attach" => (ioctl, [-1, 0x4004_54ca, 0]),
        "lock" => (fcntl, [-1, libc::F_SETLK.into(), 0]),
        _ => return None,
    })
}

fn perform(name: &str) {
    if let Some((call, arguments)) = forbidden_call(name) {
        let answer = native::call(call, arguments);
        panic!("{call} was allowed: {answer:?}");
    }
    match name {
        "devices" => devices(),
        "work" => work(),
        "run" | "run-without-landlock" => {
            // KVM_RUN, on an invalid descriptor.
            let answer = native::call(Sysno::ioctl, [-1, 0xae80, 0]).unwrap_err();
            assert_eq!(answer.raw_os_error(), Some(libc::EBADF));
        }
        "files" => {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join("a"), "text").unwrap();
            std::fs::rename(dir.path().join("a"), dir.path().join("b")).unwrap();
            assert_eq!(std::fs::read(dir.path().join("b")).unwrap(), b"text");
            std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        }
        "system" | "no-file-by-landlock" if landlock_offered().is_none() => {}
        "system" => {
            let e = std::fs::write("/etc/driftline-was-here", "").unwrap_err();
            assert_eq!(e.kind(), io::ErrorKind::PermissionDenied);
            std::fs::File::open("/proc/self/pagemap").unwrap();
            check_allowed(Path::new("/etc/driftline-was-here")).unwrap_err();
            check_allowed(&std::env::temp_dir().join("some/store")).unwrap();
        }
        "no-file-by-landlock" => {
            for path in ["/etc/hosts", "/proc/self/maps", "/dev/null"] {
                let e = std::fs::File::open(path).unwrap_err();
                assert_eq!(e.kind(), io::ErrorKind::PermissionDenied, "{path}");
            }
        }
        "outside" => write_outside(),
        "closing" => close_and_write_outside(),
        other => panic!("no act {other}"),
    }
}

/// Writes to the allowed directory, and to others if landlock is there to refuse that.
fn write_outside() {
    let tmp = std::env::temp_dir();
    let allowed = tmp.join("driftline-sandbox-allowed");
    std::fs::write(allowed.join("in"), "").unwrap();
    assert_eq!(check_allowed(&allowed.join("deeper/in")), Ok(()));
    if landlock_offered().is_some() {
        let e = std::fs::write(tmp.join("driftline-was-here"), "").unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::PermissionDenied);
        std::fs::read(std::env::current_exe().unwrap()).unwrap_err();
        let output = check_allowed(&tmp.join("driftline-was-here")).unwrap_err().to_string();
        assert!(output.contains("sandbox does not allow writes"), "{output}");
    }
}

/// Writes anywhere until the sandbox closes, and then only to the allowed directory. Threads of the
/// pool do the same.
fn close_and_write_outside() {
    let file = std::env::temp_dir().join("driftline-sandbox-open");
    std::fs::write(&file, "").unwrap();
    std::fs::remove_file(&file).unwrap();
    check_allowed(Path::new("/etc/driftline-was-here")).unwrap();
    let allowed = vec![std::env::temp_dir().join("driftline-sandbox-allowed")];
    let options = SandboxOptions { allowed, ..SandboxOptions::default() };
    crate::pool::start().unwrap();
    close_pool(&options).unwrap();
    close(&options).unwrap();
    write_outside();
    let on_pool = crate::pool::on_each_thread(|| {
        write_outside();
        Ok::<(), io::Error>(())
    });
    on_pool.unwrap();
}

/// Does what every thread does: memory, small and large, messages, time, text on standard error.
fn work() {
    let (to, from) = std::sync::mpsc::channel();
    for size in [16usize, 1 << 12, 1 << 20, 64 << 20] {
        to.send(vec![1u8; size]).unwrap();
        let received: Vec<u8> = from.recv().unwrap();
        assert_eq!((received.len(), received.last()), (size, Some(&1)));
    }
    std::thread::sleep(std::time::Duration::from_millis(1));
    assert!(from.recv_timeout(std::time::Duration::from_millis(1)).is_err());
    // Many small pieces, freed together, so that the allocator also returns memory to the system.
    drop((0..1000).map(|n| vec![n as u8; 20_000]).collect::<Vec<_>>());
    let table: std::collections::HashMap<u32, u32> = (0..1000).map(|n| (n, n)).collect();
    eprintln!("{} {:?}", table.len(), std::time::SystemTime::now());
}

#[test]
fn no_class_opens_files_or_starts_programs() {
    let check = |class: &str| {
        done(class, "work");
        assert_killed(class, "open", Sysno::openat);
        assert_killed(class, "exec", Sysno::execve);
        assert_killed(class, "socket", Sysno::socket);
        assert_killed(class, "code", Sysno::mprotect);
        assert_killed(class, "handler", Sysno::rt_sigaction);
        assert_killed(class, "limit", Sysno::prlimit64);
        done(class, "no-file-by-landlock");
    };
    std::thread::scope(|scope| {
        for class in Class::ALL {
            scope.spawn(move || check(&format!("{class:?}")));
        }
    });
}

#[test]
fn forbidden_call_ends_with_its_exit_code() {
    for class in Class::ALL.map(|c| format!("{c:?}")) {
        let out = act(&class, "coded-socket");
        let log = String::from_utf8_lossy(&out.stdout);
        assert_eq!(out.status.code(), Some(148), "{class}: {log}");
        let start = format!(" [a-1:{class}] Shutting down VM after intercepting ");
        let (signal, call) = (libc::SIGSYS, Sysno::socket.id());
        for end in [format!("signal {signal}, code 1."), format!("a bad syscall ({call}).")] {
            assert!(log.contains(&format!("{start}{end}\n")), "{class}: {log}");
        }
    }
}

#[test]
fn vcpu_has_only_its_own_ioctls() {
    done("Vcpu", "run");
    assert_killed("Vcpu", "create-vm", Sysno::ioctl);
    assert_killed("Vcpu", "unix", Sysno::socket);
    assert_killed("Vcpu", "uring", Sysno::io_uring_setup);
    assert_killed("Collector", "create-vm", Sysno::ioctl);
}

#[test]
fn device_has_only_the_calls_of_its_kind() {
    let all = [
        ("uring", Sysno::io_uring_setup, &[][..]),
        ("uring-register", Sysno::io_uring_register, &[]),
        ("connect", Sysno::connect, &[]),
        ("accept", Sysno::accept4, &["Vsock"]),
        ("timer", Sysno::timerfd_settime, &["Block", "Net", "Rng", "Vsock", "Balloon"]),
        ("space", Sysno::fallocate, &["Block", "Balloon"]),
        ("data", Sysno::pread64, &["Block", "Balloon"]),
        ("attach", Sysno::ioctl, &[]),
        ("lock", Sysno::fcntl, &[]),
    ];
    for class in ["Rng", "Balloon", "Block", "Net", "Vsock"] {
        for (name, call, of) in all {
            if !of.contains(&class) {
                assert_killed(class, name, call);
            }
        }
    }
}

/// Device threads and others may make all the calls that their own tests make: those tests also
/// pass when restricted.
#[test]
fn threads_make_only_allowed_calls() {
    let mut me = Command::new(std::env::current_exe().unwrap());
    me.args(["devices::", "collector::"]).env(EVERYWHERE, "1");
    // The test harness starts threads before this process could set it by itself.
    me.env("MALLOC_ARENA_MAX", "1");
    // Most of these tests wait, and no others run beside them at the end.
    me.env("RUST_TEST_THREADS", "16");
    let out = me.output().unwrap();
    let output = [out.stdout, out.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(out.status.success(), "{} {}", out.status, output.concat());
    assert!(!output[0].contains(" 0 passed"), "{}", output[0]);
}

#[test]
fn sandboxed_devices_release_and_acquire() {
    let tap = TestTap::new("sb");
    if let Err(why) = &tap {
        let without = format!("no network interface: {why}");
        crate::testing::skip("sandboxed_devices_release_and_acquire", &without);
    }
    let mut child = child_of("process", "devices");
    if let Ok(TestTap(name)) = &tap {
        child.env(TAP, name);
    }
    did(&child.output().unwrap(), "process: devices");
}

/// Builds all kinds of devices as a machine does, and hands them over and back.
fn devices() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, uds) = (dir.path().join("disk"), dir.path().join("vsock"));
    std::fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let disk = crate::testing::disk("d", &disk, 1 << 20);
    let mut devices = vec![
        DeviceConfig::Disk(disk),
        DeviceConfig::Vsock(VsockConfig { cid: 3, uds: uds.clone() }),
        DeviceConfig::Rng(RngConfig::default()),
        DeviceConfig::Balloon(BalloonConfig::default()),
    ];
    if let Ok(tap) = std::env::var(TAP) {
        let (id, mac) = ("n".to_owned(), MacAddr([2, 0, 0, 0, 0, 9]));
        devices.push(DeviceConfig::Net(NetConfig {
            id,
            tap,
            mac,
            queues: 1,
            mtu: None,
            limits: Default::default(),
            metadata: None,
        }));
    }
    let config = MachineConfig {
        mem_bytes: 64 << 20,
        vcpus: 2,
        tracking: crate::tracking::TrackingMode::None,
        devices,
        ..payload_config(BackendKind::Kvm)
    };
    let memory = crate::memory::Memory::new(64 << 20, &Default::default()).unwrap();
    let set = DeviceSet::build(
        &config,
        &memory,
        driftline_guest::VmId::random(),
        true,
        &Default::default(),
    )
    .unwrap();
    for _ in 0..3 {
        set.resume();
        std::os::unix::net::UnixStream::connect(&uds).unwrap();
        // On files that this thread opens for it.
        let limit = std::time::Duration::from_secs(20);
        assert!(Drive::flush(set.drives(), limit).unwrap());
        set.quiesce().unwrap();
        set.release(NextHost::Another).unwrap();
        assert!(!uds.exists(), "another host may listen there");
        let queued_packets = set.detach(NextHost::Another).unwrap();
        set.attach(&queued_packets).unwrap();
        set.detach(NextHost::Another).unwrap();
        set.acquire(NextHost::Another).unwrap();
    }
    drop(set);
    assert!(!uds.exists());
}

#[test]
fn host_without_landlock_causes_a_warning() {
    done("Vcpu", "run-without-landlock");
    let out = act("Vcpu", "run-without-landlock");
    let output = String::from_utf8_lossy(&out.stdout);
    assert!(output.contains("this kernel has no landlock"), "{output}");
}

#[test]
fn operator_threads_have_no_more_than_they_need() {
    done("process", "work");
    done("process", "files");
    done("process", "system");
    done("process", "outside");
    done("process", "closing");
    for (name, call) in [
        ("exec", Sysno::execve),
        ("fork", Sysno::clone),
        ("ptrace", Sysno::ptrace),
        ("mount", Sysno::mount),
        ("packet", Sysno::socket),
        ("kill", Sysno::kill),
        ("limit", Sysno::prlimit64),
        ("type", Sysno::ioctl),
        ("code", Sysno::mprotect),
    ] {
        assert_killed("process", name, call);
    }
}
