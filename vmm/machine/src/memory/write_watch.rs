//! Owns write tracking by the host's page tables. It uses userfaultfd's asynchronous write
//! protection, which a write removes, and `PAGEMAP_SCAN`, which finds the pages that lost their
//! protection and protects them again in the same step.
//!
//! No thread waits at a protected page, and every writer is seen: vCPUs, KVM, devices. A page that
//! has not been protected since it was mapped counts as written. So the first touch of anonymous
//! memory counts, even a read, and so do all frames of a huge page that one touch maps. That is
//! more than was written, never less.
//!
//! How absent pages are treated depends on the backing:
//! - Anonymous memory leaves the page table only when it is discarded, and then `discard.rs` marks
//!   it. Absent pages are left alone: a marker in their place would look like memory in use to
//!   `resident.rs`. The same holds for pages of the pool.
//! - A page of a memory file may leave the page table at any time, because of swap or a huge page.
//!   The record of a write is then lost, unless the page was protected: then a marker stays. So
//!   the whole file is protected at the start, including absent pages, and an entry that is empty
//!   afterwards counts as written.
//!
//! Discarding removes the protection or leaves a marker; either way the next write is seen.

use std::fs::File;
use std::io;

use driftline_dirty_tracker::{FrameRun, Gfn, PAGE_SIZE};
use driftline_guest::GuestRam;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::ioctl::ioctl_with_mut_ref;
use vmm_sys_util::ioctl_iowr_nr;

use super::region::{Region, all, is_pooled};
use super::userfault::Userfault;

/// `struct pm_scan_arg`.
#[repr(C)]
#[derive(Default)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region`.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

ioctl_iowr_nr!(PAGEMAP_SCAN, b'f' as u32, 16, ScanArg);

/// Protects the pages that were found again.
const SCAN_WP_MATCHING: u64 = 1 << 0;
/// Fails on memory without asynchronous write protection.
const SCAN_CHECK_WPASYNC: u64 = 1 << 1;
const PAGE_IS_WRITTEN: u64 = 1 << 1;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;

/// Runs that one system call may find: a run takes 24 bytes, so each of the two buffers has 96 KiB.
const MAX_RUNS: usize = 4096;
/// Bytes of a memory file that one system call protects. The kernel holds the lock of the address
/// space meanwhile, for about 20 ms (see [`WriteWatch::begin`]).
const PROTECT_BYTES: u64 = 1 << 30;

/// Number of runs in a scan up to which they share a call only across a small gap. Above that they
/// share it across a large gap, so that the number of calls is bounded by the size of memory. The
/// rows `userfault-wp` of `driftline compare` show the cost of both.
const FEW_RUNS: usize = 64;
/// Clean bytes between written runs that are protected along with them, for few runs. One call less
/// costs the guest faults on at most these 16 pages.
const GAP_OF_FEW: u64 = 16 * PAGE_SIZE;
/// The same for many runs: the range of one page table, by which the kernel scans.
const GAP_OF_MANY: u64 = 2 << 20;

/// Write tracking of one guest's memory. Dropping it ends the tracking.
#[derive(Debug)]
pub struct WriteWatch {
    userfault: Userfault,
    pagemap: File,
    /// Keeps the memory mapped.
    ram: GuestRam,
    /// Buffer of the scan that does not protect.
    scanned: Vec<PageRegion>,
    /// Buffer of the scan that protects.
    protected: Vec<PageRegion>,
}

impl WriteWatch {
    /// Checks that the host supports this.
    ///
    /// # Errors
    ///
    /// This host's kernel has no asynchronous write protection, or does not let this process use
    /// it.
    pub fn probe() -> io::Result<()> {
        Userfault::open_async().map(drop)
    }

    /// Opens all system resources now, because this process may not be allowed to later. Tracking
    /// starts with [`begin`](Self::begin).
    ///
    /// # Errors
    ///
    /// The host does not let this process use userfaultfd, or its kernel is older than 6.7.
    pub fn open(ram: &GuestRam) -> io::Result<Self> {
        Ok(Self {
            userfault: Userfault::open_async()?,
            pagemap: File::open("/proc/self/pagemap")?,
            ram: ram.clone(),
            scanned: vec![PageRegion::default(); MAX_RUNS],
            protected: vec![PageRegion::default(); MAX_RUNS],
        })
    }

