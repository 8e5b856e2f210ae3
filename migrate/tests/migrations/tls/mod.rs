//! TLS: a guest moves only between hosts that accept each other's certificates. `openssl` makes the
//! certificates and is the foreign peer.

mod certificates;
mod runbook;

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use driftline_format::STREAM_VERSION;
use driftline_guest::testing::{MemoryConfig, MemoryGuest};
use driftline_guest::{Lifecycle, RunState};
use driftline_migrate::{Listener, Phase, ReceiveOptions, ReceiveTls, SendOptions, SendTls};

use crate::common::{HostPair, LONG, Receiver, Sender, exactly_one_runs, quick_send, raw, within};
use certificates::{FUTURE, NOW, PAST, TestCa};

const SOURCE: &str = "spiffe://test.example/source";
const SERVER: &str = "IP:127.0.0.1,DNS:destination";
const CLIENT: &str = "DNS:source,URI:spiffe://test.example/source";

/// Two hosts with directories of certificates.
struct SecureHosts {
    ca: TestCa,
    hosts: HostPair,
    dir: tempfile::TempDir,
}

impl SecureHosts {
    fn new() -> Self {
        let made =
            Self { ca: TestCa::new(), hosts: HostPair::new(), dir: tempfile::tempdir().unwrap() };
        for (role, names) in [("client", CLIENT), ("server", SERVER)] {
            fs::create_dir(made.tls_dir(role)).unwrap();
            fs::copy(made.ca.certificate(), made.tls_dir(role).join("ca-cert.pem")).unwrap();
            made.ca.issue(&made.tls_dir(role), role, names, NOW);
        }
        made
    }

    fn tls_dir(&self, role: &str) -> PathBuf {
        self.dir.path().join(role)
    }

    /// Returns a copy of the source's directory, which a test changes.
    fn other_client(&self, name: &str) -> PathBuf {
        let to = self.dir.path().join(name);
        fs::create_dir(&to).unwrap();
        for entry in fs::read_dir(self.tls_dir("client")).unwrap() {
            let from = entry.unwrap().path();
            fs::copy(&from, to.join(from.file_name().unwrap())).unwrap();
        }
        to
    }

    fn send_options(&self) -> SendOptions {
        self.send_options_with(self.tls_dir("client"))
    }

    fn send_options_with(&self, dir: PathBuf) -> SendOptions {
        SendOptions { tls: Some(SendTls { dir, peer: None }), ..quick_send(&self.hosts) }
    }

    fn receive_options(&self) -> ReceiveOptions {
        let allow = vec!["other.example".parse().unwrap(), SOURCE.parse().unwrap()];
        let tls = ReceiveTls { dir: self.tls_dir("server"), allow };
        ReceiveOptions { tls: Some(tls), ..self.hosts.receive_options() }
    }
}

/// Sends a guest that must stay, and returns the source's sentence.
fn refused(guest: &Arc<MemoryGuest>, to: &str, options: &SendOptions) -> String {
    let e = Sender::start(guest, to, options).result().unwrap_err().to_string();
    assert!(e.ends_with("; the guest continues here"), "{e}");
    assert_eq!(guest.run_state(), RunState::Running);
    e
}

/// Waits until the receiver has refused one more caller than `before`, and returns its sentence.
fn refusal_after(there: &Receiver, before: u64) -> String {
    within(LONG, "the receiver refuses", || there.control.progress().refused > before);
    let progress = there.control.progress();
    assert_eq!((progress.refused, progress.phase), (before + 1, Phase::Waiting));
    progress.last_refusal.unwrap()
}

/// Starts `openssl` with a pipe as its input.
fn openssl(args: &[&str]) -> Child {
    let mut command = Command::new("openssl");
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap()
}

#[test]
fn guest_moves_between_hosts_with_accepted_certificates() {
    let secure = SecureHosts::new();
    let guest = secure.hosts.start(MemoryConfig::small());
    let there = secure.hosts.receiver_with(secure.receive_options());
    let mut options = secure.send_options();
    (options.connections, options.verify) = (4, true);
    let to = there.to.clone();
    let sent = Sender::start(&guest, &to, &options).result();
    sent.as_ref().unwrap();
    exactly_one_runs(&secure.hosts, &guest, &sent, there, "TLS");
}

