//! Disks from the command line: refused with a message before anything runs, locked by the process
//! that may run the guest, and moved with the guest.

use std::fs::File;

use crate::common::{TestDir, Vmm, fail, output, receiver, request, succeed, text};
use driftline_guest::{Lifecycle, RunState};
use driftline_machine::config::{Boot, DeviceConfig, HostConfig, MachineConfig, SerialSink};
use driftline_machine::machine::Machine;
use driftline_machine::testing::{fail_fdatasync, kvm_or_skip};
use serde_json::Value;

const GUEST: &[&str] = &["--mem", "32M", "--guest", "payload,ws=1M"];

fn disk(tmp: &TestDir, name: &str, bytes: u64) -> String {
    let path = tmp.path(name);
    File::create(&path).unwrap().set_len(bytes).unwrap();
    format!("path={}", path.display())
}

fn run<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&["run", "--serial", "null"], GUEST, more].concat()
}

#[test]
fn unusable_disk_is_refused_with_the_reason() {
    if !kvm_or_skip("unusable_disk_is_refused_with_the_reason") {
        return;
    }
    let tmp = TestDir::new();
    let none = format!("path={}", tmp.text("none"));
    let stderr = fail(1, &run(&["--disk", &none]));
    assert!(stderr.contains("none\" cannot be opened for writing"), "{stderr}");
    let directory = format!("path={},readonly", tmp.text("."));
    let stderr = fail(1, &run(&["--disk", &directory]));
    assert!(stderr.contains("neither a regular file nor a block device"), "{stderr}");
    for bytes in [511, 513, (1 << 20) - 1] {
        let odd = disk(&tmp, "odd", bytes);
        let stderr = fail(1, &run(&["--disk", &odd]));
        let why = format!("has {bytes} bytes, which are not whole sectors of 512");
        assert!(stderr.contains(&why), "{stderr}");
    }
    let empty = disk(&tmp, "empty", 0);
    let stderr = fail(1, &run(&["--disk", &empty]));
    assert!(stderr.contains("has 0 bytes: a disk has at least one sector"), "{stderr}");
    let good = disk(&tmp, "good", 1 << 20);
    let twice = format!("{good},id=disk0");
    let stderr = fail(1, &run(&["--disk", &good, "--disk", &twice]));
    assert!(stderr.contains("two devices with the name \"disk0\""), "{stderr}");
    let stderr = fail(1, &run(&["--backend", "threads", "--disk", &good]));
    assert!(stderr.contains("the threads backend has no devices"), "{stderr}");
    for bad in [
        "good",
        "path=",
        "path=/d,size=1",
        "path=/d,id=a b",
        "path=/d,serial=123456789012345678901",
    ] {
        let stderr = fail(2, &run(&["--disk", bad]));
        assert!(stderr.contains("--disk"), "{stderr}");
    }
}

