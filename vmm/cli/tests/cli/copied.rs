//! Disks that are copied with their guest, from the command line: copied, refused by name, and
//! removed if the guest did not arrive.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{TestDir, Vmm, fail, receiver, text, wait_for};
use driftline_machine::testing::{kvm_or_skip, skip};
use serde_json::Value;

const GUEST: &[&str] = &["--mem", "32M", "--guest", "payload,ws=1M,rate=1M,burst=8,report=200"];
const BYTES: u64 = (8 << 20) + 512;

/// Creates a disk with scattered data and holes between it.
fn disk(tmp: &TestDir, name: &str) -> String {
    let path = tmp.path(name);
    let file = File::create(&path).unwrap();
    file.set_len(BYTES).unwrap();
    for (at, byte) in [(0, 1), (1 << 20, 2), (5 << 20, 3), (BYTES - 512, 4)] {
        file.write_all_at(&[byte; 512], at).unwrap();
    }
    // Data that consists of zeros.
    file.write_all_at(&[0; 64 << 10], 2 << 20).unwrap();
    format!("path={}", path.display())
}

fn copy(tmp: &TestDir, name: &str, id: &str) -> String {
    format!("path={},id={id},copy", tmp.text(name))
}

fn same(a: &Path, b: &Path) -> bool {
    std::fs::read(a).unwrap() == std::fs::read(b).unwrap()
}

#[test]
fn copied_disks_migrate_there_and_back() {
    if !kvm_or_skip("copied_disks_migrate_there_and_back") {
        return;
    }
    let tmp = TestDir::new();
    let (a, b) = (disk(&tmp, "a"), format!("{},readonly,id=b", disk(&tmp, "b")));
    let mut first = Vmm::run(&tmp, "first", &[GUEST, &["--disk", &a, "--disk", &b]].concat());
    let before = first.await_progress(1, &[]);

    let (to_a, to_b) = (copy(&tmp, "a2", "disk0"), format!("{},readonly", copy(&tmp, "b2", "b")));
    let (mut second, to) = receiver(&tmp, "second", &["--disk", &to_a, "--disk", &to_b]);
    let report = first.tell(&["send-migration", &to, "--copy-disks", "--json"]);
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["status"], "completed", "{report}");
    // The four sectors of each disk lie in separate blocks. A file system's own blocks may be
    // larger.
    let sent = report["disk_bytes"].as_u64().unwrap();
    assert_eq!(sent, 2 * 4 * 4096, "{report}");
    assert!(report["disk_zero_bytes"].as_u64().unwrap() >= 128 << 10, "{report}");
    assert!(report["passes"][0]["disk_bytes"].as_u64().unwrap() < BYTES, "{report}");
    assert_eq!(first.wait(), Some(0), "{}", first.stderr());
    second.await_api();
    let between = second.await_progress(1, &before);
    for (old, new) in [("a", "a2"), ("b", "b2")] {
        assert!(same(&tmp.path(old), &tmp.path(new)), "{new}");
        let made = tmp.path(new).metadata().unwrap();
        assert!(made.blocks() * 512 < BYTES / 2, "its holes are holes");
        assert_eq!(made.mode() & 0o777, 0o600);
    }
    assert!(second.stderr().contains("of its disks were copied"), "{}", second.stderr());

    // Migrate back with a copy of one disk only; the other one is shared, under another name.
    std::fs::hard_link(tmp.path("b2"), tmp.path("b3")).unwrap();
    let (to_a, to_b) =
        (copy(&tmp, "a3", "disk0"), format!("path={},id=b,readonly", tmp.text("b3")));
    // The directory for the new file differs from the directory that the process may use later.
    std::fs::create_dir(tmp.path("elsewhere")).unwrap();
    let (disks, elsewhere) = (["--disk", &to_a, "--disk", &to_b], tmp.text("elsewhere"));
    let (mut third, to) =
        receiver(&tmp, "third", &[&disks[..], &["--allow-path", &elsewhere]].concat());
    let table = second.tell(&["send-migration", &to, "--copy-disks=disk0"]);
    assert!(table.contains("\ndisks "), "{table}");
    assert!(table.contains("their files here are out of date"), "{table}");
    assert_eq!(second.wait(), Some(0), "{}", second.stderr());
    third.await_api();
    third.await_progress(1, &between);
    assert!(same(&tmp.path("a"), &tmp.path("a3")));
    // The guest has locked the disk: no other guest may use it.
    let stderr = fail(
        1,
        &[&["run", "--serial", "null"], GUEST, &["--disk", &format!("path={}", tmp.text("a3"))]]
            .concat(),
    );
    assert!(stderr.contains("a3\" is in use by another"), "{stderr}");
    third.tell(&["stop"]);
    assert_eq!(third.wait(), Some(0));
    assert!(tmp.path("a3").exists());
}

#[test]
fn copies_are_only_for_receivers() {
    let tmp = TestDir::new();
    let made = copy(&tmp, "made", "disk0");
    for args in [
        vec!["run", "--mem", "32M", "--guest", "payload,ws=1M", "--disk", &made],
        vec!["restore", "--store", "none", "--disk", &made],
    ] {
        let stderr = fail(2, &args);
        assert!(stderr.contains("'copy' of --disk is only for receive-migration"), "{stderr}");
    }
}

