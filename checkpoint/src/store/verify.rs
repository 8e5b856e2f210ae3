//! Reading all of a store to see whether it could be restored.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Serialize;

use super::{Damage, EpochInfo, EpochReader, ParentLink, Store, StoreError, peek};
use crate::VmId;

/// What a sound store holds.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct VerifyReport {
    /// Epochs read and found sound.
    pub epochs: u64,
    /// Frames in them, those of zeros included.
    pub frames: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Files of epochs that were never finished: no damage, the next writer removes them.
    pub unfinished: Vec<String>,
    /// Files that have no place in a store: left alone.
    pub foreign: Vec<String>,
}

/// What is known of the epochs read so far.
#[derive(Default)]
struct Known {
    vm_id: Option<VmId>,
    /// By number: digest and layout hash of sound ones, nothing of damaged ones.
    epochs: BTreeMap<u64, Option<(ParentLink, u32)>>,
}

impl Store {
    /// Reads every byte of every epoch, checks it against its checksums and each epoch against its
    /// parent. `on_epoch` hears of each epoch, ascending, sound or not; all are read even if one is
    /// damaged, and the first damage is the result.
    pub fn verify(
        &self,
        mut on_epoch: impl FnMut(u64, Result<&EpochInfo, &StoreError>),
    ) -> Result<VerifyReport, StoreError> {
        let listing = self.list()?;
        let mut report = VerifyReport {
            unfinished: listing.unfinished,
            foreign: listing.foreign,
            ..VerifyReport::default()
        };
        let (mut known, mut first_damage) = (Known::default(), None);
        for epoch in self.numbers()? {
            match self.verify_epoch(epoch, &mut known) {
                Ok(info) => {
                    report.epochs += 1;
                    report.frames = report.frames.saturating_add(info.frames);
                    report.read_bytes += info.bytes;
                    on_epoch(epoch, Ok(&info));
                }
                Err(e) => {
                    known.epochs.insert(epoch, None);
                    on_epoch(epoch, Err(&e));
                    first_damage.get_or_insert(e);
                }
            }
        }
        first_damage.map_or(Ok(report), Err)
    }

    fn verify_epoch(&self, epoch: u64, known: &mut Known) -> Result<EpochInfo, StoreError> {
        // Front to end first: it names the first byte that is wrong, not the first thing missed.
        let mut reader = EpochReader::open(self, epoch)?;
        let link = reader.finish()?;
        let (info, _) = peek(self, epoch)?;
        let hash = reader.layout().hash();
        let file = || self.epoch_path(epoch);
        check_vm(file, reader.vm_id(), *known.vm_id.get_or_insert(reader.vm_id()))?;
        if let Some(parent) = reader.parent() {
            match known.epochs.get(&parent.epoch) {
                None => {
                    return Err(StoreError::MissingParent { file: file(), parent: parent.epoch });
                }
                // A damaged parent has been reported as such.
                Some(None) => {}
                Some(Some((found, parent_hash))) => {
                    check_link(file, parent, *found)?;
                    check_layout(file, hash, *parent_hash)?;
                }
            }
        }
        known.epochs.insert(epoch, Some((link, hash)));
        Ok(info)
    }
}

/// Where the header, and where the parent link, begins.
const HEADER_AT: u64 = 0;
const PARENT_AT: u64 = crate::format::HEADER_LEN as u64;

fn mismatch(
    file: PathBuf,
    offset: u64,
    what: &'static str,
    found: u32,
    expected: u32,
) -> StoreError {
    let damage = Damage::Mismatch { what, found: found.into(), expected: expected.into() };
    StoreError::Damaged { file, offset, damage }
}

/// Refuses an epoch of another VM.
pub(crate) fn check_vm(
    file: impl FnOnce() -> PathBuf,
    found: VmId,
    expected: VmId,
) -> Result<(), StoreError> {
    if found == expected {
        return Ok(());
    }
    let damage = Damage::OtherVm { found, expected };
    Err(StoreError::Damaged { file: file(), offset: HEADER_AT, damage })
}

/// Refuses a parent that is not the epoch that `file` was built on.
pub(crate) fn check_link(
    file: impl FnOnce() -> PathBuf,
    link: ParentLink,
    parent: ParentLink,
) -> Result<(), StoreError> {
    if link == parent {
        return Ok(());
    }
    let what = "the parent's digest, as this epoch knows it,";
    Err(mismatch(file(), PARENT_AT, what, link.digest, parent.digest))
}

/// Refuses a memory layout that differs from the parent's.
pub(crate) fn check_layout(
    file: impl FnOnce() -> PathBuf,
    hash: u32,
    parent: u32,
) -> Result<(), StoreError> {
    if hash == parent {
        return Ok(());
    }
    Err(mismatch(file(), HEADER_AT, "the hash of the memory layout", hash, parent))
}
