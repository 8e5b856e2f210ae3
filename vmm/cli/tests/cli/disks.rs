//! Disks from the command line: refused with a message before anything runs, locked by the process
//! that may run the guest, and moved with the guest.

use std::fs::File;

use crate::common::{Place, Vmm, fail, output, receiver, request, succeed, text};
use driftline_guest::{Lifecycle, RunState};
use driftline_machine::config::{Boot, DeviceConfig, HostConfig, MachineConfig, SerialSink};
use driftline_machine::machine::Machine;
use driftline_machine::testing::{fail_fdatasync, kvm_or_skip};
use serde_json::Value;

const GUEST: &[&str] = &["--mem", "32M", "--guest", "payload,ws=1M"];

fn disk(place: &Place, name: &str, bytes: u64) -> String {
    let path = place.path(name);
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
    let place = Place::new();
    let none = format!("path={}", place.text("none"));
    let said = fail(1, &run(&["--disk", &none]));
    assert!(said.contains("none\" cannot be opened for writing"), "{said}");
    let directory = format!("path={},readonly", place.text("."));
    let said = fail(1, &run(&["--disk", &directory]));
    assert!(said.contains("neither a regular file nor a block device"), "{said}");
    for bytes in [511, 513, (1 << 20) - 1] {
        let odd = disk(&place, "odd", bytes);
        let said = fail(1, &run(&["--disk", &odd]));
        let why = format!("has {bytes} bytes, which are not whole sectors of 512");
        assert!(said.contains(&why), "{said}");
    }
    let empty = disk(&place, "empty", 0);
    let said = fail(1, &run(&["--disk", &empty]));
    assert!(said.contains("has 0 bytes: a disk has at least one sector"), "{said}");
    let good = disk(&place, "good", 1 << 20);
    let twice = format!("{good},id=disk0");
    let said = fail(1, &run(&["--disk", &good, "--disk", &twice]));
    assert!(said.contains("two devices with the name \"disk0\""), "{said}");
    let said = fail(1, &run(&["--backend", "threads", "--disk", &good]));
    assert!(said.contains("the threads backend has no devices"), "{said}");
    for bad in [
        "good",
        "path=",
        "path=/d,size=1",
        "path=/d,id=a b",
        "path=/d,serial=123456789012345678901",
    ] {
        let said = fail(2, &run(&["--disk", bad]));
        assert!(said.contains("--disk"), "{said}");
    }
}

