//! Migrations over unix sockets and over a socket that the receiver was started with.

use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};

use crate::common::{SMALL_GUEST, TestDir, Vmm, driftline, fail, wait_for};
use crate::migration_protection::certificates::{NOW, TestCa};

fn await_waiting(receiver: &Vmm<'_>, address: &str) {
    let line = format!("waiting for a migration on {address}\n");
    wait_for("the receiver to listen", || receiver.stderr().contains(&line).then_some(()));
}

/// Returns the command of a receiver that a service manager starts with a socket, as descriptor 3.
fn inheriting(socket: OwnedFd, more: &[&str]) -> Command {
    let mut command = Command::new("sh");
    command
        .args(["-c", "exec 3<&0 </dev/null; exec \"$0\" \"$@\""])
        .arg(driftline(&[]).get_program())
        .args(["receive-migration", "fd:3"])
        .args(more)
        .stdin(Stdio::from(socket));
    command
}

#[test]
fn guest_moves_through_a_private_unix_socket() {
    let tmp = TestDir::new();
    let (path, source) = (tmp.path("in.sock"), Vmm::run(&tmp, "a", SMALL_GUEST));
    // The socket of a receiver that was killed.
    drop(UnixListener::bind(&path).unwrap());
    let address = format!("unix:{}", path.display());
    let mut receiver = Vmm::start(&tmp, "b", &["receive-migration", &address]);
    await_waiting(&receiver, &address);
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let stderr = fail(1, &["receive-migration", &address, "--state-dir", &tmp.text("other")]);
    assert!(stderr.contains("is in use: another process listens there"), "{stderr}");
    source.tell(&["send-migration", &address]);
    assert_eq!(receiver.state(), "running");
    receiver.tell(&["stop"]);
    receiver.wait();
    assert!(!path.exists(), "the receiver removes its socket");
}

#[test]
fn receiver_waits_on_an_inherited_socket() {
    let tmp = TestDir::new();
    let (path, source) = (tmp.path("in.sock"), Vmm::run(&tmp, "a", SMALL_GUEST));
    let listener = UnixListener::bind(&path).unwrap();
    let command = inheriting(listener.into(), &[]);
    let mut receiver = Vmm::start_by(&tmp, "b", command);
    await_waiting(&receiver, "fd:3");
    source.tell(&["send-migration", &format!("unix:{}", path.display())]);
    assert_eq!(receiver.state(), "running");
    receiver.tell(&["stop"]);
    receiver.wait();
    let stderr = fail(1, &["receive-migration", "fd:9", "--state-dir", &tmp.text("other")]);
    assert!(stderr.contains("this process was not started with descriptor 9"), "{stderr}");
}

#[test]
fn inherited_port_accepts_only_tls() {
    let (tmp, ca) = (TestDir::new(), TestCa::new());
    let dir = tmp.path("tls");
    std::fs::create_dir(&dir).unwrap();
    std::fs::copy(ca.certificate(), dir.join("ca-cert.pem")).unwrap();
    ca.issue(&dir, "server", "DNS:there", NOW);
    ca.issue(&dir, "client", "DNS:here", NOW);
    let tls = ["--tls-dir", dir.to_str().unwrap()];
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = format!("tcp:{}", listener.local_addr().unwrap());
    let source = Vmm::run(&tmp, "a", SMALL_GUEST);
    let allow = [&tls[..], &["--allow-peer", "here"]].concat();
    let mut receiver = Vmm::start_by(&tmp, "b", inheriting(listener.into(), &allow));
    await_waiting(&receiver, "fd:3");
    let said = source.refuse(4, &["send-migration", &to]);
    let why = "this receiver uses TLS, and the source does not: give --tls-dir";
    assert!(said.contains(why) && said.contains("the guest continues here"), "{said}");
    receiver.await_message("the peer does not use TLS, and this side does");
    assert_eq!((source.state(), receiver.is_alive()), ("running".to_owned(), true));
    source.tell(&[&["send-migration", &to], &tls[..], &["--peer", "there"]].concat());
    assert_eq!(receiver.state(), "running");
    receiver.tell(&["stop"]);
    receiver.wait();
}

#[test]
fn guest_arrives_over_an_inherited_connection() {
    let tmp = TestDir::new();
    let (path, mut source) = (tmp.path("in.sock"), Vmm::run(&tmp, "a", SMALL_GUEST));
    let listener = UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    let to = format!("unix:{}", path.display());
    // As a super-server does: it accepts, and starts a receiver for the connection.
    let mut receiver = std::thread::scope(|scope| {
        let sent = scope.spawn(|| source.tell(&["send-migration", &to]));
        let (connection, _) = wait_for("the source to connect", || listener.accept().ok());
        let receiver = Vmm::start_by(&tmp, "b", inheriting(connection.into(), &[]));
        sent.join().unwrap();
        receiver
    });
    assert_eq!(source.wait(), Some(0), "{}", source.stderr());
    receiver.await_progress(1, &[]);
    receiver.tell(&["stop"]);
    assert_eq!(receiver.wait(), Some(0), "{}", receiver.stderr());
}
