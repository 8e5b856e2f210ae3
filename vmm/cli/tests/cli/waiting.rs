//! A receiver that strangers and failing sources connect to continues to wait, and receives the
//! next guest.

use std::fs::File;
use std::io::Write;
use std::net::TcpStream;
use std::time::Instant;

use crate::common::{TestDir, Vmm, attack, output, receiver, wait_for};
use driftline_machine::testing::kvm_or_skip;

/// Memory that takes a while to send at [`SLOW`].
const GUEST: &[&str] =
    &["--mem", "128M", "--vcpus", "2", "--guest", "payload,ws=64M,rate=1M,burst=8,report=200"];
const SLOW: &[&str] = &["--max-bandwidth", "4M", "--downtime-ms", "1"];

fn phase(of: &Vmm<'_>) -> String {
    let info = of.info().unwrap_or_default();
    info["migration"]["phase"].as_str().unwrap_or_default().to_owned()
}

/// Starts to send the guest of `from`, and kills its process during pre-copy.
fn dies_in_precopy(from: &mut Vmm<'_>, to: &str, there: &Vmm<'_>) {
    let socket = from.socket();
    std::thread::scope(|scope| {
        let args = [&["send-migration", to, "--api-sock", &socket], SLOW].concat();
        scope.spawn(move || output(&args));
        wait_for("memory on its way", || (phase(there) == "precopy").then_some(()));
        from.kill();
    });
}

fn await_waiting(there: &Vmm<'_>) {
    wait_for("the receiver to wait again", || (phase(there) == "waiting").then_some(()));
}

/// Receives the guest of a third source after two sources have died during pre-copy.
fn receive_after_failures(tmp: &TestDir, machine: &[&str], there: &[&str]) {
    let run = |name| Vmm::run(tmp, name, &[machine, GUEST].concat());
    let (mut destination, to) = receiver(tmp, "destination", there);
    let address = to.strip_prefix("tcp:").unwrap();

    let began = Instant::now();
    for n in 0.. {
        if n >= 200 && began.elapsed() >= attack() {
            break;
        }
        let mut stream = TcpStream::connect(address).unwrap();
        // The connection may have been closed already.
        let _ = stream.write_all([&b""[..], b"DRIFTMIG", &[b'x'; 200]][n % 3]);
    }
    let mut first = run("first");
    first.await_progress(2, &[]);
    dies_in_precopy(&mut first, &to, &destination);
    await_waiting(&destination);
    let mut second = run("second");
    second.await_progress(2, &[]);
    let before = destination.usage();
    dies_in_precopy(&mut second, &to, &destination);
    await_waiting(&destination);
    wait_for("threads and files as before", || {
        let now = destination.usage();
        (now.threads <= before.threads && now.files <= before.files).then_some(())
    });
    assert!(destination.is_alive(), "{}", destination.stderr());

    let mut third = run("third");
    let before = third.await_progress(2, &[]);
    third.tell(&["send-migration", &to]);
    assert_eq!(third.wait(), Some(0), "{}", third.stderr());
    destination.await_progress(2, &before);
    destination.tell(&["stop"]);
    assert_eq!(destination.wait(), Some(0), "{}", destination.stderr());
    let stderr = destination.stderr();
    assert!(stderr.contains("no guest was received (in pre-copy)"), "{stderr}");
}

#[test]
fn receiver_survives_strangers_and_dead_sources() {
    receive_after_failures(&TestDir::new(), &["--backend", "threads"], &[]);
}

#[test]
fn machine_is_rebuilt_after_a_failed_arrival() {
    if !kvm_or_skip("machine_is_rebuilt_after_a_failed_arrival") {
        return;
    }
    let tmp = TestDir::new();
    File::create(tmp.path("disk")).unwrap().set_len(1 << 20).unwrap();
    let (disk, sockets) = (format!("path={}", tmp.text("disk")), ["v0", "v1"].map(|v| tmp.text(v)));
    let here = format!("cid=5,uds={}", sockets[0]);
    let there = format!("uds={}", sockets[1]);
    receive_after_failures(&tmp, &["--disk", &disk, "--vsock", &here], &["--vsock", &there]);
}

#[test]
fn a_receiver_for_one_source_ends_with_it() {
    let tmp = TestDir::new();
    let (mut destination, to) = receiver(&tmp, "destination", &["--once"]);
    let mut source = Vmm::run(&tmp, "source", &[&["--backend", "threads"], GUEST].concat());
    source.await_progress(2, &[]);
    dies_in_precopy(&mut source, &to, &destination);
    assert_eq!(destination.wait(), Some(1));
    let stderr = destination.stderr();
    assert!(stderr.contains("no guest was received (in pre-copy)"), "{stderr}");
}
