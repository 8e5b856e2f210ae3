//! Owns guest memory: its mappings in this process, the layout that they follow, and the tracker
//! that the VMM's own writes mark.

mod backing;
mod discard;
mod fill;
mod late;
#[cfg(test)]
mod late_tests;
mod map;
mod populated;
mod preparing;
mod shield;
mod userfault;
mod watch;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use driftline_dirty_tracker::{
    FrameRun, FrameSet, Gfn, Layout, LayoutError, PAGE_SIZE, TrackedBitmap, Tracker,
};
use driftline_guest::{Backlog, Fetching, Fill, GuestError, GuestRam, Shield};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestRegionMmap};

pub use backing::{Backing, HugePages, MemoryOptions};
pub(crate) use discard::Discarder;
use fill::MemoryFill;
use late::Late;
pub(crate) use late::Owner;
pub use map::{HOLE_END, HOLE_START, frames, layout};
use populated::Populated;
use preparing::Preparing;
pub(crate) use shield::Kept;
use shield::MemoryShield;
#[cfg(any(test, feature = "testing"))]
pub(crate) use userfault::USERFAULTFD_IOC_NEW;
pub(crate) use userfault::Userfault;
pub use watch::WriteWatch;

/// Why there is no guest memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The size is no size for a guest.
    #[error("guest memory of {0} bytes is not a whole number of pages between 16 MiB and 16 TiB")]
    Size(u64),
    /// The host has no room for it.
    #[error("{} of guest memory does not fit (--mem): {cause}", gib(*bytes))]
    DoesNotFit {
        /// Bytes asked for.
        bytes: u64,
        /// The system's answer.
        cause: String,
    },
    /// Its size and the pool's pages do not agree.
    #[error("guest memory of {0} bytes is not a whole number of huge pages of 2 MiB")]
    NotHuge(u64),
    /// The pool is too small.
    #[error(
        "guest memory needs {needed} huge pages of 2 MiB, and this host has {free} free: \
         reserve more (sysctl vm.nr_hugepages), or use --hugepages thp"
    )]
    PoolTooSmall {
        /// Pages that the guest needs.
        needed: u64,
        /// Pages that are neither used nor promised to others.
        free: u64,
    },
    /// The kernel is too old.
    #[error(
        "this host's kernel cannot populate memory beforehand (5.14 can): leave --prefault out"
    )]
    NoPrefault,
    /// The layout is none; only a programming error leads here.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

impl MemoryError {
    /// Whether another host might have it.
    pub(crate) fn host_lacks(&self) -> bool {
        matches!(self, Self::DoesNotFit { .. } | Self::PoolTooSmall { .. } | Self::NoPrefault)
    }
}

/// Guest memory and what is known about it.
#[derive(Debug)]
pub struct Memory {
    ram: GuestRam,
    tracker: Arc<Tracker>,
    /// The choice of pages where nobody has said whether there may be huge ones; `None` where
    /// somebody has.
    preparing: Option<Preparing>,
    /// Frames that nobody may change now.
    kept: Arc<Kept>,
    options: MemoryOptions,
}

impl Memory {
    /// Maps zeroed memory for a guest of `bytes`, as `options` say.
    ///
    /// Unless they say otherwise nothing is reserved: frames get host memory when they are first
    /// touched, and a guest may be larger than what the host has free; larger than all it has only
    /// where the administrator has asked for that (`vm.overcommit_memory` 1).
    pub fn new(bytes: u64, options: &MemoryOptions) -> Result<Self, MemoryError> {
        Self::of_layout(layout(bytes)?, options)
    }

    /// As [`new`](Self::new), for a guest of which it is known that it touches little: of any size
    /// that the kernel maps.
    pub(crate) fn sparse(bytes: u64, options: &MemoryOptions) -> Result<Self, MemoryError> {
        Self::map(layout(bytes)?, options, None)
    }

