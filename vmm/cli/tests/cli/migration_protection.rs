//! Migrations to other hosts need TLS, or `--insecure`.

use crate::common::{TestDir, Vmm, fail};

const GUEST: &[&str] =
    &["--backend", "threads", "--mem", "32M", "--guest", "payload,ws=4M,rate=1M,report=200"];

#[test]
fn other_hosts_are_refused_without_protection() {
    let tmp = TestDir::new();
    for any in ["tcp:0.0.0.0:0", "tcp:[::]:0"] {
        let stderr = fail(1, &["receive-migration", any, "--state-dir", &tmp.text("there")]);
        assert!(stderr.contains("without TLS every host on the way can read"), "{stderr}");
        assert!(!stderr.contains("waiting for a migration"), "{stderr}");
    }
    let guest = Vmm::run(&tmp, "a", GUEST);
    // An address of documentation, to which nothing is sent.
    let stderr = guest.refuse(4, &["send-migration", "tcp:192.0.2.1:7000"]);
    let why = "cannot connect to 192.0.2.1:7000: 192.0.2.1:7000 is not on this host's loopback";
    assert!(stderr.contains(why) && stderr.contains("the guest continues here"), "{stderr}");
    let mut receiver = Vmm::start(&tmp, "b", &["receive-migration", "tcp:0.0.0.0:0", "--insecure"]);
    receiver.await_api();
    let warnings = receiver.stderr().matches("insecure: every host that reaches").count();
    assert_eq!(warnings, 1, "{}", receiver.stderr());
    assert_eq!(guest.state(), "running");
}