#[test]
fn disk_in_use_is_refused_to_others() {
    const TEST: &str = "disk_in_use_is_refused_to_others";
    if !kvm_or_skip(TEST) {
        return;
    }
    let tmp = TestDir::new();
    let spec = disk(&tmp, "disk", 1 << 20);
    let mut first = Vmm::run(&tmp, "first", &[GUEST, &["--disk", &spec]].concat());
    let stderr = fail(1, &run(&["--disk", &spec]));
    assert!(stderr.contains("disk\" is in use by another"), "{stderr}");
    let stderr = fail(1, &run(&["--disk", &format!("{spec},readonly")]));
    assert!(stderr.contains("disk\" is in use by another"), "{stderr}");

    let store = tmp.text("store");
    let socket = first.socket();
    let args = ["checkpoint", "--api-sock", &socket, "--store", &store, "--disks", "external"];
    let stderr = output(&args);
    assert!(stderr.status.success() && text(&stderr.stderr).contains("disks are yours to keep"));
    let before = first.await_progress(1, &[]);
    let figures = first.info().unwrap()["devices"][0].clone();
    assert_eq!((&figures["id"], &figures["reads"]), (&"disk0".into(), &0.into()), "{figures}");
    let answered = |path: &str| -> Value {
        let answer = request(&first.socket(), "GET", path, "");
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200"), "{answer}");
        serde_json::from_str(body).unwrap()
    };
    let drive = answered("/drives/disk0");
    assert_eq!((&drive["bytes"], &drive["is_read_only"]), (&(1 << 20).into(), &false.into()));
    assert_eq!(answered("/vm/config")["drives"], serde_json::json!([drive]));

    // The guest that has the disk still runs, so a restored one must not.
    let restore = |more: &[&str]| {
        let args = ["restore", "--store", &store, "--serial", "null"];
        let state = tmp.text("state");
        fail(1, &[&args[..], &["--state-dir", &state], more].concat())
    };
    let stderr = restore(&[]);
    assert!(stderr.contains("in use by another"), "{stderr}");
    first.kill();

    let small = disk(&tmp, "small", 4096);
    let wrong = format!("{spec},id=disk7");
    let readonly = format!("{spec},readonly");
    for (disks, why) in [
        (vec!["--disk", &small], "has 1048576 bytes, and its file"),
        (vec!["--disk", &wrong], "the guest has no disk \"disk7\""),
        (vec!["--disk", &readonly], "only its path can be another one"),
        (vec!["--disk", &spec, "--disk", &small], "2 disks are given"),
    ] {
        let args = ["restore", "--store", &store, "--serial", "null"];
        let state = tmp.text("state");
        let out = output(&[&args[..], &["--state-dir", &state], &disks].concat());
        let stderr = text(&out.stderr);
        assert!(!out.status.success() && stderr.contains(why), "{stderr}");
    }
    let moved = format!("path={},id=disk0", tmp.text("moved"));
    std::fs::rename(tmp.path("disk"), tmp.path("moved")).unwrap();
    let args = ["restore", "--store", &store, "--disk", &moved];
    let mut second = Vmm::start(&tmp, "second", &args);
    second.await_api();
    second.await_progress(1, &before);
    second.tell(&["stop"]);
    assert_eq!(second.wait(), Some(0));
}

