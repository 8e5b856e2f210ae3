//! The 64-bit Linux boot protocol, with small hand-made kernels: ELF files without a PVH note, and
//! bzImages.

use driftline_machine::config::{Boot, MachineConfig};
use driftline_machine::testing::{Elf, note};
use driftline_machine::vm::{EndReason, Vm};

use driftline_guest::Lifecycle;

use crate::harness::*;

/// Prints the first byte of the command line, the first byte of the RAM disk, the number of e820
/// entries, and "R" if the zero page names a valid RSDP. Then powers off through ACPI's PM1 control
/// register. RSI points to the zero page. Only a 64-bit processor can decode this code.
fn reads_its_zero_page() -> Vec<u8> {
    let mut code = vec![0x66, 0xba, 0xf8, 0x03]; // mov dx, 0x3f8
    code.extend([0x8b, 0x9e, 0x28, 0x02, 0, 0]); // mov ebx, [rsi+0x228]: cmd_line_ptr
    code.extend([0x8a, 0x03, 0xee]); // mov al, [rbx]; out dx, al
    code.extend([0x8b, 0x9e, 0x18, 0x02, 0, 0]); // mov ebx, [rsi+0x218]: ramdisk_image
    code.extend([0x8a, 0x03, 0xee]); // mov al, [rbx]; out dx, al
    code.extend([0x8a, 0x86, 0xe8, 0x01, 0, 0, 0x04, b'0', 0xee]); // [rsi+0x1e8] + '0'; out
    code.extend([0x48, 0x8b, 0x5e, 0x70]); // mov rbx, [rsi+0x70]: acpi_rsdp_addr
    code.extend([0x49, 0xb8]); // mov r8, "RSD PTR "
    code.extend(*b"RSD PTR ");
    code.extend([0x4c, 0x39, 0x03, 0x75, 0x03]); // cmp [rbx], r8; jne +3
    code.extend([0xb0, b'R', 0xee]); // mov al, 'R'; out dx, al
    code.extend([0x66, 0xba, 0x04, 0x06, 0x66, 0xb8, 0x00, 0x20, 0x66, 0xef]); // out 0x604, 0x2000
    code.extend([0xf4, 0xeb, 0xfd]); // hlt; jmp
    code
}

/// Returns a bzImage with one setup sector and `code` at its 64-bit entry.
fn bzimage(code: &[u8], relocatable: bool) -> Vec<u8> {
    let mut file = vec![0; 1024];
    file[0x1f1] = 1;
    file[0x1fe..0x202].copy_from_slice(&[0x55, 0xaa, 0xeb, 0x6a]);
    file[0x202..0x206].copy_from_slice(b"HdrS");
    let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    put(0x206, &0x020fu16.to_le_bytes());
    put(0x211, &[1]); // loaded high
    put(0x22c, &0x7fff_ffffu32.to_le_bytes()); // initrd_addr_max
    put(0x230, &0x20_0000u32.to_le_bytes()); // kernel_alignment
    put(0x234, &[u8::from(relocatable)]);
    put(0x236, &1u16.to_le_bytes()); // XLF_KERNEL_64
    put(0x238, &64u32.to_le_bytes()); // cmdline_size
    put(0x258, &0x100_0000u64.to_le_bytes()); // pref_address
    put(0x260, &0x1_0000u32.to_le_bytes()); // init_size
    file.resize(1024 + 0x200, 0xcc);
    file.extend(code);
    file.resize(1024 + 4096, 0);
    file
}

fn boots(file: &[u8]) {
    let dir = tempfile::tempdir().unwrap();
    let mut config = kernel(file, &dir);
    let Boot::Kernel { initrd, cmdline, .. } = &mut config.boot else { unreachable!() };
    std::fs::write(dir.path().join("initrd"), b"disk").unwrap();
    *initrd = Some(dir.path().join("initrd"));
    *cmdline = "line".to_owned();
    let console = SerialLog::new();
    let machine = launch(config, &console);
    machine.resume().unwrap();
    assert_powers_off(&machine, &console);
    drop(machine);
    // 64 MiB: low memory, the reserved range up to 1 MiB, the rest, the chipset.
    assert_eq!(console.text(), "ld4R");
}

