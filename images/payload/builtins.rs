//! The functions to which the compiler emits calls.

use core::arch::asm;

/// Copies in ascending order.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8 {
    // SAFETY: left to the caller.
    unsafe {
        asm!("rep movsq", "mov ecx, {rest:e}", "rep movsb", rest = in(reg) bytes & 7,
            inout("rcx") bytes / 8 => _, inout("rdi") to => _, inout("rsi") from => _,
            options(nostack, preserves_flags))
    };
    to
}

/// Copies in the direction that is correct for ranges that overlap.
#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8 {
    if (to as usize).wrapping_sub(from as usize) >= bytes {
        // SAFETY: copying forward reads every byte before it is overwritten.
        return unsafe { memcpy(to, from, bytes) };
    }
    // SAFETY: copying backward reads every byte before it is overwritten; the rest is left to the
    // caller.
    unsafe {
        asm!("std", "rep movsb", "cld", inout("rcx") bytes => _,
            inout("rdi") to.wrapping_add(bytes).wrapping_sub(1) => _,
            inout("rsi") from.wrapping_add(bytes).wrapping_sub(1) => _, options(nostack))
    };
    to
}

/// Fills memory with one byte.
#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, byte: i32, bytes: usize) -> *mut u8 {
    let word = u64::from(byte as u8) * 0x0101_0101_0101_0101;
    // SAFETY: left to the caller.
    unsafe {
        asm!("rep stosq", "mov ecx, {rest:e}", "rep stosb", rest = in(reg) bytes & 7,
            in("rax") word, inout("rcx") bytes / 8 => _, inout("rdi") to => _,
            options(nostack, preserves_flags))
    };
    to
}

/// Compares byte by byte.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(left: *const u8, right: *const u8, bytes: usize) -> i32 {
    for index in 0..bytes {
        // SAFETY: left to the caller.
        let a = unsafe { *left.add(index) };
        // SAFETY: left to the caller.
        let b = unsafe { *right.add(index) };
        if a != b {
            return i32::from(a) - i32::from(b);
        }
    }
    0
}

/// Compares for equality only.
#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(left: *const u8, right: *const u8, bytes: usize) -> i32 {
    // SAFETY: left to the caller.
    unsafe { memcmp(left, right, bytes) }
}

/// Referenced by `core`, never called: there is no unwinding here.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}
