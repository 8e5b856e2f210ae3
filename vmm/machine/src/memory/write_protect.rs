//! Owns write protection of guest memory (see [`WriteProtection`]): which frames must not change
//! until they have been copied. It uses userfaultfd for writes, and [`ProtectedFrames`] for threads
//! that change frames without a fault.
//!
//! A thread that writes to a protected frame waits in the kernel: a vCPU in `KVM_RUN`, a device in
//! its store or in its `readv`, KVM on behalf of a vCPU. All of them can be interrupted or killed.
//! Discarding a frame is not a write and would empty it at once: the balloon therefore checks
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
use super::region::{RegionSource, all, frame_at, is_pooled, source};
use super::userfault::Userfault;

/// The frames that are protected and the frames that have not been restored yet, for threads that
/// change frames without writing to them.
#[derive(Debug, Default)]
pub(crate) struct ProtectedFrames {
    /// Whether any frames are protected. Checked before the lock is taken.
    any: AtomicBool,
    state: Mutex<ProtectedState>,
    changed: Condvar,
    lazy_restore: OnceLock<LazyRestore>,
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

    fn lock(&self) -> MutexGuard<'_, ProtectedState> {
        self.state.lock()
    }

    /// Waits until none of `frames` is protected. Callers must be threads that a pause waits for
    /// (vCPUs, device threads): frames are protected for real only while the guest and its devices
    /// are paused.
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
    /// For a memory file, the kernel no longer maps pages around a touched one, and khugepaged
    /// fills no holes.
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
            return Err(FrameError::ReleaseFailed);
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
        // added again, so that `release_all` unprotects them in any case.
        self.protected.add(frames);
        Ok(protected.map_err(FrameError::system("protecting frames"))?)
    }

    fn release(&self, frames: FrameRun) -> Result<(), GuestError> {
        self.require_registered()?;
        // Comes first: a frame that is protected again meanwhile is added after it.
        self.protected.remove(frames);
        let released = self.each(frames, Userfault::release);
        let released = released.inspect_err(|_| self.protected.add(&[frames]));
        Ok(released.map_err(FrameError::system("unprotecting frames"))?)
    }

    fn release_all(&self) {
        let left = self.protected.clear();
        let released = left.iter().map(|run| self.each(run, Userfault::release));
        if let Some(e) = released.filter_map(Result::err).last() {
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
        self.release_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use driftline_dirty_tracker::Gfn;
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::memory::{Backing, Discarder, HugePages, Memory, MemoryOptions};

    const SOON: Duration = Duration::from_secs(20);

    fn run(start: u64, count: u64) -> FrameRun {
        FrameRun { start: Gfn(start), count }
    }

    fn option_sets() -> impl Iterator<Item = MemoryOptions> {
        let pages = [Some(HugePages::None), Some(HugePages::Thp)];
        [Backing::Anon, Backing::Memfd].into_iter().flat_map(move |backing| {
            pages.map(|huge_pages| MemoryOptions { backing, huge_pages, prefault: false })
        })
    }

    /// Memory and its write protection, if this host supports it.
    fn write_protected(
        test: &str,
        options: &MemoryOptions,
    ) -> Option<(Memory, Box<dyn WriteProtection>)> {
        // In two slots.
        let memory = Memory::new((3 << 30) + (16 << 20), options).unwrap();
        let protection = memory.write_protection().unwrap();
        if protection.is_none() {
            crate::testing::skip(test, "this host has no userfaultfd that protects");
        }
        Some((memory, protection?))
    }

    fn byte(ram: &GuestRam, gfn: u64) -> u8 {
        ram.read_obj(GuestAddress(Gfn(gfn).gpa() + 9)).unwrap()
    }

    fn write(ram: &GuestRam, gfn: u64, value: u8) {
        ram.write_obj(value, GuestAddress(Gfn(gfn).gpa() + 9)).unwrap();
    }

    #[test]
    fn protected_frame_keeps_its_content_until_released() {
        for options in option_sets() {
            let name = "protected_frame_keeps_its_content_until_released";
            let Some((memory, protection)) = write_protected(name, &options) else { return };
            let ram = memory.ram();
            // Written, never written, and the last of one slot.
            for (gfn, value) in [(5000, 7), (5001, 0), (0xb_ffff, 8)] {
                if value > 0 {
                    write(ram, gfn, value);
                }
                protection.protect(&[run(gfn - 1, 2)]).unwrap();
                let (done, finished) = mpsc::channel();
                let theirs = ram.clone();
                let writer = thread::spawn(move || {
                    write(&theirs, gfn, 200);
                    done.send(()).unwrap();
                });
                assert_eq!(protection.awaited(SOON).unwrap(), Some(run(gfn, 1)), "{options:?}");
                finished.recv_timeout(Duration::from_millis(20)).unwrap_err();
                assert_eq!(byte(ram, gfn), value, "{options:?}");
                protection.release(run(gfn - 1, 1)).unwrap();
                finished.recv_timeout(Duration::from_millis(20)).unwrap_err();
                protection.release(run(gfn, 1)).unwrap();
                finished.recv_timeout(SOON).unwrap();
                writer.join().unwrap();
                assert_eq!(byte(ram, gfn), 200);
                // The write is reported once: no thread waits.
                write(ram, gfn, 201);
                assert_eq!(protection.awaited(Duration::ZERO).unwrap(), None);
            }
        }
    }

    #[test]
    fn dropping_write_protection_wakes_all_writers() {
        for options in option_sets() {
            let name = "dropping_write_protection_wakes_all_writers";
            let Some((memory, protection)) = write_protected(name, &options) else { return };
            // In both slots.
            let frames = [run(100, 1000), run(0x10_0000, 500)];
            protection.protect(&frames).unwrap();
            let writers = [100, 600, 1099, 0x10_0000, 0x10_01f3].map(|gfn| {
                let ram = memory.ram().clone();
                thread::spawn(move || write(&ram, gfn, 3))
            });
            protection.awaited(SOON).unwrap().unwrap();
            let refused = memory.write_protection().err().map(|e| e.to_string());
            assert!(refused.is_some_and(|e| e.contains("userfaultfd")), "one at a time");
            drop(protection);
            writers.into_iter().for_each(|writer| writer.join().unwrap());
            let again = memory.write_protection().unwrap().unwrap();
            again.protect(&frames).unwrap();
            again.release_all();
            write(memory.ram(), 100, 4);
        }
    }

    #[test]
    fn second_write_protection_is_refused_without_effect() {
        for options in option_sets() {
            let name = "second_write_protection_is_refused_without_effect";
            let Some((memory, protection)) = write_protected(name, &options) else { return };
            let ram = memory.ram();
            write(ram, 70, 5);
            protection.protect(&[run(70, 4), run(0x10_0000, 3)]).unwrap();
            for _ in 0..2 {
                memory.write_protection().map(|other| other.is_some()).unwrap_err();
            }
            assert_eq!(
                memory.protected_frames().lock().protected.frames(),
                7,
                "the balloon waits for them"
            );
            let (done, finished) = mpsc::channel();
            for gfn in [70, 0x10_0002] {
                let (theirs, done) = (ram.clone(), done.clone());
                thread::spawn(move || {
                    write(&theirs, gfn, 6);
                    done.send(()).unwrap();
                });
                assert_eq!(protection.awaited(SOON).unwrap(), Some(run(gfn, 1)), "{options:?}");
            }
            finished.recv_timeout(Duration::from_millis(20)).unwrap_err();
            assert_eq!(byte(ram, 70), 5, "{options:?}");
            protection.release_all();
            finished.recv_timeout(SOON).unwrap();
            finished.recv_timeout(SOON).unwrap();
            assert_eq!(
                (byte(ram, 70), memory.protected_frames().lock().protected.frames()),
                (6, 0)
            );
        }
    }

    #[test]
    fn frame_reprotected_during_release_is_released_at_end() {
        const RUNS: u64 = 2000;
        for options in option_sets() {
            let name = "frame_reprotected_during_release_is_released_at_end";
            let Some((memory, protection)) = write_protected(name, &options) else { return };
            let (ram, protection) = (memory.ram(), &*protection);
            let runs = (0..RUNS).map(|n| run(256 + 32 * n, 1)).collect::<Vec<_>>();
            runs.iter().for_each(|run| write(ram, run.start.0, 1));
            for _ in 0..10 {
                let writes = AtomicBool::new(true);
                let all_written = AtomicBool::new(false);
                thread::scope(|scope| {
                    scope.spawn(|| {
                        while writes.load(Ordering::Relaxed) {
                            runs.iter().rev().take(200).for_each(|run| write(ram, run.start.0, 2));
                        }
                        all_written.store(true, Ordering::Relaxed);
                    });
                    scope.spawn(|| {
                        while !all_written.load(Ordering::Relaxed) {
                            if let Some(run) = protection.awaited(Duration::from_millis(1)).unwrap()
                            {
                                protection.release(run).unwrap();
                            }
                        }
                    });
                    (0..4).for_each(|_| protection.protect(&runs).unwrap());
                    writes.store(false, Ordering::Relaxed);
                });
                protection.release_all();
                let (done, finished) = mpsc::channel();
                let (theirs, to_write) = (ram.clone(), runs.clone());
                thread::spawn(move || {
                    to_write.iter().for_each(|run| write(&theirs, run.start.0, 3));
                    done.send(()).unwrap();
                });
                finished.recv_timeout(SOON).unwrap_or_else(|_| {
                    let waits = protection.awaited(Duration::ZERO).unwrap();
                    panic!("{waits:?} is protected and in no set: {options:?}")
                });
            }
        }
    }

    #[test]
    fn failed_release_wakes_writers_and_ends_protection() {
        for options in option_sets() {
            let memory = Memory::new((3 << 30) + (16 << 20), &options).unwrap();
            let ram = memory.ram();
            let Some(protection) =
                MemoryWriteProtection::open(ram, memory.protected_frames()).unwrap()
            else {
                let name = "failed_release_wakes_writers_and_ends_protection";
                return crate::testing::skip(name, "this host has no userfaultfd that protects");
            };
            let (done, finished) = mpsc::channel();
            for gfn in [500, 0x10_0007] {
                protection.protect(&[run(gfn, 1)]).unwrap();
                let (theirs, done) = (ram.clone(), done.clone());
                thread::spawn(move || {
                    write(&theirs, gfn, 6);
                    done.send(()).unwrap();
                });
                assert_eq!(protection.awaited(SOON).unwrap(), Some(run(gfn, 1)), "{options:?}");
            }
            // From here on the kernel refuses to unprotect frames, and wakes no writer.
            let first = ram.iter().next().unwrap();
            protection.userfault.unregister(first.as_ptr() as u64, first.len()).unwrap();
            protection.release(run(500, 1)).unwrap_err();
            finished.recv_timeout(Duration::from_millis(20)).unwrap_err();
            protection.release_all();
            finished.recv_timeout(SOON).unwrap();
            finished.recv_timeout(SOON).unwrap();
            protection.protect(&[run(0x10_0000, 1)]).unwrap_err();
            protection.release(run(0x10_0000, 1)).unwrap_err();
            drop(protection);
            let again = memory.write_protection().unwrap().unwrap();
            again.protect(&[run(500, 1)]).unwrap();
        }
    }

    #[test]
    fn discard_waits_until_protected_frames_are_released() {
        for options in option_sets().filter(|o| o.huge_pages == Some(HugePages::None)) {
            let name = "discard_waits_until_protected_frames_are_released";
            let Some((memory, protection)) = write_protected(name, &options) else { return };
            let ram = memory.ram();
            (64..128).for_each(|gfn| write(ram, gfn, 9));
            protection.protect(&[run(70, 4), run(120, 50)]).unwrap();
            let mut discarder = Discarder::open(memory.protected_frames().clone()).unwrap();
            // Discarding frames that are not protected does not wait.
            assert_eq!(discarder.discard(ram, run(64, 6)).unwrap(), 6);
            let theirs = ram.clone();
            let balloon = thread::spawn(move || discarder.discard(&theirs, run(64, 64)).unwrap());
            for (first, all) in [(70, run(70, 4)), (120, run(120, 50))] {
                // The balloon waits without a fault, so no descriptor reports it.
                let mut looks =
                    (0..4000).map(|_| protection.awaited(Duration::from_millis(5)).unwrap());
                let awaited = looks.find_map(|awaited| awaited);
                assert_eq!(awaited.map(|run| run.start), Some(Gfn(first)));
                assert_eq!(byte(ram, first), 9, "{options:?}");
                protection.release(all).unwrap();
            }
            assert_eq!(balloon.join().unwrap(), 58);
            assert!((64..128).all(|gfn| byte(ram, gfn) == 0));
        }
    }
}