#[test]
fn elf_without_pvh_note_enters_long_mode() {
    if !kvm_or_skip("elf_without_pvh_note_enters_long_mode") {
        return;
    }
    boots(&Elf { notes: note(b"GNU\0", 18, &[0; 4]), ..Elf::new(&reads_its_zero_page()) }.bytes());
}

#[test]
fn bzimage_is_entered_at_64_bit_entry() {
    if !kvm_or_skip("bzimage_is_entered_at_64_bit_entry") {
        return;
    }
    boots(&bzimage(&reads_its_zero_page(), true));
    boots(&bzimage(&reads_its_zero_page(), false));
}

#[test]
fn unfit_bzimage_is_refused() {
    if !kvm_or_skip("unfit_bzimage_is_refused") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let with = |change: &dyn Fn(&mut Vec<u8>), initrd_bytes: u64, line: &str| {
        let mut file = bzimage(&reads_its_zero_page(), true);
        change(&mut file);
        let mut config = kernel(&file, &dir);
        let Boot::Kernel { initrd, cmdline, .. } = &mut config.boot else { unreachable!() };
        let path = dir.path().join("initrd");
        std::fs::File::create(&path).unwrap().set_len(initrd_bytes).unwrap();
        *initrd = Some(path);
        *cmdline = line.to_owned();
        refused(config).to_string()
    };
    let error = with(&|_| (), 4, &"x".repeat(65));
    assert!(error.ends_with("it has 65 bytes, and the kernel takes 64"), "{error}");
    let error = with(&|_| (), 64 << 20, "");
    assert!(
        error.contains("initrd")
            && error.ends_with("its 67108864 bytes must lie between 0x1010000 and 0x4000000"),
        "{error}"
    );
    let low = |file: &mut Vec<u8>| file[0x22c..0x230].copy_from_slice(&0x100_ffffu32.to_le_bytes());
    let error = with(&low, 4097, "");
    assert!(error.ends_with("its 4097 bytes must lie between 0x1010000 and 0x1010000"), "{error}");
    let old = |file: &mut Vec<u8>| file[0x206] = 0x0a;
    let error = with(&old, 4, "");
    assert!(
        error.starts_with("kernel \"")
            && error.ends_with("its boot protocol is 2.10, and the 64-bit entry needs 2.12"),
        "{error}"
    );
}

#[test]
fn panicking_guest_reports_by_pvpanic() {
    if !kvm_or_skip("panicking_guest_reports_by_pvpanic") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    // mov dx, 0x505; in al, dx; add al, '0'; mov dx, 0x3f8; out dx, al
    let mut code = vec![0x66, 0xba, 0x05, 0x05, 0xec, 0x04, b'0', 0x66, 0xba, 0xf8, 0x03, 0xee];
    // mov dx, 0x505; mov al, 2; out dx, al; mov al, 1; out dx, al; jmp $
    code.extend([0x66, 0xba, 0x05, 0x05, 0xb0, 2, 0xee, 0xb0, 1, 0xee, 0xeb, 0xfe]);
    let console = SerialLog::new();
    let machine = launch(kernel(&Elf::new(&code).bytes(), &dir), &console);
    machine.resume().unwrap();
    assert_eq!(machine.wait_end(Some(LONG)), Some(EndReason::Panicked));
    drop(machine);
    assert_eq!(console.text(), "3", "both events are understood, and the first ends nothing");
}

#[test]
fn thirty_two_vcpus_boot() {
    if !kvm_or_skip("thirty_two_vcpus_boot") {
        return;
    }
    let console = SerialLog::new();
    let spec = payload("payload,ws=1M,rate=max,passes=1");
    let machine = launch(MachineConfig { vcpus: 32, ..spec }, &console);
    machine.resume().unwrap();
    assert_powers_off(&machine, &console);
    drop(machine);
    console.assert_no_errors();
    assert_eq!(console.reports().iter().filter(|r| r.done).count(), 32, "{}", console.text());
}
