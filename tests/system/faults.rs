//! Migrations that fail: either process is killed at every message, a peer is not Driftline, a peer
//! has another version, or the link is slow.
//!
//! A test uses one source guest for all of its failed migrations. The guest must continue to write
//! without an error after each of them.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use driftline_format::{Header, MAGIC_STREAM};
use driftline_guest::VmId;
use driftline_machine::testing::kvm_or_skip;
use driftline_migrate::Tag;
use tests::{
    CutAction, Direction, Driftline, LaterConnections, MigrationProxy, SOON, ScratchDir, json_of,
    wait_for,
};

/// A small guest, because dozens of them start.
const GUEST: &str = "payload,ws=8M,rate=320M,pattern=random";
const MACHINE: [&str; 4] = ["--vcpus", "2", "--mem", "256M"];

/// The messages of a migration up to COMMIT. ZERO has no fixed position; the tests of `migrate` cut
/// there.
const BEFORE_COMMIT: [(Direction, Tag); 13] = [
    (Direction::ToDestination, Tag::Hello),
    (Direction::ToSource, Tag::Hello),
    (Direction::ToDestination, Tag::Config),
    (Direction::ToSource, Tag::Ready),
    (Direction::ToDestination, Tag::PassBegin),
    (Direction::ToDestination, Tag::Frames),
    (Direction::ToDestination, Tag::PassEnd),
    (Direction::ToSource, Tag::PassAck),
    (Direction::ToDestination, Tag::State),
    (Direction::ToDestination, Tag::StateWhole),
    (Direction::ToDestination, Tag::StateEnd),
    (Direction::ToSource, Tag::Prepared),
    (Direction::ToDestination, Tag::Commit),
];

type SharedProcess = Arc<Mutex<Driftline>>;

/// Returns a cut that kills the process when the record arrives, before it passes.
fn kill(victim: &SharedProcess) -> CutAction {
    let victim = victim.clone();
    CutAction::Call(Box::new(move || victim.lock().expect("no test has failed").kill()))
}

fn shared(process: Driftline) -> SharedProcess {
    Arc::new(Mutex::new(process))
}

#[test]
fn destination_killed_at_any_message_leaves_source_running() {
    if !kvm_or_skip("destination_killed_at_any_message_leaves_source_running") {
        return;
    }
    let scratch = ScratchDir::new();
    let source = Driftline::run(&scratch, "source", GUEST, &MACHINE);
    // A lost COMMIT leaves the migration in doubt and has its own test.
    for (direction, tag) in &BEFORE_COMMIT[..BEFORE_COMMIT.len() - 1] {
        let name = format!("destination-{}-{direction:?}", tag.name());
        let (destination, address) = Driftline::receive(&scratch, &name);
        let destination = shared(destination);
        let proxy = MigrationProxy::start(
            &address,
            *direction,
            *tag,
            kill(&destination),
            LaterConnections::Refused,
        );
        let sent = source.cli("send-migration", &[proxy.address(), "--json"]);
        let stderr = String::from_utf8_lossy(&sent.stderr);
        assert!(proxy.has_cut(), "{name}: the message was not sent: {stderr}");
        assert_eq!(sent.status.code(), Some(4), "{name}: {stderr}");
        assert!(
            stderr.contains("the guest continues here"),
            "{name}: the message must say where the guest is: {stderr}"
        );
        assert_eq!(source.state().as_deref(), Some("running"), "{name}");
        source.console().wait_reports(2, 1, SOON);
    }
    source.console().assert_clean();
}

#[test]
fn source_killed_before_commit_leaves_no_second_guest() {
    if !kvm_or_skip("source_killed_before_commit_leaves_no_second_guest") {
        return;
    }
    let scratch = ScratchDir::new();
    for (direction, tag) in BEFORE_COMMIT {
        let name = format!("{}-{direction:?}", tag.name());
        let source = Driftline::run(&scratch, &format!("source-{name}"), GUEST, &MACHINE);
        let (mut destination, address) =
            Driftline::receive(&scratch, &format!("destination-{name}"));
        let socket = source.socket().to_owned();
        let source = shared(source);
        let proxy = MigrationProxy::start(
            &address,
            direction,
            tag,
            kill(&source),
            LaterConnections::Refused,
        );
        let sent =
            tests::run_cli(&["send-migration", proxy.address(), "--api-sock", &socket, "--json"]);
        assert!(proxy.has_cut(), "{name}: the message was not sent");
        assert_ne!(sent.status.code(), Some(0), "{name}");
        // Before PREPARED the destination waits for the next source.
        if [Tag::Prepared, Tag::Commit].contains(&tag) {
            let code = destination.wait_exit(SOON);
            assert_eq!(code, 1, "{name}: {}", destination.log());
        } else {
            destination.wait_for_another();
        }
        assert!(destination.console().lines().is_empty(), "{name}: the guest ran there");
    }
}

