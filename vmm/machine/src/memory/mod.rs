//! Owns guest memory: its mappings in this process, their layout, and the tracker that records the
//! VMM's own writes.

mod backing;
mod discard;
mod error;
#[cfg(test)]
mod file_tests;
mod fill;
mod lazy_restore;
#[cfg(test)]
mod lazy_restore_tests;
mod map;
mod page_handler;
mod prefault;
mod region;
mod resident;
mod shared;
mod userfault;
mod write_protect;
mod write_watch;
mod zero_mappings;

use std::sync::Arc;
use std::time::Duration;

use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn, Layout, PAGE_SIZE, TrackedBitmap, Tracker};
use driftline_guest::{
    GuestRam, LazyRestoreProgress, MemoryLoader, MemoryRight, PageSource, WriteProtection,
};
use driftline_store::{MemoryFileLayout, SlotPlace};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestRegionMmap};

use backing::MemoryContents;
pub use backing::{Backing, HugePages, MemoryOptions, PrivateFile};
pub(crate) use discard::Discarder;
pub use error::{FrameError, HandlerStep, MemoryError, MisfitCause, PageHandlerError};
use fill::MemoryFill;
pub use lazy_restore::RestoreFigures;
pub(crate) use lazy_restore::RestoreOwner;
use lazy_restore::{LAZY_RESTORE_LIMIT, LazyRestore};
pub use map::layout;
pub(crate) use map::{HOLE_END, HOLE_START};
use page_handler::PageHandler;
pub use page_handler::PageHandlerSocket;
use prefault::AdaptivePrefault;
use resident::ResidentFrames;
#[cfg(any(test, feature = "testing"))]
pub(crate) use userfault::USERFAULTFD_IOC_NEW;
pub(crate) use userfault::Userfault;
use write_protect::MemoryWriteProtection;
pub(crate) use write_protect::ProtectedFrames;
pub use write_watch::WriteWatch;

use crate::{HostMemory, pool};

/// Guest memory, its tracker and its options.
#[derive(Debug)]
pub struct Memory {
    ram: GuestRam,
    layout: Arc<Layout>,
    tracker: Arc<Tracker>,
    right: MemoryRight,
    /// Chooses between huge and small pages; `None` if the options already decide that.
    adaptive_prefault: Option<AdaptivePrefault>,
    /// Write-protected frames, the lazy restore and the page handler.
    protected: Arc<ProtectedFrames>,
    /// Whether the memory is mapped from a file with its first contents, or from the memory file of
    /// another process.
    is_of_file: bool,
    options: MemoryOptions,
}

impl Memory {
    /// Maps zeroed memory for a guest of `bytes` bytes, with `options`.
    ///
    /// By default no memory is reserved: frames get host memory at their first touch. A guest may
    /// be larger than the host's free memory. It may be larger than the host's total memory and
    /// swap only if the administrator allows that (`vm.overcommit_memory` is 1).
    ///
    /// # Errors
    ///
    /// The size is not allowed, the host or its huge page pool has too little memory, or the kernel
    /// cannot prefault.
    pub fn new(bytes: u64, options: &MemoryOptions) -> Result<Self, MemoryError> {
        Self::of_layout(layout(bytes)?, options)
    }

    /// Behaves like [`new`](Self::new), without the check against the host's total memory. For a
    /// guest that touches little.
    pub(crate) fn sparse(bytes: u64, options: &MemoryOptions) -> Result<Self, MemoryError> {
        Self::map(layout(bytes)?, options, None, MemoryContents::Zeros)
    }

    /// Behaves like [`new`](Self::new), with the contents of `file`, which is mapped privately: a
    /// frame costs memory of this process when it is first written. Of `options`, only `prefault`
    /// and transparent huge pages have an effect.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), or the file is shorter than the memory.
    pub(crate) fn of_file(
        bytes: u64,
        options: &MemoryOptions,
        file: &PrivateFile,
    ) -> Result<Self, MemoryError> {
        file.check_length(bytes)?;
        let huge_pages = options.huge_pages.filter(|pages| *pages == HugePages::Thp);
        let prefault = options.prefault;
        let options = MemoryOptions { huge_pages, prefault, ..MemoryOptions::default() };
        Self::map(layout(bytes)?, &options, host_limit_bytes(), MemoryContents::Private(file))
    }