    /// Starts tracking: every write that starts after this call returns will be found. No other
    /// userfaultfd can register this memory until [`end`](Self::end). Takes about 20 ms for each
    /// GiB of resident memory, or of a memory file's size.
    ///
    /// # Errors
    ///
    /// Another descriptor has the memory, or the kernel refuses.
    pub fn begin(&mut self) -> io::Result<()> {
        for region in self.ram.iter() {
            let (start, len) = span(region);
            self.userfault.register(start, len)?;
            if is_memory_file(region) {
                for piece in (start..start + len).step_by(PROTECT_BYTES as usize) {
                    self.userfault.protect(piece, PROTECT_BYTES.min(start + len - piece))?;
                }
            }
        }
        // Discards the writes before this point.
        self.written(|_| ())
    }

    /// Stops tracking: the memory is unregistered and no longer protected.
    ///
    /// # Errors
    ///
    /// The kernel refuses to unregister the memory.
    pub fn end(&mut self) -> io::Result<()> {
        self.ram.iter().try_for_each(|region| {
            let (start, len) = span(region);
            self.userfault.unregister(start, len)
        })
    }

    /// Calls `each` for the frames that were written since the last call, in ascending runs, after
    /// each run has been protected again.
    ///
    /// Protecting a page removes KVM's mapping of it, whether it was written or not, and the guest
    /// must fault it in again. So this method first scans without protecting, which costs the guest
    /// nothing, and then protects no more than necessary.
    ///
    /// # Errors
    ///
    /// The scan fails. Then some frames may be protected that were not reported.
    pub fn written(&mut self, mut each: impl FnMut(FrameRun)) -> io::Result<()> {
        for region in self.ram.iter() {
            let (start, len) = span(region);
            let (mut at, end) = (start, start + len);
            while at < end {
                let scan = Scan { start: at, end, protect: false, of_file: is_memory_file(region) };
                let (count, walked) = scan.call(&self.pagemap, &mut self.scanned)?;
                for (start, end) in spans(&self.scanned[..count]) {
                    let mut at = start;
                    while at < end {
                        let protect = Scan { start: at, end, protect: true, ..scan };
                        let (count, walked) = protect.call(&self.pagemap, &mut self.protected)?;
                        self.protected[..count].iter().for_each(|r| each(run_of(region, r)));
                        at = walked;
                    }
                }
                at = walked;
            }
        }
        Ok(())
    }
}

/// Returns the address and length of a region, in bytes.
fn span(region: &Region) -> (u64, u64) {
    (region.as_ptr() as u64, region.len())
}

/// Returns whether pages of the region may leave the page table without a trace.
fn is_memory_file(region: &Region) -> bool {
    region.file_offset().is_some() && !is_pooled(region)
}

fn run_of(region: &Region, found: &PageRegion) -> FrameRun {
    let first = (found.start - region.as_ptr() as u64) / PAGE_SIZE;
    let start = Gfn(all(region).start.0 + first);
    FrameRun { start, count: (found.end - found.start) / PAGE_SIZE }
}

/// Returns the ranges to protect, given the ascending runs that a scan found. Runs near each other
/// share a range.
fn spans(scanned: &[PageRegion]) -> impl Iterator<Item = (u64, u64)> {
    let near = if scanned.len() <= FEW_RUNS { GAP_OF_FEW } else { GAP_OF_MANY };
    let groups = scanned.chunk_by(move |a, b| b.start - a.end <= near);
    groups.filter_map(|group| Some((group.first()?.start, group.last()?.end)))
}

/// One `PAGEMAP_SCAN` call over a range of addresses.
#[derive(Clone, Copy)]
struct Scan {
    start: u64,
    end: u64,
    protect: bool,
    /// Whether an empty page table entry counts as written.
    of_file: bool,
}

impl Scan {
    /// Puts runs of written pages into `found`. Returns their number and the address at which the
    /// scan stopped: the end, or where `found` was full.
    fn call(&self, pagemap: &File, found: &mut [PageRegion]) -> io::Result<(usize, u64)> {
        let mut arg = ScanArg {
            size: size_of::<ScanArg>() as u64,
            flags: SCAN_CHECK_WPASYNC | if self.protect { SCAN_WP_MATCHING } else { 0 },
            start: self.start,
            end: self.end,
            vec: found.as_mut_ptr() as u64,
            vec_len: found.len() as u64,
            category_mask: PAGE_IS_WRITTEN,
            category_anyof_mask: if self.of_file { 0 } else { PAGE_IS_PRESENT | PAGE_IS_SWAPPED },
            return_mask: PAGE_IS_WRITTEN,
            ..ScanArg::default()
        };
        // SAFETY: the kernel reads and writes the structure, and writes at most `vec_len` runs to
        // `found`. What it does to the memory between `start` and `end` changes no content.
        let count = unsafe { ioctl_with_mut_ref(pagemap, PAGEMAP_SCAN(), &mut arg) };
        let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        let inside = |r: &PageRegion| self.start <= r.start && r.start < r.end && r.end <= self.end;
        let runs = found.get(..count).filter(|runs| runs.iter().all(inside));
        if runs.is_none() || arg.walk_end <= self.start || arg.walk_end > self.end {
            return Err(io::Error::other(format!(
                "the kernel's scan of {:#x} to {:#x} gave {count} runs and ended at {:#x}",
                self.start, self.end, arg.walk_end
            )));
        }
        Ok((count, arg.walk_end))
    }
}