#[test]
fn lost_commit_is_resolved_by_the_destination() {
    if !kvm_or_skip("lost_commit_is_resolved_by_the_destination") {
        return;
    }
    let scratch = ScratchDir::new();
    let source = Driftline::run(&scratch, "source", GUEST, &MACHINE);
    let (mut destination, address) =
        Driftline::receive_with_answer_timeout(&scratch, "destination", "20s");
    let proxy = MigrationProxy::start(
        &address,
        Direction::ToDestination,
        Tag::Commit,
        CutAction::Before,
        LaterConnections::Passed,
    );
    let sent = source.cli("send-migration", &[proxy.address(), "--json"]);
    let stderr = String::from_utf8_lossy(&sent.stderr);
    assert!(proxy.has_cut(), "COMMIT was not sent: {stderr}");
    // The source queries the destination, which answers that it has discarded the guest.
    assert_eq!(sent.status.code(), Some(4), "{stderr}");
    assert_eq!(source.state().as_deref(), Some("running"));
    source.console().wait_reports(2, 1, SOON);
    source.console().assert_clean();
    assert_eq!(destination.wait_exit(SOON), 1);
    assert!(destination.console().lines().is_empty(), "without COMMIT the guest never runs there");
}

#[test]
fn migration_in_doubt_is_resolved_by_the_operator() {
    if !kvm_or_skip("migration_in_doubt_is_resolved_by_the_operator") {
        return;
    }
    let scratch = ScratchDir::new();
    let source = Driftline::run(&scratch, "source", GUEST, &MACHINE);
    let (destination, address) = Driftline::receive(&scratch, "destination");
    // The source cannot query the destination: the proxy refuses a second connection.
    let proxy = MigrationProxy::start(
        &address,
        Direction::ToDestination,
        Tag::Commit,
        CutAction::Before,
        LaterConnections::Refused,
    );
    let mut send_command = std::process::Command::new(tests::driftline())
        .args(["send-migration", proxy.address(), "--api-sock", source.socket(), "--json"])
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("driftline starts");
    source.wait_state("in-doubt");
    assert!(!source.cli("resume", &[]).status.success(), "in doubt, nothing resumes the guest");
    let resolved = source.cli("resolve", &["--run", "--json"]);
    let stderr = String::from_utf8_lossy(&resolved.stderr);
    assert!(resolved.status.success(), "{stderr}");
    let resolved = json_of(&resolved);
    let peers = [proxy.address().trim_start_matches("tcp:")];
    assert!(
        resolved["action"] == "run" && resolved["peers"] == serde_json::json!(peers),
        "{resolved}"
    );
    assert!(stderr.contains("if it does, the guest runs twice"), "the command warns: {stderr}");
    source.wait_state("running");
    source.console().wait_reports(2, 1, SOON);
    source.console().assert_clean();
    let code =
        wait_for("end of send-migration", SOON, || send_command.try_wait().expect("our child"));
    assert_eq!(code.code(), Some(4), "the migration failed, and the guest runs here");
    assert!(destination.console().lines().is_empty(), "without COMMIT the guest never runs there");
}

#[test]
fn lost_running_message_is_requested_again() {
    if !kvm_or_skip("lost_running_message_is_requested_again") {
        return;
    }
    let scratch = ScratchDir::new();
    let mut source = Driftline::run(&scratch, "source", GUEST, &MACHINE);
    let (destination, address) = Driftline::receive(&scratch, "destination");
    // RUNNING is lost; the proxy lets later connections through.
    let proxy = MigrationProxy::start(
        &address,
        Direction::ToSource,
        Tag::Running,
        CutAction::Before,
        LaterConnections::Passed,
    );
    let sent = source.cli("send-migration", &[proxy.address(), "--json"]);
    assert_eq!(sent.status.code(), Some(0), "{}", String::from_utf8_lossy(&sent.stderr));
    assert_eq!(source.wait_exit(SOON), 0);
    destination.console().wait_reports(2, 2, SOON);
    destination.console().assert_clean();
}