    /// Behaves like [`new`](Self::new), with the contents that the process at `handler` serves. The
    /// kind of memory in `options` has no effect, nor has prefaulting. Nothing may touch the memory
    /// before [`watch_handler`](Self::watch_handler).
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), or the memory cannot be handed over.
    pub(crate) fn of_handler(
        bytes: u64,
        options: &MemoryOptions,
        handler: PageHandlerSocket,
    ) -> Result<Self, MemoryError> {
        let options = MemoryOptions { huge_pages: options.huge_pages, ..MemoryOptions::default() };
        let memory =
            Self::map(layout(bytes)?, &options, host_limit_bytes(), MemoryContents::Zeros)?;
        let places = MemoryFileLayout::new(&memory.layout);
        let handler = PageHandler::begin(&memory.ram, &places, handler)?;
        // Memory that was just mapped has none.
        let _ = memory.protected.set_page_handler(handler);
        Ok(memory)
    }

    /// Starts to watch the page handler, if there is one. Its end is reported to `owner`.
    pub(crate) fn watch_handler(&self, owner: Box<dyn RestoreOwner>) -> std::io::Result<()> {
        self.protected.page_handler().map_or(Ok(()), |handler| handler.watch(owner))
    }

    /// Gives up the pages that a page handler has not served: KVM's accesses to them fail. The
    /// guest must never run, and no thread of this process may touch its memory any more.
    pub(crate) fn abandon(&self) {
        if let Some(handler) = self.protected.page_handler() {
            handler.abandon();
        }
    }

    /// Waits until `frames` can be read without waiting for another process.
    pub(crate) fn fetch(&self, frames: &[FrameRun]) -> Result<(), FrameError> {
        self.protected.page_handler().map_or(Ok(()), |handler| handler.fetch(frames))
    }

    /// Behaves like [`new`](Self::new), for any layout.
    pub(crate) fn of_layout(layout: Layout, options: &MemoryOptions) -> Result<Self, MemoryError> {
        Self::map(layout, options, host_limit_bytes(), MemoryContents::Zeros)
    }

    /// Maps the memory of `layout`, which must not exceed `limit_bytes`, if that is given.
    fn map(
        layout: Layout,
        options: &MemoryOptions,
        limit_bytes: Option<u64>,
        contents: MemoryContents<'_>,
    ) -> Result<Self, MemoryError> {
        let bytes = layout.frames() * PAGE_SIZE;
        let layout = Arc::new(layout);
        let tracker = Arc::new(Tracker::new(layout.clone()));
        // The host has the pages of shared memory already.
        let is_shared = matches!(contents, MemoryContents::Shared(_));
        if options.is_pooled() && !is_shared {
            check_pool(bytes)?;
        } else if let Some(has) = limit_bytes.filter(|has| *has < bytes) {
            let cause = MisfitCause::Host { bytes: has };
            return Err(MemoryError::DoesNotFit { bytes, cause });
        }
        if bytes >= pool::SHARED_FROM || options.prefault {
            pool::start().map_err(MemoryError::Pool)?;
        }
        let (places, mut regions) = (MemoryFileLayout::new(&layout), Vec::new());
        for (i, SlotPlace { slot, offset }) in places.slots().iter().enumerate() {
            let bitmap = TrackedBitmap::new(tracker.clone(), slot.base);
            let len =
                usize::try_from(slot.run().bytes()).map_err(MemoryError::does_not_fit(bytes))?;
            let map = contents.map(options, i, *offset, len, bitmap);
            let map = map.map_err(MemoryError::does_not_fit(bytes))?;
            options.advise(map.as_ptr(), len).map_err(MemoryError::does_not_fit(bytes))?;
            if options.prefault {
                backing::populate(map.as_ptr(), len).map_err(|e| match e.raw_os_error() {
                    Some(libc::EINVAL) => MemoryError::NoPrefault,
                    _ => MemoryError::does_not_fit(bytes)(e),
                })?;
            }
            let region = GuestRegionMmap::new(map, GuestAddress(slot.base.gpa()));
            regions.push(region.ok_or(MisfitCause::End).map_err(MemoryError::does_not_fit(bytes))?);
        }
        let is_of_file = !matches!(contents, MemoryContents::Zeros);
        let adaptive_prefault = options.huge_pages.is_none().then(AdaptivePrefault::default);
        let ram = GuestRam::from_regions(regions).map_err(MemoryError::does_not_fit(bytes))?;
        Ok(Self {
            ram,
            layout,
            tracker,
            right: MemoryRight::default(),
            adaptive_prefault,
            protected: Arc::default(),
            is_of_file,
            options: *options,
        })
    }

    /// Returns the mappings.
    pub fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// Returns the tracker that records all writes.
    pub fn tracker(&self) -> &Arc<Tracker> {
        &self.tracker
    }

    /// Returns this process's right to run a guest in this memory.
    pub fn right(&self) -> &MemoryRight {
        &self.right
    }

    /// Returns the frames that must not change now. Threads that change frames without writing to
    /// them (the balloon) must check it first.
    pub(crate) fn protected_frames(&self) -> &Arc<ProtectedFrames> {
        &self.protected
    }

    /// Returns write protection for this memory. Only one can exist at a time. `None` if the host
    /// or this memory's pages do not support it.
    ///
    /// # Errors
    ///
    /// A lazy restore is still under way, a page handler does not serve all pages, or the system
    /// refuses.
    pub fn write_protection(&self) -> Result<Option<Box<dyn WriteProtection>>, FrameError> {
        // A mapping can be registered with one userfaultfd at a time.
        if let Some(handler) = self.protected.page_handler() {
            handler.fetch_all()?;
        }
        if self.protected.lazy_restore().is_some_and(|restore| !restore.wait(LAZY_RESTORE_LIMIT)) {
            // An error, not `None`: write protection becomes available later.
            return Err(FrameError::RestoreUnfinished { what: "protecting frames" });
        }
        let opened = MemoryWriteProtection::open(&self.ram, &self.protected)
            .map_err(FrameError::system("registering guest memory with userfaultfd"))?;
        Ok(opened.map(|protection| Box::new(protection) as Box<dyn WriteProtection>))
    }

    /// Starts a lazy restore: a fault fetches its frame from `source`, and the background copy
    /// fetches the others. No thread may have accessed this memory before. The restore calls
    /// `owner` if a frame cannot be fetched.
    ///
    /// Returns the source if the host or this memory's pages do not support that, or if the memory
    /// was prefaulted. The caller must then read all frames before the guest runs.
    pub(crate) fn fetch_lazily(
        &self,
        source: Box<dyn PageSource>,
        owner: Box<dyn RestoreOwner>,
    ) -> Result<Option<Box<dyn PageSource>>, FrameError> {
        if self.options.prefault {
            tracing::info!("no lazy restore of prefaulted memory: all pages are read first");
            return Ok(Some(source));
        }
        let begun = LazyRestore::begin(&self.ram, source, owner);
        match begun.map_err(FrameError::system("starting a lazy restore"))? {
            Err(source) => Ok(Some(source)),
            Ok(restore) => match self.protected.set_lazy_restore(restore) {
                Ok(()) => Ok(None),
                Err(_) => Err(FrameError::SecondRestore),
            },
        }
    }

    /// Returns a [`MemoryLoader`] that places the first contents of untouched memory. `None` if the
    /// host does not allow that, or if a write may get a page larger than a frame, which makes
    /// plain writes cheaper.
    pub fn memory_loader(&self) -> Option<Box<dyn MemoryLoader>> {
        if self.options.prefault
            || self.is_of_file
            || self.protected.lazy_restore().is_some()
            || self.protected.page_handler().is_some()
            || !self.options.faults_are_small()
        {
            return None;
        }
        let opened = MemoryFill::open(&self.ram);
        let opened =
            opened.inspect_err(|e| tracing::debug!("memory is written instead of filled: {e}"));
        opened.ok().map(|fill| Box::new(fill) as Box<dyn MemoryLoader>)
    }

    /// Fetches `frame` next, if it has not arrived. The caller follows with
    /// [`require`](Self::require).
    pub(crate) fn fetch_next(&self, frame: Gfn) {
        if let Some(restore) = self.protected.lazy_restore() {
            restore.fetch_next(frame);
        }
    }

    /// Waits until `frame` has arrived, so that this process may touch it.
    ///
    /// # Errors
    ///
    /// The reason why the frame has not arrived, after `limit` at the latest.
    pub(crate) fn require(&self, frame: Gfn, limit: Duration) -> Result<(), MemoryError> {
        if let Some(handler) = self.protected.page_handler() {
            handler.require(frame, limit)?;
        }
        self.protected.lazy_restore().map_or(Ok(()), |restore| restore.require(frame, limit))
    }

    /// Returns the progress of the lazy restore; `None` if there is none.
    pub(crate) fn fetching(&self) -> Option<LazyRestoreProgress> {
        self.protected.lazy_restore().map(LazyRestore::fetching)
    }

    /// Returns the figures of the lazy restore; `None` if there is none.
    pub fn restore_figures(&self) -> Option<RestoreFigures> {
        self.protected.lazy_restore().map(LazyRestore::figures)
    }

    /// Returns the memory slots.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Populates the frames of `run` that lie in this memory.
    ///
    /// Uses huge pages where they fit into the run, the options leave the choice open, and huge
    /// pages are currently the cheaper way. One huge page then usually costs as much as a few small
    /// ones. If the kernel cannot populate (before 5.14) or has no memory, the frames get memory at
    /// their first write.
    pub fn prefault(&self, run: FrameRun) {
        let start = GuestAddress(run.start.gpa());
        let Ok(len) = usize::try_from(run.bytes()) else { return };
        for slice in self.ram.get_slices(start, len).map_while(Result::ok) {
            let address = slice.ptr_guard_mut().as_ptr() as usize;
            let populated = match &self.adaptive_prefault {
                Some(adaptive) => adaptive.populate(address, slice.len()),
                None => backing::populate_piece(address, slice.len()),
            };
            if let Err(e) = populated {
                tracing::trace!("{run:?} is not prefaulted: {e}");
            }
        }
    }

    /// Behaves like [`prefault`](Self::prefault), in pages of the size that the guest's own first
    /// writes would get.
    pub(crate) fn fault_in(&self, run: FrameRun) {
        let start = GuestAddress(run.start.gpa());
        let Ok(len) = usize::try_from(run.bytes()) else { return };
        for slice in self.ram.get_slices(start, len).map_while(Result::ok) {
            let address = slice.ptr_guard_mut().as_ptr() as usize;
            if let Err(e) = backing::populate_piece(address, slice.len()) {
                tracing::warn!("{run:?} is not prefaulted: {e}");
            }
        }
    }

    /// Returns ascending runs of the frames that have host memory, are swapped out, or have not
    /// been restored yet. All other frames were never written and read as zeros. Fetches all memory
    /// that a page handler serves.
    ///
    /// Reads eight bytes a frame from the kernel, or, for a memory file, one pair of seeks a run.
    /// Of memory from the huge page pool that another process has handed over, all frames count.
    ///
    /// # Errors
    ///
    /// The kernel does not report them, or a page handler does not serve them.
    pub fn resident(&self) -> Result<Vec<FrameRun>, FrameError> {
        if let Some(handler) = self.protected.page_handler() {
            handler.fetch_all()?;
        }
        // This comes first: frames that arrive after it are found in memory.
        let left =
            self.protected.lazy_restore().map(LazyRestore::left).filter(|left| !left.is_empty());
        let (mut populated, mut runs) = (ResidentFrames::default(), Vec::new());
        for region in self.ram.iter() {
            // A huge page that only another process has touched is not in this one's page tables,
            // and the pool's files do not report their holes.
            if self.is_of_file && region::is_pooled(region) {
                runs.push(region::all(region));
                continue;
            }
            populated
                .find_or_all(region, region::all(region), &mut runs)
                .map_err(FrameError::system("reading /proc/self/pagemap"))?;
        }
        let Some(left) = left else { return Ok(runs) };
        let mut all: FrameSet = runs.into_iter().collect();
        all.insert_all(left.as_slice());
        // No run may cross from one slot into the next.
        Ok(self.layout().slots().flat_map(|s| all.within(s.run()).collect::<Vec<_>>()).collect())
    }
}

