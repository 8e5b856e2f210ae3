//! Booting: the payload in memories of all shapes, other ELF files, and invalid ELF files.

use driftline_guest::Lifecycle;
use driftline_machine::config::{Boot, MachineConfig};
use driftline_machine::testing::{CODE_AT, Elf, note};
use driftline_machine::vm::{EndReason, Vm};

use crate::harness::*;

#[test]
fn the_payload_boots_in_every_shape_of_memory() {
    if !kvm_or_skip("the_payload_boots_in_every_shape_of_memory") {
        return;
    }
    for (mem_mib, vcpus) in [(64, 1), (1024, 2), (5 * 1024, 2)] {
        let console = SerialLog::new();
        let machine = launch(
            MachineConfig {
                identity: Default::default(),
                mem_bytes: mem_mib * MIB,
                vcpus,
                ..payload("payload,ws=16M,rate=max,passes=3")
            },
            &console,
        );
        assert_eq!(console.text(), "", "a machine is launched paused");
        machine.resume().unwrap();
        assert_powers_off(&machine, &console);
        drop(machine);
        console.assert_no_errors();
        let done = console.reports().iter().filter(|r| r.done).count();
        assert_eq!(done, usize::from(vcpus), "{}", console.text());
    }
}

#[test]
fn payload_that_lacks_devices_says_so() {
    if !kvm_or_skip("payload_that_lacks_devices_says_so") {
        return;
    }
    let console = SerialLog::new();
    let machine = launch(payload("payload,ws=1M,io=5"), &console);
    machine.resume().unwrap();
    assert_eq!(machine.wait_end(Some(LONG)), Some(EndReason::Panicked));
    drop(machine);
    let why = "payload fatal: io= needs a virtio disk or interface\n";
    assert_eq!(console.text(), why);
}

/// Prints "ok\n", reads the command line's first byte back, and powers off.
fn prints_ok() -> Vec<u8> {
    let mut code = vec![0x66, 0xba, 0xf8, 0x03]; // mov dx, 0x3f8
    for byte in *b"ok\n" {
        code.extend([0xb0, byte, 0xee]); // mov al, byte; out dx, al
    }
    // mov esi, [ebx+24]; mov al, [esi]; out dx, al
    code.extend([0x8b, 0x73, 0x18, 0x8a, 0x06, 0xee]);
    code.extend([0x66, 0xba, 0x04, 0x06, 0x66, 0xb8, 0x00, 0x20, 0x66, 0xef]); // out 0x604, 0x2000
    code.extend([0xf4, 0xeb, 0xfd]); // hlt; jmp
    code
}

#[test]
fn foreign_elf_files_boot_in_both_classes() {
    if !kvm_or_skip("foreign_elf_files_boot_in_both_classes") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    // A GNU note before Xen's, in the segment of notes after the code, as compilers emit them.
    let notes = [note(b"GNU\0", 5, &[0; 16]), note(b"Xen\0", 18, &CODE_AT.to_le_bytes())].concat();
    for (class, machine) in [(2, 62), (1, 3), (1, 62)] {
        let elf = Elf { class, machine, notes: notes.clone(), ..Elf::new(&prints_ok()) };
        let mut config = kernel(&elf.bytes(), &dir);
        if let Boot::Kernel { cmdline, initrd, .. } = &mut config.boot {
            *cmdline = "hello".to_owned();
            std::fs::write(dir.path().join("initrd"), vec![7; 12345]).unwrap();
            *initrd = Some(dir.path().join("initrd"));
        }
        let console = SerialLog::new();
        let machine = launch(config, &console);
        machine.resume().unwrap();
        assert_powers_off(&machine, &console);
        drop(machine);
        assert_eq!(console.text(), "ok\nh");
    }
}

#[test]
fn unbootable_files_are_refused() {
    if !kvm_or_skip("unbootable_files_are_refused") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let good = Elf::new(&prints_ok());
    let name = format!("kernel \"{}\"", dir.path().join("kernel.elf").display());
    let says = |bytes: &[u8], sentence: &str| {
        let error = refused(kernel(bytes, &dir));
        assert!(!error.host_lacks());
        let error = error.to_string();
        assert_eq!(error.strip_prefix(&name), Some(sentence), "{error}");
    };
    says(b"#!/bin/sh\n", " is neither an ELF file nor a bzImage");
    says(&[], " is neither an ELF file nor a bzImage");
    says(
        &Elf { machine: 183, ..good.clone() }.bytes(),
        " is an ELF file for another architecture (machine 183), not for x86",
    );
    let no_note = " is a 32-bit ELF file without a PVH note (XEN_ELFNOTE_PHYS32_ENTRY), so there \
                   is no way to enter it";
    let narrow = Elf { class: 1, ..good.clone() };
    says(&Elf { notes: note(b"GNU\0", 18, &[0; 4]), ..narrow.clone() }.bytes(), no_note);
    says(&Elf { notes: vec![0xff; 40], ..narrow }.bytes(), no_note);
    says(
        &Elf { code_at: 63 << 20, mem_bytes: 2 << 20, ..good.clone() }.bytes(),
        " does not fit in guest memory of 67108864 bytes: a segment goes to 0x3f00000..0x4100000",
    );
    says(
        &Elf { mem_bytes: u64::MAX, ..good.clone() }.bytes(),
        " is a damaged ELF file: a segment ends past the last address",
    );
    says(
        &Elf { notes: note(b"Xen\0", 18, &[0; 4]), ..good.clone() }.bytes(),
        " is a damaged ELF file: its PVH entry 0x0 lies in no segment",
    );
    let cut = &good.bytes()[..100];
    says(
        cut,
        " is a damaged ELF file: its 2 program headers of 56 bytes at 0x40 are cut short, or of \
         another size",
    );
}

