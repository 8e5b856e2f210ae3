//! COM1: complete lines from each vCPU, sent a few bytes at a time so that printing does not stop
//! the loop.

use core::arch::asm;
use core::hint::spin_loop;
use core::sync::atomic::{AtomicU32, Ordering};

/// Bytes sent after a busy tick.
pub const BUSY_BYTES: u32 = 2;
/// Bytes sent before going to sleep.
pub const IDLE_BYTES: u32 = 12;
/// Capacity of the port's FIFO in bytes.
const FIFO_BYTES: u32 = 16;
/// Capacity of the queue in bytes.
pub const QUEUE: usize = 4096;

/// Lock, held from the first byte of a line to its last.
static LOCK: AtomicU32 = AtomicU32::new(0);

/// The queued lines of one vCPU.
pub struct Console {
    owner: u32,
    queue: *mut u8,
    head: usize,
    tail: usize,
    holding: bool,
}

impl Console {
    /// Creates a console whose queue lies at `queue`.
    pub fn new(index: u32, queue: u64) -> Console {
        Console { owner: index + 1, queue: queue as *mut u8, head: 0, tail: 0, holding: false }
    }

    /// Queues a line with its newline. Without room it first sends what is queued, and the loop has
    /// a gap of that length.
    pub fn print(&mut self, line: &[u8]) {
        if self.head - self.tail + line.len() > QUEUE {
            self.flush();
        }
        for &byte in line {
            // SAFETY: the index stays within the queue.
            unsafe { self.queue.add(self.head % QUEUE).write(byte) };
            self.head += 1;
        }
    }

    /// Sends at most `bytes` bytes, if no other vCPU is in the middle of a line. Calls `sent` after
    /// each.
    #[inline(always)]
    pub fn pump(&mut self, bytes: u32, mut sent: impl FnMut()) {
        if self.head != self.tail {
            self.send(bytes, &mut sent);
        }
    }

    /// Sends all queued bytes.
    pub fn flush(&mut self) {
        while self.head != self.tail {
            self.send(FIFO_BYTES, &mut || {});
            spin_loop();
        }
    }

    /// Sends at most `bytes` bytes of one line. Reads the line status once: it says that the FIFO
    /// is empty, so [`FIFO_BYTES`] fit. An access to the port costs 40 us on a host without
    /// hardware virtualization.
    #[cold]
    #[inline(never)]
    fn send(&mut self, bytes: u32, sent: &mut dyn FnMut()) {
        // Without the lock another vCPU may fill the FIFO after the status was read.
        if !self.lock() || !ready() {
            return;
        }
        for _ in 0..bytes.min(FIFO_BYTES) {
            if !self.holding {
                return;
            }
            // SAFETY: the index stays within the queue, below what was written.
            let byte = unsafe { self.queue.add(self.tail % QUEUE).read() };
            self.tail += 1;
            put(byte);
            if byte == b'\n' {
                self.holding = false;
                LOCK.store(0, Ordering::Release);
            }
            sent();
        }
    }

    /// Returns whether this vCPU may send, until the end of a line.
    fn lock(&mut self) -> bool {
        let free = || LOCK.compare_exchange(0, self.owner, Ordering::Acquire, Ordering::Relaxed);
        self.holding = self.holding || free().is_ok();
        self.holding
    }
}

/// Prints immediately and bypasses the lock, for output that cannot wait.
pub fn print_now(line: &[u8]) {
    for &byte in line {
        while !ready() {
            spin_loop();
        }
        put(byte);
    }
}

/// Switches the port's FIFO on, once for all vCPUs.
pub fn enable_fifo() {
    // SAFETY: writes COM1's FIFO control register, which also clears the FIFOs. They are empty.
    unsafe {
        asm!("out dx, al", in("dx") 0x3fau16, in("al") 1u8,
            options(nomem, nostack, preserves_flags))
    };
}

fn ready() -> bool {
    let status: u8;
    // SAFETY: reads COM1's line status.
    unsafe {
        asm!("in al, dx", in("dx") 0x3fdu16, out("al") status,
            options(nomem, nostack, preserves_flags))
    };
    status & 0x20 != 0
}

fn put(byte: u8) {
    // SAFETY: sends a byte over COM1.
    unsafe {
        asm!("out dx, al", in("dx") 0x3f8u16, in("al") byte,
            options(nomem, nostack, preserves_flags))
    };
}