#[test]
fn source_in_doubt_asks_over_tls() {
    let secure = SecureHosts::new();
    let guest = secure.hosts.start(MemoryConfig::small());
    let there = secure.hosts.receiver_with(secure.receive_options());
    // COMMIT is not answered in time.
    let options = SendOptions { commit_timeout: Duration::ZERO, ..secure.send_options() };
    let to = there.to.clone();
    let sent = Sender::start(&guest, &to, &options).result();
    exactly_one_runs(&secure.hosts, &guest, &sent, there, "in doubt");
}

#[test]
fn unix_socket_needs_the_name_of_its_peer() {
    let secure = SecureHosts::new();
    let guest = secure.hosts.start(MemoryConfig::small());
    let path = secure.dir.path().join("socket");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let listener = Listener::unix(listener, &path);
    let (hosts, to) = (&secure.hosts, format!("unix:{}", path.display()));
    let there = hosts.receive_on(listener, hosts.factory(), secure.receive_options());
    let said = refused(&guest, &to, &secure.send_options());
    assert!(said.contains("give the receiver's with --peer"), "{said}");
    let mut options = secure.send_options();
    options.tls.as_mut().unwrap().peer = Some("destination".parse().unwrap());
    let sent = Sender::start(&guest, &to, &options).result();
    exactly_one_runs(hosts, &guest, &sent, there, &to);
}

#[test]
fn sources_without_the_right_certificate_are_refused() {
    let secure = SecureHosts::new();
    let guest = secure.hosts.start(MemoryConfig::small());
    let there = secure.hosts.receiver_with(secure.receive_options());
    let to = there.to.clone();
    let (stranger, twin) = (TestCa::new(), secure.ca.twin());
    let issued = |name: &str, ca: &TestCa, names, dates| {
        let dir = secure.other_client(name);
        ca.issue(&dir, "client", names, dates);
        secure.send_options_with(dir)
    };
    let cases = [
        (
            issued("other-ca", &stranger, CLIENT, NOW),
            "the peer does not trust the CA that signed this host's certificate",
            "is not signed by the CA in ca-cert.pem of this host",
        ),
        (
            issued("twin", &twin, CLIENT, NOW),
            "it trusts another CA of that name",
            "is not signed by the CA in ca-cert.pem of this host",
        ),
        (
            issued("past", &secure.ca, CLIENT, PAST),
            "this host's certificate has expired or is not valid yet",
            "the peer's certificate has expired, by the clock of this host",
        ),
        (
            issued("future", &secure.ca, CLIENT, FUTURE),
            "this host's certificate has expired or is not valid yet",
            "the peer's certificate is not valid yet, by the clock of this host",
        ),
        (
            issued("name", &secure.ca, "DNS:stranger", NOW),
            "the sender's certificate is for stranger; name one of its names with --allow-peer",
            "the sender's certificate is for stranger; name one of its names with --allow-peer",
        ),
        (
            quick_send(&secure.hosts),
            "this receiver uses TLS, and the source does not: give --tls-dir",
            "the peer does not use TLS, and this side does",
        ),
    ];
    for (n, (options, here, at_receiver)) in cases.into_iter().enumerate() {
        let said = refused(&guest, &to, &options);
        assert!(said.contains(here), "{said}");
        let said = refusal_after(&there, n as u64);
        assert!(said.contains(at_receiver), "{said}");
    }
    let sent = Sender::start(&guest, &to, &secure.send_options()).result();
    exactly_one_runs(&secure.hosts, &guest, &sent, there, "after refusals");
}

