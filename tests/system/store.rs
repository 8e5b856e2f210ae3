//! Stores of real guests: the VMM is killed at any moment, and bits of the files are flipped.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use driftline_machine::testing::kvm_or_skip;
use rustix::fs::SeekFrom;
use serde_json::Value;
use tests::{Driftline, SOON, ScratchDir, driftline, one_at_a_time, repeats, run_cli, wait_for};

#[test]
fn durable_epoch_of_a_killed_vmm_restores() {
    if !kvm_or_skip("durable_epoch_of_a_killed_vmm_restores") {
        return;
    }
    let _alone = one_at_a_time();
    let scratch = ScratchDir::new();
    for round in 0..repeats(6, 40) {
        let store = scratch.path(&format!("store{round}"));
        let store = store.to_str().expect("UTF-8");
        let spec = "payload,ws=16M,rate=max,pattern=random";
        let args = ["--vcpus", "2", "--mem", "256M"];
        let mut vm = Driftline::run(&scratch, &format!("vm{round}"), spec, &args);
        let mut reports = Command::new(driftline())
            .args(["checkpoint", "--json", "--store", store, "--every", "10ms"])
            .args(["--api-sock", vm.socket()])
            .stdin(Stdio::null())
            .stdout(fs::File::create(scratch.path("epochs")).expect("a file"))
            .stderr(Stdio::null())
            .spawn()
            .expect("driftline starts");
        let epochs = || fs::read_to_string(scratch.path("epochs")).unwrap_or_default();
        wait_for("first durable epoch", SOON, || epochs().contains('\n').then_some(()));
        // Kills at a different point of the cycle in each round.
        std::thread::sleep(Duration::from_micros(1_000 + 7_919 * round as u64 % 50_000));
        vm.kill();
        let _ = reports.wait();
        let durable = epochs().lines().filter_map(epoch_of).max().expect("one was durable");
        let name = format!("restored{round}");
        let back = Driftline::start(&scratch, &name, &["restore", "--same-id", "--store", store]);
        back.console().wait_pass(2, SOON);
        let latest = listed(store).into_iter().max().expect("an epoch is listed");
        assert!(latest >= durable, "epoch {durable} was durable; the store's latest is {latest}");
        fs::remove_dir_all(store).expect("the store is ours");
    }
}

#[test]
fn flipped_bit_is_reported_with_its_place() {
    if !kvm_or_skip("flipped_bit_is_reported_with_its_place") {
        return;
    }
    let scratch = ScratchDir::new();
    let store = scratch.path("store");
    let path = store.to_str().expect("UTF-8");
    let vm = Driftline::run(&scratch, "vm", "payload,ws=4M", &["--vcpus", "1", "--mem", "64M"]);
    let taken = vm.cli("checkpoint", &["--store", path, "--every", "20ms", "--count", "3"]);
    assert!(taken.status.success(), "{}", String::from_utf8_lossy(&taken.stderr));
    drop(vm);
    assert!(run_cli(&["store", "verify", path]).status.success());
    for name in ["manifest", "log-1", "pages-1"] {
        let file = store.join(name);
        let sound = fs::read(&file).expect("readable");
        let some = [0, 9, 60, 64, 90, sound.len() / 3, sound.len() / 2, sound.len() - 1];
        // In the page file the header and all frames together, because no epoch may refer to a
        // single frame any more.
        let places = match name {
            "pages-1" => vec![0, 9, 60, 64, 90, 5000],
            _ => some.to_vec(),
        };
        for at in places {
            let mut flipped = sound.clone();
            let step = if at < 4096 || name != "pages-1" { sound.len() } else { 4096 };
            flipped.iter_mut().skip(at).step_by(step).for_each(|byte| *byte ^= 0x10);
            fs::write(&file, &flipped).expect("writable");
            for command in [&["store", "verify", path][..], &["restore", "--store", path]] {
                let out = run_cli(command);
                let stderr = String::from_utf8_lossy(&out.stderr);
                assert_eq!(
                    out.status.code(),
                    Some(1),
                    "{command:?}, byte {at} of {name}: {stderr}"
                );
                assert!(stderr.contains(name), "byte {at} of {name}: {stderr}");
                assert!(
                    stderr.contains("byte") || stderr.contains("offset"),
                    "no position: {stderr}"
                );
            }
        }
        fs::write(&file, &sound).expect("writable");
    }
    assert!(run_cli(&["store", "verify", path]).status.success(), "the restored files are valid");
}

/// Returns the epoch's number from a line of `checkpoint --json` if the epoch is durable.
fn epoch_of(line: &str) -> Option<u64> {
    let report: Value = serde_json::from_str(line).ok()?;
    if report.get("durable")? == true { report.get("checkpoint")?.as_u64() } else { None }
}

