//! What both sides say if a host has no certificate, or cannot read a file of its own.

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{PermissionsExt, chown};
use std::process::{Child, Command, Stdio};

use crate::common::{SMALL_GUEST, TestDir, Vmm, address_of, receiver, text};
use crate::local_users::{NOBODY, OtherUsers, directory_of};
use crate::migration_protection::certificates::{NOW, TestCa};

/// Writes the files of both sides of a host into the directory `tls`.
fn certificates(tmp: &TestDir) -> String {
    let (ca, dir) = (TestCa::new(), tmp.path("tls"));
    fs::create_dir(&dir).unwrap();
    fs::copy(ca.certificate(), dir.join("ca-cert.pem")).unwrap();
    for role in ["server", "client"] {
        ca.issue(&dir, role, "IP:127.0.0.1", NOW);
    }
    tmp.text("tls")
}

/// `openssl s_server`, killed when dropped.
struct TestServer {
    child: Child,
    address: String,
}

impl TestServer {
    fn start(tls: &str, more: &[&str]) -> Self {
        let [certificate, key] = ["cert", "key"].map(|kind| format!("{tls}/server-{kind}.pem"));
        let args = ["s_server", "-accept", "127.0.0.1:0", "-cert", &certificate, "-key", &key];
        let mut command = Command::new("openssl");
        command.args(args).args(more).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.stderr(Stdio::null()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let mut found = lines.filter_map(|line| Some(line.strip_prefix("ACCEPT ")?.to_owned()));
        let address = format!("tcp:{}", found.next().unwrap());
        // Its output is read to the end, so that it never waits for a reader.
        std::thread::spawn(move || found.count());
        Self { child, address }
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn peers_without_a_certificate_are_told() {
    let tmp = TestDir::new();
    let tls = certificates(&tmp);
    let options = ["--tls-dir", &tls];
    let guest = Vmm::run(&tmp, "a", SMALL_GUEST);
    let (mut there, to) = receiver(&tmp, "b", &options);
    let port = to.strip_prefix("tcp:").unwrap();
    let client = ["s_client", "-connect", port, "-quiet"];
    let out = Command::new("openssl").args(client).stdin(Stdio::null()).output().unwrap();
    let said = text(&out.stderr);
    assert!(said.contains("alert certificate required"), "{said}");
    there.await_message("the peer presented no certificate");
    // A source has no certificate for a peer that accepts no signature of its key.
    let only_rsa = ["-tls1_3", "-Verify", "1", "-client_sigalgs", "RSA-PSS+SHA256"];
    let foreign = TestServer::start(&tls, &only_rsa);
    let before = guest.await_progress(1, &[]);
    let words = [&["send-migration", &*foreign.address], &options[..]].concat();
    let said = guest.refuse(4, &words);
    let why = "the peer requires a certificate of this host; the guest continues here";
    assert!(said.contains(why), "{said}");
    guest.await_progress(1, &before);
    assert!(there.is_alive(), "{}", there.stderr());
    guest.tell(&[&["send-migration", &*to], &options[..]].concat());
    assert_eq!(there.state(), "running");
}

#[test]
fn files_without_permission_are_named() {
    let Some(users) = OtherUsers::or_skip("files_without_permission_are_named", false) else {
        return;
    };
    let tmp = directory_of(NOBODY);
    let tls = certificates(&tmp);
    for entry in fs::read_dir(&tls).unwrap() {
        chown(entry.unwrap().path(), Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let set_mode = |file: &str, mode: u32| {
        fs::set_permissions(format!("{tls}/{file}"), Permissions::from_mode(mode)).unwrap();
    };
    let why_not = |file: &str| format!("cannot read {tls}/{file}: Permission denied (os error 13)");
    let mut guest = users.start(NOBODY, &tmp, "a", &[&["run"], SMALL_GUEST].concat());
    guest.await_api();
    let words = ["receive-migration", "tcp:127.0.0.1:0", "--tls-dir", &tls];
    set_mode("server-key.pem", 0);
    let mut refused = users.start(NOBODY, &tmp, "refused", &words);
    assert_eq!(refused.wait(), Some(1));
    assert!(refused.stderr().contains(&why_not("server-key.pem")), "{}", refused.stderr());
    set_mode("server-key.pem", 0o600);
    let mut there = users.start(NOBODY, &tmp, "b", &words);
    let to = address_of(&there);
    let words = ["send-migration", &to, "--tls-dir", &tls];
    let mut before = guest.await_progress(1, &[]);
    for (file, here) in [
        ("client-cert.pem", why_not("client-cert.pem")),
        ("client-key.pem", why_not("client-key.pem")),
        ("server-key.pem", "the peer cannot use TLS: its log says why".to_owned()),
    ] {
        set_mode(file, 0);
        let said = guest.refuse(4, &words);
        set_mode(file, 0o600);
        assert!(said.contains(&here) && said.contains("the guest continues here"), "{said}");
        before = guest.await_progress(1, &before);
        assert!(there.is_alive(), "{}", there.stderr());
    }
    there.await_message(&why_not("server-key.pem"));
    guest.tell(&words);
    assert_eq!(there.state(), "running");
}
