//! The processor: descriptor tables, the TSS with its I/O permission bitmap, model-specific
//! registers, and the exits from ring 3 and from the machine.

use core::arch::asm;
use core::arch::x86_64::__cpuid;
use core::cell::UnsafeCell;
use core::mem::{offset_of, size_of};

use crate::clock::KvmClock;
use crate::console::Console;
use crate::heap;
use crate::pvh::MAX_VCPUS;
use crate::virtio::Devices;

/// The private data of one vCPU. The loop uses all of it, also in ring 3.
pub struct Cpu {
    pub index: u32,
    pub clock: KvmClock,
    pub console: Console,
    /// The devices that this vCPU uses.
    pub devices: Option<Devices>,
    pub user_stack: u64,
}

/// CPU features from CPUID, read in ring 0: in ring 3 some hosts return their own values.
pub struct CpuFeatures {
    pub x2apic: bool,
    pub tsc_deadline: bool,
    pub kvmclock: bool,
}

const STACK: u64 = 32 << 10;
const REQUEST_STACK: u64 = 4 << 10;
const FAULT_STACK: u64 = 8 << 10;

impl Cpu {
    /// Sets up the calling processor; `None` if the host offers it no clock.
    pub fn start(index: u32, features: &CpuFeatures) -> Option<&'static mut Cpu> {
        crate::apic::enable();
        if !features.kvmclock {
            return None;
        }
        let cpu = Cpu {
            index,
            clock: KvmClock::start(heap::take(4096)),
            console: Console::new(index, heap::take(crate::console::QUEUE as u64)),
            devices: None,
            user_stack: heap::take(STACK) + STACK - 16,
        };
        let place = heap::take(size_of::<Cpu>() as u64) as *mut Cpu;
        // SAFETY: the place was just allocated, is aligned to a page and large enough.
        unsafe { place.write(cpu) };
        // SAFETY: it was just written, and there is no other reference to it.
        Some(unsafe { &mut *place })
    }
}

/// Reads the CPU's features from CPUID.
pub fn features() -> CpuFeatures {
    let basic = __cpuid(1).ecx;
    let mut kvmclock = false;
    let mut leaf = 0x4000_0000;
    while leaf < 0x4000_1000 {
        let name = __cpuid(leaf);
        if (name.ebx, name.ecx, name.edx) == (0x4b4d_564b, 0x564b_4d56, 0x4d) {
            kvmclock = __cpuid(leaf + 1).eax & (1 << 3) != 0;
            break;
        }
        leaf += 0x100;
    }
    CpuFeatures { x2apic: basic & (1 << 21) != 0, tsc_deadline: basic & (1 << 24) != 0, kvmclock }
}

/// Returns whether the CPU has pages of 1 GiB.
pub fn has_1g_pages() -> bool {
    __cpuid(0x8000_0000).eax >= 0x8000_0001 && __cpuid(0x8000_0001).edx & (1 << 26) != 0
}

/// Last port that the bitmap covers, which is the last one that ring 3 uses.
const LAST_PORT: usize = 0x605;
const BITMAP: usize = LAST_PORT / 8 + 2;
const OPEN_PORTS: [u16; 12] =
    [0x64, 0x3f8, 0x3f9, 0x3fa, 0x3fb, 0x3fc, 0x3fd, 0x3fe, 0x3ff, 0x505, 0x604, 0x605];

#[repr(C, packed(4))]
struct Tss {
    reserved0: u32,
    rsp: [u64; 3],
    reserved1: u64,
    ist: [u64; 7],
    reserved2: u64,
    reserved3: u16,
    bitmap_at: u16,
    bitmap: [u8; BITMAP],
}

#[derive(Clone, Copy)]
#[repr(C)]
struct IdtGate {
    low: u64,
    high: u64,
}

struct Idt(UnsafeCell<[IdtGate; 256]>);

// SAFETY: written by the boot processor before the others start.
unsafe impl Sync for Idt {}

static IDT: Idt = Idt(UnsafeCell::new([IdtGate { low: 0, high: 0 }; 256]));

unsafe extern "C" {
    static mut gdt: [u64; 70];
    static fault_entries: [[u8; 16]; 32];
    fn timer_entry_x2apic();
    fn timer_entry_xapic();
    fn spurious_entry();
    fn invalid_entry();
    fn enter_ring3(argument: u64, function: u64, stack: u64) -> !;
}

