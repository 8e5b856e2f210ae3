//! Owns write protection of guest memory (see [`WriteProtection`]): which frames must not change
//! until they have been copied. It uses userfaultfd for writes, and [`ProtectedFrames`] for threads
//! that change frames without a fault.
//!
//! A thread that writes to a protected frame waits in the kernel: a vCPU in `KVM_RUN`, a device in
//! its store or in its `readv`, KVM on behalf of a vCPU. All of them can be interrupted or killed.
//! Discarding a frame is not a write and would empty it immediately: the balloon therefore checks
//! [`ProtectedFrames`] first, and waits there.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use driftline_dirty_tracker::{FrameRun, FrameSet, PAGE_SIZE};
use driftline_guest::{GuestError, GuestRam, WriteProtection};
use parking_lot::{Condvar, Mutex, MutexGuard};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use super::error::FrameError;
use super::lazy_restore::LazyRestore;
use super::page_handler::PageHandler;
use super::region::{RegionSource, all, frame_at, is_pooled, source};
use super::userfault::Userfault;

/// The frames that are protected and the frames that have not arrived yet, for threads that change
/// frames without writing to them.
#[derive(Debug, Default)]
pub(crate) struct ProtectedFrames {
    /// Whether any frames are protected. Checked before the lock is taken.
    any: AtomicBool,
    state: Mutex<ProtectedState>,
    changed: Condvar,
    lazy_restore: OnceLock<LazyRestore>,
    page_handler: OnceLock<PageHandler>,
}

#[derive(Debug, Default)]
struct ProtectedState {
    protected: FrameSet,
    /// Number of times that frames were protected.
    generation: u64,
    /// Frames for which a thread waits in [`ProtectedFrames::wait`].
    awaited: Vec<FrameRun>,
}

impl ProtectedFrames {
    /// Returns the lazy restore of this guest, if it was restored that way.
    pub(super) fn lazy_restore(&self) -> Option<&LazyRestore> {
        self.lazy_restore.get()
    }

    /// Sets the lazy restore. A guest's memory is restored once: a second one is returned as the
    /// error.
    pub(super) fn set_lazy_restore(&self, restore: LazyRestore) -> Result<(), LazyRestore> {
        self.lazy_restore.set(restore)
    }

    /// Returns the page handler that serves this guest's memory, if there is one and a page may be
    /// missing.
    pub(super) fn page_handler(&self) -> Option<&PageHandler> {
        self.page_handler.get().filter(|handler| handler.serves())
    }

    /// Sets the page handler. Memory has one: a second one is returned as the error.
    pub(super) fn set_page_handler(&self, handler: PageHandler) -> Result<(), PageHandler> {
        self.page_handler.set(handler)
    }

    fn lock(&self) -> MutexGuard<'_, ProtectedState> {
        self.state.lock()
    }

    /// Waits until none of `frames` is protected. Callers must be threads that a pause waits for
    /// (vCPUs, device threads): the protection that an epoch relies on is completed only while the
    /// guest and its devices are paused.
    pub(crate) fn wait(&self, frames: FrameRun) {
        if !self.any.load(Ordering::Acquire) {
            return;
        }
        let mut state = self.lock();
        loop {
            let Some(first) = state.protected.within(frames).next() else { return };
            state.awaited.push(first);
            let first = FrameRun { start: first.start, count: 1 };
            // If the frame was unprotected and protected again before this thread woke, the thread
            // registers its wait anew.
            let generation = state.generation;
            let waits = |s: &mut ProtectedState| {
                s.protected.intersects(first) && s.generation == generation
            };
            self.changed.wait_while(&mut state, waits);
        }
    }

    fn add(&self, frames: &[FrameRun]) {
        let mut state = self.lock();
        state.protected.insert_all(frames);
        state.generation += 1;
        self.changed.notify_all();
        self.any.store(!state.protected.is_empty(), Ordering::Release);
    }

    fn remove(&self, frames: FrameRun) {
        let mut state = self.lock();
        if state.protected.remove(frames) > 0 {
            self.any.store(!state.protected.is_empty(), Ordering::Release);
            self.changed.notify_all();
        }
    }

    fn clear(&self) -> FrameSet {
        let mut state = self.lock();
        state.awaited.clear();
        self.any.store(false, Ordering::Release);
        self.changed.notify_all();
        std::mem::take(&mut state.protected)
    }

    fn awaited(&self) -> Option<FrameRun> {
        if self.any.load(Ordering::Acquire) { self.lock().awaited.pop() } else { None }
    }
}

/// Write protection of one guest's memory. Dropping it unprotects all frames and unregisters the
/// memory.
#[derive(Debug)]
pub(crate) struct MemoryWriteProtection {
    userfault: Userfault,
    /// Keeps the memory mapped.
    ram: GuestRam,
    protected: Arc<ProtectedFrames>,
    /// Addresses of faults that `awaited` has read but not returned yet.
    faults: Mutex<VecDeque<u64>>,
    /// Whether memory had to be unregistered to wake its writers. This instance can then neither
    /// protect nor unprotect frames.
    broken: AtomicBool,
}

