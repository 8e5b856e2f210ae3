//! A Linux guest that frees memory: freed memory is neither stored nor resident on this host. Needs
//! the Linux image that `images/linux/build.sh` builds.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use driftline_checkpoint::{Checkpointer, EpochReport, restore};
use driftline_guest::{Clock, HandOver, Lifecycle};
use driftline_machine::config::{BalloonConfig, Boot, DeviceConfig, MachineConfig};
use driftline_machine::machine::{KvmMachine, MachineFactory};
use driftline_machine::testing::{linux_guest, skip};
use driftline_machine::vm::Vm;
use driftline_store::Store;
use tempfile::TempDir;

use crate::harness::*;

const CMDLINE: &str = "console=ttyS0 reboot=k panic=-1 quiet noxsave tsc=reliable no_timer_check \
     rodata=off clearcpuid=popcnt,smap,erms,fsrm noreplace-smp rdinit=/frees \
     GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX,-AVX2,-AVX512F,-AVX512VL,-AVX512BW";

/// Fills files in memory, and removes them once part of the guest's memory is in the balloon. Then
/// compacts the memory in use, so that free memory forms large blocks.
const FREES: &str = r#"#!/bin/busybox sh
/bin/busybox mkdir /proc /files
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t tmpfs files /files
total() {
    while read -r key value unit; do
        if [ "$key" = MemTotal: ]; then total=$value; fi
    done </proc/meminfo
}
for i in 0 1 2 3 4 5 6 7 8 9 a b c d e f g h i j; do
    /bin/busybox cat /bin/busybox >/files/$i
done
total
first=$total
echo "guest: holds"
while [ "$total" = "$first" ]; do
    /bin/busybox sleep 0.2
    total
done
/bin/busybox rm /files/?
echo 1 >/proc/sys/vm/compact_memory
echo "guest: freed"
while :; do
    /bin/busybox sleep 0.5
    echo "guest: alive"
done
"#;

/// Minimum freed memory that the host learns of, in bytes. The guest frees twenty times a static
/// busybox, nearly 40 MiB, but Linux reports blocks of 2 MiB and hints blocks of 4 MiB, which must
/// be entirely free.
const FREED: u64 = 12 * MIB;

/// Returns the image's initramfs with one more file, an executable.
fn initramfs(image: &Path, dir: &TempDir, name: &str, content: &str) -> PathBuf {
    let mut archive = fs::read(image.join("initramfs.cpio")).unwrap();
    let mut entry = |name: &str, mode: u32, content: &str| {
        archive.resize(archive.len().next_multiple_of(4), 0);
        let (size, len) = (content.len(), name.len() + 1);
        let fields = [1, mode as usize, 0, 0, 1, 0, size, 0, 0, 0, 0, len, 0];
        let fields: String = fields.iter().map(|f| format!("{f:08X}")).collect();
        archive.extend(format!("070701{fields}{name}\0").bytes());
        archive.resize(archive.len().next_multiple_of(4), 0);
        archive.extend(content.bytes());
    };
    entry(name, 0o100_755, content);
    entry("TRAILER!!!", 0, "");
    let path = dir.path().join("initramfs.cpio");
    fs::write(&path, archive).unwrap();
    path
}

struct FreeingGuest {
    machine: Arc<KvmMachine>,
    console: SerialLog,
    dir: TempDir,
}

impl FreeingGuest {
    /// Boots a guest that holds its files in memory.
    fn boot(image: &Path, balloon: BalloonConfig) -> Self {
        let (console, dir) = (SerialLog::new(), tempfile::tempdir().unwrap());
        let initrd = Some(initramfs(image, &dir, "frees", FREES));
        let kernel = image.join("vmlinux");
        let boot = Boot::Kernel { kernel, initrd, cmdline: CMDLINE.to_owned(), bare: false };
        let devices = vec![DeviceConfig::Balloon(balloon)];
        let config = MachineConfig { mem_bytes: 128 * MIB, boot, devices, ..payload("") };
        let machine = launch(config, &console);
        machine.resume().unwrap();
        console.wait_for("memory held", |text| text.contains("guest: holds"));
        Self { machine, console, dir }
    }

    /// Makes the guest free its files.
    fn free(&self) {
        self.machine.balloon().unwrap().set_target(MIB);
        self.console.wait_for("memory freed", |text| text.contains("guest: freed"));
    }

