//! Messages about a damaged store, and the result of its repair.

use std::fs;
use std::path::Path;

use crate::common::{TestDir, Vmm, fail, output, succeed, text};
use driftline_dirty_tracker::PAGE_SIZE;
use serde_json::Value;

const GUEST: &[&str] = &[
    "--mem",
    "64M",
    "--guest",
    "payload,ws=1M,rate=8M,pattern=random,report=200",
    "--backend",
    "threads",
];

/// Creates a store with two checkpoints. Returns its path, and the pages of the first checkpoint.
fn stored(tmp: &TestDir) -> (String, Vec<u8>) {
    let store = tmp.text("store");
    let mut vmm = Vmm::run(tmp, "a", GUEST);
    vmm.await_progress(1, &[]);
    vmm.tell(&["checkpoint", "--store", &store]);
    let first = fs::read(tmp.path("store").join("pages-1")).unwrap();
    let before = vmm.reports();
    vmm.await_progress(1, &before);
    vmm.tell(&["checkpoint", "--store", &store]);
    vmm.tell(&["stop"]);
    vmm.wait();
    (store, first)
}

/// Damages the pages that the second checkpoint wrote, wherever they are in the page file. `first`
/// is the file's content after the first checkpoint.
fn damage_second(store: &Path, first: &[u8]) {
    let pages = store.join("pages-1");
    let mut bytes = fs::read(&pages).unwrap();
    for (n, page) in bytes.chunks_mut(PAGE_SIZE as usize).enumerate() {
        let at = n * PAGE_SIZE as usize;
        if first.get(at..at + page.len()) != Some(&*page) {
            page[0] ^= 1;
        }
    }
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
    let tmp = TestDir::new();
    let (store, first) = stored(&tmp);
    damage_second(&tmp.path("store"), &first);
    copy(&tmp.path("store"), &tmp.path("other"));
    let repaired = output(&["store", "repair", &store]);
    let (stderr, printed) = (text(&repaired.stderr), text(&repaired.stdout));
    assert_eq!(repaired.status.code(), Some(1), "{stderr}");
    let verdict = "1 of 2 checkpoints are sound; the latest sound one is 1\n";
    assert_eq!(printed, verdict);
    assert!(stderr.contains("checkpoint 2 is damaged: "), "{stderr}");
    assert!(stderr.contains("what was replaced is in ") && stderr.contains(".pages-1"), "{stderr}");
    assert!(succeed(&["store", "verify", &store]).ends_with("latest sound one is 1\n"));
    // A second repair loses nothing more.
    assert!(succeed(&["store", "repair", &store]).starts_with("1 of 1 checkpoint is sound"));

    let repaired = output(&["store", "repair", "--json", &tmp.text("other")]);
    let report: Value = serde_json::from_slice(&repaired.stdout).unwrap();
    assert_eq!(repaired.status.code(), Some(1), "{report}");
    assert_eq!((&report["repaired"], &report["sound"]), (&true.into(), &1.into()), "{report}");
    assert_eq!(report["checkpoints"][1]["checkpoint"], 2, "{report}");
}

#[test]
fn damage_message_names_the_repair() {
    let tmp = TestDir::new();
    let (store, first) = stored(&tmp);
    let hint = format!(". Salvage what is sound with: driftline store repair {store}");
    let (dir, sound) = (tmp.path("store"), tmp.path("sound"));
    copy(&dir, &sound);
    let file = tmp.text("memory");
    let restore = ["restore", "--store", &store];
    let export = ["store", "export", &store, "--output", &file];
    damage_second(&dir, &first);
    for args in [&restore[..], &export] {
        let stderr = fail(1, args);
        assert!(
            stderr.contains("fails its checksum") && stderr.trim_end().ends_with(&hint),
            "{stderr}"
        );
    }
    // Unreadable files: nothing is mapped at address 0 of the process.
    for name in ["pages-1", "manifest"] {
        fs::remove_file(dir.join(name)).unwrap();
        std::os::unix::fs::symlink("/proc/self/mem", dir.join(name)).unwrap();
        for args in [&restore[..], &export] {
            let stderr = fail(1, args);
            assert!(stderr.contains(name) && stderr.trim_end().ends_with(&hint), "{stderr}");
        }
        fs::remove_file(dir.join(name)).unwrap();
        fs::copy(sound.join(name), dir.join(name)).unwrap();
    }
    let log = fs::read(dir.join("log-1")).unwrap();
    fs::write(dir.join("log-1"), [&[1; 9], &log[9..]].concat()).unwrap();
    for args in [&restore[..], &export, &["store", "compact", &store]] {
        let stderr = fail(1, args);
        assert!(stderr.contains("log-1, byte 0") && stderr.trim_end().ends_with(&hint), "{stderr}");
    }
    fs::remove_file(dir.join("log-1")).unwrap();
    for args in [&restore[..], &["store", "ls", &store], &["store", "repair", &store]] {
        let stderr = fail(1, args);
        assert!(stderr.contains("has lost its log (log-1)"), "{stderr}");
    }
}
