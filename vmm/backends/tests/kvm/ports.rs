//! Port accesses that are wider than a register, and port accesses of string instructions.

use driftline_guest::Lifecycle;
use driftline_machine::testing::{CODE_AT, Elf};

use crate::harness::*;

/// Runs `code`, followed by `data`, in a guest until it powers itself off. Returns the guest's
/// output. `code` starts with the address of `data` in ESI.
fn printed(code: &[u8], data: &[u8]) -> Vec<u8> {
    const ESI_BYTES: u32 = 5;
    let mut rest = code.to_vec();
    rest.extend([0x66, 0xba, 0x04, 0x06, 0x66, 0xb8, 0x00, 0x20, 0x66, 0xef]); // out 0x604, 0x2000
    rest.extend([0xf4, 0xeb, 0xfd]); // hlt; jmp
    let mut all = vec![0xbe]; // mov esi, data
    all.extend((CODE_AT + ESI_BYTES + rest.len() as u32).to_le_bytes());
    all.extend(rest);
    all.extend(data);
    let (dir, console) = (tempfile::tempdir().unwrap(), SerialLog::new());
    let machine = launch(kernel(&Elf::new(&all).bytes(), &dir), &console);
    machine.resume().unwrap();
    assert_powers_off(&machine, &console);
    drop(machine);
    console.bytes()
}

/// cld; mov dx, port; mov ecx, count
fn string(port: u16, count: u32) -> Vec<u8> {
    let mut code = vec![0xfc, 0x66, 0xba];
    code.extend(port.to_le_bytes());
    code.push(0xb9);
    code.extend(count.to_le_bytes());
    code
}

#[test]
fn string_output_to_the_serial_port_is_complete() {
    if !kvm_or_skip("string_output_to_the_serial_port_is_complete") {
        return;
    }
    let data: Vec<u8> = (0..9000u32).map(|i| (i % 251) as u8).collect();
    for count in [300, 9000] {
        let code = [string(0x3f8, count), vec![0xf3, 0x6e]].concat(); // rep outsb
        assert_eq!(printed(&code, &data), data[..count as usize]);
    }
    // The second byte of each pair goes to the interrupt enable register.
    let pairs: Vec<u8> = data[..300].iter().flat_map(|byte| [*byte, 0]).collect();
    let code = [string(0x3f8, 300), vec![0xf3, 0x66, 0x6f]].concat(); // rep outsw
    assert_eq!(printed(&code, &pairs), data[..300]);
}

#[test]
fn wide_access_reaches_each_of_its_ports() {
    if !kvm_or_skip("wide_access_reaches_each_of_its_ports") {
        return;
    }
    #[rustfmt::skip]
    let code = [
        // mov dx, 0x3f8; mov ax, 0x0541; out dx, ax: an A, and two interrupts enabled
        0x66, 0xba, 0xf8, 0x03, 0x66, 0xb8, 0x41, 0x05, 0x66, 0xef,
        // inc dx; in al, dx; dec dx; out dx, al: which
        0x42, 0xec, 0x4a, 0xee,
        // mov eax, 0x03000042; out dx, eax: a B, no interrupts, no FIFO, 8 bits
        0xb8, 0x42, 0x00, 0x00, 0x03, 0xef,
        // mov dx, 0x3fb; in al, dx; mov dx, 0x3f8; out dx, al: the line control register
        0x66, 0xba, 0xfb, 0x03, 0xec, 0x66, 0xba, 0xf8, 0x03, 0xee,
        // mov dx, 0x3ff; mov ax, 0x7743; out dx, ax: the scratch register, and an unused port
        0x66, 0xba, 0xff, 0x03, 0x66, 0xb8, 0x43, 0x77, 0x66, 0xef,
        // in ax, dx; mov dx, 0x3f8; out dx, al; mov al, ah; out dx, al: that, and a floating bus
        0x66, 0xed, 0x66, 0xba, 0xf8, 0x03, 0xee, 0x88, 0xe0, 0xee,
        // mov dx, 0x3fe; in eax, dx; shr eax, 8; mov dx, 0x3f8; out dx, al; mov al, ah; out dx, al
        0x66, 0xba, 0xfe, 0x03, 0xed, 0xc1, 0xe8, 0x08,
        0x66, 0xba, 0xf8, 0x03, 0xee, 0x88, 0xe0, 0xee,
    ];
    assert_eq!(printed(&code, &[]), [b'A', 0x05, b'B', 0x03, b'C', 0xff, b'C', 0xff]);
}

#[test]
fn string_input_reads_the_same_port_again() {
    if !kvm_or_skip("string_input_reads_the_same_port_again") {
        return;
    }
    // mov edi, esi; cld; mov dx, 0x3ff; mov al, 'S'; out dx, al
    let mut code = vec![0x89, 0xf7, 0xfc, 0x66, 0xba, 0xff, 0x03, 0xb0, b'S', 0xee];
    // mov ecx, 5; rep insb
    code.extend([0xb9, 5, 0, 0, 0, 0xf3, 0x6c]);
    // mov ecx, 3; rep insw
    code.extend([0xb9, 3, 0, 0, 0, 0xf3, 0x66, 0x6d]);
    code.extend([string(0x3f8, 11), vec![0xf3, 0x6e]].concat()); // rep outsb
    assert_eq!(printed(&code, &[0; 16]), b"SSSSSS\xffS\xffS\xff");
}
