//! Each class in a process of its own: what it may goes well, what it may not ends the process.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};

use syscalls::Sysno;

use super::*;

/// Tells a copy of this test binary which act to perform: `<class>:<act>`.
const ACT: &str = "DRIFTLINE_SANDBOX_ACT";

/// Runs one act, on a thread of `class` of a process that has a sandbox.
fn act(class: &str, act: &str) -> Output {
    let mut me = Command::new(std::env::current_exe().unwrap());
    me.args(["--exact", "sandbox::tests::child", "--nocapture", "--test-threads=1"]);
    me.env(ACT, format!("{class}:{act}")).output().unwrap()
}

#[track_caller]
fn killed(class: &str, name: &str, call: Sysno) {
    let out = act(class, name);
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.signal(), Some(libc::SIGSYS), "{class}: {name}: {said}");
    let line = format!("made system call {} ({call}", call.id());
    assert!(said.contains(&line), "{class}: {name}: {said}");
    assert!(said.contains(&format!("driftline: thread {class} ")), "{said}");
}

#[track_caller]
fn done(class: &str, name: &str) {
    let out = act(class, name);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{class}: {name}: {} {said}", out.status);
    assert!(String::from_utf8_lossy(&out.stdout).contains("did it"), "{class}: {name}: {said}");
}

/// Performs what the environment says, or nothing.
#[test]
fn child() {
    let Ok(asked) = std::env::var(ACT) else { return };
    let (class, name) = asked.split_once(':').unwrap();
    let (class, name) = (class.to_owned(), name.to_owned());
    let dir = std::env::temp_dir();
    let strict = name.starts_with("outside");
    let options = Options {
        seccomp: !name.ends_with("by-landlock"),
        landlock: true,
        allowed: if strict { vec![dir.join("driftline-sandbox-allowed")] } else { Vec::new() },
        ..Options::default()
    };
    std::fs::create_dir_all(dir.join("driftline-sandbox-allowed")).unwrap();
    // As main does: whatever is started from here on inherits it.
    let thread = std::thread::Builder::new().name("process".to_owned());
    let thread = thread.spawn(move || {
        start(&options).unwrap();
        match Class::ALL.into_iter().find(|c| format!("{c:?}") == class) {
            None => perform(&name),
            Some(known) => spawn(known, class, move || perform(&name)).unwrap().join().unwrap(),
        }
    });
    thread.unwrap().join().unwrap();
    println!("did it");
}