#[test]
fn unusable_files_of_a_source_are_named() {
    let secure = SecureHosts::new();
    let guest = secure.hosts.start(MemoryConfig::small());
    let unused = TcpListener::bind("127.0.0.1:0").unwrap();
    unused.set_nonblocking(true).unwrap();
    let to = unused.local_addr().unwrap().to_string();
    let said = |name: &str, change: &dyn Fn(&Path)| {
        let dir = secure.other_client(name);
        change(&dir);
        refused(&guest, &to, &secure.send_options_with(dir))
    };
    let key = |dir: &Path| dir.join("client-key.pem");
    let e = said("mixed", &|dir| {
        fs::copy(secure.tls_dir("server").join("server-key.pem"), key(dir)).unwrap();
    });
    assert!(e.contains("client-key.pem is not the key of"), "{e}");
    let e = said("missing", &|dir| fs::remove_file(key(dir)).unwrap());
    assert!(e.contains("client-key.pem: No such file or directory"), "{e}");
    let e = said("text", &|dir| fs::write(dir.join("ca-cert.pem"), "text").unwrap());
    assert!(e.contains("ca-cert.pem has no certificate in PEM"), "{e}");
    let e = said("large", &|dir| fs::write(key(dir), vec![b'-'; 1 << 20]).unwrap());
    assert!(e.contains("it has more than 256 KiB"), "{e}");
    let e = said("fifo", &|dir| {
        fs::remove_file(key(dir)).unwrap();
        let mode = rustix::fs::Mode::RUSR;
        rustix::fs::mknodat(rustix::fs::CWD, key(dir), rustix::fs::FileType::Fifo, mode, 0)
            .unwrap();
    });
    assert!(e.contains("it is not a file"), "{e}");
    let e = unused.accept().expect_err("no connection is made without the files");
    assert_eq!(e.kind(), ErrorKind::WouldBlock, "{e}");
    let there = secure.hosts.receiver_with(secure.receive_options());
    let sent = Sender::start(&guest, &there.to, &secure.send_options()).result();
    exactly_one_runs(&secure.hosts, &guest, &sent, there, "after refusals");
}

