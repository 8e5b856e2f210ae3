//! Owns guest memory: its mappings in this process, the layout that they follow, and the tracker
//! that the VMM's own writes mark.
//!
//! ```text
//! slot 0   0 .. 3 GiB            all memory of a guest that has no more than this
//!          3 GiB .. 4 GiB        no memory: interrupt controllers, KVM's own pages
//! slot 1   4 GiB ..              the rest
//! ```

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use checkpoint::GuestRam;
use dirty_tracker::{
    FrameRun, Gfn, Layout, LayoutError, PAGE_SIZE, Slot, SlotId, TrackedBitmap, Tracker,
};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap};

use crate::config::{MAX_MEM_BYTES, MIN_MEM_BYTES};

/// First byte of the hole below 4 GiB.
pub const HOLE_START: u64 = 0xc000_0000;
/// First byte after the hole.
pub const HOLE_END: u64 = 0x1_0000_0000;

/// Why there is no guest memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The size is no size for a guest.
    #[error("guest memory of {0} bytes is not a whole number of frames between 16 MiB and 16 TiB")]
    Size(u64),
    /// The host has no room for it.
    #[error("guest memory of {bytes} bytes does not fit this host: {cause}")]
    DoesNotFit {
        /// Bytes asked for.
        bytes: u64,
        /// The system's answer.
        cause: String,
    },
    /// The layout is none; only a programming error leads here.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

/// Guest memory and what is known about it.
#[derive(Debug)]
pub struct Memory {
    ram: GuestRam,
    tracker: Arc<Tracker>,
}

/// The layout of a guest with `bytes` of memory.
pub fn layout(bytes: u64) -> Result<Layout, MemoryError> {
    if !bytes.is_multiple_of(PAGE_SIZE) || !(MIN_MEM_BYTES..=MAX_MEM_BYTES).contains(&bytes) {
        return Err(MemoryError::Size(bytes));
    }
    let low = bytes.min(HOLE_START);
    let slot = |id, start: u64, len: u64| Slot {
        id: SlotId(id),
        base: Gfn::containing(start),
        frames: len / PAGE_SIZE,
    };
    let mut slots = vec![slot(0, 0, low)];
    if bytes > low {
        slots.push(slot(1, HOLE_END, bytes - low));
    }
    Ok(Layout::new(slots)?)
}

impl Memory {
    /// Maps zeroed memory for a guest of `bytes`.
    ///
    /// Nothing is reserved: frames get host memory when they are first touched, and a guest may be
    /// larger than what the host has free; larger than all it has only where the administrator has
    /// asked for that (`vm.overcommit_memory` 1).
    pub fn new(bytes: u64) -> Result<Self, MemoryError> {
        let layout = layout(bytes)?;
        let tracker = Arc::new(Tracker::new(layout.clone()));
        let does_not_fit = |cause: String| MemoryError::DoesNotFit { bytes, cause };
        if let Some(has) = most_bytes().filter(|has| *has < bytes) {
            let cause = format!("it has {has} bytes of memory and swap");
            return Err(does_not_fit(cause));
        }
        let mut regions = Vec::new();
        for slot in layout.slots() {
            let bitmap = TrackedBitmap::new(tracker.clone(), slot.base);
            let len =
                usize::try_from(slot.run().bytes()).map_err(|e| does_not_fit(e.to_string()))?;
            let map = MmapRegionBuilder::new_with_bitmap(len, bitmap)
                .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
                .with_mmap_flags(libc::MAP_ANONYMOUS | libc::MAP_PRIVATE | libc::MAP_NORESERVE)
                .build()
                .map_err(|e| does_not_fit(e.to_string()))?;
            advise(map.as_ptr(), len).map_err(|e| does_not_fit(e.to_string()))?;
            let region = GuestRegionMmap::new(map, GuestAddress(slot.base.gpa()));
            regions.push(region.ok_or_else(|| does_not_fit("its end overflows".to_owned()))?);
        }
        let ram = GuestRam::from_regions(regions).map_err(|e| does_not_fit(e.to_string()))?;
        Ok(Self { ram, tracker })
    }

    /// The mappings.
    pub fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// The tracker of all writes.
    pub fn tracker(&self) -> &Arc<Tracker> {
        &self.tracker
    }

    /// The slots.
    pub fn layout(&self) -> &Layout {
        self.tracker.layout()
    }