#[cfg(test)]
mod tests {
    use driftline_dirty_tracker::FrameSet;
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::memory::{Backing, Discarder, HugePages, Memory, MemoryOptions};

    fn option_sets() -> impl Iterator<Item = MemoryOptions> {
        let pages = [Some(HugePages::None), Some(HugePages::Thp), None];
        [Backing::Anon, Backing::Memfd].into_iter().flat_map(move |backing| {
            pages.map(|huge_pages| MemoryOptions { backing, huge_pages, prefault: false })
        })
    }

    fn run(start: u64, count: u64) -> FrameRun {
        FrameRun { start: Gfn(start), count }
    }

    /// Memory in two slots and its write tracking, if this host supports it.
    fn watched(test: &str, options: &MemoryOptions) -> Option<(Memory, WriteWatch)> {
        let memory = Memory::new((3 << 30) + (16 << 20), options).unwrap();
        match WriteWatch::open(memory.ram()) {
            Ok(watch) => Some((memory, watch)),
            Err(e) => {
                crate::testing::skip(test, &format!("no asynchronous userfaultfd: {e}"));
                None
            }
        }
    }

    fn written(watch: &mut WriteWatch) -> Vec<FrameRun> {
        let mut set = FrameSet::default();
        watch.written(|run| _ = set.insert(run)).unwrap();
        set.iter().collect()
    }

    fn write(memory: &Memory, gfn: u64) {
        memory.ram().write_obj(gfn, GuestAddress(Gfn(gfn).gpa() + 8)).unwrap();
    }

    fn frames(runs: &[FrameRun]) -> u64 {
        runs.iter().map(|run| run.count).sum()
    }

    #[test]
    fn each_write_is_found_once() {
        let name = "each_write_is_found_once";
        for options in option_sets() {
            let Some((memory, mut watch)) = watched(name, &options) else { return };
            (1000..1300).for_each(|gfn| write(&memory, gfn));
            watch.begin().unwrap();
            assert_eq!(written(&mut watch), [], "{options:?}: earlier writes do not count");
            let resident = memory.resident().unwrap();
            for _ in 0..3 {
                // All of them were present before, so pages are as small as they get.
                let gfns = [1000, 1001, 1100, 1299];
                gfns.iter().for_each(|gfn| write(&memory, *gfn));
                let runs = [run(1000, 2), run(1100, 1), run(1299, 1)];
                assert_eq!(written(&mut watch), runs, "{options:?}");
                assert_eq!(written(&mut watch), [], "{options:?}");
            }
            assert_eq!(
                memory.resident().unwrap(),
                resident,
                "{options:?}: no further frame is resident"
            );
            // A read of a page that was present does not count as a write either.
            memory.ram().read_obj::<u8>(GuestAddress(Gfn(1200).gpa())).unwrap();
            assert_eq!(written(&mut watch), [], "{options:?}");
        }
    }

    #[test]
    fn first_touches_are_found_and_nothing_is_lost() {
        let name = "first_touches_are_found_and_nothing_is_lost";
        for options in option_sets() {
            let Some((memory, mut watch)) = watched(name, &options) else { return };
            watch.begin().unwrap();
            assert_eq!(memory.resident().unwrap(), [], "{options:?}");
            // Both slots; the first and the last frame of each.
            for gfn in [0, 77, 5000, 0xb_ffff, 0x10_0000, 0x10_0fff] {
                write(&memory, gfn);
                let found = written(&mut watch);
                let has = found.iter().any(|r| r.start.0 <= gfn && gfn < r.end().0);
                assert!(has, "{options:?}: {gfn:#x} is not in {found:?}");
                // Exact for a memory file; for anonymous memory, the whole page that was mapped.
                let most = match (options.backing, options.huge_pages) {
                    (Backing::Memfd, _) | (_, Some(HugePages::None)) => 1,
                    _ => 512,
                };
                assert!(frames(&found) <= most, "{options:?}: {found:?}");
            }
            assert_eq!(written(&mut watch), [], "{options:?}");
        }
    }