    /// As [`new`](Self::new), of any shape.
    pub(crate) fn of_layout(layout: Layout, options: &MemoryOptions) -> Result<Self, MemoryError> {
        Self::map(layout, options, most_bytes())
    }

    /// Maps memory of at most so many bytes.
    fn map(
        layout: Layout,
        options: &MemoryOptions,
        most_bytes: Option<u64>,
    ) -> Result<Self, MemoryError> {
        let bytes = layout.frames() * PAGE_SIZE;
        let tracker = Arc::new(Tracker::new(layout.clone()));
        let does_not_fit = |cause: String| MemoryError::DoesNotFit { bytes, cause };
        if options.is_pooled() {
            check_pool(bytes)?;
        } else if let Some(has) = most_bytes.filter(|has| *has < bytes) {
            let cause = format!("this host has {} of memory and swap", gib(has));
            return Err(does_not_fit(cause));
        }
        let mut regions = Vec::new();
        for slot in layout.slots() {
            let bitmap = TrackedBitmap::new(tracker.clone(), slot.base);
            let len =
                usize::try_from(slot.run().bytes()).map_err(|e| does_not_fit(e.to_string()))?;
            let map = options.map(len, bitmap).map_err(|e| does_not_fit(e.to_string()))?;
            options.advise(map.as_ptr(), len).map_err(|e| does_not_fit(e.to_string()))?;
            if options.prefault {
                backing::populate(map.as_ptr(), len).map_err(|e| match e.raw_os_error() {
                    Some(libc::EINVAL) => MemoryError::NoPrefault,
                    _ => does_not_fit(e.to_string()),
                })?;
            }
            let region = GuestRegionMmap::new(map, GuestAddress(slot.base.gpa()));
            regions.push(region.ok_or_else(|| does_not_fit("its end overflows".to_owned()))?);
        }
        let preparing = options.huge_pages.is_none().then(Preparing::default);
        let ram = GuestRam::from_regions(regions).map_err(|e| does_not_fit(e.to_string()))?;
        Ok(Self { ram, tracker, preparing, kept: Arc::default(), options: *options })
    }

    /// The mappings.
    pub fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// The tracker of all writes.
    pub fn tracker(&self) -> &Arc<Tracker> {
        &self.tracker
    }

    /// Frames that nobody may change now, for whoever changes them without writing.
    pub(crate) fn kept(&self) -> &Arc<Kept> {
        &self.kept
    }

    /// What keeps frames as they are while the guest runs; one at a time. `None` where the host or
    /// this memory's pages do not allow it.
    pub(crate) fn shield(&self) -> Result<Option<Box<dyn Shield>>, GuestError> {
        // Each memory has one descriptor at most.
        if self.kept.late().is_some_and(|late| !late.wait(LATE_LIMIT)) {
            // Not `None`: it can be had later.
            let cause = "the restored guest's memory is still coming".into();
            return Err(GuestError::System { what: "protecting frames", cause });
        }
        let opened = MemoryShield::open(&self.ram, &self.kept).map_err(|e| GuestError::System {
            what: "registering guest memory with userfaultfd",
            cause: Box::new(e),
        })?;
        Ok(opened.map(|shield| Box::new(shield) as Box<dyn Shield>))
    }

    /// Has the frames of `backlog` come when they are touched, and behind that; nobody has touched
    /// this memory before. Gives the backlog back where the host or this memory's pages do not
    /// allow that: then they have to come first, as in memory that was populated beforehand.
    /// `owner` is told if one cannot be had.
    pub(crate) fn fetch_late(
        &self,
        backlog: Box<dyn Backlog>,
        owner: Box<dyn Owner>,
    ) -> Result<Option<Box<dyn Backlog>>, GuestError> {
        let failed = |cause| GuestError::System { what: "fetching memory late", cause };
        if self.options.prefault {
            tracing::info!("no lazy restore of prefaulted memory: all pages are read first");
            return Ok(Some(backlog));
        }
        match Late::begin(&self.ram, backlog, owner).map_err(|e| failed(e.into()))? {
            Err(backlog) => Ok(Some(backlog)),
            Ok(late) => match self.kept.set_late(late) {
                Ok(()) => Ok(None),
                Err(_) => Err(failed("it is fetched already".into())),
            },
        }
    }

