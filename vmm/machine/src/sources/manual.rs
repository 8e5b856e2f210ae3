//! `dirty-bitmap-manual`: KVM's dirty bitmap of each slot, read in one call and reprotected in
//! others, range by range.
//!
//! Reading costs a copy of the bitmap and no lock that a vCPU wants; reprotecting goes over what
//! was found alone, some of it a call, so that no vCPU's fault waits long for KVM's lock of the
//! page tables.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use driftline_dirty_tracker::{Collected, DirtySource, SourceError, Tracker, TrackingMode};

use super::lap;
use super::log::DirtyLog;
use crate::kvm::KvmVm;

/// Words of clean frames that are passed to the kernel with the dirty ones around them: it looks at
/// a thousand in the time that a call takes, with its locks and its flush of all vCPUs' TLBs.
const NEAR: usize = 1024;
/// Words in one call: those of 512 MiB, so that the lock is held for milliseconds at most.
const MOST: usize = 2048;

/// The bitmaps of a VM's slots.
#[derive(Debug)]
pub struct ManualSource {
    log: DirtyLog,
}

impl ManualSource {
    /// Over all slots of a VM whose dirty log is manual; nothing is caught yet.
    pub fn new(vm: Arc<KvmVm>) -> Self {
        Self { log: DirtyLog::new(vm) }
    }
}

/// Reprotects what is set in `bitmap`, that of a whole slot. After an error only those bits are
/// left in it whose frames have been reprotected.
fn clear(
    bitmap: &mut [u64],
    mut call: impl FnMut(u64, &[u64]) -> io::Result<()>,
) -> Result<(), SourceError> {
    let mut at = 0;
    while let Some(range) = next_range(bitmap, at) {
        at = range.end;
        if let Err(cause) = call(range.start as u64, &bitmap[range.clone()]) {
            bitmap[range.start..].fill(0);
            return Err(SourceError { what: "KVM_CLEAR_DIRTY_LOG", cause });
        }
    }
    Ok(())
}

/// The words of the next call, from `at` on: the first and the last have bits set.
fn next_range(bitmap: &[u64], at: usize) -> Option<Range<usize>> {
    let start = at + bitmap.get(at..)?.iter().position(|word| *word != 0)?;
    let most = &bitmap[start..bitmap.len().min(start + MOST)];
    let mut end = 1;
    for (i, word) in most.iter().enumerate() {
        if *word != 0 {
            end = i + 1;
        } else if i - end >= NEAR {
            break;
        }
    }
    Some(start..start + end)
}

impl DirtySource for ManualSource {
    fn mode(&self) -> TrackingMode {
        TrackingMode::DirtyBitmapManual
    }

    /// A slot begins with all bits set and nothing protected. A write would leave no trace in it,
    /// and the first collection would be of all memory, just when the first pass or the first epoch
    /// has copied that. So all is cleared here: as much work as protecting everything when logging
    /// is switched on, but in pieces, between which vCPUs get KVM's lock. What is thrown away was
    /// written before this returns.
    fn start(&mut self) -> Result<(), SourceError> {
        self.log.start()?;
        let vm = self.log.vm().clone();
        for slot in vm.memory().layout().slots() {
            let bitmap = self.log.room(slot);
            bitmap.fill(u64::MAX);
            clear(bitmap, |word, bits| vm.clear_dirty_log(slot.id, word, bits))?;
        }
        Ok(())
    }

    fn stop(&mut self) -> Result<(), SourceError> {
        self.log.stop()
    }

    fn collect(&mut self, tracker: &Tracker) -> Result<Collected, SourceError> {
        let mut out = Collected::default();
        let vm = self.log.vm().clone();
        for slot in vm.memory().layout().slots() {
            let mut at = Instant::now();
            let bitmap = self.log.read(slot)?;
            out.harvest_ns += lap(&mut at);
            // I3. A frame that is written between the two calls is in `bitmap`, or stays in KVM's.
            let cleared = clear(bitmap, |word, bits| vm.clear_dirty_log(slot.id, word, bits));
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
            // The rest is in KVM's bitmap still.
            cleared?;
        }
        Ok(out)
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

    /// The calls that `bitmap` takes, of which the one after `good` fails.
    fn calls(bitmap: &mut [u64], good: usize) -> (Vec<Range<usize>>, bool) {
        let mut calls = Vec::new();
        let cleared = clear(bitmap, |word, bits| {
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
    fn near_words_share_a_call_and_far_ones_do_not() {
        let of = |words: &[usize]| calls(&mut bitmap_with(10_000, words), usize::MAX).0;
        assert!(of(&[]).is_empty());
        assert_eq!(of(&[0]), [0..1]);
        assert_eq!(of(&[9_999]), [9_999..10_000]);
        assert_eq!(of(&[5, 6 + NEAR]), [5..7 + NEAR]);
        assert_eq!(of(&[5, 7 + NEAR]), [5..6, 7 + NEAR..8 + NEAR]);
        let all: Vec<_> = (0..MOST + 1).collect();
        assert_eq!(of(&all), [0..MOST, MOST..MOST + 1]);
    }

    proptest! {
        /// Each word that is set is in one call, and in one only; of a failed one and what follows
        /// nothing is left.
        #[test]
        fn every_dirty_word_is_cleared_once(
            set in proptest::collection::btree_set(0usize..20_000, 0..60),
            good in 0usize..20,
        ) {
            let set: Vec<_> = set.into_iter().collect();
            let whole = bitmap_with(20_000, &set);
            let mut bitmap = whole.clone();
            let (calls, done) = calls(&mut bitmap, good);
            prop_assert!(calls.windows(2).all(|w| w[0].end <= w[1].start));
            prop_assert!(calls.iter().all(|c| !c.is_empty() && c.len() <= MOST));
            let in_call = |at: &usize| calls.iter().any(|c| c.contains(at));
            prop_assert_eq!(done, set.iter().all(in_call));
            let left: Vec<_> = set.iter().copied().filter(in_call).collect();
            prop_assert_eq!(bitmap, bitmap_with(20_000, &left));
        }
    }
}