#[test]
fn receivers_without_the_right_certificate_are_refused() {
    let secure = SecureHosts::new();
    let guest = secure.hosts.start(MemoryConfig::small());
    let there = secure.hosts.receiver_with(secure.receive_options());
    let (to, options, dir) = (there.to.clone(), secure.send_options(), secure.tls_dir("server"));
    let stranger = TestCa::new();
    // The receiver reads its files for each arrival.
    type FileChange<'a> = Box<dyn Fn() + 'a>;
    let issue =
        |ca: &'static str, names: &'static str, dates: [&'static str; 2]| -> FileChange<'_> {
            let (ca, dir) = (if ca == "stranger" { &stranger } else { &secure.ca }, dir.clone());
            Box::new(move || ca.issue(&dir, "server", names, dates))
        };
    let cases: [(FileChange<'_>, &str, &str); 6] = [
        (
            issue("stranger", SERVER, NOW),
            "the peer's certificate is not signed by the CA in ca-cert.pem of this host",
            "the peer does not trust the CA that signed this host's certificate",
        ),
        (
            issue("own", SERVER, PAST),
            "the peer's certificate has expired, by the clock of this host",
            "this host's certificate has expired or is not valid yet",
        ),
        (
            issue("own", SERVER, FUTURE),
            "the peer's certificate is not valid yet, by the clock of this host",
            "this host's certificate has expired or is not valid yet",
        ),
        (
            issue("own", "DNS:destination", NOW),
            "the peer's certificate does not have the name 127.0.0.1; --peer gives its name",
            "this host's certificate has another name than it expects",
        ),
        (
            Box::new(|| {
                let key = secure.tls_dir("client").join("client-key.pem");
                fs::copy(key, dir.join("server-key.pem")).unwrap();
            }),
            "the peer cannot use TLS: its log says why",
            "server-key.pem is not the key of",
        ),
        (
            Box::new(|| fs::remove_file(dir.join("server-key.pem")).unwrap()),
            "the peer cannot use TLS: its log says why",
            "server-key.pem: No such file or directory",
        ),
    ];
    for (n, (change, here, at_receiver)) in cases.into_iter().enumerate() {
        change();
        let said = refused(&guest, &to, &options);
        assert!(said.contains(here), "{said}");
        let said = refusal_after(&there, n as u64);
        assert!(said.contains(at_receiver), "{said}");
    }
    // A source without TLS is told as well.
    let said = refused(&guest, &to, &quick_send(&secure.hosts));
    assert!(said.contains("the peer uses TLS, and this side does not"), "{said}");
    refusal_after(&there, 6);
    secure.ca.issue(&dir, "server", SERVER, NOW);
    let sent = Sender::start(&guest, &to, &options).result();
    exactly_one_runs(&secure.hosts, &guest, &sent, there, "after refusals");
}

/// Returns whether the peer has sent something, or closed the connection.
fn has_answer(stream: &mut TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    let read = stream.read(&mut [0]);
    stream.set_nonblocking(false).unwrap();
    read.is_ok()
}

#[test]
fn strangers_at_a_tls_port_change_nothing() {
    let secure = SecureHosts::new();
    let guest = secure.hosts.start(MemoryConfig::small());
    let mut options = secure.receive_options();
    options.handshake_timeout = Duration::from_millis(500);
    let there = secure.hosts.receiver_with(options);
    let to = there.to.clone();
    let handshake = vec![22, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3];
    // Sends a byte now and then until the receiver closes the connection or, if it `leaves`, until
    // the receiver has answered. Returns whether either came before the last byte.
    let trickle = |bytes: Vec<u8>, leaves: bool| {
        let mut stream = TcpStream::connect(&to).unwrap();
        std::thread::spawn(move || {
            for byte in bytes {
                if stream.write_all(&[byte]).is_err() || leaves && has_answer(&mut stream) {
                    return true;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            false
        })
    };
    let expect = |n: u64, why: &str| {
        let said = refusal_after(&there, n);
        assert!(said.contains(why), "{said}");
    };
    let mut garbage = TcpStream::connect(&to).unwrap();
    garbage.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    // The receiver may have refused a peer already, and reset its connection.
    let _ = garbage.shutdown(Shutdown::Write);
    expect(0, "the peer sent bytes that are not TLS");
    let mut vanishing = TcpStream::connect(&to).unwrap();
    vanishing.write_all(&handshake).unwrap();
    let _ = vanishing.shutdown(Shutdown::Write);
    expect(1, "the peer closed the connection during the TLS handshake");
    let mut endless = TcpStream::connect(&to).unwrap();
    endless.write_all(&handshake).unwrap();
    // It closes the connection once it is refused.
    let peer = std::thread::spawn(move || drop(endless.read(&mut [0])));
    expect(2, "the peer sent nothing for");
    peer.join().unwrap();
    // A whole message would be refused as such. The receiver waits for its whole closing limit,
    // because the peer sends on.
    let peer = trickle([&handshake[..], &[0; 500]].concat(), false);
    expect(3, "the peer sent nothing for");
    assert!(peer.join().unwrap());
    let peer = trickle(raw::header(STREAM_VERSION)[..10].to_vec(), true);
    expect(4, "the peer does not use TLS, and this side does");
    assert!(peer.join().unwrap());
    let client = ["s_client", "-connect", &to, "-quiet", "-no_ign_eof"];
    let mut without = openssl(&client);
    expect(5, "the peer presented no certificate");
    let mut old = openssl(&[&client[..], &["-tls1_2"]].concat());
    expect(6, "the peer does not offer TLS 1.3");
    for child in [&mut without, &mut old] {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let sent = Sender::start(&guest, &to, &secure.send_options()).result();
    exactly_one_runs(&secure.hosts, &guest, &sent, there, "after strangers");
}

#[test]
fn every_connection_needs_an_allowed_name() {
    let secure = SecureHosts::new();
    let there = secure.hosts.receiver_with(secure.receive_options());
    let stranger = secure.other_client("stranger");
    secure.ca.issue(&stranger, "client", "DNS:stranger", NOW);
    let file = |name: &str| stranger.join(name).display().to_string();
    let (certificate, key) = (file("client-cert.pem"), file("client-key.pem"));
    let client = ["s_client", "-connect", &there.to, "-cert", &certificate, "-key", &key, "-quiet"];
    for (n, purpose) in [raw::MOVE, raw::JOIN, raw::QUERY].into_iter().enumerate() {
        let mut caller = openssl(&client);
        let hello = [raw::header(STREAM_VERSION), raw::hello(purpose)].concat();
        caller.stdin.as_mut().unwrap().write_all(&hello).unwrap();
        let said = refusal_after(&there, n as u64);
        assert!(said.contains("the sender's certificate is for stranger"), "{said}");
        caller.kill().unwrap();
        caller.wait().unwrap();
    }
    there.control.cancel().unwrap();
    assert!(matches!(there.error().cause, driftline_migrate::Cause::Cancelled));
}

#[test]
fn source_refuses_foreign_servers() {
    let secure = SecureHosts::new();
    let guest = secure.hosts.start(MemoryConfig::small());
    let options = secure.send_options();
    let free = || TcpListener::bind("127.0.0.1:0").unwrap();
    let answered = |answer: &'static [u8]| {
        let listener = free();
        let to = listener.local_addr().unwrap().to_string();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.write_all(answer);
            let _ = stream.shutdown(Shutdown::Write);
            let _ = std::io::copy(&mut stream, &mut std::io::sink());
        });
        let said = refused(&guest, &to, &options);
        server.join().unwrap();
        said
    };
    let said = answered(b"HTTP/1.1 400 Bad Request\r\n\r\n");
    assert!(said.contains("the peer sent bytes that are not TLS"), "{said}");
    let said = answered(b"");
    assert!(said.contains("the peer closed the connection during the TLS handshake"), "{said}");
    // The head of a ServerHello, and a part of it. With a byte every 20 ms the rest of the record
    // would take minutes.
    const RECORD: usize = 0x3fff;
    let begun: &[u8] = b"\x16\x03\x03\x3f\xff\x02\x00\x3f\xfb\x03\x03";
    let said = answered(begun);
    assert!(said.contains("the peer closed the connection during the TLS handshake"), "{said}");
    let mute = free();
    let to = mute.local_addr().unwrap().to_string();
    let impatient = SendOptions { connect_timeout: Duration::from_millis(300), ..options.clone() };
    let said = refused(&guest, &to, &impatient);
    assert!(said.contains("the peer sent nothing for"), "{said}");
    // More bytes arrive before each limit on a read would pass.
    let patient = SendOptions { connect_timeout: Duration::from_secs(3), ..options.clone() };
    for (pause, options) in [(LONG, &impatient), (Duration::from_millis(20), &patient)] {
        let stalls = free();
        let to = stalls.local_addr().unwrap().to_string();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = stalls.accept().unwrap();
            stream.write_all(begun).unwrap();
            stream.set_read_timeout(Some(pause)).unwrap();
            let (mut piece, mut sent) = ([0; 4096], 0);
            loop {
                match stream.read(&mut piece) {
                    Ok(0) => return sent,
                    Ok(_) => {}
                    Err(_) if stream.write_all(&[0]).is_err() => return sent,
                    Err(_) => sent += 1,
                }
            }
        });
        let said = refused(&guest, &to, options);
        assert!(said.contains("the peer sent nothing for"), "{said}");
        // The source gives up within the record, while its bytes still arrive.
        let sent = server.join().unwrap();
        assert!(sent < RECORD - begun.len() && (sent == 0) == (pause == LONG), "{sent} bytes");
    }
    let said = refused_by_s_server(&secure, &guest, &["-tls1_2"]);
    assert!(said.contains("the peer does not offer TLS 1.3"), "{said}");
    // A server with the right certificate that is no receiver.
    let said = refused_by_s_server(&secure, &guest, &["-tls1_3"]);
    assert!(said.contains("not a Driftline migration stream"), "{said}");
}

