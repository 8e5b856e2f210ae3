//! Handles faults of the payload itself: prints one line with the position, and resets.

use core::arch::asm;
use core::panic::PanicInfo;

use crate::console::print_now;
use crate::cpu;
use crate::workload::LineBuffer;

/// The stack frame that the entries in `boot.s` build.
#[repr(C)]
struct ExceptionFrame {
    vector: u64,
    code: u64,
    rip: u64,
    cs: u64,
    rflags: u64,
    rsp: u64,
    ss: u64,
}

/// Handles every exception: none is expected.
#[unsafe(no_mangle)]
extern "C" fn fault_main(frame: &ExceptionFrame) -> ! {
    let cr2: u64;
    // SAFETY: reads a register; the handler runs in ring 0.
    unsafe { asm!("mov {}, cr2", out(reg) cr2, options(nomem, nostack)) };
    let mut line = LineBuffer::new();
    line.text("\npayload fault")
        .field("vcpu", u64::from(cpu::index()))
        .field("vector", frame.vector);
    line.text(" code=").hex(frame.code).text(" rip=").hex(frame.rip);
    line.text(" cr2=").hex(cr2).text(" cs=").hex(frame.cs).text(" rsp=").hex(frame.rsp).byte(b'\n');
    print_now(line.as_bytes());
    cpu::give_up()
}

#[panic_handler]
fn panic(info: &PanicInfo) -> ! {
    let mut line = LineBuffer::new();
    line.text("\npayload fatal: panic");
    if let Some(place) = info.location() {
        line.text(" at ").text(place.file()).byte(b':').number(u64::from(place.line()));
    }
    print_now(line.byte(b'\n').as_bytes());
    cpu::give_up()
}