/// Interrupt vector of the APIC timer.
pub const TIMER_VECTOR: u8 = 0x40;
/// Vector of spurious interrupts.
pub const SPURIOUS_VECTOR: u8 = 0xff;
const INVALID_VECTOR: usize = 6;
const FIRST_TSS: u32 = 0x30;

/// Gives the calling processor its TSS and the common interrupt table.
pub fn load_tables(index: u32) {
    if index == 0 {
        fill_idt();
    }
    let tss_at = make_tss();
    let limit = size_of::<Tss>() as u64 - 1;
    let low = limit | (tss_at & 0xff_ffff) << 16 | 0x89 << 40 | (tss_at >> 24 & 0xff) << 56;
    let slot = (FIRST_TSS / 8 + 2 * index.min(MAX_VCPUS - 1)) as usize;
    // SAFETY: each processor writes its own two entries.
    unsafe { (&raw mut gdt[slot]).write_volatile(low) };
    // SAFETY: as above.
    unsafe { (&raw mut gdt[slot + 1]).write_volatile(tss_at >> 32) };
    let pointer =
        IdtPointer { limit: (size_of::<IdtGate>() * 256 - 1) as u16, base: IDT.0.get() as u64 };
    // SAFETY: the table is complete and static.
    unsafe { asm!("lidt [{}]", in(reg) &raw const pointer, options(nostack)) };
    // SAFETY: the descriptor was just written.
    unsafe { asm!("ltr {:x}", in(reg) FIRST_TSS + 16 * index, options(nostack)) };
}

#[repr(C, packed)]
struct IdtPointer {
    limit: u16,
    base: u64,
}

/// Returns the stack of requests from ring 3. Writes to it, because whether a vCPU ever sleeps
/// depends on which vCPU finishes first, and the set of frames that a run writes must not depend on
/// that.
fn request_stack() -> u64 {
    let at = heap::take(REQUEST_STACK);
    // SAFETY: the page was just allocated and is mapped.
    unsafe { core::ptr::write_volatile(at as *mut u64, 0) };
    at
}

fn make_tss() -> u64 {
    let at = heap::take(size_of::<Tss>() as u64);
    let mut bitmap = [0xff; BITMAP];
    for port in OPEN_PORTS {
        bitmap[usize::from(port / 8)] &= !(1 << (port % 8));
    }
    let tss = Tss {
        reserved0: 0,
        rsp: [request_stack() + REQUEST_STACK, 0, 0],
        reserved1: 0,
        ist: [heap::take(FAULT_STACK) + FAULT_STACK, 0, 0, 0, 0, 0, 0],
        reserved2: 0,
        reserved3: 0,
        bitmap_at: offset_of!(Tss, bitmap) as u16,
        bitmap,
    };
    // SAFETY: the place was just allocated and is large enough.
    unsafe { (at as *mut Tss).write(tss) };
    at
}

fn fill_idt() {
    let timer = if crate::apic::is_x2apic() {
        timer_entry_x2apic as *const ()
    } else {
        timer_entry_xapic as *const ()
    };
    for vector in 0..32 {
        // SAFETY: only the address of an entry is taken.
        let entry = unsafe { &raw const fault_entries[vector] };
        // Faults have their own stack, because the loop may run in ring 0 with a bad stack pointer.
        set_gate(vector, entry as u64, 1, 0x8e);
    }
    set_gate(usize::from(TIMER_VECTOR), timer as u64, 0, 0x8e);
    set_gate(usize::from(SPURIOUS_VECTOR), spurious_entry as *const () as u64, 0, 0x8e);
    set_gate(INVALID_VECTOR, invalid_entry as *const () as u64, 0, 0x8e);
}

fn set_gate(vector: usize, entry: u64, stack: u64, kind: u64) {
    let low =
        (entry & 0xffff) | 0x08 << 16 | stack << 32 | kind << 40 | (entry >> 16 & 0xffff) << 48;
    let gate = IdtGate { low, high: entry >> 32 };
    // SAFETY: only the boot processor executes this, before interrupts and before the other
    // processors.
    unsafe { (&raw mut (*IDT.0.get())[vector]).write_volatile(gate) };
}