/// Sends a guest to `openssl s_server` with the receiver's certificate.
fn refused_by_s_server(secure: &SecureHosts, guest: &Arc<MemoryGuest>, more: &[&str]) -> String {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let file = |name: &str| secure.tls_dir("server").join(name).display().to_string();
    let (certificate, key) = (file("server-cert.pem"), file("server-key.pem"));
    let args = ["s_server", "-accept", &port, "-cert", &certificate, "-key", &key, "-quiet"];
    let mut server = openssl(&[&args[..], more].concat());
    // Bytes that the server sends to its first client.
    server.stdin.as_mut().unwrap().write_all(&[b'-'; 80]).unwrap();
    let to = format!("127.0.0.1:{port}");
    let mut said = String::new();
    within(LONG, "the server listens", || {
        said = refused(guest, &to, &secure.send_options());
        !said.contains("Connection refused")
    });
    server.kill().unwrap();
    server.wait().unwrap();
    said
}

#[test]
fn tls_source_is_told_of_a_plain_receiver() {
    let secure = SecureHosts::new();
    let guest = secure.hosts.start(MemoryConfig::small());
    let there = secure.hosts.receiver();
    let to = there.to.clone();
    let said = refused(&guest, &to, &secure.send_options());
    assert!(said.contains("the peer does not use TLS, and this side does"), "{said}");
    let said = refusal_after(&there, 0);
    assert!(said.contains("the peer uses TLS, and this side does not"), "{said}");
    let sent = Sender::start(&guest, &to, &quick_send(&secure.hosts)).result();
    exactly_one_runs(&secure.hosts, &guest, &sent, there, "after TLS");
}