#[test]
fn files_that_do_not_fit_are_refused() {
    if !kvm_or_skip("files_that_do_not_fit_are_refused") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = kernel(&Elf::new(&prints_ok()).bytes(), &dir);
    let Boot::Kernel { kernel: file, initrd, cmdline, .. } = &config.boot else { unreachable!() };
    let with = |file: &std::path::Path, initrd: Option<&std::path::Path>, cmdline: &str| {
        let boot = Boot::Kernel {
            kernel: file.to_owned(),
            initrd: initrd.map(ToOwned::to_owned),
            cmdline: cmdline.to_owned(),
            bare: true,
        };
        refused(MachineConfig { boot, ..payload("") }).to_string()
    };
    let nowhere = dir.path().join("nowhere");
    assert!(
        with(&nowhere, None, "")
            .ends_with("cannot be read: No such file or directory (os error 2)")
    );
    assert!(with(dir.path(), None, "").ends_with("cannot be read: it is not a regular file"));
    let big = dir.path().join("big");
    std::fs::File::create(&big).unwrap().set_len(63 << 20 | 1).unwrap();
    let error = with(file, Some(&big), cmdline);
    assert!(error.contains("initrd") && error.contains("does not fit in guest memory"), "{error}");
    let error = with(file, initrd.as_deref(), &"x".repeat(700_000));
    assert!(error.contains("command line does not fit in guest memory"), "{error}");
    assert!(with(file, None, "a\0b").contains("NUL"));
}

#[test]
fn damaged_file_does_not_panic_the_loader() {
    if !kvm_or_skip("damaged_file_does_not_panic_the_loader") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let good = Elf::new(&prints_ok()).bytes();
    let mut seeded = SeededRandom(7);
    let mut random = |below: usize| seeded.below(below as u64) as usize;
    for _ in 0..200 {
        let mut bad = good.clone();
        for _ in 0..=random(3) {
            bad[random(220)] = [0, 1, 0x7f, 0x80, 0xff][random(5)];
        }
        bad.truncate(good.len() - random(2) * random(good.len()));
        let _ = driftline_machine::machine::KvmMachine::launch(kernel(&bad, &dir), &silent());
    }
}

#[test]
fn reset_and_crash_are_distinguished() {
    if !kvm_or_skip("reset_and_crash_are_distinguished") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let end = |code: &[u8]| {
        let machine = launch(kernel(&Elf::new(code).bytes(), &dir), &SerialLog::new());
        machine.resume().unwrap();
        machine.wait_end(Some(LONG)).unwrap()
    };
    // mov al, 0xfe; out 0x64, al; jmp $
    assert_eq!(end(&[0xb0, 0xfe, 0xe6, 0x64, 0xeb, 0xfe]), EndReason::Reset);
    // lidt [an empty table]; ud2
    let crash = end(&[0x0f, 0x01, 0x1d, 0x00, 0x00, 0x20, 0x00, 0x0f, 0x0b]);
    assert_eq!(crash, EndReason::Crashed("vCPU 0: triple fault".to_owned()));
}

/// Enables COM1's transmitter interrupt, prints "x", then prints whether the interrupt controller
/// has interrupt 4 requested: "x1".
fn asks_for_an_interrupt() -> Vec<u8> {
    let mut code = vec![0x66, 0xba, 0xf9, 0x03, 0xb0, 0x02, 0xee]; // out 0x3f9, 2
    code.extend([0x66, 0xba, 0xf8, 0x03, 0xb0, b'x', 0xee]); // out 0x3f8, 'x'
    code.extend([0xb0, 0x0a, 0xe6, 0x20, 0xe4, 0x20]); // out 0x20, 0x0a; in al, 0x20
    code.extend([0xc0, 0xe8, 0x04, 0x24, 0x01, 0x04, b'0', 0xee]); // shr 4; and 1; add '0'; out
    code.extend([0xb0, 0xfe, 0xe6, 0x64, 0xeb, 0xfe]); // reset
    code
}

#[test]
fn serial_interrupt_precedes_the_next_instruction() {
    if !kvm_or_skip("serial_interrupt_precedes_the_next_instruction") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let console = SerialLog::new();
    let elf = Elf::new(&asks_for_an_interrupt()).bytes();
    let machine = launch(kernel(&elf, &dir), &console);
    machine.resume().unwrap();
    assert_eq!(machine.wait_end(Some(LONG)), Some(EndReason::Reset));
    drop(machine);
    assert_eq!(console.text(), "x1");
}
