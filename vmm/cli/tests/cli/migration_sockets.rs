//! Migrations over unix sockets and over a socket that the receiver was started with.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};

use crate::common::{SMALL_GUEST, TestDir, Vmm, driftline, fail, wait_for};

fn await_waiting(receiver: &Vmm<'_>, address: &str) {
    let line = format!("waiting for a migration on {address}\n");
    wait_for("the receiver to listen", || receiver.stderr().contains(&line).then_some(()));
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
    // As a service manager passes a socket: as descriptor 3.
    let mut command = Command::new("sh");
    command
        .args(["-c", "exec 3<&0 </dev/null; exec \"$0\" \"$@\""])
        .arg(driftline(&[]).get_program())
        .args(["receive-migration", "fd:3"])
        .stdin(Stdio::from(std::os::fd::OwnedFd::from(listener)));
    let mut receiver = Vmm::start_by(&tmp, "b", command);
    await_waiting(&receiver, "fd:3");
    source.tell(&["send-migration", &format!("unix:{}", path.display())]);
    assert_eq!(receiver.state(), "running");
    receiver.tell(&["stop"]);
    receiver.wait();
    let stderr = fail(1, &["receive-migration", "fd:9", "--state-dir", &tmp.text("other")]);
    assert!(stderr.contains("this process was not started with descriptor 9"), "{stderr}");
}
