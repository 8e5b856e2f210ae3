//! Building a guest from a stored epoch. Every byte it needs is checked before the guest may run.

use std::sync::Arc;
use std::time::Instant;

use dirty_tracker::{FrameRun, FrameSet, PAGE_SIZE};
use serde::Serialize;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use crate::store::{
    EpochInfo, EpochReader, ParentLink, Peeked, Record, Store, StoreError, check_layout,
    check_link, check_vm, peek,
};
use crate::zero::{ZEROS, is_zero};
use crate::{Clock, Guest, GuestError, GuestFactory, GuestRam, Section, VmId};

/// A guest that could not be restored. Nothing runs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// The store is damaged or does not have the epoch.
    #[error("{0}")]
    Store(#[from] StoreError),
    /// The guest could not be built, or refused its state.
    #[error("epoch {epoch} cannot be restored: {cause}")]
    Guest {
        /// The epoch.
        epoch: u64,
        /// The guest's reason.
        cause: GuestError,
    },
    /// The configuration in the epoch makes another memory than the one that is stored.
    #[error(
        "epoch {epoch} cannot be restored: its configuration makes a guest with memory layout \
         {built:#010x}, its memory has layout {stored:#010x}"
    )]
    Layout {
        /// The epoch.
        epoch: u64,
        /// Hash of the layout that the factory built.
        built: u32,
        /// Hash of the stored layout.
        stored: u32,
    },
    /// The guest's memory could not be written.
    #[error("epoch {epoch} cannot be restored: writing the guest's memory failed: {cause}")]
    Memory {
        /// The epoch.
        epoch: u64,
        /// Memory's answer.
        cause: GuestMemoryError,
    },
}

/// What a restore did.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct RestoreReport {
    /// The epoch restored.
    pub epoch: u64,
    /// Whose it is.
    pub vm_id: VmId,
    /// When it was taken: milliseconds since 1970, by that host's clock.
    pub created_unix_ms: u64,
    /// Epochs read: it and those that it builds on.
    pub epochs: u64,
    /// Frames read, with repetitions.
    pub frames: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// How long it took, in milliseconds.
    pub time_ms: f64,
}

/// Builds the guest of `epoch`, or of the latest in the store, with `factory`, and puts memory and
/// state into it. The guest is paused and has acquired nothing: `acquire`, then `resume`.
///
/// Reads the epoch and all that it builds on, newest first, so that a frame is written once, however
/// many epochs have it. All checksums are compared on the way; at the first that is wrong the guest
/// is thrown away. The latest epoch is the one with the
/// highest number: if that is damaged it is refused, not passed over; ask for another by number.
///
/// Contents go through a buffer of 1 MiB that stays in the cache: their checksum has to be computed
/// by reading them once anyway.
pub fn restore<F: GuestFactory>(
    store: &Store,
    epoch: Option<u64>,
    factory: &F,
    clock: Clock,
) -> Result<(Arc<F::Guest>, RestoreReport), RestoreError> {
    let since = Instant::now();
    let epoch = match epoch {
        Some(epoch) => epoch,
        None => store.numbers()?.last().copied().ok_or_else(|| store.no_epoch(None))?,
    };
    let span = tracing::info_span!("restore", epoch);
    let _entered = span.enter();
    tracing::debug!("begin");
    let (link, older, info) = find_chain(store, epoch)?;
    let (guest, reader) = build(store, factory, &info)?;
    let mut report = RestoreReport {
        epoch,
        vm_id: info.vm_id,
        created_unix_ms: info.created_unix_ms,
        epochs: 1 + older.len() as u64,
        frames: 0,
        read_bytes: 0,
        time_ms: 0.0,
    };
    let fill = || {
        let mut done = FrameSet::new();
        let sections = load(store, link, reader, &*guest, &mut done, &mut report)?;
        for link in older {
            let reader = EpochReader::open(store, link.epoch)?;
            load(store, link, reader, &*guest, &mut done, &mut report)?;
        }
        let restored = guest.restore_state(&sections, clock);
        restored.map_err(|cause| RestoreError::Guest { epoch, cause })
    };
    if let Err(e) = fill() {
        guest.stop("it could not be restored");
        tracing::debug!("end: {e}");
        return Err(e);
    }
    report.time_ms = since.elapsed().as_micros() as f64 / 1000.0;
    tracing::info!(epochs = report.epochs, frames = report.frames, ms = report.time_ms, "end");
    Ok((guest, report))
}