impl MemoryWriteProtection {
    /// Opens write protection of `ram`; `None` if its pages or the host do not support it.
    ///
    /// While no frame is protected, the guest writes as fast as before (`tests/bench/cadence.rs`).
    /// While a memory file is registered, the kernel maps no pages around a touched one, and
    /// khugepaged fills no holes.
    pub(super) fn open(
        ram: &GuestRam,
        protected: &Arc<ProtectedFrames>,
    ) -> io::Result<Option<Self>> {
        if ram.iter().any(is_pooled) {
            // Pool pages can be protected only 2 MiB at a time.
            tracing::debug!(
                "no write protection with huge pages from the pool: frames are copied in the pause"
            );
            return Ok(None);
        }
        if ram.iter().any(|region| matches!(source(region), RegionSource::Private(_))) {
            // The kernel refuses synchronous protection of files' pages.
            tracing::info!(
                "no write protection of memory that is mapped from a snapshot's file: changed \
                 frames are copied in the pause"
            );
            return Ok(None);
        }
        let userfault = match Userfault::open() {
            Ok(userfault) => userfault,
            Err(e) => {
                tracing::info!("no userfaultfd: {e}; changed frames are copied in the pause");
                return Ok(None);
            }
        };
        // Register before `Self` exists: dropping `Self` would unprotect what another instance
        // protects.
        for region in ram.iter() {
            userfault.register(region.as_ptr() as u64, region.len())?;
        }
        Ok(Some(Self {
            userfault,
            ram: ram.clone(),
            protected: protected.clone(),
            faults: Mutex::default(),
            broken: AtomicBool::new(false),
        }))
    }

    fn require_registered(&self) -> Result<(), FrameError> {
        if self.broken.load(Ordering::Acquire) {
            return Err(FrameError::UnprotectFailed);
        }
        Ok(())
    }

    /// Calls `act` with the address and length of `frames`, once for each mapping that they lie in.
    fn each(
        &self,
        frames: FrameRun,
        act: impl Fn(&Userfault, u64, u64) -> io::Result<()>,
    ) -> io::Result<()> {
        let (start, end) = (frames.start, frames.end());
        for region in self.ram.iter() {
            let has = all(region);
            let (low, high) = (start.max(has.start), end.min(has.end()));
            if low < high {
                let address = region.as_ptr() as u64 + (low.gpa() - has.start.gpa());
                act(&self.userfault, address, (high.0 - low.0) * PAGE_SIZE)?;
            }
        }
        Ok(())
    }
}

impl WriteProtection for MemoryWriteProtection {
    fn protect(&self, frames: &[FrameRun]) -> Result<(), GuestError> {
        self.require_registered()?;
        // Comes first, so that a thread that calls `wait` does wait.
        self.protected.add(frames);
        let protected = frames.iter().try_for_each(|run| self.each(*run, Userfault::protect));
        // A frame that was unprotected meanwhile may have been protected after that. All frames are
        // added again, so that `unprotect_all` unprotects them in any case.
        self.protected.add(frames);
        Ok(protected.map_err(FrameError::system("protecting frames"))?)
    }

    fn unprotect(&self, frames: FrameRun) -> Result<(), GuestError> {
        self.require_registered()?;
        // Comes first: a frame that is protected again meanwhile is added after it.
        self.protected.remove(frames);
        let unprotected = self.each(frames, Userfault::unprotect);
        let unprotected = unprotected.inspect_err(|_| self.protected.add(&[frames]));
        Ok(unprotected.map_err(FrameError::system("unprotecting frames"))?)
    }

    fn unprotect_all(&self) {
        let left = self.protected.clear();
        let unprotected = left.iter().map(|run| self.each(run, Userfault::unprotect));
        if let Some(e) = unprotected.filter_map(Result::err).last() {
            tracing::error!("frames cannot be unprotected: {e}; all memory is unregistered");
            self.broken.store(true, Ordering::Release);
            for region in self.ram.iter() {
                let (start, len) = (region.as_ptr() as u64, region.len());
                // Unregistering alone does not wake waiting writers.
                let unregistered = self.userfault.unregister(start, len);
                if let Err(e) = unregistered.and(self.userfault.wake(start, len)) {
                    tracing::error!("memory cannot be unregistered from userfaultfd: {e}");
                }
            }
        }
    }

    fn awaited(&self, limit: Duration) -> Result<Option<FrameRun>, GuestError> {
        if let Some(frames) = self.protected.awaited() {
            return Ok(Some(frames));
        }
        let mut faults = self.faults.lock();
        loop {
            while let Some(address) = faults.pop_front() {
                if let Some(start) = frame_at(&self.ram, address) {
                    return Ok(Some(FrameRun { start, count: 1 }));
                }
            }
            let read = self.userfault.faults(limit, &mut *faults);
            read.map_err(FrameError::system("reading faults"))?;
            if faults.is_empty() {
                return Ok(None);
            }
        }
    }
}

impl Drop for MemoryWriteProtection {
    fn drop(&mut self) {
        // The descriptor is closed with the remaining fields.
        self.unprotect_all();
    }
}

#[cfg(test)]
mod tests;
