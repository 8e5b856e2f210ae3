//! An epoch in a log's index, and the rules for the epoch after it.

use crate::damage::Damage;
use crate::epoch_info::EpochInfo;
use crate::records::Front;
use crate::sectors::LogPosition;

/// An epoch in a log.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoggedEpoch {
    pub(crate) info: EpochInfo,
    pub(crate) front: Front,
    /// Identifies the list of drives; 0 without drives.
    pub(crate) drives: u32,
    /// Oldest epoch that is retained once this one is there.
    pub(crate) oldest: u64,
    pub(crate) place: LogPosition,
    /// Number of sectors that it takes.
    pub(crate) sectors: u64,
}

/// Fails if an epoch cannot follow `before`.
pub(crate) fn follows(
    front: &Front,
    drives: u32,
    before: Option<&LoggedEpoch>,
    after: Option<u64>,
) -> Result<(), Damage> {
    let Some(before) = before else {
        if let Some(last) = after.filter(|last| front.epoch <= *last) {
            let (what, found) = ("a checkpoint's number", front.epoch);
            return Err(Damage::Mismatch { what, found, expected: last.saturating_add(1) });
        }
        // Nothing is known of what it builds on.
        let Some(parent) = front.parent.filter(|_| !front.is_whole()) else { return Ok(()) };
        let what = "the parent of the first checkpoint in a log";
        return Err(Damage::Mismatch { what, found: parent, expected: 0 });
    };
    let last = before.info.epoch;
    if front.epoch <= last {
        let (what, found) = ("a checkpoint's number", front.epoch);
        return Err(Damage::Mismatch { what, found, expected: last.saturating_add(1) });
    }
    if front.rebased {
        let what = "the flag that a checkpoint is rebased";
        return Err(Damage::Mismatch { what, found: 1, expected: 0 });
    }
    let Some(parent) = front.parent else { return Ok(()) };
    let fields = [
        ("the parent's number", parent, last),
        ("the checksum of the list of drives", drives.into(), before.drives.into()),
        ("the hash of the memory layout", front.layout.into(), before.front.layout.into()),
    ];
    match fields.into_iter().find(|(_, found, expected)| found != expected) {
        Some((what, found, expected)) => Err(Damage::Mismatch { what, found, expected }),
        None => Ok(()),
    }
}