    /// What puts first contents into memory that nobody has touched. `None` where the host does not
    /// allow that, or where a write gets more than a frame's page: it then costs less.
    pub(crate) fn fill(&self) -> Option<Box<dyn Fill>> {
        if self.options.prefault || self.kept.late().is_some() || !self.options.faults_are_small() {
            return None;
        }
        let opened = MemoryFill::open(&self.ram);
        let opened = opened.inspect_err(|e| tracing::debug!("memory is written, not filled: {e}"));
        opened.ok().map(|fill| Box::new(fill) as Box<dyn Fill>)
    }

    /// Has `frame` fetched next, if it has not come, for a [`require`](Self::require) that follows.
    pub(crate) fn ask(&self, frame: Gfn) {
        if let Some(late) = self.kept.late() {
            late.ask(frame);
        }
    }

    /// Returns when `frame` has come, so that this process may touch it; why it has not otherwise,
    /// after `limit` at the latest.
    pub(crate) fn require(&self, frame: Gfn, limit: Duration) -> Result<(), String> {
        self.kept.late().map_or(Ok(()), |late| late.require(frame, limit))
    }

    /// How far the fetching is; `None` where nothing was to be fetched.
    pub(crate) fn fetching(&self) -> Option<Fetching> {
        self.kept.late().map(Late::fetching)
    }

    /// The slots.
    pub fn layout(&self) -> &Layout {
        self.tracker.layout()
    }

    /// Gives host memory to the frames of `run` that lie in this memory, in one call of the kernel
    /// for each 2 MiB; huge pages where they fit into the run, the options leave it open and they
    /// are the cheaper way now: mostly 512 frames for the price of a few. They get it at their
    /// first write where the kernel cannot, before 5.14, or has none.
    pub fn prepare(&self, run: FrameRun) {
        let start = GuestAddress(run.start.gpa());
        let Ok(len) = usize::try_from(run.bytes()) else { return };
        for slice in self.ram.get_slices(start, len).map_while(Result::ok) {
            let address = slice.ptr_guard_mut().as_ptr() as usize;
            let populated = match &self.preparing {
                Some(preparing) => preparing.populate(address, slice.len()),
                None => backing::populate_piece(address, slice.len()),
            };
            if let Err(e) = populated {
                tracing::trace!("{run:?} is not populated beforehand: {e}");
            }
        }
    }

    /// As [`prepare`](Self::prepare), in pages of the size that the guest's own first writes would
    /// get.
    pub(crate) fn fault_in(&self, run: FrameRun) {
        let start = GuestAddress(run.start.gpa());
        let Ok(len) = usize::try_from(run.bytes()) else { return };
        for slice in self.ram.get_slices(start, len).map_while(Result::ok) {
            let address = slice.ptr_guard_mut().as_ptr() as usize;
            if let Err(e) = backing::populate_piece(address, slice.len()) {
                tracing::warn!("{run:?} is not populated beforehand: {e}");
            }
        }
    }

    /// Runs of frames, ascending, that have host memory, are swapped out, or are still to come: all
    /// others were never written and read as zeros. Reads eight bytes a frame from the kernel, or,
    /// of a memory file, asks for the bounds of each run.
    pub fn populated(&self) -> io::Result<Vec<FrameRun>> {
        // First: what comes after this is in memory.
        let left = self.kept.late().map(Late::left).filter(|left| !left.is_empty());
        let (mut populated, mut runs) = (Populated::default(), Vec::new());
        for region in self.ram.iter() {
            populated.find(region, populated::all(region), &mut runs)?;
        }
        let Some(left) = left else { return Ok(runs) };
        let mut all: FrameSet = runs.into_iter().collect();
        all.insert_all(left.as_slice());
        // None may cross from one slot into the next.
        Ok(self.layout().slots().flat_map(|s| all.within(s.run()).collect::<Vec<_>>()).collect())
    }
}

