//! Migrations to other hosts need TLS, or `--insecure`.

use crate::common::{SMALL_GUEST, TestDir, Vmm, fail, receiver, wait_for};
use certificates::{NOW, TestCa};

#[allow(dead_code, reason = "only `migrate` tests dates")]
#[path = "../../../../migrate/tests/migrations/tls/certificates.rs"]
pub mod certificates;

#[test]
fn other_hosts_are_refused_without_protection() {
    let tmp = TestDir::new();
    for any in ["tcp:0.0.0.0:0", "tcp:[::]:0"] {
        let stderr = fail(1, &["receive-migration", any, "--state-dir", &tmp.text("there")]);
        assert!(stderr.contains("without TLS every host on the way can read"), "{stderr}");
        assert!(!stderr.contains("waiting for a migration"), "{stderr}");
    }
    let guest = Vmm::run(&tmp, "a", SMALL_GUEST);
    // An address that is reserved for documentation. Nothing is sent to it.
    let stderr = guest.refuse(4, &["send-migration", "tcp:192.0.2.1:7000"]);
    let why = "cannot connect to 192.0.2.1:7000: 192.0.2.1:7000 is not on this host's loopback";
    assert!(stderr.contains(why) && stderr.contains("the guest continues here"), "{stderr}");
    let mut receiver = Vmm::start(&tmp, "b", &["receive-migration", "tcp:0.0.0.0:0", "--insecure"]);
    receiver.await_api();
    let warning = "insecure: every host that reaches";
    wait_for("the warning", || receiver.stderr().contains(warning).then_some(()));
    assert_eq!(receiver.stderr().matches(warning).count(), 1, "{}", receiver.stderr());
    assert_eq!(guest.state(), "running");
}

#[test]
fn guest_moves_with_certificates_of_both_hosts() {
    let (tmp, ca) = (TestDir::new(), TestCa::new());
    let dir = tmp.path("tls");
    std::fs::create_dir(&dir).unwrap();
    std::fs::copy(ca.certificate(), dir.join("ca-cert.pem")).unwrap();
    ca.issue(&dir, "server", "DNS:there", NOW);
    let tls = ["--tls-dir", dir.to_str().unwrap()];
    let stderr = fail(1, &["receive-migration", "tcp:127.0.0.1:0", "--tls-dir", "/none"]);
    assert!(stderr.contains("cannot read /none/ca-cert.pem: No such file"), "{stderr}");
    let guest = Vmm::run(&tmp, "a", SMALL_GUEST);
    let (mut there, to) = receiver(&tmp, "b", &[&tls[..], &["--allow-peer", "here"]].concat());
    let words = [&["send-migration", &*to], &tls[..], &["--peer", "there"]].concat();
    let stderr = guest.refuse(4, &words);
    assert!(stderr.contains("client-cert.pem: No such file or directory"), "{stderr}");
    ca.issue(&dir, "client", "DNS:stranger", NOW);
    let stderr = guest.refuse(4, &words);
    assert!(stderr.contains("the sender's certificate is for stranger"), "{stderr}");
    // Read again for each connection.
    ca.issue(&dir, "client", "DNS:here", NOW);
    guest.tell(&words);
    assert_eq!(there.state(), "running");
    there.tell(&["stop"]);
    there.wait();
}