/// `epoch`, and those that it builds on, newest first.
fn find_chain(
    store: &Store,
    epoch: u64,
) -> Result<(ParentLink, Vec<ParentLink>, EpochInfo), RestoreError> {
    let path = |epoch| move || store.epoch_path(epoch);
    let (info, mut child) = peek(store, epoch)?;
    let (link, mut older) = (child.link, Vec::new());
    // Ends: a parent's number is always lower than its child's.
    while let Some(parent) = child.parent {
        let of = child.link.epoch;
        let (found, at): (EpochInfo, Peeked) = match peek(store, parent.epoch) {
            Err(StoreError::NoEpoch { .. }) => {
                let (file, parent) = (store.epoch_path(of), parent.epoch);
                return Err(StoreError::MissingParent { file, parent }.into());
            }
            other => other?,
        };
        check_vm(path(parent.epoch), found.vm_id, info.vm_id)?;
        check_link(path(of), parent, at.link)?;
        check_layout(path(of), child.layout_hash, at.layout_hash)?;
        older.push(at.link);
        child = at;
    }
    Ok((link, older, info))
}

/// A guest with zeroed memory, as the epoch's configuration says, and the epoch's file, read up to
/// there.
fn build<F: GuestFactory>(
    store: &Store,
    factory: &F,
    info: &EpochInfo,
) -> Result<(Arc<F::Guest>, EpochReader), RestoreError> {
    let epoch = info.epoch;
    let reader = EpochReader::open(store, epoch)?;
    let guest = factory
        .create(info.vm_id, reader.config())
        .map_err(|cause| RestoreError::Guest { epoch, cause })?;
    if guest.layout() != reader.layout() {
        let (built, stored) = (guest.layout().hash(), reader.layout().hash());
        guest.stop("its memory is not the stored one");
        return Err(RestoreError::Layout { epoch, built, stored });
    }
    Ok((guest, reader))
}

/// Puts one epoch's frames into memory, but those that are `done`: newer epochs had them. Then they
/// are done, too. Returns the epoch's state sections.
fn load<G: Guest + ?Sized>(
    store: &Store,
    link: ParentLink,
    mut reader: EpochReader,
    guest: &G,
    done: &mut FrameSet,
    report: &mut RestoreReport,
) -> Result<Vec<Section>, RestoreError> {
    let epoch = report.epoch;
    let memory = |cause| RestoreError::Memory { epoch, cause };
    tracing::debug!(from = link.epoch, "begin reading");
    let mut sections = Vec::new();
    // Done only afterwards: of this epoch's own records the last wins.
    let mut here = Vec::new();
    while let Some(record) = reader.next()? {
        match record {
            Record::Frames(runs, contents) => {
                write_frames(guest.ram(), done, runs, contents).map_err(memory)?;
                report.frames += runs.iter().map(|run| run.count).sum::<u64>();
                here.extend_from_slice(runs);
            }
            Record::Zeros(runs) => {
                write_zeros(guest.ram(), done, runs).map_err(memory)?;
                report.frames += runs.iter().map(|run| run.count).sum::<u64>();
                here.extend_from_slice(runs);
            }
            Record::Section(section) => sections.push(section),
        }
    }
    // Between finding the chain and reading it the file may have been exchanged.
    check_link(|| store.epoch_path(link.epoch), link, reader.link())?;
    done.insert_all(&here);
    report.read_bytes += reader.len();
    tracing::debug!(from = link.epoch, "end reading");
    Ok(sections)
}

fn write_frames(
    ram: &GuestRam,
    done: &FrameSet,
    runs: &[FrameRun],
    mut contents: &[u8],
) -> Result<(), GuestMemoryError> {
    for run in runs {
        let (bytes, rest) = contents.split_at(run.bytes() as usize);
        for part in done.gaps(*run) {
            let from = ((part.start.0 - run.start.0) * PAGE_SIZE) as usize;
            let part_bytes = &bytes[from..from + part.bytes() as usize];
            ram.write_slice(part_bytes, GuestAddress(part.start.gpa()))?;
        }
        contents = rest;
    }
    Ok(())
}

/// Memory that is zero already is left as it is: writing to it would only cost memory.
fn write_zeros(ram: &GuestRam, done: &FrameSet, runs: &[FrameRun]) -> Result<(), GuestMemoryError> {
    let mut page = ZEROS;
    for gfn in runs.iter().flat_map(|run| done.gaps(*run)).flat_map(FrameRun::frames) {
        let at = GuestAddress(gfn.gpa());
        ram.read_slice(&mut page, at)?;
        if !is_zero(&page) {
            ram.write_slice(&ZEROS, at)?;
        }
    }
    Ok(())
}
