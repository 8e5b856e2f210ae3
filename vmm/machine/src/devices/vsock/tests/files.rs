//! A process that may open only a few files.

use std::process::Stdio;

use super::*;
use crate::testing::run_in_child;

#[test]
fn connections_leave_file_descriptors_for_other_uses() {
    let most = [0, 256, 300, 1024, 4096, u64::MAX].map(max_connections);
    assert_eq!(most, [16, 16, 44, 768, 1024, 1024]);
}

/// Returns the processor time of this process's threads in milliseconds. Needs a free file
/// descriptor.
fn cpu_ms() -> u64 {
    let used = |task: std::io::Result<std::fs::DirEntry>| {
        let stat = std::fs::read_to_string(task.unwrap().path().join("schedstat")).unwrap();
        stat.split(' ').next().unwrap().parse::<u64>().unwrap() / 1_000_000
    };
    std::fs::read_dir("/proc/self/task").unwrap().map(used).sum()
}

#[test]
fn exhausted_file_descriptors_do_not_spin() {
    const TEST: &str = "devices::vsock::tests::files::exhausted_file_descriptors_do_not_spin";
    // Runs in a process of its own, because it leaves no file descriptor for other tests.
    if std::env::var_os("NO_FILES_LEFT").is_none() {
        return run_in_child(TEST, "NO_FILES_LEFT", "1", Stdio::null());
    }
    let sockets = TestSockets::new();
    let mut guest = sockets.guest();
    let mut program = rustix::net::socket(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
        None,
    )
    .map(UnixStream::from)
    .unwrap();
    let limit = rustix::process::Rlimit { current: Some(64), maximum: Some(64) };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    let mut files = Vec::new();
    while let Ok(file) = std::fs::File::open("/dev/null") {
        files.push(file);
    }
    let listener = rustix::net::SocketAddrUnix::new(sockets.uds()).unwrap();
    rustix::net::connect(&program, &listener).unwrap();
    program.write_all(b"CONNECT 7\n").unwrap();
    std::thread::sleep(Duration::from_millis(2500));
    drop(files);
    let used = cpu_ms();
    assert!(used < 1000, "{used} ms of 2,500");
    let (header, _) = guest.next();
    assert_eq!((header.op.get(), header.dst_port.get()), (op::REQUEST, 7));
}