/// Refuses a guest that is too large for the pool of huge pages. Without this check the kernel
/// reports only "out of memory".
fn check_pool(bytes: u64) -> Result<(), MemoryError> {
    if !bytes.is_multiple_of(backing::HUGE_PAGE) {
        return Err(MemoryError::NotHuge(bytes));
    }
    let pool = |name: &str| {
        let path = format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{name}");
        std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok()
    };
    let free =
        pool("free_hugepages").unwrap_or(0).saturating_sub(pool("resv_hugepages").unwrap_or(0));
    // The pool may grow by this many pages, if the administrator allows it.
    let more = pool("nr_overcommit_hugepages").unwrap_or(0);
    let needed = bytes / backing::HUGE_PAGE;
    if needed > free + more { Err(MemoryError::PoolTooSmall { needed, free }) } else { Ok(()) }
}

/// Returns the host's memory and swap, in bytes. `None` if the host does not report them, or if it
/// allows any amount.
fn host_limit_bytes() -> Option<u64> {
    let overcommit = std::fs::read_to_string("/proc/sys/vm/overcommit_memory").ok()?;
    if overcommit.trim() == "1" {
        return None;
    }
    let host = HostMemory::read()?;
    host.total.checked_add(host.swap)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::Bytes;

    /// Options that work on any host. Another test covers the pool of huge pages.
    fn option_sets() -> impl Iterator<Item = MemoryOptions> {
        let pages = [None, Some(HugePages::None), Some(HugePages::Thp)];
        [Backing::Anon, Backing::Memfd].into_iter().flat_map(move |backing| {
            pages.map(|huge_pages| MemoryOptions { backing, huge_pages, prefault: false })
        })
    }

    const WRITTEN: [u64; 7] = [0, 1, 2, 70_000, 0xbffff, 0x100000, 0x17ffff];

    /// Writes a byte to some frames, then checks `resident` against them.
    fn check_populated(options: &MemoryOptions) {
        let memory = Memory::new(5 << 30, options).unwrap();
        assert_eq!(memory.resident().unwrap(), [], "fresh memory has no frames: {options:?}");
        for gfn in WRITTEN {
            memory.ram().write_obj(1u8, GuestAddress(Gfn(gfn).gpa())).unwrap();
        }
        let runs = memory.resident().unwrap();
        let has = |gfn| runs.iter().any(|r| (r.start..r.end()).contains(&Gfn(gfn)));
        for gfn in WRITTEN {
            assert!(has(gfn), "frame {gfn:#x} was written: {options:?}");
        }
        assert!(runs.windows(2).all(|w| w[0].end() <= w[1].start), "ascending: {runs:?}");
        assert!(runs.iter().all(|r| memory.layout().contains(*r)), "no run crosses the hole");
        let frames: u64 = runs.iter().map(|r| r.count).sum();
        let pages = if options.huge_pages == Some(HugePages::None) { 1 } else { 512 };
        assert!(frames <= WRITTEN.len() as u64 * pages, "{frames} frames: {options:?}");
    }

    #[test]
    fn populated_frames_are_those_written() {
        option_sets().for_each(|options| check_populated(&options));
    }

    #[test]
    fn prefaulted_memory_is_resident_and_zero() {
        for options in option_sets().map(|o| MemoryOptions { prefault: true, ..o }) {
            let memory = Memory::new(96 << 20, &options).unwrap();
            let frames: u64 = memory.resident().unwrap().iter().map(|r| r.count).sum();
            assert_eq!(frames, 96 << 8, "{options:?}");
            let last: u64 = memory.ram().read_obj(GuestAddress((96 << 20) - 8)).unwrap();
            assert_eq!(last, 0);
        }
    }

    #[test]
    fn prefault_keeps_content_and_marks_nothing() {
        let small = |o: &MemoryOptions| o.huge_pages != Some(HugePages::Thp);
        for options in option_sets().filter(small) {
            let memory = Memory::new(64 << 20, &options).unwrap();
            let mut writes = memory.tracker().subscribe("test").unwrap();
            memory.ram().write_obj(7u8, GuestAddress(Gfn(101).gpa())).unwrap();
            writes.drain().commit();
            let run = FrameRun { start: Gfn(100), count: 5 };
            memory.prefault(run);
            assert_eq!(memory.resident().unwrap(), [run], "{options:?}");
            let byte =
                |gfn: u64| memory.ram().read_obj::<u8>(GuestAddress(Gfn(gfn).gpa())).unwrap();
            assert_eq!((byte(100), byte(101), byte(104)), (0, 7, 0));
            assert!(writes.drain().is_empty(), "{options:?}");
            // Past the end of memory: only the part inside it is populated.
            memory.prefault(FrameRun { start: Gfn((64 << 8) - 1), count: 9 });
            let last = FrameRun { start: Gfn((64 << 8) - 1), count: 1 };
            assert!([vec![run], vec![run, last]].contains(&memory.resident().unwrap()));
            memory.fault_in(FrameRun { start: Gfn(99), count: 7 });
            let more = FrameRun { start: Gfn(99), count: 7 };
            assert_eq!(memory.resident().unwrap()[0], more, "{options:?}");
            assert_eq!((byte(99), byte(101)), (0, 7));
            assert!(writes.drain().is_empty(), "{options:?}");
        }
    }

    #[test]
    fn too_small_pool_of_huge_pages_is_refused() {
        for backing in [Backing::Anon, Backing::Memfd] {
            let options =
                MemoryOptions { backing, huge_pages: Some(HugePages::Hugetlbfs), prefault: false };
            // No host has this many free.
            let refused = Memory::new(8 << 40, &options).unwrap_err().to_string();
            assert!(refused.contains("4194304 huge pages of 2 MiB"), "{refused}");
            let odd = Memory::new((64 << 20) + 4096, &options).unwrap_err().to_string();
            assert!(odd.contains("67112960 bytes is not a whole number of huge pages"), "{odd}");
        }
    }

    #[test]
    fn pool_of_huge_pages_backs_guest_memory() {
        let options =
            MemoryOptions { huge_pages: Some(HugePages::Hugetlbfs), ..MemoryOptions::default() };
        match check_pool(5 << 30) {
            Ok(()) => check_populated(&options),
            Err(e) => crate::testing::skip("pool_of_huge_pages_backs_guest_memory", &e.to_string()),
        }
    }

    #[test]
    fn writes_of_the_vmm_mark_the_tree() {
        let memory = Memory::new(64 << 20, &MemoryOptions::default()).unwrap();
        let mut subscription = memory.tracker().subscribe("test").unwrap();
        memory.ram().write_slice(&[1; 100], GuestAddress(0x1ff0)).unwrap();
        let epoch = subscription.drain();
        assert_eq!(epoch.runs().collect::<Vec<_>>(), [FrameRun { start: Gfn(1), count: 2 }]);
    }
}
