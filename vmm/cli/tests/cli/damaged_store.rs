//! Messages about a damaged store, and the result of its repair.

use std::fs;
use std::path::Path;

use crate::common::{Place, Vmm, fail, output, succeed, text};
use serde_json::Value;

const GUEST: &[&str] =
    &["--mem", "64M", "--guest", "payload,ws=1M,pattern=random", "--backend", "threads"];

/// Creates a store with two checkpoints.
fn stored(place: &Place) -> String {
    let store = place.text("store");
    let mut vmm = Vmm::run(place, "a", GUEST);
    vmm.await_progress(1, &[]);
    vmm.tell(&["checkpoint", "--store", &store]);
    let before = vmm.reports();
    vmm.await_progress(1, &before);
    vmm.tell(&["checkpoint", "--store", &store]);
    vmm.tell(&["stop"]);
    vmm.wait();
    store
}

/// Damages a page of the second checkpoint: the last one that was written.
fn damage_second(store: &Path) {
    let pages = store.join("pages-1");
    let mut bytes = fs::read(&pages).unwrap();
    let last = bytes.iter().rposition(|byte| *byte != 0).unwrap();
    bytes[last] ^= 1;
    fs::write(&pages, bytes).unwrap();
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for file in fs::read_dir(from).unwrap().flatten() {
        fs::copy(file.path(), to.join(file.file_name())).unwrap();
    }
}

#[test]
fn repair_that_loses_checkpoints_ends_with_1() {
    let place = Place::new();
    let store = stored(&place);
    damage_second(&place.path("store"));
    copy(&place.path("store"), &place.path("other"));
    let repaired = output(&["store", "repair", &store]);
    let (said, printed) = (text(&repaired.stderr), text(&repaired.stdout));
    assert_eq!(repaired.status.code(), Some(1), "{said}");
    let verdict = "1 of 2 checkpoints are sound; the latest sound one is 1\n";
    assert_eq!(printed, verdict);
    assert!(said.contains("checkpoint 2 is damaged: "), "{said}");
    assert!(said.contains("what was replaced is in ") && said.contains(".pages-1"), "{said}");
    assert!(succeed(&["store", "verify", &store]).ends_with("latest sound one is 1\n"));
    // A second repair loses nothing more.
    assert!(succeed(&["store", "repair", &store]).starts_with("1 of 1 checkpoint is sound"));

    let repaired = output(&["store", "repair", "--json", &place.text("other")]);
    let report: Value = serde_json::from_slice(&repaired.stdout).unwrap();
    assert_eq!(repaired.status.code(), Some(1), "{report}");
    assert_eq!((&report["repaired"], &report["sound"]), (&true.into(), &1.into()), "{report}");
    assert_eq!(report["checkpoints"][1]["epoch"], 2, "{report}");
}

#[test]
fn damage_message_names_the_repair() {
    let place = Place::new();
    let store = stored(&place);
    let hint = format!(". Salvage what is sound with: driftline store repair {store}");
    let (dir, sound) = (place.path("store"), place.path("sound"));
    copy(&dir, &sound);
    let file = place.text("memory");
    let restore = ["restore", "--store", &store];
    let export = ["store", "export", &store, "--output", &file];
    damage_second(&dir);
    for args in [&restore[..], &export] {
        let said = fail(1, args);
        assert!(said.contains("fails its checksum") && said.trim_end().ends_with(&hint), "{said}");
    }
    // Unreadable files: nothing is mapped at address 0 of the process.
    for name in ["pages-1", "manifest"] {
        fs::remove_file(dir.join(name)).unwrap();
        std::os::unix::fs::symlink("/proc/self/mem", dir.join(name)).unwrap();
        for args in [&restore[..], &export] {
            let said = fail(1, args);
            assert!(said.contains(name) && said.trim_end().ends_with(&hint), "{said}");
        }
        fs::remove_file(dir.join(name)).unwrap();
        fs::copy(sound.join(name), dir.join(name)).unwrap();
    }
    let log = fs::read(dir.join("log-1")).unwrap();
    fs::write(dir.join("log-1"), [&[1; 9], &log[9..]].concat()).unwrap();
    for args in [&restore[..], &export, &["store", "compact", &store]] {
        let said = fail(1, args);
        assert!(said.contains("log-1, byte 0") && said.trim_end().ends_with(&hint), "{said}");
    }
    fs::remove_file(dir.join("log-1")).unwrap();
    for args in [&restore[..], &["store", "ls", &store], &["store", "repair", &store]] {
        let said = fail(1, args);
        assert!(said.contains("has lost its log (log-1)"), "{said}");
    }
}
