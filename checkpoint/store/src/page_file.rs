//! The page file: contents of frames in slots of 4 KiB. The first slot is the header.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Instant;

use driftline_dirty_tracker::PAGE_SIZE;
use driftline_format::{HEADER_LEN, Header, MAGIC_PAGES, is_zero};
use driftline_guest::{PAGE_BYTES, VmId};
use parking_lot::{Mutex, MutexGuard};

use crate::alloc::{MAX_RUN, SlotRun, Slots};
use crate::backend::{RangeLock, StoreFile, is_media_error};
use crate::damage::Damage;
use crate::error::StoreError;
use crate::names::pages_name;
use crate::store::Store;
use crate::unreadable::UnreadableUnits;

/// Limits of the file's growth in slots: 1 MiB and 256 MiB. Within these, it grows by an eighth.
/// Chosen: smaller steps cost a call to the file system for every few epochs; larger ones take
/// space that other files of a shared disk could use.
const MIN_GROWTH: u32 = 256;
const MAX_GROWTH: u32 = 1 << 16;
/// Byte that the writer locks: no epoch has that number.
const WRITER: Range<u64> = 0..1;

fn is_full(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Writes the header of a new page file.
pub(crate) fn begin_pages(file: &dyn StoreFile, vm_id: VmId, generation: u64) -> io::Result<()> {
    let mut slot = Vec::with_capacity(PAGE_BYTES);
    Header::new(MAGIC_PAGES, vm_id, generation, 0).write_to(&mut slot)?;
    slot.resize(PAGE_BYTES, 0);
    file.write_all_at(&slot, 0)
}

/// A page file, open for reading.
#[derive(Debug)]
pub(crate) struct PageReader {
    file: Box<dyn StoreFile>,
    pub(crate) path: PathBuf,
    /// State of failed reads for a salvage, which treats a part that the disk cannot read as
    /// damaged.
    unreadable: Option<Mutex<UnreadableUnits>>,
}

impl PageReader {
    /// Opens the page file of `generation` to salvage what is left. Nothing in it has been checked.
    pub(crate) fn open_damaged(store: &Store, generation: u64) -> Result<Self, StoreError> {
        let name = pages_name(generation);
        let file = store.backend().open(&name).map_err(|e| store.not_read("opening", &name, e))?;
        let unreadable = Mutex::new(store.unreadable(true));
        Ok(Self { file, path: store.path(&name), unreadable: Some(unreadable) })
    }

    /// Returns the guest of the page file of `generation`; `None` if the file is missing, or its
    /// header is damaged.
    pub(crate) fn owner_of(store: &Store, generation: u64) -> Result<Option<VmId>, StoreError> {
        store.header_owner(&pages_name(generation), MAGIC_PAGES)
    }

    /// Opens the page file of `generation`, which must be of guest `vm_id`.
    pub(crate) fn open(store: &Store, generation: u64, vm_id: VmId) -> Result<Self, StoreError> {
        let name = pages_name(generation);
        let file = store.backend().open(&name).map_err(|e| store.not_read("opening", &name, e))?;
        let new = Self { file, path: store.path(&name), unreadable: None };
        new.check_header(generation, vm_id)?;
        Ok(new)
    }

    /// Opens the page file of `generation` for writing, and locks it for as long as it is open: no
    /// other process frees its slots, even if the store's lock was lost. Nothing in it has been
    /// checked.
    pub(crate) fn open_locked(store: &Store, generation: u64) -> Result<Self, StoreError> {
        let name = pages_name(generation);
        let file = store.backend().open_for_writing(&name);
        let file = file.map_err(|e| store.not_read("opening", &name, e))?;
        let alone = file.lock_range(WRITER, RangeLock::Exclusive);
        match alone.map_err(|e| store.io("locking", &name, e))? {
            true => Ok(Self { file, path: store.path(&name), unreadable: None }),
            false => Err(StoreError::InUse { dir: store.dir(), pid: None }),
        }
    }

    /// Fails if the file is not the page file of `generation` of guest `vm_id`.
    pub(crate) fn check_header(&self, generation: u64, vm_id: VmId) -> Result<(), StoreError> {
        let damaged = |damage| StoreError::Damaged { file: self.path.clone(), offset: 0, damage };
        let mut slot = [0; PAGE_BYTES];
        self.read(0, &mut slot)?;
        let header = Header::read_from(&slot[..], MAGIC_PAGES).map_err(|e| damaged(e.into()))?;
        if header.vm_id() != vm_id {
            let damage = Damage::OtherVm { found: header.vm_id(), expected: vm_id };
            return Err(damaged(damage));
        }
        let padding = is_zero(&slot[HEADER_LEN..]);
        let fields = [
            ("the generation in the header", header.epoch(), generation),
            ("the layout in the header of a page file", header.layout_hash().into(), 0),
            ("what follows the header", (!padding).into(), 0),
        ];
        match fields.into_iter().find(|(_, found, expected)| found != expected) {
            Some((what, found, expected)) => {
                Err(damaged(Damage::Mismatch { what, found, expected }))
            }
            None => Ok(()),
        }
    }

    pub(crate) fn file(&self) -> &dyn StoreFile {
        &*self.file
    }

    fn io(&self, cause: io::Error) -> StoreError {
        StoreError::not_read("reading", self.path.clone(), cause)
    }

    /// Returns the current number of slots of the file.
    pub(crate) fn slots(&self) -> Result<u32, StoreError> {
        let len = self.file.len().map_err(|e| self.io(e))?;
        Ok(u32::try_from(len / PAGE_SIZE).unwrap_or(u32::MAX))
    }

    /// Hints that `count` slots from `slot` on will be read soon.
    pub(crate) fn will_read(&self, slot: u32, count: u32) {
        self.file.will_read(u64::from(slot) * PAGE_SIZE, u64::from(count) * PAGE_SIZE);
    }

    /// Fills `buf` with slots from `slot` on.
    pub(crate) fn read(&self, slot: u32, buf: &mut [u8]) -> Result<(), StoreError> {
        let offset = u64::from(slot) * PAGE_SIZE;
        let damaged = |damage| StoreError::Damaged { file: self.path.clone(), offset, damage };
        if let Some(damage) = self.known_unreadable(slot, buf.len()) {
            return Err(damaged(damage));
        }
        let begun = Instant::now();
        let Err(e) = self.file.read_exact_at(buf, offset) else { return Ok(()) };
        Err(match &self.unreadable {
            _ if e.kind() == io::ErrorKind::UnexpectedEof => {
                let length = self.file.len().unwrap_or(0);
                damaged(Damage::EndsEarly { length, wanted: buf.len() as u64 })
            }
            Some(unreadable) if is_media_error(&e) => {
                let mut unreadable = unreadable.lock();
                unreadable.add_time(begun.elapsed());
                // Of several slots, each is tried alone later.
                if buf.len() <= PAGE_BYTES {
                    let end = self.slots()?;
                    let read =
                        |n: u64| self.file.read_exact_at(&mut [0; PAGE_BYTES], n * PAGE_SIZE);
                    unreadable.note(slot.into(), end.into(), &e, read).map_err(|e| self.io(e))?;
                }
                damaged(Damage::Unreadable { cause: e })
            }
            _ => self.io(e),
        })
    }

    /// Returns why slots are not read: one of them was given up.
    fn known_unreadable(&self, slot: u32, len: usize) -> Option<Damage> {
        let unreadable = self.unreadable.as_ref()?;
        let unreadable = unreadable.lock();
        let (slot, count) = (u64::from(slot), len.div_ceil(PAGE_BYTES) as u64);
        let next = unreadable.next(slot).filter(|next| *next < slot + count)?;
        Some(unreadable.damage(next))
    }
}

/// The page file of a store's writer. Writers of epochs take slots, and the committer frees those
/// that no epoch needs any more.
#[derive(Debug)]
pub struct PageFile {
    reader: PageReader,
    slots: Mutex<Slots>,
}

impl PageFile {
    /// Returns the page file `locked`, with the given state of its slots.
    pub(crate) fn new(locked: PageReader, slots: Slots) -> Self {
        Self { reader: locked, slots: Mutex::new(slots) }
    }

    pub(crate) fn file(&self) -> &dyn StoreFile {
        self.reader.file()
    }

    /// Returns the file's path, for messages.
    pub fn path(&self) -> &Path {
        &self.reader.path
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock()
    }

    fn io(&self, what: &'static str, cause: io::Error) -> StoreError {
        StoreError::Io { what, path: self.reader.path.clone(), cause }
    }

    /// Takes `count` adjacent slots, or fewer. The file grows if none is free.
    pub(crate) fn take(&self, count: u32) -> Result<SlotRun, StoreError> {
        let count = count.clamp(1, MAX_RUN);
        let mut slots = self.slots();
        if let Some(run) = slots.allocate_up_to(count) {
            return Ok(run);
        }
        self.grow(&mut slots, count)?;
        let full =
            || StoreError::NoMoreSlots { pages: self.reader.path.clone(), slots: u32::MAX - 1 };
        slots.allocate_up_to(count).ok_or_else(full)
    }

    /// Grows the file by an eighth. If there is no room for that, grows it by less, down to `least`
    /// slots, or by what the file system allocated before it failed.
    fn grow(&self, slots: &mut Slots, least: u32) -> Result<(), StoreError> {
        let old = slots.total();
        let mut more = (old / 8).clamp(MIN_GROWTH, MAX_GROWTH).max(least);
        loop {
            let total = old.saturating_add(more).min(u32::MAX - 1);
            if total == old {
                return Ok(());
            }
            match self.file().allocate(u64::from(total) * PAGE_SIZE) {
                Ok(()) => {
                    slots.grow_to(total);
                    return Ok(());
                }
                Err(e) => {
                    // Some file systems leave the file with the space that they had.
                    let there = self.reader.slots()?.min(total);
                    if there > old {
                        slots.grow_to(there);
                        return Ok(());
                    }
                    if !is_full(&e) || more <= least {
                        return Err(self.io("growing", e));
                    }
                    more = (more / 2).max(least);
                }
            }
        }
    }

    /// Frees slots that no epoch needs.
    pub(crate) fn give_back(&self, runs: &[SlotRun]) {
        let mut slots = self.slots();
        for run in runs {
            if let Err(e) = slots.free(*run) {
                // Only the slots are lost: slots of an epoch are never handed out twice.
                tracing::error!("{}: {e}", self.reader.path.display());
            }
        }
    }

    /// Fills slots from `slot` on.
    pub(crate) fn write(&self, slot: u32, bytes: &[u8]) -> Result<(), StoreError> {
        let written = self.file().write_all_at(bytes, u64::from(slot) * PAGE_SIZE);
        written.map_err(|e| self.io("writing", e))
    }

    /// Makes all that was written durable.
    pub(crate) fn sync(&self) -> Result<(), StoreError> {
        self.file().sync().map_err(|e| self.io("syncing", e))
    }
}
