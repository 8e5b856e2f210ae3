//! The local APIC: starts the other processors, and provides the timer that ends a sleep.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::clock::KvmClock;
use crate::cpu::{self, CpuFeatures, SPURIOUS_VECTOR, TIMER_VECTOR, read_msr, tsc, write_msr};
use crate::heap;

const APIC_BASE: u32 = 0x1b;
const MMIO: u64 = 0xfee0_0000;
const X2APIC_FIRST: u32 = 0x800;

/// Registers, by their numbers in x2APIC mode.
const TASK_PRIORITY: u32 = 0x08;
const SPURIOUS: u32 = 0x0f;
const COMMAND: u32 = 0x30;
const COMMAND_HIGH: u32 = 0x31;
const TIMER: u32 = 0x32;
const LINT0: u32 = 0x35;
const LINT1: u32 = 0x36;
const INITIAL_COUNT: u32 = 0x38;
const CURRENT_COUNT: u32 = 0x39;
const DIVIDE: u32 = 0x3e;

const MASKED: u64 = 1 << 16;
const DEADLINE: u64 = 2 << 17;
const DIVIDE_BY_1: u64 = 0x0b;
/// Fraction bits of the timer's speed.
const SPEED_BITS: u32 = 20;
const AP_STACK: u64 = 16 << 10;
const TRAMPOLINE: u64 = 0x8000;

/// Whether registers are model-specific rather than in memory.
static X2APIC: AtomicBool = AtomicBool::new(false);
/// Timer ticks per nanosecond, or 0 if the timer takes a TSC deadline.
static SPEED: AtomicU64 = AtomicU64::new(0);
static BY_DEADLINE: AtomicBool = AtomicBool::new(false);

unsafe extern "C" {
    static mut idle_function: u64;
    static mut ap_stacks: [u32; 32];
    static trampoline_start: u8;
    static trampoline_end: u8;
    fn idle_deadline();
    fn idle_x2apic();
    fn idle_xapic();
}

/// Decides how the APIC is used; the boot processor decides for all processors.
pub fn choose(features: &CpuFeatures) {
    X2APIC.store(features.x2apic, Ordering::Relaxed);
    BY_DEADLINE.store(features.tsc_deadline, Ordering::Relaxed);
    let idle = if features.tsc_deadline {
        idle_deadline as *const ()
    } else if features.x2apic {
        idle_x2apic as *const ()
    } else {
        idle_xapic as *const ()
    };
    // SAFETY: only the boot processor runs, and no sleep has happened yet.
    unsafe { (&raw mut idle_function).write_volatile(idle as u64) };
}

/// Returns whether registers are model-specific.
pub fn is_x2apic() -> bool {
    X2APIC.load(Ordering::Relaxed)
}

/// Enables the calling processor's APIC, with its timer as the only interrupt source.
pub fn enable() {
    let mode = if is_x2apic() { 0xc00 } else { 0x800 };
    // SAFETY: every processor in long mode has this register.
    let base = unsafe { read_msr(APIC_BASE) };
    // SAFETY: this sets only the enable bits.
    unsafe { write_msr(APIC_BASE, base | mode) };
    write(TASK_PRIORITY, 0);
    write(LINT0, MASKED);
    write(LINT1, MASKED);
    write(SPURIOUS, 0x100 | u64::from(SPURIOUS_VECTOR));
}

/// Prepares the timer, and measures its speed once if necessary.
pub fn start_timer(clock: &KvmClock) -> Option<()> {
    if BY_DEADLINE.load(Ordering::Relaxed) {
        write(TIMER, DEADLINE | u64::from(TIMER_VECTOR));
        // A deadline that is armed before the mode is set would be lost, and the write above may go
        // to memory.
        core::sync::atomic::fence(Ordering::SeqCst);
        return Some(());
    }
    write(DIVIDE, DIVIDE_BY_1);
    write(TIMER, MASKED | u64::from(TIMER_VECTOR));
    if SPEED.load(Ordering::Relaxed) == 0 {
        write(INITIAL_COUNT, u64::from(u32::MAX));
        let start = clock.now();
        while clock.now() < start + 10_000_000 {
            core::hint::spin_loop();
        }
        let ticks = u64::from(u32::MAX) - read(CURRENT_COUNT);
        let speed = (ticks << SPEED_BITS) / (clock.now() - start).max(1);
        write(INITIAL_COUNT, 0);
        if speed == 0 {
            return None;
        }
        SPEED.store(speed, Ordering::Relaxed);
    }
    write(TIMER, u64::from(TIMER_VECTOR));
    Some(())
}

/// Sleeps from `now` until `wake`, or slightly shorter. Callable from both rings.
#[inline(always)]
pub fn sleep(clock: &KvmClock, now: u64, wake: u64) {
    let ns = wake.saturating_sub(now).min(1_000_000_000);
    let argument = match SPEED.load(Ordering::Relaxed) {
        0 => tsc() + clock.tsc_in(ns),
        speed => ((ns * speed) >> SPEED_BITS).clamp(1, u64::from(u32::MAX)),
    };
    cpu::request(cpu::SLEEP, argument);
}

/// Starts another processor, whose APIC id equals its index.
pub fn start_ap(index: u32, clock: &KvmClock) {
    let (from, end) = (&raw const trampoline_start, &raw const trampoline_end);
    for offset in 0..end as usize - from as usize {
        // SAFETY: the trampoline is this program's code.
        let byte = unsafe { from.add(offset).read_volatile() };
        // SAFETY: low memory is RAM, and the VMM's data in it has been read.
        unsafe { ((TRAMPOLINE as usize + offset) as *mut u8).write_volatile(byte) };
    }
    let stack = heap::take(AP_STACK) + AP_STACK - 16;
    // SAFETY: the processor that reads it has not started.
    unsafe { (&raw mut ap_stacks[index as usize]).write_volatile(stack as u32) };
    command(index, 0x4500);
    pause(clock, 200_000);
    for _ in 0..2 {
        command(index, 0x4600 | TRAMPOLINE >> 12);
        pause(clock, 200_000);
    }
}

fn pause(clock: &KvmClock, ns: u64) {
    let end = clock.now() + ns;
    while clock.now() < end {
        core::hint::spin_loop();
    }
}

fn command(index: u32, value: u64) {
    if is_x2apic() {
        write(COMMAND, u64::from(index) << 32 | value);
    } else {
        write(COMMAND_HIGH, u64::from(index) << 24);
        write(COMMAND, value);
    }
}

fn write(register: u32, value: u64) {
    if is_x2apic() {
        // SAFETY: an APIC register in x2APIC mode.
        unsafe { write_msr(X2APIC_FIRST + register, value) };
    } else {
        // SAFETY: the APIC's page is mapped, uncached.
        unsafe { ((MMIO + u64::from(register) * 16) as *mut u32).write_volatile(value as u32) };
    }
}

fn read(register: u32) -> u64 {
    if is_x2apic() {
        // SAFETY: an APIC register in x2APIC mode.
        unsafe { read_msr(X2APIC_FIRST + register) }
    } else {
        // SAFETY: the APIC's page is mapped, uncached.
        u64::from(unsafe { ((MMIO + u64::from(register) * 16) as *const u32).read_volatile() })
    }
}