/// Returns the index of this vCPU, from its task register; in ring 0 only.
pub fn index() -> u32 {
    let selector: u32;
    // SAFETY: reads a register.
    unsafe { asm!("str {:e}", out(reg) selector, options(nomem, nostack)) };
    (selector.max(FIRST_TSS) - FIRST_TSS) / 16
}

/// Enters ring 3 and never returns.
pub fn to_ring3<T>(
    argument: &'static mut T,
    function: extern "C" fn(&'static mut T) -> !,
    stack: u64,
) -> ! {
    // A function expects its stack 8 bytes off alignment, as after a call.
    let stack = (stack & !15) - 8;
    // SAFETY: the stack belongs to this processor, and all memory is mapped for ring 3.
    unsafe { enter_ring3((&raw mut *argument) as u64, function as *const () as u64, stack) }
}

/// Request: sleeps by the APIC timer; the argument is the time in the timer's units.
pub const SLEEP: u32 = 0;
/// Request: stops this processor.
pub const PARK: u32 = 1;
/// Request: ends the machine by a triple fault.
pub const TRIPLE_FAULT: u32 = 2;

/// Sends a request to ring 0, from either ring.
#[inline(always)]
pub fn request(kind: u32, argument: u64) {
    let ring: u32;
    // SAFETY: reads a register.
    unsafe { asm!("mov {:e}, cs", out(reg) ring, options(nomem, nostack, preserves_flags)) };
    if ring & 3 == 0 {
        // SAFETY: the routine changes these registers and no memory of this program.
        unsafe {
            asm!("call request", in("esi") kind, in("rdi") argument,
                out("rax") _, out("rcx") _, out("rdx") _)
        };
    } else {
        // SAFETY: as above, through an exception.
        unsafe {
            asm!("call request_from_ring3", in("esi") kind, in("rdi") argument,
                out("rax") _, out("rcx") _, out("rdx") _)
        };
    }
}

/// Stops this processor.
pub fn park() -> ! {
    loop {
        request(PARK, 0);
    }
}

/// Reports that the guest cannot continue. Powers off if the device is missing.
pub fn give_up() -> ! {
    // SAFETY: this writes "panicked" to pvpanic's port. Without the device nothing happens.
    unsafe { asm!("out dx, al", in("dx") 0x505u16, in("al") 1u8, options(nomem, nostack)) };
    wait();
    power_off()
}

/// Powers off. Failing that, resets; failing that, ends the machine by a triple fault.
pub fn power_off() -> ! {
    // SAFETY: this writes sleep type 0 and sleep enable to ACPI's PM1a control register. Without it
    // nothing happens.
    unsafe { asm!("out dx, ax", in("dx") 0x604u16, in("ax") 0x2000u16, options(nomem, nostack)) };
    wait();
    reset()
}

/// Resets by the keyboard controller. Failing that, ends the machine by a triple fault.
pub fn reset() -> ! {
    // SAFETY: this pulses the reset line. Without the controller nothing happens.
    unsafe { asm!("out 0x64, al", in("al") 0xfeu8, options(nomem, nostack)) };
    wait();
    loop {
        request(TRIPLE_FAULT, 0);
    }
}

/// Waits some milliseconds, in which the VMM may stop the machine.
fn wait() {
    let start = tsc();
    while tsc().wrapping_sub(start) < 50_000_000 {
        core::hint::spin_loop();
    }
}

/// Returns the time-stamp counter.
#[inline(always)]
pub fn tsc() -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: reads a counter.
    unsafe {
        asm!("rdtsc", out("eax") low, out("edx") high, options(nomem, nostack, preserves_flags))
    };
    u64::from(high) << 32 | u64::from(low)
}

/// Writes a model-specific register; in ring 0 only.
///
/// # Safety
///
/// The register must exist, and its new value must not take memory away from the program.
pub unsafe fn write_msr(register: u32, value: u64) {
    // SAFETY: left to the caller.
    unsafe {
        asm!("wrmsr", in("ecx") register, in("eax") value as u32,
            in("edx") (value >> 32) as u32, options(nostack))
    };
}

/// Reads a model-specific register; in ring 0 only.
///
/// # Safety
///
/// The register must exist.
pub unsafe fn read_msr(register: u32) -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: left to the caller.
    unsafe { asm!("rdmsr", in("ecx") register, out("eax") low, out("edx") high, options(nostack)) };
    u64::from(high) << 32 | u64::from(low)
}