#[test]
fn disk_in_use_is_refused_to_others() {
    const TEST: &str = "disk_in_use_is_refused_to_others";
    if !kvm_or_skip(TEST) {
        return;
    }
    let place = Place::new();
    let spec = disk(&place, "disk", 1 << 20);
    let mut first = Vmm::run(&place, "first", &[GUEST, &["--disk", &spec]].concat());
    let said = fail(1, &run(&["--disk", &spec]));
    assert!(said.contains("disk\" is in use by another"), "{said}");
    let said = fail(1, &run(&["--disk", &format!("{spec},readonly")]));
    assert!(said.contains("disk\" is in use by another"), "{said}");

    let store = place.text("store");
    let socket = first.socket();
    let args = ["checkpoint", "--api-sock", &socket, "--store", &store, "--disks", "external"];
    let said = output(&args);
    assert!(said.status.success() && text(&said.stderr).contains("disks are yours to keep"));
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
        let state = place.text("state");
        fail(1, &[&args[..], &["--state-dir", &state], more].concat())
    };
    let said = restore(&[]);
    assert!(said.contains("in use by another"), "{said}");
    first.kill();

    let small = disk(&place, "small", 4096);
    let wrong = format!("{spec},id=disk7");
    let readonly = format!("{spec},readonly");
    for (disks, why) in [
        (vec!["--disk", &small], "has 1048576 bytes, and its file"),
        (vec!["--disk", &wrong], "the guest has no disk \"disk7\""),
        (vec!["--disk", &readonly], "only its path can be another one"),
        (vec!["--disk", &spec, "--disk", &small], "2 disks are given"),
    ] {
        let args = ["restore", "--store", &store, "--serial", "null"];
        let state = place.text("state");
        let out = output(&[&args[..], &["--state-dir", &state], &disks].concat());
        let said = text(&out.stderr);
        assert!(!out.status.success() && said.contains(why), "{said}");
    }
    let moved = format!("path={},id=disk0", place.text("moved"));
    std::fs::rename(place.path("disk"), place.path("moved")).unwrap();
    let args = ["restore", "--store", &store, "--disk", &moved];
    let mut second = Vmm::start(&place, "second", &args);
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
    let place = Place::new();
    let (spec, bytes) = (disk(&place, "disk", 1 << 20), 1 << 20);
    let mut then = vec![0; bytes];
    then[4096 * 3..4096 * 10].fill(7);
    std::fs::write(place.path("disk"), &then).unwrap();
    let mut first = Vmm::run(&place, "first", &[GUEST, &["--disk", &spec]].concat());
    let id = first.info().unwrap()["vm_id"].as_str().unwrap().to_owned();
    let store = place.text("store");
    first.tell(&["checkpoint", "--store", &store]);
    let before = first.await_progress(1, &[]);
    let file = place.text("exported");
    let export = |format| ["store", "export", &store, "--format", format, "--output", &file];
    succeed(&export("driftline-zstd"));
    let archive = place.text("archive");
    std::fs::rename(&file, &archive).unwrap();
    for format in ["raw", "elf-core"] {
        let out = output(&[&export(format)[..], &["--force"]].concat());
        let said = text(&out.stderr);
        assert!(
            out.status.success() && said.contains("in checkpoint 1 is not in this file"),
            "{said}"
        );
    }
    let state = place.text("state");
    let restore = |more: &[&str]| {
        let args = ["restore", "--store", &store, "--serial", "null", "--state-dir", &state];
        fail(1, &[&args[..], more].concat())
    };
    let said = restore(&["--same-id"]);
    assert!(said.contains("disk\" is in use by another"), "{said}");
    first.kill();
    let later = vec![9; bytes];
    std::fs::write(place.path("disk"), &later).unwrap();
    let small = disk(&place, "small", 4096);
    let said = restore(&["--disk", &small]);
    assert!(said.contains("has 1048576 bytes, and its file"), "{said}");
    assert!(std::fs::read(place.path("disk")).unwrap() == later, "refused before it was touched");
    // The first guest may itself be restored, and then needs its disk.
    for more in [&[][..], &["--disk", &spec]] {
        let said = restore(more);
        assert!(said.contains(&format!("is guest {id}'s: give the new guest a file")), "{said}");
        assert!(said.contains("--disk id=disk0,path=FILE") && said.contains("--same-id"), "{said}");
        let content = std::fs::read(place.path("disk")).unwrap();
        assert!(content == later, "refused before it was touched");
    }
    let named = format!("path={}", place.text("named"));
    let lazily = ["--lazy", "--disk", &named];
    let same = &["--same-id"][..];
    for (name, life, from, more) in [
        ("named", "second", &store, &lazily[..]),
        ("disk", "third", &store, same),
        ("disk", "archived", &archive, same),
    ] {
        std::fs::write(place.path(name), &later).unwrap();
        let args = [&["restore", "--store", from], more].concat();
        let mut second = Vmm::start(&place, life, &args);
        second.await_api();
        second.await_progress(1, &before);
        second.await_said("7 blocks written to 1 of its disks");
        assert!(!second.said().contains("as it is now"), "{}", second.said());
        assert!(std::fs::read(place.path(name)).unwrap() == then, "{name}");
        second.kill();
    }
    // Another file at that path is overwritten only if the command names it.
    std::fs::write(place.path("other"), &later).unwrap();
    std::fs::rename(place.path("other"), place.path("disk")).unwrap();
    let said = restore(&["--same-id"]);
    assert!(said.contains("disk \"disk0\" is another one on this host"), "{said}");
    assert!(std::fs::read(place.path("disk")).unwrap() == later, "refused before it was touched");
    // It is not overwritten while its guest may be running elsewhere.
    std::fs::create_dir_all(&state).unwrap();
    let record = place.path("state").join(format!("{id}.source.json"));
    std::fs::write(&record, "torn").unwrap();
    let said = restore(&["--disk", &spec]);
    assert!(said.contains("runs on another host"), "{said}");
    assert!(std::fs::read(place.path("disk")).unwrap() == later, "refused before it was touched");
    std::fs::remove_file(record).unwrap();
    // A new guest does not overwrite it either: the file is at the path of its parent's disk.
    let any = format!("{spec},identity=any");
    for spec in [&spec, &any] {
        let said = restore(&["--disk", spec]);
        let why = format!("has the path of guest {id}'s disk: name another path");
        assert!(said.contains(&why), "{said}");
    }
    assert!(std::fs::read(place.path("disk")).unwrap() == later, "refused before it was touched");
    let args = ["restore", "--store", &store, "--disk", &spec, "--same-id"];
    let mut fourth = Vmm::start(&place, "fourth", &args);
    fourth.await_api();
    fourth.await_progress(1, &before);
    assert!(std::fs::read(place.path("disk")).unwrap() == then);
    fourth.kill();
}