/// How long epochs wait for memory that is still coming, so as to be copied behind the guest.
const LATE_LIMIT: Duration = Duration::from_secs(1);

type Region = GuestRegionMmap<TrackedBitmap>;

/// Refuses a guest that the pool of huge pages has no room for: the kernel would say "out of
/// memory".
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
    // Pages beyond the pool may be borrowed, if the administrator allows it.
    let more = pool("nr_overcommit_hugepages").unwrap_or(0);
    let needed = bytes / backing::HUGE_PAGE;
    if needed > free + more { Err(MemoryError::PoolTooSmall { needed, free }) } else { Ok(()) }
}

/// Bytes of memory for people.
fn gib(bytes: u64) -> String {
    match bytes {
        _ if bytes < 1 << 30 => format!("{} MiB", bytes >> 20),
        _ if bytes.is_multiple_of(1 << 30) => format!("{} GiB", bytes >> 30),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

/// Memory and swap of the host; `None` if the host does not say, or any amount may be asked for.
fn most_bytes() -> Option<u64> {
    let overcommit = std::fs::read_to_string("/proc/sys/vm/overcommit_memory").ok()?;
    if overcommit.trim() == "1" {
        return None;
    }
    total_bytes(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

fn total_bytes(meminfo: &str) -> Option<u64> {
    let swap = meminfo_bytes(meminfo, "SwapTotal:").unwrap_or(0);
    meminfo_bytes(meminfo, "MemTotal:")?.checked_add(swap)
}

/// One field, colon and all, of what `/proc/meminfo` says.
pub fn meminfo_bytes(meminfo: &str, field: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|l| l.strip_prefix(field))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::Bytes;

    #[test]
    fn more_than_the_host_has_is_refused_with_what_it_has() {
        assert_eq!(total_bytes("MemTotal:  8 kB\nMemFree: 1 kB\nSwapTotal: 2 kB\n"), Some(10240));
        assert_eq!(total_bytes("MemTotal: 8 kB\n"), Some(8192));
        assert_eq!(total_bytes("MemTotal: many\n"), None);
    }

    /// The ways to hold memory that any host has: the pool of huge pages is another test's.
    fn ways() -> impl Iterator<Item = MemoryOptions> {
        let pages = [None, Some(HugePages::None), Some(HugePages::Thp)];
        [Backing::Anon, Backing::Memfd].into_iter().flat_map(move |backing| {
            pages.map(|huge_pages| MemoryOptions { backing, huge_pages, prefault: false })
        })
    }

    const WRITTEN: [u64; 7] = [0, 1, 2, 70_000, 0xbffff, 0x100000, 0x17ffff];

    /// Writes a byte to some frames and holds `populated` to them.
    fn check_populated(options: &MemoryOptions) {
        let memory = Memory::new(5 << 30, options).unwrap();
        assert_eq!(memory.populated().unwrap(), [], "fresh memory has no frames: {options:?}");
        for gfn in WRITTEN {
            memory.ram().write_obj(1u8, GuestAddress(Gfn(gfn).gpa())).unwrap();
        }
        let runs = memory.populated().unwrap();
        let has = |gfn| runs.iter().any(|r| (r.start..r.end()).contains(&Gfn(gfn)));
        for gfn in WRITTEN {
            assert!(has(gfn), "frame {gfn:#x} was written: {options:?}");
        }
        assert!(runs.windows(2).all(|w| w[0].end() <= w[1].start), "ascending: {runs:?}");
        assert!(runs.iter().all(|r| memory.layout().contains(*r)), "none crosses the hole");
        let frames: u64 = runs.iter().map(|r| r.count).sum();
        let pages = if options.huge_pages == Some(HugePages::None) { 1 } else { 512 };
        assert!(frames <= WRITTEN.len() as u64 * pages, "{frames} frames: {options:?}");
    }

    #[test]
    fn populated_is_what_was_written() {
        ways().for_each(|options| check_populated(&options));
    }

    #[test]
    fn memory_that_is_prefaulted_is_all_there_and_zero() {
        for options in ways().map(|o| MemoryOptions { prefault: true, ..o }) {
            let memory = Memory::new(96 << 20, &options).unwrap();
            let frames: u64 = memory.populated().unwrap().iter().map(|r| r.count).sum();
            assert_eq!(frames, 96 << 8, "{options:?}");
            let last: u64 = memory.ram().read_obj(GuestAddress((96 << 20) - 8)).unwrap();
            assert_eq!(last, 0);
        }
    }

    #[test]
    fn frames_that_are_prepared_have_memory_keep_their_content_and_are_not_marked() {
        let small = |o: &MemoryOptions| o.huge_pages != Some(HugePages::Thp);
        for options in ways().filter(small) {
            let memory = Memory::new(64 << 20, &options).unwrap();
            let mut writes = memory.tracker().subscribe("test").unwrap();
            memory.ram().write_obj(7u8, GuestAddress(Gfn(101).gpa())).unwrap();
            writes.drain().commit();
            let run = FrameRun { start: Gfn(100), count: 5 };
            memory.prepare(run);
            assert_eq!(memory.populated().unwrap(), [run], "{options:?}");
            let byte =
                |gfn: u64| memory.ram().read_obj::<u8>(GuestAddress(Gfn(gfn).gpa())).unwrap();
            assert_eq!((byte(100), byte(101), byte(104)), (0, 7, 0));
            assert!(writes.drain().is_empty(), "{options:?}");
            // Past the end of memory: what is there is prepared.
            memory.prepare(FrameRun { start: Gfn((64 << 8) - 1), count: 9 });
            let last = FrameRun { start: Gfn((64 << 8) - 1), count: 1 };
            assert!([vec![run], vec![run, last]].contains(&memory.populated().unwrap()));
            memory.fault_in(FrameRun { start: Gfn(99), count: 7 });
            let more = FrameRun { start: Gfn(99), count: 7 };
            assert_eq!(memory.populated().unwrap()[0], more, "{options:?}");
            assert_eq!((byte(99), byte(101)), (0, 7));
            assert!(writes.drain().is_empty(), "{options:?}");
        }
    }

    #[test]
    fn a_pool_of_huge_pages_that_is_too_small_is_refused_with_what_it_has() {
        for backing in [Backing::Anon, Backing::Memfd] {
            let options =
                MemoryOptions { backing, huge_pages: Some(HugePages::Hugetlbfs), prefault: false };
            // No host has promised so many.
            let refused = Memory::new(8 << 40, &options).unwrap_err().to_string();
            assert!(refused.contains("4194304 huge pages of 2 MiB"), "{refused}");
            let odd = Memory::new((64 << 20) + 4096, &options).unwrap_err().to_string();
            assert!(odd.contains("67112960 bytes is not a whole number of huge pages"), "{odd}");
        }
    }

    #[test]
    fn a_pool_of_huge_pages_holds_memory_like_any_other() {
        let options =
            MemoryOptions { huge_pages: Some(HugePages::Hugetlbfs), ..MemoryOptions::default() };
        match check_pool(5 << 30) {
            Ok(()) => check_populated(&options),
            Err(e) => crate::testing::skip(
                "a_pool_of_huge_pages_holds_memory_like_any_other",
                &e.to_string(),
            ),
        }
    }

    #[test]
    fn the_vmms_own_writes_mark_the_tree() {
        let memory = Memory::new(64 << 20, &MemoryOptions::default()).unwrap();
        let mut subscription = memory.tracker().subscribe("test").unwrap();
        memory.ram().write_slice(&[1; 100], GuestAddress(0x1ff0)).unwrap();
        let epoch = subscription.drain();
        assert_eq!(epoch.runs().collect::<Vec<_>>(), [FrameRun { start: Gfn(1), count: 2 }]);
    }
}
