//! Disks from the command line: refused with a message before anything runs, locked by the process
//! that may run the guest, and moved with the guest.

use std::fs::File;

use crate::common::{TestDir, Vmm, fail, output, receiver, request, text};
use driftline_guest::{Lifecycle, RunState};
use driftline_images::PayloadReport;
use driftline_machine::config::{Boot, DeviceConfig, HostConfig, MachineConfig, SerialSink};
use driftline_machine::machine::KvmMachine;
use driftline_machine::testing::{fail_fdatasync, kvm_or_skip};
use serde_json::Value;

const GUEST: &[&str] = &["--mem", "32M", "--guest", "payload,ws=1M,rate=1M,burst=8,report=200"];

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

/// Runs a restore that must fail with exit code 1 or 2. Returns its message.
fn refuse_restore(tmp: &TestDir, store: &str, more: &[&str]) -> String {
    let state = tmp.text("state");
    let args = ["restore", "--store", store, "--serial", "null", "--state-dir", &state];
    let out = output(&[&args[..], more].concat());
    let stderr = text(&out.stderr);
    assert!(matches!(out.status.code(), Some(1 | 2)), "{more:?}: {}: {stderr}", out.status);
    stderr
}

#[test]
fn disk_in_use_is_refused_to_others() {
    if !kvm_or_skip("disk_in_use_is_refused_to_others") {
        return;
    }
    let tmp = TestDir::new();
    let spec = disk(&tmp, "disk", 1 << 20);
    let guest = Vmm::run(&tmp, "guest", &[GUEST, &["--disk", &spec]].concat());
    for spec in [&spec, &format!("{spec},readonly")] {
        let stderr = fail(1, &run(&["--disk", spec]));
        assert!(stderr.contains("disk\" is in use by another"), "{stderr}");
    }
    let figures = guest.info().unwrap()["devices"][0].clone();
    assert_eq!((&figures["id"], &figures["reads"]), (&"disk0".into(), &0.into()), "{figures}");
    let get = |path: &str| -> Value {
        let answer = request(&guest.socket(), "GET", path, "");
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200"), "{answer}");
        serde_json::from_str(body).unwrap()
    };
    let drive = get("/drives/disk0");
    assert_eq!((&drive["bytes"], &drive["is_read_only"]), (&(1 << 20).into(), &false.into()));
    assert_eq!(get("/vm/config")["drives"], serde_json::json!([drive]));
}

/// The operator preserves the disks. Their checkpoint has memory alone.
#[test]
fn external_disks_are_given_to_the_restore() {
    if !kvm_or_skip("external_disks_are_given_to_the_restore") {
        return;
    }
    let tmp = TestDir::new();
    let (spec, other) = (disk(&tmp, "disk", 1 << 20), disk(&tmp, "other", 1 << 20));
    let disks = ["--disk", &spec, "--disk", &other];
    let mut first = Vmm::run(&tmp, "first", &[GUEST, &disks].concat());
    let (store, socket) = (tmp.text("store"), first.socket());
    let args = ["checkpoint", "--api-sock", &socket, "--store", &store, "--disks", "external"];
    let out = output(&args);
    assert!(out.status.success() && text(&out.stderr).contains("contains no disks"));
    let before = first.await_progress(1, &[]);
    // The guest that has the disk still runs.
    let stderr = refuse_restore(&tmp, &store, &[]);
    assert!(stderr.contains("in use by another"), "{stderr}");
    first.kill();

    let small = disk(&tmp, "small", 4096);
    let wrong = format!("{spec},id=disk7");
    let readonly = format!("{spec},readonly");
    for (disks, why) in [
        (&["--disk", &*small][..], "has 1048576 bytes, and its file"),
        (&["--disk", &wrong], "the guest has no disk \"disk7\""),
        (&["--disk", &readonly], "only its path can be another one"),
        (&["--disk", &spec, "--disk", &other, "--disk", &small], "3 disks are given"),
    ] {
        let stderr = refuse_restore(&tmp, &store, disks);
        assert!(stderr.contains(why), "{stderr}");
    }
    let moved = format!("path={},id=disk0", tmp.text("moved"));
    std::fs::rename(tmp.path("disk"), tmp.path("moved")).unwrap();
    let args = ["restore", "--store", &store, "--disk", &moved];
    let mut second = Vmm::start(&tmp, "second", &args);
    second.await_api();
    second.await_progress(1, &before);
    second.tell(&["stop"]);
    assert_eq!(second.wait(), Some(0));
    // Only the disk that was not given may have other content than in the checkpoint.
    let warned =
        |disk| second.stderr().contains(&format!("disk \"{disk}\" has the current content"));
    assert!(warned("disk1") && !warned("disk0"), "{}", second.stderr());
}

const DISK_BYTES: usize = 1 << 20;

/// A guest with a disk, and a checkpoint that has seven blocks of the disk.
struct CheckpointedGuest<'p> {
    tmp: &'p TestDir,
    vmm: Vmm<'p>,
    id: String,
    spec: String,
    store: String,
    /// The disk's content in the checkpoint.
    content: Vec<u8>,
    reports: Vec<PayloadReport>,
}

impl<'p> CheckpointedGuest<'p> {
    fn new(tmp: &'p TestDir) -> Self {
        let spec = disk(tmp, "disk", DISK_BYTES as u64);
        let mut content = vec![0; DISK_BYTES];
        content[4096 * 3..4096 * 10].fill(7);
        std::fs::write(tmp.path("disk"), &content).unwrap();
        let vmm = Vmm::run(tmp, "first", &[GUEST, &["--disk", &spec]].concat());
        let id = vmm.info().unwrap()["vm_id"].as_str().unwrap().to_owned();
        let store = tmp.text("store");
        vmm.tell(&["checkpoint", "--store", &store]);
        let reports = vmm.await_progress(1, &[]);
        Self { tmp, vmm, id, spec, store, content, reports }
    }

