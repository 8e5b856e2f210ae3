//! Either process is killed at messages of every phase. That process is this test binary, started
//! again in a role. These tests are a binary of their own, because a forked child briefly holds the
//! locks of all records.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

#[path = "migrations/common/mod.rs"]
mod common;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{
    At, CutPoint, HookedGuest, HostPair, LONG, Proxy, ProxyPlan, Sender, each, quick_send, tag,
    within,
};
use driftline_guest::testing::{MemoryConfig, MemoryGuest, MemoryGuestFactory};
use driftline_guest::{Lifecycle, RunState};
use driftline_migrate::{Cause, Listener, Phase, ReceiveControl, ReceiveOptions, receive};

const FROM_SOURCE: [&str; 9] = [
    "HELLO",
    "CONFIG",
    "PASS_BEGIN",
    "PAGES",
    "PASS_END",
    "STATE",
    "STATE_WHOLE",
    "STATE_END",
    "COMMIT",
];
/// The messages of a hand-over on one host.
const FROM_LOCAL_SOURCE: [&str; 10] = [
    "HELLO",
    "MEMORY",
    "FILES",
    "CONFIG",
    "PASS_BEGIN",
    "PASS_END",
    "STATE",
    "STATE_WHOLE",
    "STATE_END",
    "COMMIT",
];

fn options(hosts: &HostPair) -> driftline_migrate::SendOptions {
    let mut options = quick_send(hosts);
    options.downtime = Duration::from_secs(60);
    options
}

fn start_guest(hosts: &HostPair, is_local: bool) -> Arc<MemoryGuest> {
    match is_local {
        true => hosts.start_in_files(MemoryConfig::small()),
        false => hosts.start(MemoryConfig::small()),
    }
}

/// Starts this binary in a role. Returns the process and the first line that it prints after
/// "role:".
fn start(role: &str, args: &[(&str, String)]) -> (Child, String) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", role, "--ignored", "--nocapture"])
        .envs(args.iter().map(|(k, v)| (*k, v)))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let line = loop {
        let line = lines.next().expect("the role prints a line").unwrap();
        if let Some((_, text)) = line.split_once("role: ") {
            break text.to_owned();
        }
    };
    // Drains further output, so that a full pipe does not block the process.
    std::thread::spawn(move || lines.count());
    (child, line)
}

fn print_line(line: &str) {
    println!("role: {line}");
    std::io::stdout().flush().unwrap();
}

#[test]
#[ignore = "a role for the other tests, not a test"]
fn role_destination() {
    let Ok(records) = std::env::var("RECORDS") else { return };
    let listener = match std::env::var("SOCKETS") {
        Err(_) => Listener::bind("127.0.0.1:0").unwrap(),
        Ok(dir) => {
            let path = Path::new(&dir).join(std::process::id().to_string());
            Listener::unix(UnixListener::bind(&path).unwrap(), &path)
        }
    };
    let address = listener.address();
    print_line(address.strip_prefix("tcp:").unwrap_or(address));
    let mut options = ReceiveOptions::new(records);
    options.commit_deadline = Duration::from_secs(2);
    let result = receive(
        listener,
        Arc::new(MemoryGuestFactory::default()),
        &options,
        &ReceiveControl::new(),
    );
    if result.is_ok() {
        // The guest runs until the test kills this process.
        std::thread::sleep(Duration::from_secs(60));
    }
}

#[test]
#[ignore = "a role for the other tests, not a test"]
fn role_source() {
    let (Ok(to), Ok(records)) = (std::env::var("TO"), std::env::var("RECORDS")) else { return };
    let (hosts, is_local) = (HostPair::new(), to.starts_with("unix:"));
    let guest = start_guest(&hosts, is_local);
    let mut options = driftline_migrate::SendOptions::new(records);
    (options.downtime, options.local) = (Duration::from_secs(60), is_local);
    print_line("sending");
    let _ = driftline_migrate::send(&*guest, &to, &options, &driftline_migrate::SendControl::new());
    // Lives until the test kills it, so that only a kill ends its guest.
    std::thread::sleep(Duration::from_secs(60));
}

/// Returns a function that kills the process in the slot, once, and waits for its end.
fn kill(slot: &Arc<Mutex<Option<Child>>>) -> impl FnMut() + Send + 'static {
    let slot = slot.clone();
    move || {
        if let Some(mut child) = slot.lock().unwrap().take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}

#[test]
fn killed_destination_leaves_the_guest_at_the_source() {
    killed_destination(&FROM_SOURCE, false);
}

#[test]
fn killed_process_leaves_the_memory_that_it_shares() {
    killed_destination(&FROM_LOCAL_SOURCE, true);
}

fn killed_destination(messages: &[&str], is_local: bool) {
    for at in messages.iter().copied() {
        let hosts = HostPair::new();
        let guest = start_guest(&hosts, is_local);
        let sockets = tempfile::tempdir().unwrap();
        let mut roles = vec![("RECORDS", hosts.destination_records().display().to_string())];
        if is_local {
            roles.push(("SOCKETS", sockets.path().display().to_string()));
        }
        let (child, to) = start("role_destination", &roles);
        let slot = Arc::new(Mutex::new(Some(child)));
        let plan = ProxyPlan::default().before_from_source(tag(at), kill(&slot));
        let proxy = Proxy::start(&to, plan);
        let mut sending = options(&hosts);
        sending.local = is_local;
        let sender = Sender::start(&guest, &proxy.to, &sending);
        // In a local hand-over the claim says that the destination has not taken the guest.
        if at == "COMMIT" && !is_local {
            // The destination died prepared, so the source is in doubt until a new process of the
            // site answers.
            within(LONG, "the source is in doubt", || {
                sender.control.progress().phase == Phase::InDoubt
            });
            assert_eq!(guest.run_state(), RunState::Paused);
            let (child, to) = start("role_destination", &roles);
            *slot.lock().unwrap() = Some(child);
            proxy.redirect(&to);
        }
        let error = sender.result().unwrap_err();
        assert_eq!(guest.run_state(), RunState::Running, "{at}: {error}");
        guest.verify().unwrap();
        assert_eq!(at == "COMMIT", matches!(error.cause, Cause::Discarded { .. }), "{at}: {error}");
        kill(&slot)();
    }
}

