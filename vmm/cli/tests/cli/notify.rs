//! What a process tells the service manager that started it.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use crate::common::{TIMEOUT, TestDir, Vmm, driftline, text};

const GUEST: &[&str] = &["run", "--backend", "threads", "--mem", "64M", "--guest", "payload,ws=1M"];

fn start<'p>(tmp: &'p TestDir, name: &'static str, args: &[&str], address: &str) -> Vmm<'p> {
    let mut command = driftline(args);
    command.env("NOTIFY_SOCKET", address);
    Vmm::start_by(tmp, name, command)
}

fn receive(socket: &UnixDatagram) -> String {
    let mut message = [0; 256];
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    let n = socket.recv(&mut message).unwrap();
    text(&message[..n])
}

#[test]
fn readiness_follows_the_start_of_the_guest() {
    let tmp = TestDir::new();
    let address = tmp.text("notify");
    let path = UnixDatagram::bind(&address).unwrap();
    let name = format!("driftline-test-{}", std::process::id());
    let by_name = SocketAddr::from_abstract_name(&name).unwrap();
    let by_name = UnixDatagram::bind_addr(&by_name).unwrap();
    for (vmm, address, socket) in [("a", address, path), ("b", format!("@{name}"), by_name)] {
        let mut vmm = start(&tmp, vmm, GUEST, &address);
        let ready = receive(&socket);
        let info = vmm.info().unwrap();
        assert_eq!(info["state"], "running");
        let vm_id = info["vm_id"].as_str().unwrap();
        assert_eq!(ready, format!("READY=1\nSTATUS=guest {vm_id} runs\n"));
        vmm.tell(&["stop"]);
        assert_eq!(receive(&socket), "STOPPING=1\n");
        assert_eq!(vmm.wait(), Some(0));
    }
}

#[test]
fn a_receiver_is_ready_when_it_listens() {
    let tmp = TestDir::new();
    let address = tmp.text("notify");
    let socket = UnixDatagram::bind(&address).unwrap();
    let mut vmm = start(&tmp, "a", &["receive-migration", "tcp:127.0.0.1:0"], &address);
    assert!(
        receive(&socket).starts_with("READY=1\nSTATUS=waiting for a migration on tcp:127.0.0.1:")
    );
    assert_eq!(vmm.state(), "receiving");
    vmm.tell(&["stop"]);
    assert_eq!(vmm.wait(), Some(1));
}

#[test]
fn a_guest_runs_without_its_service_manager() {
    let tmp = TestDir::new();
    let none = tmp.text("none");
    let mut vmm = start(&tmp, "a", GUEST, &none);
    vmm.await_message(&format!("NOTIFY_SOCKET is {none}: "));
    vmm.tell(&["stop"]);
    assert_eq!(vmm.wait(), Some(0));
}