    /// Runs a restore that must fail and must not touch the disk.
    fn refuse_restore(&self, more: &[&str]) -> String {
        let before = std::fs::read(self.tmp.path("disk")).unwrap();
        let stderr = refuse_restore(self.tmp, &self.store, more);
        let after = std::fs::read(self.tmp.path("disk")).unwrap();
        assert!(before == after, "the refused restore has written to the disk");
        stderr
    }

    /// Restores the guest as `name`, from a store or an archive. The disk `file` must have the
    /// content of the checkpoint afterwards.
    fn restore(&self, name: &'static str, from: &str, file: &str, more: &[&str]) {
        std::fs::write(self.tmp.path(file), vec![9; DISK_BYTES]).unwrap();
        let args = [&["restore", "--store", from], more].concat();
        let mut vmm = Vmm::start(self.tmp, name, &args);
        vmm.await_api();
        vmm.await_progress(1, &self.reports);
        vmm.await_message("7 blocks written to 1 of its disks");
        assert!(!vmm.stderr().contains("has the current content"), "{}", vmm.stderr());
        assert!(std::fs::read(self.tmp.path(file)).unwrap() == self.content, "{file}");
        vmm.kill();
    }
}

/// The restored guest has the disk's content from the checkpoint, whatever was written since.
#[test]
fn restore_brings_the_disk_back() {
    if !kvm_or_skip("restore_brings_the_disk_back") {
        return;
    }
    let tmp = TestDir::new();
    let mut guest = CheckpointedGuest::new(&tmp);
    let archive = tmp.text("archive");
    let export = |format: &str, file: &str| {
        let export = ["store", "export", &guest.store, "--format", format, "--output", file];
        let out = output(&export);
        assert!(out.status.success(), "{}", text(&out.stderr));
        text(&out.stderr)
    };
    export("driftline-zstd", &archive);
    for format in ["raw", "elf-core"] {
        let stderr = export(format, &tmp.text(format));
        assert!(stderr.contains("in checkpoint 1 is not in this file"), "{stderr}");
    }
    guest.vmm.kill();
    let named = format!("path={}", tmp.text("named"));
    guest.restore("second", &guest.store, "named", &["--lazy", "--disk", &named]);
    guest.restore("third", &guest.store, "disk", &["--same-id"]);
    guest.restore("archived", &archive, "disk", &["--same-id"]);
}

/// A file is overwritten only if the command names it, or it is the disk of the guest that is
/// recovered.
#[test]
fn restore_overwrites_only_its_own_disk() {
    if !kvm_or_skip("restore_overwrites_only_its_own_disk") {
        return;
    }
    let tmp = TestDir::new();
    let mut guest = CheckpointedGuest::new(&tmp);
    let (id, spec) = (guest.id.clone(), guest.spec.clone());
    let stderr = guest.refuse_restore(&["--same-id"]);
    assert!(stderr.contains("disk\" is in use by another"), "{stderr}");
    guest.vmm.kill();
    let small = disk(&tmp, "small", 4096);
    let stderr = guest.refuse_restore(&["--disk", &small]);
    assert!(stderr.contains("has 1048576 bytes, and its file"), "{stderr}");
    // The first guest may itself be restored, and then needs its disk.
    for more in [&[][..], &["--disk", &spec]] {
        let stderr = guest.refuse_restore(more);
        let owned = format!("is guest {id}'s: give the new guest a file");
        assert!(stderr.contains(&owned), "{stderr}");
        let options = ["--disk id=disk0,path=FILE", "--same-id"];
        assert!(options.iter().all(|option| stderr.contains(option)), "{stderr}");
    }
    // Another file at that path.
    std::fs::write(tmp.path("other"), vec![9; DISK_BYTES]).unwrap();
    std::fs::rename(tmp.path("other"), tmp.path("disk")).unwrap();
    let stderr = guest.refuse_restore(&["--same-id"]);
    assert!(stderr.contains("disk \"disk0\" is a different disk on this host"), "{stderr}");
    // The guest may be running elsewhere.
    std::fs::create_dir_all(tmp.path("state")).unwrap();
    let record = tmp.path("state").join(format!("{id}.source.json"));
    std::fs::write(&record, "torn").unwrap();
    let stderr = guest.refuse_restore(&["--disk", &spec]);
    assert!(stderr.contains("runs on another host"), "{stderr}");
    std::fs::remove_file(record).unwrap();
    // The file is at the path of the new guest's parent's disk.
    for spec in [&spec, &format!("{spec},identity=any")] {
        let stderr = guest.refuse_restore(&["--disk", spec]);
        let why = format!("has the path of guest {id}'s disk: name another path");
        assert!(stderr.contains(&why), "{stderr}");
    }
    guest.restore("second", &guest.store, "disk", &["--disk", &spec, "--same-id"]);
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
        "disk \"disk0\" is a different disk on this host".to_owned(),
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
    assert!(stderr.contains("disk \"disk0\" is a different disk on this host"), "{stderr}");
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
fn launch(tmp: &TestDir) -> std::sync::Arc<KvmMachine> {
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
    let machine = KvmMachine::launch(config, &host).unwrap();
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
        let why = "disk \"disk0\": writes of the guest could not be made durable in";
        assert!(refused.contains(why) && refused.contains("Input/output error"), "{refused}");
        assert_eq!(guest.run_state(), RunState::Running, "the guest runs at its source");
    };
    std::thread::scope(|scope| scope.spawn(failing).join().unwrap());
    destination.kill();
}