    /// Runs of frames, ascending, that have host memory or are swapped out: all others were never
    /// written and read as zeros. Reads eight bytes a frame from the kernel.
    pub fn populated(&self) -> io::Result<Vec<FrameRun>> {
        let pagemap = File::open("/proc/self/pagemap")?;
        let mut buffer = vec![0; PAGEMAP_CHUNK];
        let mut runs: Vec<FrameRun> = Vec::new();
        for region in self.ram.iter() {
            let first = region.as_ptr() as u64 / PAGE_SIZE;
            let base = Gfn::containing(region.start_addr().0);
            let frames = region.len() / PAGE_SIZE;
            let region_floor = runs.len();
            for chunk in (FrameRun { start: Gfn(0), count: frames }).chunks(ENTRIES_PER_CHUNK) {
                let bytes = &mut buffer[..chunk.count as usize * 8];
                pagemap.read_exact_at(bytes, (first + chunk.start.0) * 8)?;
                for (i, entry) in bytes.chunks_exact(8).enumerate() {
                    // The top byte has both bits that matter: 63 present, 62 swapped.
                    if entry[7] & 0xc0 == 0 {
                        continue;
                    }
                    let gfn = Gfn(base.0 + chunk.start.0 + i as u64);
                    match runs[region_floor..].last_mut() {
                        Some(run) if run.end() == gfn => run.count += 1,
                        _ => runs.push(FrameRun { start: gfn, count: 1 }),
                    }
                }
            }
        }
        Ok(runs)
    }
}

/// Memory and swap of the host; `None` if nobody knows, or any amount may be asked for.
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
pub(crate) fn meminfo_bytes(meminfo: &str, field: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|l| l.strip_prefix(field))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

const ENTRIES_PER_CHUNK: u64 = 64 << 10;
const PAGEMAP_CHUNK: usize = ENTRIES_PER_CHUNK as usize * 8;

/// Keeps guest memory out of core dumps (it is the guest's, and large) and out of children. Page
/// size is left as the administrator set it: huge pages make first touches cheap and are split by
/// KVM where tracking write-protects.
fn advise(start: *mut u8, len: usize) -> io::Result<()> {
    for advice in [libc::MADV_DONTDUMP, libc::MADV_DONTFORK] {
        // SAFETY: start and len are a whole mapping that we have just made; neither advice changes
        // its content in this process.
        let ret = unsafe { libc::madvise(start.cast(), len, advice) };
        if ret != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::Bytes;

    #[test]
    fn memory_past_three_gibibytes_goes_above_the_hole() {
        let slots: Vec<Slot> = layout(5 << 30).unwrap().slots().copied().collect();
        assert_eq!(slots[0], Slot { id: SlotId(0), base: Gfn(0), frames: 0xc0000 });
        assert_eq!(slots[1], Slot { id: SlotId(1), base: Gfn(0x100000), frames: 0x80000 });
        assert_eq!(layout(3 << 30).unwrap().slots().len(), 1);
        assert!(layout((64 << 20) | 1).is_err());
        assert!(layout(!0xfff).is_err());
    }

    #[test]
    fn more_than_the_host_has_is_refused_with_what_it_has() {
        assert_eq!(total_bytes("MemTotal:  8 kB\nMemFree: 1 kB\nSwapTotal: 2 kB\n"), Some(10240));
        assert_eq!(total_bytes("MemTotal: 8 kB\n"), Some(8192));
        assert_eq!(total_bytes("MemTotal: many\n"), None);
    }

    #[test]
    fn populated_is_what_was_written() {
        let memory = Memory::new(5 << 30).unwrap();
        assert_eq!(memory.populated().unwrap(), [], "fresh memory has no frames");
        for gfn in [0, 1, 2, 70_000, 0xbffff, 0x100000, 0x17ffff] {
            memory.ram().write_obj(1u8, GuestAddress(Gfn(gfn).gpa())).unwrap();
        }
        let runs = memory.populated().unwrap();
        let has = |gfn| runs.iter().any(|r| (r.start..r.end()).contains(&Gfn(gfn)));
        for gfn in [0, 1, 2, 70_000, 0xbffff, 0x100000, 0x17ffff] {
            assert!(has(gfn), "frame {gfn:#x} was written");
        }
        assert!(runs.windows(2).all(|w| w[0].end() <= w[1].start), "ascending: {runs:?}");
        assert!(runs.iter().all(|r| memory.layout().contains(*r)), "none crosses the hole");
    }

    #[test]
    fn the_vmms_own_writes_mark_the_tree() {
        let memory = Memory::new(64 << 20).unwrap();
        let mut subscription = memory.tracker().subscribe("test");
        memory.ram().write_slice(&[1; 100], GuestAddress(0x1ff0)).unwrap();
        let epoch = subscription.drain();
        assert_eq!(epoch.runs().collect::<Vec<_>>(), [FrameRun { start: Gfn(1), count: 2 }]);
    }
}
