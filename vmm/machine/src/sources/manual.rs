//! `dirty-bitmap-manual`: KVM's dirty bitmap of each slot, read in one call and write-protected by
//! separate calls, range by range.
//!
//! Reading costs a copy of the bitmap and takes no lock that a vCPU needs. Write-protecting visits
//! only the dirty ranges, a limited number of words per call, so that no vCPU's fault waits long
//! for KVM's page-table lock.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use driftline_dirty_tracker::{Slot, Tracker};
use driftline_guest::CollectionReport;

use super::lap::lap;
use super::slot_bitmaps::SlotBitmaps;
use super::source::{DirtySource, SourceError};
use crate::kvm::KvmVm;
use crate::tracking::TrackingMode;

/// Longest run of clean words that is passed to the kernel together with the dirty words around it.
/// The kernel scans a thousand clean words in the time that one call takes, with its locks and its
/// flush of all vCPUs' TLBs.
const MAX_GAP: usize = 1024;
/// Maximum words in one call: those of 512 MiB, so that the lock is held for milliseconds at most.
const MAX_WORDS_PER_CALL: usize = 2048;

/// Dirty source that reads bitmaps and write-protects frames in separate calls.
#[derive(Debug)]
pub struct ManualSource {
    log: SlotBitmaps,
}

impl ManualSource {
    /// Returns a source over all slots of `vm`, whose dirty log must be manual. Logging is off
    /// until [`DirtySource::start`].
    pub fn new(vm: Arc<KvmVm>) -> Self {
        Self { log: SlotBitmaps::new(vm) }
    }
}

/// Write-protects the frames of `slot` whose bits are set in `bitmap`. After an error, only the
/// bits of frames that were write-protected remain set.
fn clear_slot(vm: &KvmVm, slot: &Slot, bitmap: &mut [u64]) -> Result<(), SourceError> {
    let part_words = usize::try_from(vm.parts().words()).unwrap_or(usize::MAX);
    clear(bitmap, part_words, |word, bits| vm.clear_dirty_log(slot.id, word, bits))
}

/// As [`clear_slot`], by calls of `call` that each lie in one part of `part_words` words.
fn clear(
    bitmap: &mut [u64],
    part_words: usize,
    mut call: impl FnMut(u64, &[u64]) -> io::Result<()>,
) -> Result<(), SourceError> {
    let mut at = 0;
    while let Some(range) = next_range(bitmap, at, part_words) {
        at = range.end;
        if let Err(cause) = call(range.start as u64, &bitmap[range.clone()]) {
            bitmap[range.start..].fill(0);
            return Err(SourceError { what: "KVM_CLEAR_DIRTY_LOG", cause });
        }
    }
    Ok(())
}

/// Returns the words of the next call, starting at or after `at`. The first and the last word of
/// the range have bits set, and are in the same part of `part_words` words.
fn next_range(bitmap: &[u64], at: usize, part_words: usize) -> Option<Range<usize>> {
    let start = at + bitmap.get(at..)?.iter().position(|word| *word != 0)?;
    let part_end = (start + 1).next_multiple_of(part_words);
    let most = &bitmap[start..bitmap.len().min(part_end).min(start + MAX_WORDS_PER_CALL)];
    let mut end = 1;
    for (i, word) in most.iter().enumerate() {
        if *word != 0 {
            end = i + 1;
        } else if i - end >= MAX_GAP {
            break;
        }
    }
    Some(start..start + end)
}

impl DirtySource for ManualSource {
    fn mode(&self) -> TrackingMode {
        TrackingMode::DirtyBitmapManual
    }

    /// Starts logging and clears the whole bitmap.
    ///
    /// KVM begins a slot with all bits set and nothing write-protected. A write would then leave no
    /// trace, and the first collection would return all memory, just after the first pass or the
    /// first epoch has copied it. Clearing everything here is as much work as write-protecting
    /// everything when logging is switched on, but it is done in pieces, between which vCPUs get
    /// KVM's lock. The discarded bits belong to writes that happened before this function returns.
    fn start(&mut self) -> Result<(), SourceError> {
        self.log.start()?;
        let vm = self.log.vm().clone();
        for slot in vm.memory().layout().slots() {
            let bitmap = self.log.room(slot);
            bitmap.fill(u64::MAX);
            clear_slot(&vm, slot, bitmap)?;
        }
        Ok(())
    }