/// The destination has run the guest, and the claim says so. The guest ended with its process.
#[test]
fn guest_that_ran_elsewhere_is_not_resumed() {
    let hosts = HostPair::new();
    let guest = start_guest(&hosts, true);
    let sockets = tempfile::tempdir().unwrap();
    let roles = [
        ("RECORDS", hosts.destination_records().display().to_string()),
        ("SOCKETS", sockets.path().display().to_string()),
    ];
    let (child, to) = start("role_destination", &roles);
    let slot = Arc::new(Mutex::new(Some(child)));
    // The kill ends the connection of the proxy, too: RUNNING may arrive, or not.
    let plan = ProxyPlan::cut_for_good(false, At::Tag(tag("RUNNING")), CutPoint::Before);
    let plan = plan.before_from_destination(tag("RUNNING"), kill(&slot));
    let proxy = Proxy::start(&to, plan);
    let mut sending = options(&hosts);
    sending.local = true;
    let sender = Sender::start(&guest, &proxy.to, &sending);
    let control = sender.control.clone();
    sender.result().unwrap();
    assert_eq!(guest.run_state(), RunState::Stopped);
    assert_eq!(control.progress().doubt, None);
    assert!(slot.lock().unwrap().is_none(), "it was killed");
}

#[test]
fn killed_source_leaves_at_most_one_guest() {
    killed_source(&FROM_SOURCE, false);
}

#[test]
fn killed_source_leaves_its_memory_to_the_guest() {
    killed_source(&FROM_LOCAL_SOURCE, true);
}

fn killed_source(messages: &[&'static str], is_local: bool) {
    each(messages.to_vec(), 5, |at| {
        let hosts = HostPair::new();
        let there = match is_local {
            true => hosts.local_receiver(hosts.receive_options()),
            false => hosts.receiver(),
        };
        let slot = Arc::new(Mutex::new(None));
        let plan = ProxyPlan::default().before_from_source(tag(at), {
            let (slot, mut killed) = (slot.clone(), false);
            move || {
                // The first message of this tag kills; there may be more.
                if std::mem::replace(&mut killed, true) {
                    return;
                }
                within(LONG, "it is started", || slot.lock().unwrap().is_some());
                kill(&slot)();
            }
        });
        let proxy = Proxy::start(&there.to, plan);
        let records = hosts.source_records().display().to_string();
        let args = [("TO", proxy.to.clone()), ("RECORDS", records)];
        let (child, _) = start("role_source", &args);
        *slot.lock().unwrap() = Some(child);
        within(LONG, "it is killed", || slot.lock().unwrap().is_none());
        // Messages that were sent before the kill still arrive. If COMMIT does, the guest runs
        // here.
        within(LONG, &format!("{at}: the receiver ends or waits"), || {
            there.thread.is_finished() || there.waits_on()
        });
        if !there.thread.is_finished() {
            there.control.cancel().unwrap();
        }
        match there.outcome() {
            Ok(arrived) => {
                assert_eq!(at, "COMMIT");
                assert_eq!(arrived.guest.run_state(), RunState::Running);
                arrived.guest.verify().unwrap();
                let pending = driftline_migrate::Records::open(hosts.source_records()).unwrap();
                assert_eq!(pending.pending().unwrap().records.len(), 1, "the record survives");
            }
            Err(e) => {
                assert_ne!(at, "COMMIT", "{e}");
                assert!(e.was_prepared || matches!(e.cause, Cause::Cancelled), "{at}: {e}");
            }
        }
    });
}

#[test]
fn destination_killed_in_the_pause_leaves_no_doubt() {
    // `release` precedes PREPARED, and `detach` follows it.
    for at in ["release", "detach"] {
        let hosts = HostPair::new();
        let guest = hosts.start(MemoryConfig::small());
        let records = ("RECORDS", hosts.destination_records().display().to_string());
        let (child, to) = start("role_destination", &[records]);
        let slot = Arc::new(Mutex::new(Some(child)));
        let control = driftline_migrate::SendControl::new();
        let kill = Mutex::new(kill(&slot));
        let hooked = HookedGuest::new(guest.clone(), move |what| {
            if what == at {
                kill.lock().unwrap()();
            }
        });
        let error = driftline_migrate::send(&hooked, &to, &options(&hosts), &control).unwrap_err();
        assert!(slot.lock().unwrap().is_none(), "it was killed");
        let phase = error.phase;
        assert!(matches!(phase, Phase::SwitchOver | Phase::HandOver), "{at}: {error}");
        assert_eq!(guest.run_state(), RunState::Running, "{at}: {error}");
        // The next process of the site sweeps the records.
        let next = hosts.receiver();
        within(LONG, &format!("{at}: it is swept"), || hosts.records_left().is_empty());
        next.control.cancel().unwrap();
        next.error();
        guest.verify().unwrap();
    }
}