/// Two hosts share a disk. The host that may run the guest locks it.
#[test]
fn disk_lock_follows_the_guest() {
    if !kvm_or_skip("disk_lock_follows_the_guest") {
        return;
    }
    let place = Place::new();
    let spec = disk(&place, "disk", 1 << 20);
    let small = disk(&place, "small", 4096);
    let mut first = Vmm::run(&place, "first", &[GUEST, &["--disk", &spec]].concat());
    let before = first.await_progress(1, &[]);
    let in_use = || {
        let said = fail(1, &run(&["--disk", &spec]));
        assert!(said.contains("disk\" is in use by another"), "{said}");
    };

    let (mut unfit, to) = receiver(&place, "unfit", &["--disk", &small]);
    let said = first.refuse(4, &["send-migration", &to]);
    assert!(said.contains("has 1048576 bytes, and its file"), "{said}");
    unfit.kill();
    let between = first.await_progress(1, &before);
    in_use();

    let (mut second, to) = receiver(&place, "second", &[]);
    first.tell(&["send-migration", &to]);
    assert_eq!(first.wait(), Some(0), "{}", first.said());
    second.await_api();
    second.await_progress(1, &between);
    in_use();
    second.tell(&["stop"]);
    assert_eq!(second.wait(), Some(0));
    let mut free = Vmm::run(&place, "free", &[GUEST, &["--disk", &spec]].concat());
    free.kill();
}

/// A copy is refused because its identity differs from the guest's disk. The same disk under
/// another name is accepted.
#[test]
fn another_disk_needs_identity_any() {
    if !kvm_or_skip("another_disk_needs_identity_any") {
        return;
    }
    let place = Place::new();
    let spec = disk(&place, "disk", 1 << 20);
    std::fs::copy(place.path("disk"), place.path("copy")).unwrap();
    let copy = format!("path={}", place.text("copy"));
    let may_be = format!("{copy},identity=any");
    let said = fail(2, &run(&["--disk", &may_be]));
    assert!(said.contains("'identity=any' of --disk is only for receive-migration"), "{said}");

    let mut first = Vmm::run(&place, "first", &[GUEST, &["--disk", &spec]].concat());
    let before = first.await_progress(1, &[]);
    let (mut unfit, to) = receiver(&place, "unfit", &["--disk", &copy]);
    let said = first.refuse(4, &["send-migration", &to]);
    let inode = |name| std::os::unix::fs::MetadataExt::ino(&place.path(name).metadata().unwrap());
    for part in [
        "disk \"disk0\" is another one on this host".to_owned(),
        format!("inode {}", inode("disk")),
        format!("copy\" is inode {}", inode("copy")),
        format!("--disk id=disk0,{may_be}"),
    ] {
        assert!(said.contains(&part), "{part}: {said}");
    }
    unfit.kill();
    let between = first.await_progress(1, &before);

    let (mut second, to) = receiver(&place, "second", &["--disk", &may_be]);
    first.tell(&["send-migration", &to]);
    assert_eq!(first.wait(), Some(0), "{}", first.said());
    second.await_api();
    let on = second.await_progress(1, &between);
    // The next disk is the guest's current one.
    std::fs::hard_link(place.path("copy"), place.path("link")).unwrap();
    let (mut unfit, to) = receiver(&place, "unfit2", &["--disk", &spec]);
    let said = second.refuse(4, &["send-migration", &to]);
    assert!(said.contains("disk \"disk0\" is another one on this host"), "{said}");
    unfit.kill();
    let link = format!("path={}", place.text("link"));
    let (mut third, to) = receiver(&place, "third", &["--disk", &link]);
    second.tell(&["send-migration", &to]);
    assert_eq!(second.wait(), Some(0), "{}", second.said());
    third.await_api();
    third.await_progress(1, &on);
    third.tell(&["stop"]);
    assert_eq!(third.wait(), Some(0));
}

/// Launches a machine with a disk in this process.
fn launch(place: &Place) -> std::sync::Arc<Machine> {
    disk(place, "disk", 1 << 20);
    let disk = driftline_machine::testing::disk("disk0", &place.path("disk"), 1 << 20);
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
    let place = Place::new();
    let (mut destination, to) = receiver(&place, "destination", &[]);
    let failing = || {
        // The machine's threads inherit this thread's filter.
        fail_fdatasync().unwrap();
        let guest = launch(&place);
        let options = driftline_migrate::SendOptions::new(place.path("records"));
        let control = driftline_migrate::SendControl::new();
        let refused =
            driftline_migrate::send(&*guest, &to, &options, &control).unwrap_err().to_string();
        let why = "disk \"disk0\": what the guest wrote could not be made durable in";
        assert!(refused.contains(why) && refused.contains("Input/output error"), "{refused}");
        assert_eq!(guest.run_state(), RunState::Running, "it goes on where it was");
    };
    std::thread::scope(|scope| scope.spawn(failing).join().unwrap());
    destination.kill();
}