/// The restored guest has the disk's content from the checkpoint, whatever was written since. Only
/// the file that the command names is overwritten.
#[test]
fn restore_brings_the_disk_back() {
    if !kvm_or_skip("restore_brings_the_disk_back") {
        return;
    }
    let tmp = TestDir::new();
    let (spec, bytes) = (disk(&tmp, "disk", 1 << 20), 1 << 20);
    let mut then = vec![0; bytes];
    then[4096 * 3..4096 * 10].fill(7);
    std::fs::write(tmp.path("disk"), &then).unwrap();
    let mut first = Vmm::run(&tmp, "first", &[GUEST, &["--disk", &spec]].concat());
    let id = first.info().unwrap()["vm_id"].as_str().unwrap().to_owned();
    let store = tmp.text("store");
    first.tell(&["checkpoint", "--store", &store]);
    let before = first.await_progress(1, &[]);
    let file = tmp.text("exported");
    let export = |format| ["store", "export", &store, "--format", format, "--output", &file];
    succeed(&export("driftline-zstd"));
    let archive = tmp.text("archive");
    std::fs::rename(&file, &archive).unwrap();
    for format in ["raw", "elf-core"] {
        let out = output(&[&export(format)[..], &["--force"]].concat());
        let stderr = text(&out.stderr);
        assert!(
            out.status.success() && stderr.contains("in checkpoint 1 is not in this file"),
            "{stderr}"
        );
    }
    let state = tmp.text("state");
    let restore = |more: &[&str]| {
        let args = ["restore", "--store", &store, "--serial", "null", "--state-dir", &state];
        fail(1, &[&args[..], more].concat())
    };
    let stderr = restore(&["--same-id"]);
    assert!(stderr.contains("disk\" is in use by another"), "{stderr}");
    first.kill();
    let later = vec![9; bytes];
    std::fs::write(tmp.path("disk"), &later).unwrap();
    let small = disk(&tmp, "small", 4096);
    let stderr = restore(&["--disk", &small]);
    assert!(stderr.contains("has 1048576 bytes, and its file"), "{stderr}");
    assert!(std::fs::read(tmp.path("disk")).unwrap() == later, "refused before it was touched");
    // The first guest may itself be restored, and then needs its disk.
    for more in [&[][..], &["--disk", &spec]] {
        let stderr = restore(more);
        assert!(
            stderr.contains(&format!("is guest {id}'s: give the new guest a file")),
            "{stderr}"
        );
        assert!(
            stderr.contains("--disk id=disk0,path=FILE") && stderr.contains("--same-id"),
            "{stderr}"
        );
        let content = std::fs::read(tmp.path("disk")).unwrap();
        assert!(content == later, "refused before it was touched");
    }
    let named = format!("path={}", tmp.text("named"));
    let lazily = ["--lazy", "--disk", &named];
    let same = &["--same-id"][..];
    for (name, life, from, more) in [
        ("named", "second", &store, &lazily[..]),
        ("disk", "third", &store, same),
        ("disk", "archived", &archive, same),
    ] {
        std::fs::write(tmp.path(name), &later).unwrap();
        let args = [&["restore", "--store", from], more].concat();
        let mut second = Vmm::start(&tmp, life, &args);
        second.await_api();
        second.await_progress(1, &before);
        second.await_message("7 blocks written to 1 of its disks");
        assert!(!second.stderr().contains("as it is now"), "{}", second.stderr());
        assert!(std::fs::read(tmp.path(name)).unwrap() == then, "{name}");
        second.kill();
    }
    // Another file at that path is overwritten only if the command names it.
    std::fs::write(tmp.path("other"), &later).unwrap();
    std::fs::rename(tmp.path("other"), tmp.path("disk")).unwrap();
    let stderr = restore(&["--same-id"]);
    assert!(stderr.contains("disk \"disk0\" is another one on this host"), "{stderr}");
    assert!(std::fs::read(tmp.path("disk")).unwrap() == later, "refused before it was touched");
    // It is not overwritten while its guest may be running elsewhere.
    std::fs::create_dir_all(&state).unwrap();
    let record = tmp.path("state").join(format!("{id}.source.json"));
    std::fs::write(&record, "torn").unwrap();
    let stderr = restore(&["--disk", &spec]);
    assert!(stderr.contains("runs on another host"), "{stderr}");
    assert!(std::fs::read(tmp.path("disk")).unwrap() == later, "refused before it was touched");
    std::fs::remove_file(record).unwrap();
    // A new guest does not overwrite it either: the file is at the path of its parent's disk.
    let any = format!("{spec},identity=any");
    for spec in [&spec, &any] {
        let stderr = restore(&["--disk", spec]);
        let why = format!("has the path of guest {id}'s disk: name another path");
        assert!(stderr.contains(&why), "{stderr}");
    }
    assert!(std::fs::read(tmp.path("disk")).unwrap() == later, "refused before it was touched");
    let args = ["restore", "--store", &store, "--disk", &spec, "--same-id"];
    let mut fourth = Vmm::start(&tmp, "fourth", &args);
    fourth.await_api();
    fourth.await_progress(1, &before);
    assert!(std::fs::read(tmp.path("disk")).unwrap() == then);
    fourth.kill();
}

/// Two hosts share a disk. The host that may run the guest locks it.
#[test]
fn disk_lock_follows_the_guest() {
    if !kvm_or_skip("disk_lock_follows_the_guest") {
        return;
    }
    let tmp = TestDir::new();
    let spec = disk(&tmp, "disk", 1 << 20);
    let small = disk(&tmp, "small", 4096);
    let mut first = Vmm::run(&tmp, "first", &[GUEST, &["--disk", &spec]].concat());
    let before = first.await_progress(1, &[]);
    let in_use = || {
        let stderr = fail(1, &run(&["--disk", &spec]));
        assert!(stderr.contains("disk\" is in use by another"), "{stderr}");
    };

    let (mut unfit, to) = receiver(&tmp, "unfit", &["--disk", &small]);
    let stderr = first.refuse(4, &["send-migration", &to]);
    assert!(stderr.contains("has 1048576 bytes, and its file"), "{stderr}");
    unfit.kill();
    let between = first.await_progress(1, &before);
    in_use();

    let (mut second, to) = receiver(&tmp, "second", &[]);
    first.tell(&["send-migration", &to]);
    assert_eq!(first.wait(), Some(0), "{}", first.stderr());
    second.await_api();
    second.await_progress(1, &between);
    in_use();
    second.tell(&["stop"]);
    assert_eq!(second.wait(), Some(0));
    let mut free = Vmm::run(&tmp, "free", &[GUEST, &["--disk", &spec]].concat());
    free.kill();
}