#[test]
fn invalid_connections_do_not_block_a_source() {
    if !kvm_or_skip("invalid_connections_do_not_block_a_source") {
        return;
    }
    let scratch = ScratchDir::new();
    let source = Driftline::run(&scratch, "source", GUEST, &MACHINE);
    let (destination, address) = Driftline::receive(&scratch, "destination");
    let connect = || {
        let stream = TcpStream::connect(address.trim_start_matches("tcp:")).expect("it listens");
        stream.set_read_timeout(Some(SOON)).expect("a timeout");
        stream
    };
    // An HTTP client, a stream that ends early, and a header of another version.
    let mut browser = connect();
    browser.write_all(b"GET / HTTP/1.1\r\nHost: driftline\r\n\r\n").expect("sent");
    let mut other = Vec::new();
    Header::new(MAGIC_STREAM, VmId::random(), 0, 0).write_to(&mut other).expect("a vector");
    connect().write_all(&other[..20]).expect("sent");
    other[8] = 99;
    let crc = crc32c::crc32c(&other[..60]).to_le_bytes();
    other[60..].copy_from_slice(&crc);
    let mut versioned = connect();
    versioned.write_all(&other).expect("sent");
    let mut answer = Vec::new();
    versioned.read_to_end(&mut answer).expect("an answer and the end");
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.contains("version 99"), "the refusal names the version: {answer}");
    let mut end = Vec::new();
    let _ = browser.read_to_end(&mut end);
    // A second receiver cannot take the same port.
    let mut second = Driftline::start(&scratch, "second", &["receive-migration", &address]);
    assert_eq!(second.wait_exit(SOON), 1);
    assert!(second.log().contains(address.trim_start_matches("tcp:")), "{}", second.log());
    // The receiver still accepts a guest.
    let sent = source.cli("send-migration", &[&address, "--json"]);
    assert_eq!(sent.status.code(), Some(0), "{}", String::from_utf8_lossy(&sent.stderr));
    destination.console().wait_reports(2, 1, SOON);
    destination.console().assert_clean();
    // A receiver with a guest refuses a second source, whose guest continues to run.
    let late = Driftline::run(&scratch, "late", GUEST, &MACHINE);
    let sent = late.cli("send-migration", &[&address, "--json"]);
    let stderr = String::from_utf8_lossy(&sent.stderr);
    assert_eq!(sent.status.code(), Some(4), "{stderr}");
    late.console().wait_reports(2, 1, SOON);
    destination.console().wait_reports(2, 1, Duration::from_secs(60));
}

/// Delay of a slow link in one direction.
const DELAY: Duration = Duration::from_millis(50);
/// Rate of a slow link, bytes a second.
const RATE: u64 = 10_000_000;

#[test]
fn guest_arrives_whole_over_a_slow_link() {
    if !kvm_or_skip("guest_arrives_whole_over_a_slow_link") {
        return;
    }
    let scratch = ScratchDir::new();
    let guest = "payload,ws=8M,rate=1M,pattern=random";
    let mut source = Driftline::run(&scratch, "source", guest, &MACHINE);
    source.console().wait_reports(2, 1, SOON);
    let (destination, address) = Driftline::receive(&scratch, "destination");
    let link = MigrationProxy::slow(&address, DELAY, RATE);
    let sent = std::thread::scope(|scope| {
        let sent = scope.spawn(|| source.cli("send-migration", &[link.address(), "--json"]));
        // Both sides report progress during the migration.
        tests::wait_for("the source's progress", SOON, || {
            let info = source.info()?;
            let sent_bytes = info["migration"]["sent_bytes"].as_u64();
            (info["state"] == "migrating" && sent_bytes? > 1 << 20).then_some(())
        });
        tests::wait_for("the destination's progress", SOON, || {
            let info = destination.info()?;
            (info["state"] == "receiving" && info["migration"]["phase"] == "precopy").then_some(())
        });
        sent.join().expect("the command ends")
    });
    let stderr = String::from_utf8_lossy(&sent.stderr);
    assert_eq!(sent.status.code(), Some(0), "{stderr}\n{}", destination.log());
    assert!(destination.log().contains("left in this pass"), "{}", destination.log());
    let report = json_of(&sent);
    let figure = |name: &str| report[name].as_f64().expect("a figure");
    // The link was as slow as configured: the state, PREPARED and COMMIT each cross it during the
    // pause.
    assert!(figure("downtime_ms") >= 3.0 * DELAY.as_secs_f64() * 1e3, "{report}");
    let least = figure("transferred_bytes") / RATE as f64;
    assert!(figure("total_time_ms") / 1e3 >= 0.9 * least, "{report}");
    assert_eq!(source.wait_exit(SOON), 0);
    destination.console().wait_reports(2, 2, SOON);
    destination.console().assert_clean();
}

#[test]
fn guest_that_outruns_the_link_stays() {
    if !kvm_or_skip("guest_that_outruns_the_link_stays") {
        return;
    }
    let scratch = ScratchDir::new();
    let source = Driftline::run(&scratch, "source", GUEST, &MACHINE);
    source.console().wait_reports(2, 1, SOON);
    let (destination, address) = Driftline::receive(&scratch, "destination");
    let link = MigrationProxy::slow(&address, DELAY, RATE);
    let args = [link.address(), "--json", "--timeout-s", "3", "--no-throttle"];
    let sent = source.cli("send-migration", &args);
    let stderr = String::from_utf8_lossy(&sent.stderr);
    assert_eq!(sent.status.code(), Some(4), "{stderr}");
    let reasons = ["outruns the link", "pre-copy took longer than its 3 s"];
    assert!(reasons.iter().any(|reason| stderr.contains(reason)), "{stderr}");
    assert!(stderr.contains("the guest continues here"), "{stderr}");
    source.console().wait_reports(2, 2, SOON);
    source.console().assert_clean();
    destination.wait_for_another();
}