/// Returns the epochs that `store ls --json` lists.
fn listed(store: &str) -> Vec<u64> {
    let out = run_cli(&["store", "ls", "--json", store]);
    let listing = tests::json_of(&out);
    let epochs = listing["checkpoints"].as_array().expect("a list of epochs");
    epochs.iter().filter_map(|e| e["checkpoint"].as_u64()).collect()
}

#[test]
fn core_has_guest_memory_and_registers() {
    const NAME: &str = "core_has_guest_memory_and_registers";
    if !kvm_or_skip(NAME) {
        return;
    }
    let scratch = ScratchDir::new();
    let store = scratch.path("store");
    let path = store.to_str().expect("UTF-8");
    // Memory in two slots, on both sides of the hole below 4 GiB.
    let mut vm = Driftline::run(&scratch, "vm", "payload,ws=8M", &["--vcpus", "2", "--mem", "4G"]);
    vm.console().wait_reports(2, 1, SOON);
    assert!(vm.cli("checkpoint", &["--store", path]).status.success());
    vm.kill();
    let [raw, core] = ["raw", "elf-core"].map(|format| {
        let file = scratch.path(format);
        let out = file.to_str().expect("UTF-8");
        let done = run_cli(&["store", "export", path, "--format", format, "--output", out]);
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        file
    });

    let head = bytes_at(&core, 0, 64);
    assert_eq!((&head[..4], word(&head, 16, 2), word(&head, 18, 2)), (&b"\x7fELF"[..], 4, 62));
    let (table, count) = (word(&head, 32, 8), word(&head, 56, 2));
    let headers = (0..count).map(|i| bytes_at(&core, table + i * 56, 56));
    let (notes, loads): (Vec<_>, Vec<_>) = headers.partition(|header| word(header, 0, 4) == 4);
    assert_eq!((notes.len(), loads.len()), (1, 2), "registers, and the memory slots");
    let frames = loads.iter().map(|load| compare_segment(&core, load, &raw)).sum::<usize>();
    assert!(frames > 2048, "the payload's 8 MiB are in the file: {frames} frames");

    let note = bytes_at(&core, word(&notes[0], 8, 8), word(&notes[0], 32, 8) as usize);
    // Each vCPU has a header, "CORE", and `struct elf_prstatus`, whose registers begin at byte 112.
    let one = 12 + 8 + 336;
    for vcpu in 0..2 {
        let note = &note[vcpu * one..(vcpu + 1) * one];
        assert_eq!((word(note, 4, 4), word(note, 8, 4), &note[12..16]), (336, 1, &b"CORE"[..]));
        let [rip, rsp] = [16, 19].map(|reg| word(note, 20 + 112 + reg * 8, 8));
        assert!(
            (4096..4 << 30).contains(&rip) && (4096..4 << 30).contains(&rsp),
            "{rip:#x} {rsp:#x}"
        );
    }
    let Ok(gdb) = Command::new("gdb")
        .args(["-nx", "-batch", "-ex", "info threads", "-ex", "p/x $rip"])
        .args(["-c", core.to_str().expect("UTF-8")])
        .output()
    else {
        return driftline_machine::testing::skip(NAME, "there is no gdb to open it");
    };
    let stdout = String::from_utf8_lossy(&gdb.stdout);
    let rip = format!("0x{:x}", word(&note, 20 + 112 + 16 * 8, 8));
    assert!(stdout.contains(&format!("$1 = {rip}")), "{rip}: {stdout}");
    assert!(stdout.contains("[New LWP 2]") && !stdout.contains("[New LWP 3]"), "{stdout}");
}

/// Compares a segment of an ELF core with the raw export. Returns the number of pages that are not
/// zero.
fn compare_segment(core: &Path, load: &[u8], raw: &Path) -> usize {
    let zeros = vec![0; 1 << 20];
    let [offset, virt, phys, len] = [8, 16, 24, 32].map(|at| word(load, at, 8));
    assert_eq!((word(load, 0, 4), virt), (1, phys));
    let mut frames = 0;
    for at in (0..len).step_by(1 << 20) {
        let size = (len - at).min(1 << 20) as usize;
        // A hole in both files reads as zeros.
        if !has_data(core, offset + at, size) && !has_data(raw, phys + at, size) {
            continue;
        }
        let [from_core, from_raw] =
            [bytes_at(core, offset + at, size), bytes_at(raw, phys + at, size)];
        assert!(from_core == from_raw, "1 MiB at {:#x}", phys + at);
        if from_core != zeros[..size] {
            frames += from_core.chunks(4096).filter(|page| *page != &zeros[..4096]).count();
        }
    }
    frames
}