    fn checkpointer(&self, store: &str) -> Checkpointer {
        let store = Store::create_or_open(&self.dir.path().join(store)).unwrap();
        Checkpointer::new(self.machine.clone(), store).unwrap()
    }

    fn discarded(&self) -> u64 {
        self.machine.balloon().unwrap().stats().discarded_bytes
    }

    /// Verifies that the guest continues from the newest epoch of the store.
    fn assert_continues(&self, store: &str) {
        self.machine.stop("it is restored");
        let store = Store::open(&self.dir.path().join(store)).unwrap();
        let console = SerialLog::new();
        let factory = MachineFactory::new(console.host());
        let (restored, _) = restore(&store, None, &factory, Clock::Continue).unwrap();
        restored.acquire().unwrap();
        restored.resume().unwrap();
        console.wait_for("a sign of life", |text| text.matches("guest: alive").count() > 2);
        assert_eq!(restored.balloon().unwrap().stats().actual_bytes, MIB);
        if restored.balloon().unwrap().statistics_interval_s() > 0 {
            await_statistics(&restored);
        }
        let output = console.text();
        assert!(!output.contains("BUG") && !output.contains("Oops"), "{output}");
    }
}

/// Waits until the guest has given statistics of its memory several times.
fn await_statistics(machine: &KvmMachine) {
    let balloon = machine.balloon().unwrap();
    let end = Instant::now() + LONG;
    while balloon.stats().counts.statistics < 4 {
        assert!(Instant::now() < end, "{:?}", balloon.statistics());
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    let statistics = balloon.statistics();
    let values: BTreeMap<_, _> = statistics.values().collect();
    let (free, total) = (values["free_memory"], values["total_memory"]);
    assert!(0 < free && free < total && total < 128 * MIB, "{values:?}");
    assert_eq!(balloon.stats().counts.statistics_failures, 0);
}

fn bytes(report: &EpochReport) -> u64 {
    report.frames * 4096
}

#[test]
fn reported_free_memory_is_neither_resident_nor_stored() {
    const NAME: &str = "reported_free_memory_is_neither_resident_nor_stored";
    if !kvm_or_skip(NAME) {
        return;
    }
    let image = match linux_guest() {
        Ok(image) => image,
        Err(why) => return skip(NAME, &why.to_string()),
    };
    let config = BalloonConfig { deflate_on_oom: false, hinting: false, ..Default::default() };
    let guest = FreeingGuest::boot(&image, config);
    let mut first = guest.checkpointer("first");
    let unfreed = first.take().unwrap();
    let before = guest.discarded();
    guest.free();
    let end = Instant::now() + LONG;
    // Somewhat more than the minimum: the guest continues to use memory.
    while guest.discarded() - before < FREED + 4 * MIB {
        assert!(Instant::now() < end, "{} bytes are reported", guest.discarded() - before);
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    let after = first.take().unwrap();
    // Freed frames have changed, and are in the epoch without content.
    assert!(bytes(&after) - after.written_bytes >= FREED, "{after:?}");
    drop(first);
    let full = guest.checkpointer("second").take().unwrap();
    eprintln!("unfreed {unfreed:?}\nafter {after:?}\nfull {full:?}");
    assert!(bytes(&unfreed) - bytes(&full) >= FREED, "unfreed {unfreed:?}, freed {full:?}");
    guest.assert_continues("first");
}

#[test]
fn hinted_free_memory_is_not_stored() {
    const NAME: &str = "hinted_free_memory_is_not_stored";
    if !kvm_or_skip(NAME) {
        return;
    }
    let image = match linux_guest() {
        Ok(image) => image,
        Err(why) => return skip(NAME, &why.to_string()),
    };
    let config = BalloonConfig {
        deflate_on_oom: false,
        reporting: false,
        statistics_interval_s: 1,
        ..Default::default()
    };
    let guest = FreeingGuest::boot(&image, config);
    await_statistics(&guest.machine);
    let unfreed = guest.checkpointer("first").take().unwrap();
    guest.free();
    let full = guest.checkpointer("second").take().unwrap();
    eprintln!("unfreed {unfreed:?}\nfull {full:?}");
    assert!(guest.discarded() <= MIB, "a hint takes nothing from the guest");
    assert!(bytes(&unfreed) - bytes(&full) >= FREED, "unfreed {unfreed:?}, freed {full:?}");
    guest.assert_continues("second");
}
