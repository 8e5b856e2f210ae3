//! Time slices of threads. A thread that decides, sends or answers runs for microseconds and then
//! waits; a vCPU that never halts runs for as long as it may. Where both share a processor, the
//! scheduler makes the thread that wakes wait for the end of the other's slice, up to a tick
//! (4 ms). A pause has several such wakes in a row.
//!
//! Since Linux 6.12 a thread may request a shorter slice (`sched_runtime` of `sched_setattr(2)`,
//! without a privilege). The scheduler then lets it preempt a thread with a longer slice when it
//! wakes. Its share of the processor does not change. Threads inherit the slice, so the process
//! requests it once, at its start.
//!
//! Threads that compute restore the default: vCPUs, and those that read a checkpoint while they
//! build the machine. With short slices the latter preempt one another, which delays the start of a
//! lazy restore by 0.4 ms (7 %, `cargo bench -p tests --bench restore`, on two processors).
//!
//! The benefit is a shorter downtime for a guest that never halts, on a host with few processors.
//! The row "spins between" of `cargo bench -p tests --bench migrate_vs_qemu` shows it. Older
//! kernels ignore the request.

use std::io;

/// Length of a short slice in nanoseconds: the kernel's minimum.
const SHORT_NS: u64 = 100_000;
/// Value that selects the kernel's default length.
const DEFAULT_NS: u64 = 0;

/// Gives the calling thread, and those that it starts, short slices.
pub fn short_slices() {
    set(SHORT_NS);
}

/// Gives the calling thread, and those that it starts, slices of the default length.
pub fn default_slices() {
    set(DEFAULT_NS);
}

/// Returns the number of the processor on which this thread runs.
pub(crate) fn processor() -> libc::c_int {
    // SAFETY: the call takes no argument and writes no memory of the caller.
    unsafe { libc::sched_getcpu() }
}

fn set(slice_ns: u64) {
    if let Err(e) = set_slice(slice_ns) {
        tracing::debug!("the scheduler refuses time slices of {slice_ns} ns: {e}");
    }
}

fn set_slice(slice_ns: u64) -> io::Result<()> {
    // SAFETY: all of the structure may be zero.
    let mut attr: libc::sched_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes no more than the size that is passed, which is the structure's own.
    let read =
        unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, size_of_val(&attr), 0) };
    if read != 0 {
        return Err(io::Error::last_os_error());
    }
    // A thread of a real-time class has no slice of this kind.
    if attr.sched_policy != libc::SCHED_OTHER as u32
        && attr.sched_policy != libc::SCHED_BATCH as u32
    {
        return Ok(());
    }
    attr.sched_runtime = slice_ns;
    // SAFETY: the structure is initialized and contains its own size.
    let written = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
    if written == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