fn perform(name: &str) {
    use Sysno::*;
    let forbidden = |call: Sysno, a: [i64; 3]| {
        let answer = native::call(call, a);
        panic!("{call} was let through: {answer:?}");
    };
    let tmp = std::env::temp_dir();
    match name {
        "open" => forbidden(openat, [i64::from(libc::AT_FDCWD), 0, 0]),
        "exec" => forbidden(execve, [0, 0, 0]),
        "ptrace" => forbidden(ptrace, [0, 0, 0]),
        "mount" => forbidden(mount, [0, 0, 0]),
        "socket" => forbidden(socket, [libc::AF_INET.into(), libc::SOCK_STREAM.into(), 0]),
        "unix" => forbidden(socket, [libc::AF_UNIX.into(), libc::SOCK_STREAM.into(), 0]),
        "packet" => forbidden(socket, [libc::AF_PACKET.into(), libc::SOCK_RAW.into(), 0]),
        "fork" => forbidden(clone, [libc::SIGCHLD.into(), 0, 0]),
        "kill" => forbidden(kill, [1, 0, 0]),
        "code" => forbidden(mprotect, [0, 4096, libc::PROT_EXEC.into()]),
        // KVM_CREATE_VM, and TIOCSTI, which types into a terminal.
        "create-vm" => forbidden(ioctl, [-1, 0xae01, 0]),
        "type" => forbidden(ioctl, [0, 0x5412, 0]),
        "handler" => forbidden(rt_sigaction, [libc::SIGSYS.into(), 0, 0]),
        "uring" => forbidden(io_uring_setup, [1, 0, 0]),
        "work" => work(),
        "run" => {
            // KVM_RUN, of no vCPU.
            let answer = native::call(ioctl, [-1, 0xae80, 0]).unwrap_err();
            assert_eq!(answer.raw_os_error(), Some(libc::EBADF));
        }
        "files" => {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join("a"), "text").unwrap();
            std::fs::rename(dir.path().join("a"), dir.path().join("b")).unwrap();
            assert_eq!(std::fs::read(dir.path().join("b")).unwrap(), b"text");
            std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        }
        "system" | "no-file-by-landlock" if !landlock_offered() => {}
        "system" => {
            let e = std::fs::write("/etc/driftline-was-here", "").unwrap_err();
            assert_eq!(e.kind(), io::ErrorKind::PermissionDenied);
            std::fs::File::open("/proc/self/pagemap").unwrap();
            check_allowed(Path::new("/etc/driftline-was-here")).unwrap_err();
            check_allowed(&tmp.join("some/store")).unwrap();
        }
        "no-file-by-landlock" => {
            for path in ["/etc/hosts", "/proc/self/maps", "/dev/null"] {
                let e = std::fs::File::open(path).unwrap_err();
                assert_eq!(e.kind(), io::ErrorKind::PermissionDenied, "{path}");
            }
        }
        "outside" => {
            let allowed = tmp.join("driftline-sandbox-allowed");
            std::fs::write(allowed.join("in"), "").unwrap();
            assert_eq!(check_allowed(&allowed.join("deeper/in")), Ok(()));
            if landlock_offered() {
                let e = std::fs::write(tmp.join("driftline-was-here"), "").unwrap_err();
                assert_eq!(e.kind(), io::ErrorKind::PermissionDenied);
                std::fs::read(std::env::current_exe().unwrap()).unwrap_err();
                let said = check_allowed(&tmp.join("driftline-was-here")).unwrap_err();
                assert!(said.contains("lies outside of where this driftline may write"), "{said}");
            }
        }
        other => panic!("no act {other}"),
    }
}

/// What every thread does: memory, small and large, messages, time, text on standard error.
fn work() {
    let (to, from) = std::sync::mpsc::channel();
    for size in [16usize, 1 << 12, 1 << 20, 64 << 20] {
        to.send(vec![1u8; size]).unwrap();
        assert_eq!(from.recv().unwrap().iter().map(|b| usize::from(*b)).sum::<usize>(), size);
    }
    std::thread::sleep(std::time::Duration::from_millis(1));
    assert!(from.recv_timeout(std::time::Duration::from_millis(1)).is_err());
    let table: std::collections::HashMap<u32, u32> = (0..1000).map(|n| (n, n)).collect();
    eprintln!("{} {:?}", table.len(), std::time::SystemTime::now());
}

#[test]
fn every_class_works_and_none_opens_files_or_starts_programs() {
    for class in Class::ALL.map(|c| format!("{c:?}")) {
        done(&class, "work");
        killed(&class, "open", Sysno::openat);
        killed(&class, "exec", Sysno::execve);
        killed(&class, "socket", Sysno::socket);
        killed(&class, "code", Sysno::mprotect);
        killed(&class, "handler", Sysno::rt_sigaction);
        done(&class, "no-file-by-landlock");
    }
}

#[test]
fn a_vcpu_has_its_own_ioctls_and_no_others() {
    done("Vcpu", "run");
    killed("Vcpu", "create-vm", Sysno::ioctl);
    killed("Vcpu", "unix", Sysno::socket);
    killed("Vcpu", "uring", Sysno::io_uring_setup);
    killed("Collector", "create-vm", Sysno::ioctl);
    killed("Net", "uring", Sysno::io_uring_setup);
}

#[test]
fn the_operators_threads_serve_him_and_nothing_else() {
    done("process", "work");
    done("process", "files");
    done("process", "system");
    done("process", "outside");
    for (name, call) in [
        ("exec", Sysno::execve),
        ("fork", Sysno::clone),
        ("ptrace", Sysno::ptrace),
        ("mount", Sysno::mount),
        ("packet", Sysno::socket),
        ("kill", Sysno::kill),
        ("type", Sysno::ioctl),
        ("code", Sysno::mprotect),
    ] {
        killed("process", name, call);
    }
}
