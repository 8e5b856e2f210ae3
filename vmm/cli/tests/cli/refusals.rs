//! Impossible requests are refused, before anything runs, with a message that names the cause:
//! kernels, RAM disks, and features that the destination of a migration lacks.

use std::fs::File;
use std::sync::Arc;

use crate::common::{TestDir, Vmm, fail, receiver, wait_for};
use driftline_dirty_tracker::Layout;
use driftline_guest::{
    DirtyLog, GuestContents, GuestIdentity, HandOver, Lifecycle, Line, Populate, RunState,
    Stateful, VmId, WriteThrottle,
};
use driftline_machine::config::{Boot, CpuidWord, HostConfig, MachineConfig, SerialSink};
use driftline_machine::machine::KvmMachine;
use driftline_machine::testing::{TestTap, kvm_or_skip, skip};

const GUEST: &[&str] = &["--mem", "32M", "--guest", "payload,ws=1M,rate=1M,burst=8,report=200"];

/// Returns the header of a bzImage with this boot protocol version.
fn bzimage(version: u16) -> Vec<u8> {
    let mut file = vec![0; 1024 + 4096];
    let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    put(0x1f1, &[1]);
    put(0x1f4, &256u32.to_le_bytes());
    put(0x1fe, &[0x55, 0xaa, 0xeb, 0x6a]);
    put(0x202, b"HdrS");
    put(0x206, &version.to_le_bytes());
    put(0x211, &[1]);
    put(0x22c, &0x7fff_ffffu32.to_le_bytes());
    put(0x230, &0x20_0000u32.to_le_bytes());
    put(0x234, &[1]);
    put(0x236, &1u16.to_le_bytes());
    put(0x238, &2047u32.to_le_bytes());
    put(0x258, &0x100_0000u64.to_le_bytes());
    put(0x260, &0x10_0000u32.to_le_bytes());
    file
}

#[test]
fn unbootable_image_is_refused_with_the_reason() {
    if !kvm_or_skip("unbootable_image_is_refused_with_the_reason") {
        return;
    }
    let tmp = TestDir::new();
    let refused = |code, more: &[&str]| {
        fail(code, &[&["run", "--mem", "64M", "--serial", "null"], more].concat())
    };
    for (version, why) in [
        (0x0203, "its boot protocol is 2.03, and the 64-bit entry needs 2.12"),
        (0x0300, "its boot protocol is 3.00, and only protocol 2 is supported"),
    ] {
        let path = tmp.text("bzImage");
        std::fs::write(&path, bzimage(version)).unwrap();
        let stderr = refused(1, &["--kernel", &path]);
        let all = format!("driftline: kernel \"{path}\" cannot be booted: {why}\n");
        assert_eq!(stderr, all);
    }
    let (kernel, initrd) = (tmp.text("kernel"), tmp.text("initrd"));
    std::fs::write(&kernel, bzimage(0x020f)).unwrap();
    File::create(&initrd).unwrap().set_len(65 << 20).unwrap();
    let stderr = refused(1, &["--kernel", &kernel, "--initrd", &initrd]);
    let all = format!(
        "driftline: initrd \"{initrd}\" does not fit in guest memory of 67108864 bytes: its \
         68157440 bytes must lie between 0x1100000 and 0x4000000\n"
    );
    assert_eq!(stderr, all);
    std::fs::write(&kernel, "#!/bin/sh\nexit 0\n# long enough for a header\n").unwrap();
    let stderr = refused(1, &["--kernel", &kernel]);
    assert!(stderr.contains("is neither an ELF file nor a bzImage"), "{stderr}");
    for program in ["/bin/ls", env!("CARGO_BIN_EXE_driftline")] {
        let stderr = refused(1, &["--kernel", program]);
        let is = "is a user-space program (dynamic ELF), not a kernel";
        assert!(stderr.starts_with(&format!("driftline: kernel \"{program}\" {is}")), "{stderr}");
    }
    let stderr = refused(1, &["--kernel", &tmp.text("none")]);
    assert!(stderr.contains("cannot be read: No such file or directory"), "{stderr}");
}

/// A guest whose reported configuration differs from its machine.
struct Pretender {
    machine: Arc<KvmMachine>,
    config: Vec<u8>,
}

driftline_guest::delegate!(
    Pretender as pretender => *pretender.machine;
    GuestContents, Populate, DirtyLog, WriteThrottle, Lifecycle, Stateful, HandOver,
);

impl GuestIdentity for Pretender {
    fn vm_id(&self) -> VmId {
        self.machine.vm_id()
    }

    fn line(&self) -> Line {
        self.machine.line()
    }

    fn config(&self) -> Vec<u8> {
        self.config.clone()
    }

    fn layout(&self) -> &Layout {
        self.machine.layout()
    }
}

