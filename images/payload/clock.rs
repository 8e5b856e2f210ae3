//! The clock: one kvmclock page for this vCPU, readable in ring 3.

use core::sync::atomic::{Ordering, compiler_fence};

use crate::cpu::{tsc, write_msr};

const SYSTEM_TIME_NEW: u32 = 0x4b56_4d01;

/// Content of the page, as the host writes it.
#[repr(C)]
struct KvmClockPage {
    version: u32,
    pad: u32,
    tsc: u64,
    system_ns: u64,
    mul: u32,
    shift: i8,
    flags: u8,
}

/// Nanoseconds since the start of the machine, by kvmclock.
pub struct KvmClock {
    page: *const KvmClockPage,
}

impl KvmClock {
    /// Registers the page at `page` with the host, which updates it from then on.
    pub fn start(page: u64) -> KvmClock {
        // SAFETY: the caller checked that the host has this register, and allocated the page for
        // it.
        unsafe { write_msr(SYSTEM_TIME_NEW, page | 1) };
        KvmClock { page: page as *const KvmClockPage }
    }

    /// Returns the present time. The host makes the version odd while it writes.
    #[inline(always)]
    pub fn now(&self) -> u64 {
        loop {
            let before = self.version();
            let (since, system_ns, mul, shift) = self.fields();
            let elapsed = tsc().wrapping_sub(since);
            compiler_fence(Ordering::SeqCst);
            if before & 1 == 0 && before == self.version() {
                let elapsed = if shift < 0 { elapsed >> -shift } else { elapsed << shift };
                return system_ns
                    .wrapping_add(((u128::from(elapsed) * u128::from(mul)) >> 32) as u64);
            }
        }
    }

    /// Returns the number of time-stamp counter ticks in `ns` nanoseconds, below four seconds.
    #[inline(always)]
    pub fn tsc_in(&self, ns: u64) -> u64 {
        let (_, _, mul, shift) = self.fields();
        let scaled = (ns << 32) / u64::from(mul.max(1));
        if shift < 0 { scaled << -shift } else { scaled >> shift }
    }

    #[inline(always)]
    fn version(&self) -> u32 {
        // SAFETY: the page is always mapped; the host writes to it, hence volatile.
        let version = unsafe { (&raw const (*self.page).version).read_volatile() };
        compiler_fence(Ordering::SeqCst);
        version
    }

    #[inline(always)]
    fn fields(&self) -> (u64, u64, u32, i8) {
        let page = self.page;
        // SAFETY: as for the version.
        let since = unsafe { (&raw const (*page).tsc).read_volatile() };
        // SAFETY: as for the version.
        let system_ns = unsafe { (&raw const (*page).system_ns).read_volatile() };
        // SAFETY: as for the version.
        let mul = unsafe { (&raw const (*page).mul).read_volatile() };
        // SAFETY: as for the version.
        let shift = unsafe { (&raw const (*page).shift).read_volatile() };
        (since, system_ns, mul, shift)
    }
}