/// A copy is refused because its identity differs from the guest's disk. The same disk under
/// another name is accepted.
#[test]
fn another_disk_needs_identity_any() {
    if !kvm_or_skip("another_disk_needs_identity_any") {
        return;
    }
    let tmp = TestDir::new();
    let spec = disk(&tmp, "disk", 1 << 20);
    std::fs::copy(tmp.path("disk"), tmp.path("copy")).unwrap();
    let copy = format!("path={}", tmp.text("copy"));
    let may_be = format!("{copy},identity=any");
    let stderr = fail(2, &run(&["--disk", &may_be]));
    assert!(stderr.contains("'identity=any' of --disk is only for receive-migration"), "{stderr}");

    let mut first = Vmm::run(&tmp, "first", &[GUEST, &["--disk", &spec]].concat());
    let before = first.await_progress(1, &[]);
    let (mut unfit, to) = receiver(&tmp, "unfit", &["--disk", &copy]);
    let stderr = first.refuse(4, &["send-migration", &to]);
    let inode = |name| std::os::unix::fs::MetadataExt::ino(&tmp.path(name).metadata().unwrap());
    for part in [
        "disk \"disk0\" is another one on this host".to_owned(),
        format!("inode {}", inode("disk")),
        format!("copy\" is inode {}", inode("copy")),
        format!("--disk id=disk0,{may_be}"),
    ] {
        assert!(stderr.contains(&part), "{part}: {stderr}");
    }
    unfit.kill();
    let between = first.await_progress(1, &before);

    let (mut second, to) = receiver(&tmp, "second", &["--disk", &may_be]);
    first.tell(&["send-migration", &to]);
    assert_eq!(first.wait(), Some(0), "{}", first.stderr());
    second.await_api();
    let on = second.await_progress(1, &between);
    // The next disk is the guest's current one.
    std::fs::hard_link(tmp.path("copy"), tmp.path("link")).unwrap();
    let (mut unfit, to) = receiver(&tmp, "unfit2", &["--disk", &spec]);
    let stderr = second.refuse(4, &["send-migration", &to]);
    assert!(stderr.contains("disk \"disk0\" is another one on this host"), "{stderr}");
    unfit.kill();
    let link = format!("path={}", tmp.text("link"));
    let (mut third, to) = receiver(&tmp, "third", &["--disk", &link]);
    second.tell(&["send-migration", &to]);
    assert_eq!(second.wait(), Some(0), "{}", second.stderr());
    third.await_api();
    third.await_progress(1, &on);
    third.tell(&["stop"]);
    assert_eq!(third.wait(), Some(0));
}

/// Launches a machine with a disk in this process.
fn launch(tmp: &TestDir) -> std::sync::Arc<Machine> {
    disk(tmp, "disk", 1 << 20);
    let disk = driftline_machine::testing::disk("disk0", &tmp.path("disk"), 1 << 20);
    let config = MachineConfig {
        identity: Default::default(),
        mem_bytes: 32 << 20,
        vcpus: 1,
        tracking: Default::default(),
        ring_entries: driftline_machine::config::DEFAULT_RING_ENTRIES,
        backend: Default::default(),
        boot: Boot::Payload("payload,ws=1M".to_owned()),
        cpu: Default::default(),
        devices: vec![DeviceConfig::Disk(disk)],
    };
    let host = HostConfig { serial: SerialSink::Null, ..Default::default() };
    let image = driftline_backends::image(&config).unwrap();
    let host = HostConfig { image, ..host };
    let machine = Machine::launch(config, &host).unwrap();
    machine.resume().unwrap();
    machine
}

#[test]
fn guest_with_a_failing_disk_does_not_move() {
    if !kvm_or_skip("guest_with_a_failing_disk_does_not_move") {
        return;
    }
    let tmp = TestDir::new();
    let (mut destination, to) = receiver(&tmp, "destination", &[]);
    let failing = || {
        // The machine's threads inherit this thread's filter.
        fail_fdatasync().unwrap();
        let guest = launch(&tmp);
        let options = driftline_migrate::SendOptions::new(tmp.path("records"));
        let control = driftline_migrate::SendControl::new();
        let refused =
            driftline_migrate::send(&*guest, &to, &options, &control).unwrap_err().to_string();
        let why = "disk \"disk0\": what the guest wrote could not be made durable in";
        assert!(refused.contains(why) && refused.contains("Input/output error"), "{refused}");
        assert_eq!(guest.run_state(), RunState::Running, "the guest runs at its source");
    };
    std::thread::scope(|scope| scope.spawn(failing).join().unwrap());
    destination.kill();
}
