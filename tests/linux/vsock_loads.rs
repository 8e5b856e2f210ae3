//! A Linux guest that programs reach through its vsock immediately after a load.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::json;
use tests::{LinuxImage, SOON, ScratchDir, ServingProcess, wait_for};

use super::served::{boot_served, take_snapshot};

/// Time after which a connection stays. The guest closes those that it has had before the load
/// within milliseconds.
const A_WHILE: Duration = Duration::from_millis(500);

/// Takes a snapshot of a guest whose echo listens on vsock.
fn snapshot(linux: &LinuxImage, scratch: &ScratchDir) {
    let socket = scratch.path("first.vsock");
    let vsock = json!({ "guest_cid": 3, "uds_path": socket });
    let guest = boot_served(linux, scratch, "driftline.check=tcp", &[("/vsock", vsock)]);
    wait_for("echo of the guest", SOON, || request(&socket).and_then(accepted));
    take_snapshot(&guest, scratch);
}

/// Requests a connection to the guest's echo.
fn request(socket: &Path) -> Option<UnixStream> {
    let mut stream = UnixStream::connect(socket).ok()?;
    stream.write_all(b"CONNECT 7\n").ok()?;
    Some(stream)
}

/// Waits for the answer to a request. Returns `None` if the guest does not accept it.
fn accepted(mut stream: UnixStream) -> Option<UnixStream> {
    let mut byte = [0];
    while byte != *b"\n" {
        stream.read_exact(&mut byte).ok()?;
    }
    Some(stream)
}

#[test]
fn connection_made_after_a_load_stays() {
    let _alone = tests::one_at_a_time();
    let test = "connection_made_after_a_load_stays";
    let Some(linux) = LinuxImage::or_skip(test) else { return };
    let scratch = ScratchDir::new();
    snapshot(&linux, &scratch);
    let mut kept = 0;
    for n in 0..5 {
        let name = format!("clone-{n}");
        let guest = ServingProcess::start(&scratch, &name);
        let socket = scratch.path(&format!("{name}.vsock"));
        let load = json!({ "snapshot_path": scratch.path("state"),
            "vsock_override": { "uds_path": socket },
            "mem_backend": { "backend_path": scratch.path("memory"), "backend_type": "File" } });
        guest.done("PUT", "/snapshot/load", &load);
        // It waits for the guest.
        let early = request(&socket).expect("the load has bound the socket");
        guest.resume();
        // The device closes it if the guest does not answer within 2 s, as on a busy host.
        let early = accepted(early);
        kept += usize::from(early.is_some());
        let again = || wait_for("connection", SOON, || request(&socket).and_then(accepted));
        let mut stream = early.unwrap_or_else(again);
        stream.set_read_timeout(Some(A_WHILE)).expect("a limit");
        let e = stream.read(&mut [0]).expect_err("the guest closes no new connection");
        assert_eq!(e.kind(), ErrorKind::WouldBlock, "{e}");
    }
    // After 5 s the device would give the guest packets without its acknowledgement.
    assert!(kept > 0, "the guest acknowledges the reset in time");
}
