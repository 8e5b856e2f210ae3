//! The sandbox of a process that has a guest, as its operator meets it. What each class of threads may do is
//! tested beside the tables, in `src/sandbox`.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;

use common::{Place, Vmm, fail};

const GUEST: &[&str] = &["--backend", "threads", "--mem", "64M", "--guest", "payload,ws=1M"];

/// The number of filters on each thread of `vmm`, by the threads' names.
fn filters(vmm: &Vmm) -> BTreeMap<String, u32> {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", vmm.pid())).unwrap();
    let of = |dir: std::path::PathBuf| {
        let status = std::fs::read_to_string(dir.join("status")).ok()?;
        let field = |name| status.lines().find_map(|l| l.strip_prefix(name)).map(str::trim);
        // Kernels before 5.9 do not count: 2 is a thread with filters.
        let count = field("Seccomp_filters:").or(field("Seccomp:"))?.parse().ok()?;
        Some((field("Name:")?.to_owned(), count))
    };
    tasks.filter_map(|task| of(task.ok()?.path())).collect()
}

#[test]
fn every_thread_has_filters_and_those_of_the_guest_have_more() {
    let place = Place::new();
    let vmm = Vmm::run(&place, "a", GUEST);
    let filters = filters(&vmm);
    assert!(filters.len() >= 4, "{filters:?}");
    assert!(filters.values().all(|n| *n > 1), "{filters:?}");
    assert!(filters["worker-0"] >= filters["driftline"], "{filters:?}");
    assert_eq!(vmm.said(), "", "nothing is missing, nothing is said");
}

#[test]
fn without_a_sandbox_the_operator_is_warned() {
    let place = Place::new();
    let vmm = Vmm::run(&place, "a", &[GUEST, &["--no-seccomp", "--no-landlock"][..]].concat());
    assert!(filters(&vmm).values().all(|n| *n == 0));
    let said = vmm.said();
    assert!(said.contains("--no-seccomp: every system call can be made"), "{said}");
    assert!(said.contains("--no-landlock: every file of the user's can be reached"), "{said}");
}

#[test]
fn stores_lie_where_they_were_allowed() {
    let place = Place::new();
    std::fs::create_dir(place.path("stores")).unwrap();
    let (allowed, other) = (place.text("stores"), place.text("other"));
    let mut vmm = Vmm::run(&place, "a", &[GUEST, &["--allow-path", &allowed][..]].concat());
    vmm.tell(&["checkpoint", "--store", &format!("{allowed}/one")]);
    let said = vmm.refuse(4, &["checkpoint", "--store", &other]);
    assert!(said.contains(&format!("{other} lies outside of where this driftline may")), "{said}");
    assert!(!place.path("other").exists());
    vmm.tell(&["stop"]);
    assert_eq!(vmm.wait(), Some(0));
    assert!(!place.path("a.sock").exists(), "it removes its own socket");

    let missing = place.text("missing");
    let said = fail(1, &[&["run"], GUEST, &["--allow-path", &missing]].concat());
    assert!(said.contains(&format!("{missing} cannot be allowed: ")), "{said}");
}

#[test]
fn the_systems_directories_hold_no_stores() {
    let place = Place::new();
    let vmm = Vmm::run(&place, "a", GUEST);
    let said = vmm.refuse(4, &["checkpoint", "--store", "/etc/driftline-store"]);
    assert!(said.contains("--allow-path says otherwise"), "{said}");
    vmm.tell(&["checkpoint", "--store", &place.text("store")]);
}
