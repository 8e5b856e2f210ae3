//! Started guests accept the examples of the document, and all their answers are as documented.

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixListener;
use std::process::Command;
use std::thread;

use driftline_machine::testing::{TestTap, kvm_or_skip, skip};
use driftline_migrate::Tag;
use rustix::io::{FdFlags, fcntl_setfd};
use serde_json::{Value, json};
use tests::{ApiDocument, CutAction, Direction, LaterConnections, MigrationProxy, SOON, wait_for};

use super::session::{ExampleHost, ServedApi};
use super::statuses::WITH_DRIVER;

/// The operations of a guest from its configuration to its end, in their order.
const CONFIGURED: [&str; 29] = [
    "PUT /logger",
    "PUT /metrics",
    "PUT /serial",
    "PUT /machine-config",
    "PATCH /machine-config",
    "PUT /boot-source",
    "PUT /drives/{id}",
    "PUT /network-interfaces/{id}",
    "PUT /vsock",
    "PUT /balloon",
    "PUT /entropy",
    "PUT /mmds/config",
    "PUT /mmds",
    "PATCH /mmds",
    "GET /mmds",
    "GET /balloon",
    "GET /vm/config",
    "PUT /actions",
    "GET /",
    "GET /version",
    "GET /machine-config",
    "GET /vm/config",
    "PATCH /drives/{id}",
    "PATCH /network-interfaces/{id}",
    "PATCH /balloon",
    "PATCH /balloon/statistics",
    "GET /balloon/statistics",
    "GET /balloon/hinting/status",
    "PATCH /vm",
];

/// Returns a tap and the files of a guest; `None`, and says so, if the host lacks something.
fn host_for(test: &str, tap: &str) -> Option<(TestTap, ExampleHost)> {
    if !kvm_or_skip(test) {
        return None;
    }
    let tap = TestTap::new(tap).inspect_err(|e| skip(test, &e.to_string())).ok()?;
    let host = ExampleHost::new(&tap.0);
    Some((tap, host))
}

/// Checks that each documented success of the operations with one of `tags` was seen.
fn all_successes_seen(tags: &[&str], seen: &BTreeSet<(String, u16)>, others: &[(&str, u16)]) {
    let operations = ApiDocument::read().operations();
    let tagged = operations.filter(|operation| tags.iter().any(|tag| operation.has_tag(tag)));
    let missing: Vec<_> = tagged
        .flat_map(|operation| {
            let statuses = operation.statuses().into_iter().filter(|status| *status != 400);
            statuses.map(move |status| (operation.name(), status)).collect::<Vec<_>>()
        })
        .filter(|(name, status)| !others.contains(&(name, *status)))
        .filter(|answer| !seen.contains(answer))
        .collect();
    assert!(missing.is_empty(), "these do not occur: {missing:?}");
}

#[test]
fn firecrackers_examples_work() {
    let Some((_tap, host)) = host_for("firecrackers_examples_work", "oa0") else { return };
    let mut guest = ServedApi::firecracker(&host.scratch, "guest", &["serve"]);
    CONFIGURED.iter().for_each(|name| guest.do_examples(&host, name));
    guest.done("PATCH", "/vm", Some(&json!({ "state": "Paused" })));
    guest.do_examples(&host, "PUT /snapshot/create");
    let mut seen = std::mem::take(&mut guest.seen);
    drop(guest);

    let mut clone = ServedApi::firecracker(&host.scratch, "clone", &["serve"]);
    clone.do_examples(&host, "PUT /snapshot/load");
    seen.append(&mut clone.seen);

    let small = ["firecracker", "--mmds-size-limit", "100"];
    let mut other = ServedApi::firecracker(&host.scratch, "other", &small);
    other.do_examples(&host, "PUT /cpu-config");
    other.done("PUT", "/mmds", Some(&json!({})));
    let large = json!({ "a": "a".repeat(100) }).to_string();
    for method in ["PUT", "PATCH"] {
        let reply = other.checked(method, "/mmds", &large);
        seen.insert((format!("{method} /mmds"), reply.status));
    }
    seen.append(&mut other.seen);
    all_successes_seen(&["firecracker"], &seen, &WITH_DRIVER);
}