/// A receiver's name and options, the sender's options, and parts of the resulting message.
type CopyCase<'a> = (&'static str, Vec<&'a str>, &'a [&'a str], &'a [&'a str]);

#[test]
fn copy_options_of_both_sides_must_match() {
    if !kvm_or_skip("copy_options_of_both_sides_must_match") {
        return;
    }
    let tmp = TestDir::new();
    let a = disk(&tmp, "a");
    let made = copy(&tmp, "made", "disk0");
    let plain = format!("path={},identity=any", tmp.text("a"));
    let first = Vmm::run(&tmp, "first", &[GUEST, &["--disk", &a]].concat());
    let mut before = first.await_progress(1, &[]);
    std::fs::write(tmp.path("precious"), "precious").unwrap();
    let precious = copy(&tmp, "precious", "disk0");
    let cases: [CopyCase<'_>; 6] = [
        (
            "r0",
            vec![],
            &["--copy-disks"],
            &["disk \"disk0\" is copied with the guest", "--disk path=FILE,id=disk0,copy"],
        ),
        ("r1", vec!["--disk", &plain], &["--copy-disks"], &["names no file for its copy"]),
        (
            "r2",
            vec!["--disk", &made],
            &[],
            &[
                "a copy of disk \"disk0\", which is not copied with the guest",
                "send-migration --copy-disks",
            ],
        ),
        (
            "r3",
            vec!["--disk", &precious],
            &["--copy-disks"],
            &["disk \"disk0\" cannot be copied to", "a file with data in it"],
        ),
        (
            "r4",
            vec!["--disk", &made],
            &["--copy-disks=disk9"],
            &["copying disk \"disk9\"", "no disk of this name"],
        ),
        (
            "r5",
            vec!["--disk", &made, "--disk", "path=/x,id=y"],
            &["--copy-disks"],
            &["the guest has no disk \"y\""],
        ),
    ];
    for (name, there, how, whys) in cases {
        let (mut unfit, to) = receiver(&tmp, name, &there);
        let stderr = first.refuse(4, &[&["send-migration", &to], how].concat());
        for why in whys {
            assert!(stderr.contains(why), "{why}: {stderr}");
        }
        assert!(unfit.is_alive(), "it waits on: {}", unfit.stderr());
        unfit.kill();
        assert!(!tmp.path("made").exists(), "{name}");
        before = first.await_progress(1, &before);
    }
    assert_eq!(tmp.read("precious"), "precious");
}

#[test]
fn full_destination_disk_keeps_guest_at_source() {
    let test = "full_destination_disk_keeps_guest_at_source";
    if !kvm_or_skip(test) {
        return;
    }
    let tmp = TestDir::new();
    let small = match Small::mount(&tmp.path("small")) {
        Ok(small) => small,
        Err(why) => return skip(test, &why),
    };
    let spec = disk(&tmp, "a");
    let noise: Vec<u8> =
        (0..4u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8 | 1).collect();
    File::options().write(true).open(tmp.path("a")).unwrap().write_all_at(&noise, 0).unwrap();
    let mut first = Vmm::run(&tmp, "first", &[GUEST, &["--disk", &spec]].concat());
    let before = first.await_progress(1, &[]);
    let (mut full, to) = receiver(&tmp, "full", &["--disk", &copy(&tmp, "small/a", "disk0")]);
    let stderr = first.refuse(4, &["send-migration", &to, "--copy-disks"]);
    assert!(
        stderr.contains("copying disk \"disk0\" failed: writing its copy: No space left on device"),
        "{stderr}"
    );
    assert!(stderr.contains("the guest continues here"), "{stderr}");
    wait_for("the receiver to wait again", || {
        full.stderr().contains("waiting for another source").then_some(())
    });
    assert!(full.stderr().contains("No space left on device"), "{}", full.stderr());
    full.kill();
    assert!(!tmp.path("small/a").exists(), "what was begun is removed");
    assert_eq!(first.state(), "running");
    let between = first.await_progress(1, &before);
    // The other file system has room.
    let (mut second, to) = receiver(&tmp, "second", &["--disk", &copy(&tmp, "a2", "disk0")]);
    first.tell(&["send-migration", &to, "--copy-disks"]);
    assert_eq!(first.wait(), Some(0), "{}", first.stderr());
    second.await_api();
    second.await_progress(1, &between);
    assert!(same(&tmp.path("a"), &tmp.path("a2")));
    drop(small);
}

/// A file system of 1 MiB, unmounted on drop.
struct Small(PathBuf);

impl Small {
    fn mount(at: &Path) -> Result<Self, String> {
        std::fs::create_dir(at).unwrap();
        let out =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=1M", "tmpfs"]).arg(at).output();
        let out = out.map_err(|e| format!("mount: {e}"))?;
        match out.status.success() {
            true => Ok(Self(at.to_owned())),
            false => Err(text(&out.stderr).trim().to_owned()),
        }
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}