#[test]
fn missing_cpu_feature_is_refused_before_memory() {
    const TEST: &str = "missing_cpu_feature_is_refused_before_memory";
    if !kvm_or_skip(TEST) {
        return;
    }
    let tmp = TestDir::new();
    let host = HostConfig { serial: SerialSink::Null, ..Default::default() };
    let config = MachineConfig {
        identity: Default::default(),
        mem_bytes: 32 << 20,
        vcpus: 1,
        tracking: Default::default(),
        ring_entries: driftline_machine::config::DEFAULT_RING_ENTRIES,
        backend: Default::default(),
        boot: Boot::Payload("payload,ws=1M".to_owned()),
        cpu: Default::default(),
        devices: Vec::new(),
    };
    let image = driftline_backends::image(&config).unwrap();
    let host = HostConfig { image, ..host };
    let machine = KvmMachine::launch(config, &host).unwrap();
    machine.resume().unwrap();
    let mut config = MachineConfig::decode(&machine.config()).unwrap();
    // No processor has this bit.
    let word = CpuidWord { function: 0x8000_0008, index: 0, registers: [0, 1 << 31, 0, 0] };
    config.cpu.exposed.retain(|w| w.function != word.function);
    config.cpu.exposed.push(word);
    let guest = Pretender { machine, config: config.encode() };
    let (mut destination, to) = receiver(&tmp, "destination", &[]);
    let options = driftline_migrate::SendOptions::new(tmp.path("records"));
    let control = driftline_migrate::SendControl::new();
    let refused = driftline_migrate::send(&guest, &to, &options, &control).unwrap_err().to_string();
    let lacks = "this host lacks CPUID leaf 0x80000008 EBX bit 31: the guest has seen it";
    assert!(refused.contains(lacks), "{refused}");
    assert_eq!(guest.run_state(), RunState::Running, "the guest runs at its source");
    let sent = control.progress().sent_bytes;
    assert!(sent < 64 << 10, "{sent} bytes were sent, and so was memory");
    wait_for("the destination's log", || destination.stderr().contains(lacks).then_some(()));
    destination.kill();
}

/// The destination refuses a disk or tap that another guest uses, before it allocates any memory.
/// It accepts one that the migrating guest itself uses, if the source is on the same host.
#[test]
fn device_of_another_guest_is_refused_early() {
    const TEST: &str = "device_of_another_guest_is_refused_early";
    if !kvm_or_skip(TEST) {
        return;
    }
    let tmp = TestDir::new();
    let disk = |name: &str| {
        File::create(tmp.path(name)).unwrap().set_len(1 << 20).unwrap();
        format!("path={}", tmp.text(name))
    };
    let (own, others) = (disk("own"), disk("others"));
    let other = Vmm::run(&tmp, "other", &[GUEST, &["--disk", &others]].concat());
    let guest = Vmm::run(&tmp, "guest", &[GUEST, &["--disk", &own]].concat());
    let before = guest.await_progress(1, &[]);
    let (mut unfit, to) = receiver(&tmp, "unfit", &["--disk", &others]);
    let stderr = guest.refuse(4, &["send-migration", &to]);
    assert!(stderr.contains("others\" is in use by another"), "{stderr}");
    assert_eq!(guest.state(), "running");
    unfit.kill();
    drop(other);
    // The same guest, with its own disk: the hand-over releases it.
    let (mut moved, to) = receiver(&tmp, "moved", &[]);
    guest.tell(&["send-migration", &to]);
    moved.await_api();
    moved.await_progress(1, &before);
    moved.tell(&["stop"]);

    let (used_tap, spare_tap) = match (TestTap::new("u"), TestTap::new("s")) {
        (Ok(used), Ok(spare)) => (used, spare),
        (Err(why), _) | (_, Err(why)) => return skip(TEST, &why.to_string()),
    };
    let (used, spare) = (&format!("tap={}", used_tap.0), &format!("tap={}", spare_tap.0));
    let mut holder = Vmm::run(&tmp, "holder", &[GUEST, &["--net", used]].concat());
    let stderr = fail(1, &[&["run", "--serial", "null"], GUEST, &["--net", used]].concat());
    assert!(stderr.contains("is in use by another"), "{stderr}");
    let (mut next, to) = receiver(&tmp, "next", &[]);
    holder.tell(&["send-migration", &to]);
    next.await_api();
    assert_eq!(holder.wait(), Some(0), "{}", holder.stderr());
    let stranger = Vmm::run(&tmp, "stranger", &[GUEST, &["--net", spare]].concat());
    let (mut unfit, to) = receiver(&tmp, "unfit2", &["--net", used]);
    let stderr = stranger.refuse(4, &["send-migration", &to]);
    assert!(stderr.contains("is in use by another"), "{stderr}");
    assert_eq!(stranger.state(), "running");
    unfit.kill();
    next.tell(&["stop"]);
}

#[test]
fn device_given_twice_is_refused() {
    if !kvm_or_skip("device_given_twice_is_refused") {
        return;
    }
    let tmp = TestDir::new();
    let path = tmp.text("disk");
    File::create(&path).unwrap().set_len(1 << 20).unwrap();
    std::os::unix::fs::symlink(&path, tmp.path("link")).unwrap();
    let run = |more: &[&str]| fail(1, &[&["run", "--serial", "null"], GUEST, more].concat());
    let (one, other) = (format!("path={path}"), format!("path={}", tmp.text("link")));
    for second in [&one, &other, &format!("{other},readonly")] {
        let stderr = run(&["--disk", &one, "--disk", second]);
        assert!(stderr.contains("disks \"disk0\" and \"disk1\" use the same file"), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
    let stderr = run(&["--net", "tap=nowhere", "--net", "tap=nowhere"]);
    assert!(stderr.contains("two network interfaces over the tap \"nowhere\""), "{stderr}");
    // Two read-only users are allowed.
    let both = format!("{one},readonly");
    let shared = format!("{other},readonly");
    let mut vmm = Vmm::run(&tmp, "both", &[GUEST, &["--disk", &both, "--disk", &shared]].concat());
    vmm.kill();
}