    fn stop(&mut self) -> Result<(), SourceError> {
        self.log.stop()
    }

    fn collect(&mut self, tracker: &Tracker) -> Result<CollectionReport, SourceError> {
        let mut out = CollectionReport::default();
        let vm = self.log.vm().clone();
        for slot in vm.memory().layout().slots() {
            let mut at = Instant::now();
            // Reading protects nothing and clears nothing, so nothing is lost if it fails.
            let bitmap = self.log.read(slot)?;
            out.harvest_ns += lap(&mut at);
            // I3: a frame that is written between the two calls is in `bitmap`, or stays in KVM's
            // bitmap.
            let cleared = clear_slot(&vm, slot, bitmap);
            out.reprotect_ns += lap(&mut at);
            match tracker.absorb_bitmap(slot.id, bitmap) {
                Ok(frames) => out.frames += frames,
                Err(e) => {
                    tracing::warn!("the dirty bitmap cannot be trusted, all memory is marked: {e}");
                    tracker.mark_all();
                    out.marked_all = true;
                }
            }
            out.insert_ns += lap(&mut at);
            // Frames that were not cleared are still in KVM's bitmap.
            cleared?;
        }
        Ok(out)
    }

    fn dirtied(&self) -> &[u64] {
        &[]
    }

    fn harvested(&self) -> &[u64] {
        &[]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bitmap_with(len: usize, words: &[usize]) -> Vec<u64> {
        let mut bitmap = vec![0; len];
        words.iter().for_each(|at| bitmap[*at] = 1 << (at % 64));
        bitmap
    }

    /// Returns the calls that clearing `bitmap` takes. The call after the first `good` ones fails.
    fn calls(bitmap: &mut [u64], part: usize, good: usize) -> (Vec<Range<usize>>, bool) {
        let mut calls = Vec::new();
        let cleared = clear(bitmap, part, |word, bits| {
            if calls.len() == good {
                return Err(io::Error::other("no"));
            }
            calls.push(word as usize..word as usize + bits.len());
            Ok(())
        });
        (calls, cleared.is_ok())
    }

    #[test]
    #[allow(clippy::single_range_in_vec_init)] // Calls are ranges.
    fn only_near_words_share_a_call() {
        let of = |words: &[usize]| calls(&mut bitmap_with(10_000, words), 10_000, usize::MAX).0;
        assert!(of(&[]).is_empty());
        assert_eq!(of(&[0]), [0..1]);
        assert_eq!(of(&[9_999]), [9_999..10_000]);
        assert_eq!(of(&[5, 6 + MAX_GAP]), [5..7 + MAX_GAP]);
        assert_eq!(of(&[5, 7 + MAX_GAP]), [5..6, 7 + MAX_GAP..8 + MAX_GAP]);
        let all: Vec<_> = (0..MAX_WORDS_PER_CALL + 1).collect();
        assert_eq!(of(&all), [0..MAX_WORDS_PER_CALL, MAX_WORDS_PER_CALL..MAX_WORDS_PER_CALL + 1]);
    }

    proptest! {
        /// Each word with bits set is in exactly one call. After a failed call, no bit of it or of
        /// later calls remains.
        #[test]
        fn every_dirty_word_is_cleared_once(
            set in proptest::collection::btree_set(0usize..20_000, 0..60),
            good in 0usize..20,
            part in 1usize..30_000,
        ) {
            let set: Vec<_> = set.into_iter().collect();
            let whole = bitmap_with(20_000, &set);
            let mut bitmap = whole.clone();
            let (calls, done) = calls(&mut bitmap, part, good);
            prop_assert!(calls.windows(2).all(|w| w[0].end <= w[1].start));
            prop_assert!(calls.iter().all(|c| !c.is_empty() && c.len() <= MAX_WORDS_PER_CALL));
            prop_assert!(calls.iter().all(|c| c.start / part == (c.end - 1) / part));
            let in_call = |at: &usize| calls.iter().any(|c| c.contains(at));
            prop_assert_eq!(done, set.iter().all(in_call));
            let left: Vec<_> = set.iter().copied().filter(in_call).collect();
            prop_assert_eq!(bitmap, bitmap_with(20_000, &left));
        }
    }
}
