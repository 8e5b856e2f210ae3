//! Owns what backs guest memory on this host: anonymous memory or a memory file, the size of its
//! pages, and whether it is populated before the guest touches it.
//!
//! None of these choices move with a guest: a destination or a restore chooses anew.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use rayon::prelude::*;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};
use vm_memory::mmap::{MmapRegionBuilder, MmapRegionError};
use vm_memory::{FileOffset, MmapRegion};

use driftline_dirty_tracker::TrackedBitmap;

use super::error::MemoryError;

/// The kind of memory that holds the guest's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Backing {
    /// Private anonymous memory.
    #[default]
    Anon,
    /// A sealed memory file, which can be shared with another process by its descriptor.
    Memfd,
}

impl Backing {
    /// Returns whether the administrator's settings give such memory pages larger than a frame, of
    /// any size, without advice.
    fn is_huge_by_default(self) -> bool {
        let dir = Path::new("/sys/kernel/mm/transparent_hugepage");
        let (all, each) = match self {
            Self::Anon => ("enabled", "enabled"),
            Self::Memfd => ("shmem_enabled", "shmem_enabled"),
        };
        let chosen = |file: PathBuf| std::fs::read_to_string(file).unwrap_or_default();
        let is_on = |setting: String| {
            ["[always]", "[within_size]", "[force]"].iter().any(|w| setting.contains(w))
        };
        let sizes =
            std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
        let sizes = sizes.filter(|path| path.is_dir());
        is_on(chosen(dir.join(all))) || sizes.map(|size| chosen(size.join(each))).any(is_on)
    }
}

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Anon => "anon",
            Self::Memfd => "memfd",
        })
    }
}

impl FromStr for Backing {
    type Err = MemoryError;

    fn from_str(s: &str) -> Result<Self, MemoryError> {
        match s {
            "anon" => Ok(Self::Anon),
            "memfd" => Ok(Self::Memfd),
            _ => Err(MemoryError::UnknownBacking { name: s.to_owned() }),
        }
    }
}

/// Host pages larger than a frame.
///
/// Huge pages make a guest's first touches cheap and its address translation faster, as long as no
/// tracking is on. KVM write-protects frame by frame, so tracking splits KVM's mapping of each huge
/// page that is written. KVM joins it again only some time after tracking has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HugePages {
    /// No huge pages, regardless of the administrator's setting.
    None,
    /// Huge pages where the kernel has a free one (`madvise`).
    Thp,
    /// Huge pages from the pool that the administrator has reserved (`vm.nr_hugepages`). Without
    /// enough of them the guest does not start.
    Hugetlbfs,
}

impl fmt::Display for HugePages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Thp => "thp",
            Self::Hugetlbfs => "hugetlbfs",
        })
    }
}

impl FromStr for HugePages {
    type Err = MemoryError;

    fn from_str(s: &str) -> Result<Self, MemoryError> {
        let all = [Self::None, Self::Thp, Self::Hugetlbfs];
        let found = all.into_iter().find(|h| h.to_string() == s);
        found.ok_or_else(|| MemoryError::UnknownHugePages { name: s.to_owned() })
    }
}

/// This host's choices for guest memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MemoryOptions {
    /// Kind of memory.
    pub backing: Backing,
    /// Pages larger than a frame; `None` keeps the administrator's setting.
    pub huge_pages: Option<HugePages>,
    /// Whether all memory is populated before the guest starts, rather than at each first touch.
    pub prefault: bool,
}

/// A file that has the first contents of a guest's memory: its slots one after another. It is
/// mapped privately, so it never gets a write, and several guests share the pages that none of them
/// has written.
///
/// If the file is truncated while a guest is mapped from it, that guest's process ends by SIGBUS.
#[derive(Clone, Debug)]
pub struct PrivateFile(Arc<File>);

impl From<File> for PrivateFile {
    /// Takes a file that is open for reading.
    fn from(file: File) -> Self {
        Self(Arc::new(file))
    }
}