/// Shows a guest with each device.
fn show_devices(host: &ExampleHost) -> BTreeSet<(String, u16)> {
    // `run` reads its own answer.
    let config = ApiDocument::read().find(&["run"], "GET", "/vm/config").expect("documented");
    let content = &config.response(200)["content"]["application/json"];
    let example = host.example(&content["examples"]["run"]["value"]);
    let file = host.scratch.path("config.json");
    std::fs::write(&file, example.to_string()).expect("a file");
    let args = ["run", "--config-file", file.to_str().expect("UTF-8")];
    let mut guest = ServedApi::own(&host.scratch, "devices", &args);
    wait_for("a guest", SOON, || {
        (guest.ask("GET", "/v1/info", "").body.contains("\"running\"")).then_some(())
    });
    for name in ["GET /", "GET /version", "GET /v1/info", "GET /machine-config", "GET /vm/config"] {
        guest.do_examples(host, name);
    }
    for name in ["GET /vsock", "PATCH /balloon", "GET /balloon", "GET /balloon/statistics"] {
        guest.do_examples(host, name);
    }
    guest.done("GET", "/drives/disk0", None);
    guest.done("GET", "/network-interfaces/net0", None);
    guest.do_examples(host, "PATCH /vm");
    guest.do_examples(host, "POST /v1/nmi");
    std::mem::take(&mut guest.seen)
}

/// Checkpoints, watches and moves a guest.
fn run_jobs(host: &ExampleHost) -> BTreeSet<(String, u16)> {
    let args = ["run", "--guest", "payload,ws=4M,rate=4M", "--mem", "64M", "--vcpus", "1"];
    let mut guest = ServedApi::own(&host.scratch, "jobs", &args);
    wait_for("a guest", SOON, || {
        (guest.ask("GET", "/v1/info", "").body.contains("\"running\"")).then_some(())
    });
    for name in ["GET /v1/dirty", "GET /metrics"] {
        guest.do_examples(host, name);
    }
    let watch =
        guest.done("POST", "/v1/dirty/watch", Some(&json!({ "bins": 16 })))["watch"].clone();
    guest.done("GET", &format!("/v1/dirty/watch?watch={watch}&wait_ms=20"), None);
    guest.done("DELETE", &format!("/v1/dirty/watch?watch={watch}"), None);

    let store = json!({ "store": host.scratch.path("jobs.store"), "every_ms": 10, "count": 2 });
    let job = guest.done("POST", "/v1/checkpoint", Some(&store))["job"].clone();
    guest.done("GET", &format!("/v1/checkpoint/attach?job={job}"), None);
    guest.done("GET", &format!("/v1/checkpoint?job={job}&since=0&wait_ms=10"), None);
    let store = json!({ "store": host.scratch.path("jobs.store"), "every_ms": 10_000 });
    guest.done("POST", "/v1/checkpoint", Some(&store));
    guest.done("DELETE", "/v1/checkpoint", None);

    // A destination that never answers.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let to = |address: String| json!({ "to": address });
    let address = format!("tcp:{}", silent.local_addr().expect("bound"));
    let job = guest.done("POST", "/v1/migration", Some(&to(address)))["job"].clone();
    guest.done("DELETE", &format!("/v1/migration?job={job}"), None);
    let failed = guest.done("GET", &format!("/v1/migration?job={job}&wait_ms=30000"), None);
    assert_eq!(failed["state"], "failed", "{failed}");
    resolve(host, &mut guest);
    guest.do_examples(host, "POST /v1/stop");
    std::mem::take(&mut guest.seen)
}