#[test]
fn any_archived_checkpoint_restores() {
    if !kvm_or_skip("any_archived_checkpoint_restores") {
        return;
    }
    let _alone = one_at_a_time();
    let scratch = ScratchDir::new();
    let [store, archive] = ["store", "archive"].map(|name| scratch.path(name));
    let path = store.to_str().expect("UTF-8");
    let file = archive.to_str().expect("UTF-8");
    let spec = "payload,ws=64M,rate=max,pattern=random";
    let mut vm = Driftline::run(&scratch, "vm", spec, &["--vcpus", "2", "--mem", "512M"]);
    vm.console().wait_pass(2, SOON);
    let taken = vm.cli("checkpoint", &["--store", path, "--every", "20ms", "--count", "3"]);
    assert!(taken.status.success(), "{}", String::from_utf8_lossy(&taken.stderr));
    vm.kill();
    let export = |more: &[&str]| {
        let args = ["store", "export", path, "--format", "driftline-zstd", "--output", file];
        run_cli(&[&args, more].concat())
    };
    let elsewhere = scratch.path("elsewhere");
    fs::create_dir(&elsewhere).expect("a directory");
    // Paths on the command line are accessible even if --allow-path restricts all others.
    let narrow = ["--allow-path", elsewhere.to_str().expect("UTF-8")];
    for (life, epoch, more) in [(1, "2", &[][..]), (2, "3", &narrow)] {
        let done = export(&["--checkpoint", epoch, "--json", "--force"]);
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let report = tests::json_of(&done);
        let frames = report["frames"].as_u64().expect("frames");
        assert!(frames > 4096, "the archive has most of the payload's memory: {frames}");
        let bytes = fs::metadata(&archive).expect("a file").len();
        assert_eq!(report["bytes"].as_u64(), Some(bytes));
        assert!(
            bytes < frames * 4096,
            "the archive is compressed: {bytes} bytes for {frames} frames"
        );
        assert!(run_cli(&["store", "verify", file]).status.success());
        assert_eq!(listed(file), [epoch.parse::<u64>().expect("a number")]);
        let name = format!("life{life}");
        let args = [&["restore", "--store", file], more].concat();
        let mut back = Driftline::start(&scratch, &name, &args);
        back.wait_state("running");
        back.console().wait_reports(2, 2, SOON);
        back.console().assert_clean();
        back.kill();
    }

    let exists = export(&[]);
    let stderr = String::from_utf8_lossy(&exists.stderr);
    assert!(exists.status.code() == Some(1) && stderr.contains("it exists; --force"), "{stderr}");
    refused(&["restore", "--store", file, "--lazy"], "so leave out --lazy");
    refused(&["restore", "--store", file, "--checkpoint", "2"], "has no checkpoint 2");
    refused(&["store", "export", file, "--output", path], "an archive is not exported again");
    refused(&["store", "compact", file], "archive");
    damaged_archive_is_refused(file);
}

/// Runs a command that must fail with a message that contains `why`.
fn refused(args: &[&str], why: &str) {
    let out = run_cli(args);
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{args:?}: {stderr}");
    assert!(stderr.contains(why), "{args:?}: {stderr}");
}

/// Flips a bit of the archive, and truncates it, at several positions.
fn damaged_archive_is_refused(archive: &str) {
    let sound = fs::read(archive).expect("readable");
    for at in [0, 9, 60, 64, 90, sound.len() / 3, sound.len() / 2, sound.len() - 1] {
        let mut flipped = sound.clone();
        flipped[at] ^= 0x10;
        fs::write(archive, &flipped).expect("writable");
        refused(&["restore", "--store", archive], "archive, byte ");
        refused(&["store", "verify", archive], "archive, byte ");
        fs::write(archive, &sound[..at]).expect("writable");
        let why =
            if at == 0 { "nor an archive (0 bytes)" } else { "is truncated: it ends at byte " };
        refused(&["restore", "--store", archive], why);
    }
}

/// Returns a little-endian number of `size` bytes.
fn word(bytes: &[u8], at: usize, size: usize) -> u64 {
    bytes[at..at + size].iter().rev().fold(0, |n, b| n << 8 | u64::from(*b))
}

/// Returns whether the file has a part of this range on disk. The file must not end before the
/// range does.
fn has_data(file: &Path, at: u64, size: usize) -> bool {
    let (file, end) = (fs::File::open(file).expect("a file"), at + size as u64);
    assert!(end <= file.metadata().expect("a length").len(), "the file ends before {end:#x}");
    match rustix::fs::seek(&file, SeekFrom::Data(at)) {
        Ok(next) => next < end,
        Err(e) => {
            assert_eq!(e, rustix::io::Errno::NXIO, "a hole up to the end of the file");
            false
        }
    }
}

fn bytes_at(file: &Path, at: u64, size: usize) -> Vec<u8> {
    let mut bytes = vec![0; size];
    let file = fs::File::open(file).expect("a file");
    file.read_exact_at(&mut bytes, at).expect("so many bytes");
    bytes
}