impl PrivateFile {
    /// Fails if the file has fewer than `bytes` bytes: an access past its end would end the
    /// process.
    pub(super) fn check_length(&self, bytes: u64) -> Result<(), MemoryError> {
        let found = self.0.metadata().map_err(MemoryError::File)?.len();
        if found < bytes { Err(MemoryError::FileTooShort { bytes, found }) } else { Ok(()) }
    }

    /// Maps `len` bytes from `offset` on. Writes through vm-memory are recorded in `bitmap`.
    pub(super) fn map(
        &self,
        offset: u64,
        len: usize,
        bitmap: TrackedBitmap,
    ) -> Result<MmapRegion<TrackedBitmap>, MmapRegionError> {
        MmapRegionBuilder::new_with_bitmap(len, bitmap)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_NORESERVE)
            .with_file_offset(FileOffset::from_arc(self.0.clone(), offset))
            .build()
    }
}

/// `f_type` of hugetlbfs (`HUGETLBFS_MAGIC`).
const HUGETLBFS: u64 = 0x9584_58f6;

/// Returns whether the pages of a memory file come from the pool.
pub(super) fn is_of_pool(file: &File) -> io::Result<bool> {
    Ok(rustix::fs::fstatfs(file.as_fd())?.f_type as u64 == HUGETLBFS)
}

/// The first contents of memory.
#[derive(Clone, Copy)]
pub(super) enum MemoryContents<'c> {
    Zeros,
    Private(&'c PrivateFile),
    /// The memory of another process: the checked place of each slot.
    Shared(&'c [FileOffset]),
}

impl MemoryContents<'_> {
    /// Maps `len` bytes: the slot number `nth`, from 0, which begins at byte `offset` of all
    /// memory. Writes through vm-memory are recorded in `bitmap`.
    pub(super) fn map(
        self,
        options: &MemoryOptions,
        nth: usize,
        offset: u64,
        len: usize,
        bitmap: TrackedBitmap,
    ) -> Result<MmapRegion<TrackedBitmap>, MmapRegionError> {
        let place = match self {
            Self::Zeros => return options.map(len, bitmap),
            Self::Private(file) => return file.map(offset, len, bitmap),
            Self::Shared(places) => places.get(nth).ok_or(MmapRegionError::MappingPastEof)?,
        };
        let is_pooled = is_of_pool(place.file()).map_err(MmapRegionError::Mmap)?;
        let reserve = if is_pooled { 0 } else { libc::MAP_NORESERVE };
        MmapRegionBuilder::new_with_bitmap(len, bitmap)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_SHARED | reserve)
            .with_hugetlbfs(is_pooled)
            .with_file_offset(place.clone())
            .build()
    }
}

/// Bytes of one page of the pool.
pub(super) const HUGE_PAGE: u64 = 2 << 20;

impl MemoryOptions {
    /// Returns whether the memory comes from the pool of huge pages.
    pub(super) fn is_pooled(&self) -> bool {
        self.huge_pages == Some(HugePages::Hugetlbfs)
    }

    /// Returns whether a first write gets a page of a frame's size and never a larger one.
    pub(super) fn faults_are_small(&self) -> bool {
        match self.huge_pages {
            Some(HugePages::None) => true,
            Some(HugePages::Thp | HugePages::Hugetlbfs) => false,
            None => !self.backing.is_huge_by_default(),
        }
    }

    /// Maps `len` zeroed bytes. Writes through vm-memory are recorded in `bitmap`.
    pub(super) fn map(
        &self,
        len: usize,
        bitmap: TrackedBitmap,
    ) -> Result<MmapRegion<TrackedBitmap>, MmapRegionError> {
        let mut flags = match self.backing {
            Backing::Anon => libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            Backing::Memfd => libc::MAP_SHARED,
        };
        // Pool pages are reserved at mmap: otherwise a guest could die by SIGBUS later.
        flags |= match (self.is_pooled(), self.backing) {
            (false, _) => libc::MAP_NORESERVE,
            (true, Backing::Anon) => libc::MAP_HUGETLB | libc::MAP_HUGE_2MB,
            (true, Backing::Memfd) => 0,
        };
        let builder = MmapRegionBuilder::new_with_bitmap(len, bitmap)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(flags)
            .with_hugetlbfs(self.is_pooled());
        match self.backing {
            Backing::Anon => builder.build(),
            Backing::Memfd => {
                let file = memory_file(len as u64, self.is_pooled());
                let file = file.map_err(MmapRegionError::Mmap)?;
                builder.with_file_offset(FileOffset::new(file, 0)).build()
            }
        }
    }