/// Leaves a migration in doubt, and resolves it.
fn resolve(host: &ExampleHost, guest: &mut ServedApi) {
    let (_destination, address) = tests::Driftline::receive(&host.scratch, "destination");
    let commit = (Direction::ToDestination, Tag::Commit);
    let (cut, later) = (CutAction::Before, LaterConnections::Refused);
    let proxy = MigrationProxy::start(&address, commit.0, commit.1, cut, later);
    guest.done("POST", "/v1/migration", Some(&json!({ "to": proxy.address() })));
    wait_for("doubt", SOON, || {
        (guest.done("GET", "/v1/migration", None)["state"] == "in-doubt").then_some(())
    });
    guest.done("POST", "/v1/migration/resolve", Some(&json!({ "action": "run" })));
    wait_for("the guest's resumption", SOON, || {
        (guest.done("GET", "/v1/migration", None)["state"] == "failed").then_some(())
    });
}

/// Gives a guest to another process.
fn upgrade(host: &ExampleHost) -> BTreeSet<(String, u16)> {
    let guest = ["run", "--guest", "payload,ws=4M,rate=4M", "--mem", "64M"];
    let args = [&guest[..], &["--memory-backing", "memfd"]].concat();
    let mut guest = ServedApi::own(&host.scratch, "upgraded", &args);
    wait_for("a guest", SOON, || {
        (guest.ask("GET", "/v1/info", "").body.contains("\"running\"")).then_some(())
    });
    let socket = host.scratch.path("next");
    let listener = UnixListener::bind(&socket).expect("a new socket");
    fcntl_setfd(&listener, FdFlags::empty()).expect("our descriptor");
    let next = Command::new(tests::driftline())
        .args(["take-over", &listener.as_raw_fd().to_string()])
        .spawn();
    let mut next = next.expect("a next process");
    drop(listener);
    let report = guest.done("POST", "/v1/upgrade", Some(&json!({ "socket": socket })));
    assert_eq!(report["status"], "completed");
    let info = guest.done("GET", "/v1/info", None);
    assert_eq!(info["pid"], next.id());
    guest.done("POST", "/v1/stop", None);
    assert!(next.wait().expect("a child of ours").success());
    std::mem::take(&mut guest.seen)
}

/// Asks for a forecast, which takes four seconds.
fn forecast(host: &ExampleHost) -> BTreeSet<(String, u16)> {
    let args = ["run", "--guest", "payload,ws=4M,rate=4M", "--mem", "64M", "--vcpus", "1"];
    let mut guest = ServedApi::own(&host.scratch, "plan", &args);
    wait_for("a guest", SOON, || {
        (guest.ask("GET", "/v1/info", "").body.contains("\"running\"")).then_some(())
    });
    guest.done("POST", "/v1/migration/plan", Some(&json!({})));
    std::mem::take(&mut guest.seen)
}

#[test]
fn own_answers_are_documented() {
    let Some((_tap, host)) = host_for("own_answers_are_documented", "oa1") else { return };
    let seen: BTreeSet<_> = thread::scope(|scope| {
        let host = &host;
        let parts = [show_devices, run_jobs, upgrade, forecast];
        let parts = parts.map(|part| scope.spawn(move || part(host)));
        parts.into_iter().flat_map(|part| part.join().expect("no panic")).collect()
    });
    // `run` has started its guest already.
    let refused = [("PUT /actions", 204)];
    all_successes_seen(&["run", "driftline"], &seen, &refused);
}

#[test]
fn process_without_a_guest_shows_its_arrival() {
    let host = ExampleHost::new("tap0");
    let args = ["receive-migration", "tcp:127.0.0.1:0"];
    let mut waiting = ServedApi::own(&host.scratch, "waiting", &args);
    let page: Value = waiting.done("GET", "/v1/info", None);
    assert_eq!(page["state"], "receiving");
    waiting.do_examples(&host, "GET /metrics");
}