    #[test]
    fn many_scattered_writes_are_found_exactly() {
        let name = "many_scattered_writes_are_found_exactly";
        for options in option_sets() {
            let Some((memory, mut watch)) = watched(name, &options) else { return };
            let all: Vec<u64> = (0..20_000).map(|i| 100 + i).collect();
            all.iter().for_each(|gfn| write(&memory, *gfn));
            watch.begin().unwrap();
            // More runs than a call can find, fewer, and so few that each has a call of its own.
            for step in [2, 7, 400, 5000] {
                let some: FrameSet = all.iter().step_by(step).map(|gfn| run(*gfn, 1)).collect();
                some.iter().for_each(|run| write(&memory, run.start.0));
                let found = written(&mut watch);
                assert_eq!(found, some.iter().collect::<Vec<_>>(), "{options:?}, every {step}th");
            }
        }
    }

    #[test]
    fn writes_to_discarded_frames_are_found() {
        let name = "writes_to_discarded_frames_are_found";
        for options in option_sets() {
            let Some((memory, mut watch)) = watched(name, &options) else { return };
            (512..2048).for_each(|gfn| write(&memory, gfn));
            watch.begin().unwrap();
            let mut discarder = Discarder::open(memory.protected_frames().clone()).unwrap();
            for round in 0..3 {
                assert!(discarder.discard(memory.ram(), run(600, 1000)).unwrap() > 0, "{round}");
                // The discarder has marked them in the tree, so it does not matter whether they are
                // found here.
                written(&mut watch);
                assert_eq!(written(&mut watch), []);
                (700..720).for_each(|gfn| write(&memory, gfn));
                let found = written(&mut watch);
                let set: FrameSet = found.iter().copied().collect();
                assert!((700..720).all(|gfn| set.contains(Gfn(gfn))), "{options:?}: {found:?}");
                assert_eq!(written(&mut watch), []);
                (600..1600).for_each(|gfn| write(&memory, gfn));
                let set: FrameSet = written(&mut watch).into_iter().collect();
                assert!((600..1600).all(|gfn| set.contains(Gfn(gfn))), "{options:?}");
            }
        }
    }

    /// Begins to track. A process that another test starts keeps the last descriptor open until it
    /// runs its program.
    fn begin_again(watch: &mut WriteWatch) {
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while let Err(e) = watch.begin() {
            let is_busy = e.kind() == io::ErrorKind::ResourceBusy;
            assert!(is_busy && std::time::Instant::now() < end, "{e}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn tracking_can_restart_and_frees_memory_meanwhile() {
        let name = "tracking_can_restart_and_frees_memory_meanwhile";
        for options in option_sets() {
            let Some((memory, mut watch)) = watched(name, &options) else { return };
            watch.end().unwrap();
            for _ in 0..3 {
                write(&memory, 4000);
                begin_again(&mut watch);
                watch.begin().unwrap();
                assert_eq!(written(&mut watch), [], "{options:?}");
                assert!(memory.write_protection().is_err(), "one descriptor at a time");
                write(&memory, 4000);
                assert_eq!(written(&mut watch), [run(4000, 1)], "{options:?}");
                watch.end().unwrap();
                drop(memory.write_protection().unwrap());
                assert!(watch.written(|_| ()).is_err(), "nothing is watched");
            }
        }
    }

    #[test]
    fn pages_of_the_pool_are_found_whole() {
        for backing in [Backing::Anon, Backing::Memfd] {
            let huge_pages = Some(HugePages::Hugetlbfs);
            let options = MemoryOptions { backing, huge_pages, prefault: false };
            let memory = match Memory::new(64 << 20, &options) {
                Ok(memory) => memory,
                Err(e) => {
                    return crate::testing::skip(
                        "pages_of_the_pool_are_found_whole",
                        &e.to_string(),
                    );
                }
            };
            let mut watch = match WriteWatch::open(memory.ram()) {
                Ok(watch) => watch,
                Err(e) => {
                    return crate::testing::skip(
                        "pages_of_the_pool_are_found_whole",
                        &e.to_string(),
                    );
                }
            };
            write(&memory, 600);
            watch.begin().unwrap();
            assert_eq!(written(&mut watch), []);
            write(&memory, 700);
            write(&memory, 2048);
            assert_eq!(written(&mut watch), [run(512, 512), run(2048, 512)], "{backing}");
            assert_eq!(written(&mut watch), []);
            assert_eq!(memory.resident().unwrap(), [run(512, 512), run(2048, 512)]);
            Discarder::default().discard(memory.ram(), run(512, 512)).unwrap();
            written(&mut watch);
            write(&memory, 513);
            assert_eq!(written(&mut watch), [run(512, 512)], "{backing}");
        }
    }
}