    /// Gives the kernel the advice for a mapping. Also excludes the mapping from core dumps,
    /// because it is large and holds the guest's data, and from child processes.
    pub(super) fn advise(&self, start: *mut u8, len: usize) -> io::Result<()> {
        let pages = match self.huge_pages {
            Some(HugePages::Thp) => Some(Advice::LinuxHugepage),
            Some(HugePages::None) => Some(Advice::LinuxNoHugepage),
            Some(HugePages::Hugetlbfs) | None => None,
        };
        for advice in [Advice::LinuxDontDump, Advice::LinuxDontFork].into_iter().chain(pages) {
            // SAFETY: start and len are a whole mapping that we have just made; no such advice
            // changes its content in this process.
            unsafe { madvise(start.cast(), len, advice) }?;
        }
        Ok(())
    }
}

/// Creates a memory file of `len` bytes whose length is sealed: if a file shrinks under a mapping,
/// an access kills the process.
fn memory_file(len: u64, from_pool: bool) -> io::Result<File> {
    let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    if from_pool {
        flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    }
    let file = rustix::fs::memfd_create("driftline-memory", flags)?;
    rustix::fs::ftruncate(file.as_fd(), len)?;
    rustix::fs::fcntl_add_seals(
        file.as_fd(),
        SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL,
    )?;
    Ok(file.into())
}

/// Bytes that one call populates: enough to be worth a call, and few enough to spread evenly over
/// threads.
const POPULATE_BYTES: usize = 16 << 20;

/// Populates `len` bytes at `start` now, on all threads of rayon's pool.
pub(super) fn populate(start: *mut u8, len: usize) -> io::Result<()> {
    let start = start as usize;
    (0..len)
        .into_par_iter()
        .step_by(POPULATE_BYTES)
        .try_for_each(|offset| populate_piece(start + offset, POPULATE_BYTES.min(len - offset)))
}

/// Maximum number of ranges with huge page advice. Each may split a mapping in three, and a process
/// can have 65,530 mappings.
const MAX_HUGE_RANGES: usize = 4096;

/// The ranges that have huge page advice.
#[derive(Debug, Default)]
pub(super) struct HugeRanges {
    count: usize,
    /// End address of the last range. A range that continues there needs no mapping of its own.
    end: usize,
}

impl HugeRanges {
    /// Asks the kernel for huge pages in the 2 MiB pages that lie wholly within `len` bytes at
    /// `start`, part of a mapping of this process that is about to be written.
    ///
    /// Returns whether the kernel accepted the advice. It has no effect if the administrator has
    /// switched huge pages off.
    pub(super) fn prefer(&mut self, start: usize, len: usize) -> bool {
        let first = start.next_multiple_of(HUGE_PAGE as usize);
        let end = (start + len) / HUGE_PAGE as usize * HUGE_PAGE as usize;
        if first >= end {
            return false;
        }
        if first != self.end {
            if self.count == MAX_HUGE_RANGES {
                return false;
            }
            self.count += 1;
        }
        self.end = end;
        // SAFETY: the range is part of a mapping that is ours; the advice changes no content.
        unsafe { madvise(first as *mut _, end - first, Advice::LinuxHugepage) }.is_ok()
    }
}

/// Populates `len` bytes at `start`, part of a mapping of this process, now, on this thread.
pub(super) fn populate_piece(start: usize, len: usize) -> io::Result<()> {
    loop {
        // SAFETY: the range is part of a mapping that is ours; populating it for writing leaves its
        // bytes as they are.
        match unsafe { madvise(start as *mut _, len, Advice::LinuxPopulateWrite) } {
            Err(Errno::INTR) => {}
            populated => return Ok(populated?),
        }
    }
}
