//! Operations that fail on request, and the drive that only one host may hold.

use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use std::sync::mpsc;

use parking_lot::Mutex;

use crate::error::GuestError;

/// An operation of a guest that a test can make fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum Op {
    /// `Lifecycle::pause`
    Pause,
    /// `Lifecycle::resume`
    Resume,
    /// `Stateful::save_state`
    Save,
    /// `Stateful::restore_state`
    Restore,
    /// `HandOver::flush`
    Flush,
    /// `HandOver::release`
    Release,
    /// `HandOver::detach`
    Detach,
    /// `HandOver::attach`
    Attach,
    /// `HandOver::acquire`
    Acquire,
    /// `DirtyLog::subscribe`
    Subscribe,
    /// `DirtyLog::collect`
    Collect,
    /// `GuestContents::populated`
    Populated,
    /// `GuestFactory::create`
    Create,
    /// `GuestContents::write_protection`: the guest has none
    WriteProtection,
    /// `WriteProtection::protect`
    Protect,
    /// `WriteProtection::unprotect`
    Unprotect,
    /// `WriteProtection::awaited`
    Awaited,
    /// `MemoryLoader::fill`
    LoadMemory,
}

const OPS: usize = Op::LoadMemory as usize + 1;

/// How many of the next calls of each operation fail, and which one waits. Share it behind an
/// `Arc`.
#[derive(Debug, Default)]
pub struct Faults {
    next: [AtomicU32; OPS],
    /// Operation whose next call waits until the sender is dropped.
    held: Mutex<Option<(Op, mpsc::Receiver<()>)>>,
}

impl Faults {
    /// Makes the next `times` calls of `op` fail and do nothing else; 0 ends that.
    pub fn fail_next(&self, op: Op, times: u32) {
        self.next[op as usize].store(times, SeqCst);
    }

    /// Makes the next call of `op` wait until the returned sender is dropped. Replaces an earlier
    /// one.
    pub fn hold_next(&self, op: Op) -> mpsc::Sender<()> {
        let (gate, held) = mpsc::channel();
        *self.held.lock() = Some((op, held));
        gate
    }

    pub(super) fn check(&self, op: Op, what: &'static str) -> Result<(), GuestError> {
        let held = self.held.lock().take_if(|(held, _)| *held == op);
        if let Some((_, gate)) = held {
            // Nothing is sent.
            let _ = gate.recv();
        }
        let left = self.next[op as usize].fetch_update(SeqCst, SeqCst, |n| n.checked_sub(1));
        match left {
            Err(_) => Ok(()),
            Ok(_) => {
                let cause = io::Error::other("the test made it fail").into();
                Err(GuestError::System { what, cause })
            }
        }
    }
}

/// A drive that only one host may hold. Counts how many guests that share it ever ran at the same
/// time.
#[derive(Debug, Default)]
pub struct ExclusiveDrive {
    /// The guest that holds it; 0 means none.
    holder: AtomicU64,
    /// The guest that peers reach by its tap; 0 means none.
    reached: AtomicU64,
    /// Number of flushes for the guest that runs on it.
    flushes: AtomicU64,
    running: AtomicU32,
    most_running: AtomicU32,
}

impl ExclusiveDrive {
    /// Returns the most guests on this drive that ever ran at the same time: I7 requires one.
    pub fn most_running(&self) -> u32 {
        self.most_running.load(SeqCst)
    }

    /// Returns whether any guest holds it.
    pub fn is_held(&self) -> bool {
        self.holder.load(SeqCst) != 0
    }

    /// Returns how often it was flushed by [`HandOver::flush`](crate::HandOver::flush).
    pub fn flushes(&self) -> u64 {
        self.flushes.load(SeqCst)
    }

    pub(super) fn flush(&self) {
        self.flushes.fetch_add(1, SeqCst);
    }

    pub(super) fn acquire(&self, guest: u64) -> Result<(), GuestError> {
        for (what, by) in [("taking the drive", &self.holder), ("taking the tap", &self.reached)] {
            if let Err(holder) = by.compare_exchange(0, guest, SeqCst, SeqCst)
                && holder != guest
            {
                self.release(guest);
                let cause = io::Error::other("another guest holds it").into();
                return Err(GuestError::System { what, cause });
            }
        }
        Ok(())
    }

    pub(super) fn release(&self, guest: u64) {
        let _ = self.holder.compare_exchange(guest, 0, SeqCst, SeqCst);
    }

    pub(super) fn detach(&self, guest: u64) {
        let _ = self.reached.compare_exchange(guest, 0, SeqCst, SeqCst);
    }

    pub(super) fn guest_resumed(&self) {
        let now = self.running.fetch_add(1, SeqCst) + 1;
        self.most_running.fetch_max(now, SeqCst);
    }

    pub(super) fn guest_paused(&self) {
        self.running.fetch_sub(1, SeqCst);
    }
}
