//! Write protection before a pause, so that little is left for the pause.

use driftline_dirty_tracker::{DirtySet, FrameSet, Subscription};

use crate::background_copy::UnprotectedFrames;
use crate::chunks::spans;
use crate::copy_policy::CopyPolicy;
use crate::guest::Checkpointable;
use crate::protection::EpochProtection;
use crate::report::{EpochStep, FailedStep, step};

/// Result of protecting frames before a pause.
pub(crate) struct ProtectedAhead {
    /// Frames that were protected; some may have been unprotected since.
    pub(crate) frames: FrameSet,
    /// Frames that changed since and were not protected.
    pub(crate) left: FrameSet,
    /// The dirty sets of all of these.
    pub(crate) drained: Vec<DirtySet>,
}

/// Protects the frames in `early`. Repeats with the frames that change meanwhile, as long as there
/// are many of them.
pub(crate) fn protect_ahead(
    guest: &dyn Checkpointable,
    policy: &CopyPolicy,
    protection: &EpochProtection<'_>,
    unprotected: &UnprotectedFrames,
    early: DirtySet,
    subscription: &mut Subscription,
) -> Result<ProtectedAhead, FailedStep> {
    let layout = guest.layout();
    let again_from = policy.protect_again_from.min(policy.background_from);
    let mut next: FrameSet = early.runs().collect();
    let (mut frames, mut drained) = (FrameSet::new(), vec![early]);
    for again in 0.. {
        step(EpochStep::Protect, || protection.protect(&spans(layout, &next, policy.span_gap)))?;
        frames.insert_all(next.as_slice());
        step(EpochStep::Drain, || guest.collect())?;
        let since = subscription.drain();
        next = since.runs().collect();
        drained.push(since);
        if next.frames() <= again_from || again == policy.protect_again_rounds {
            break;
        }
        // These frames are protected again with the others, so they are not late. A frame that is
        // unprotected and written from now on is in the next drain.
        if let Some(unprotected) = &mut *unprotected.lock() {
            next.insert_all(&std::mem::take(unprotected));
        }
    }
    Ok(ProtectedAhead { frames, left: next, drained })
}

#[cfg(all(test, feature = "testing"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use parking_lot::Mutex;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
    use std::time::Duration;

    use driftline_dirty_tracker::{FrameRun, Gfn, Slot, SlotId};
    use driftline_guest::{GuestError, WriteProtection};
    use proptest::prelude::*;

    use super::*;
    use driftline_guest::testing::{MemoryConfig, MemoryGuest};
    use driftline_guest::{DirtyLog, VmId};

    const AGAIN_FROM: u64 = CopyPolicy::DEFAULT.protect_again_from;
    const FIRST: FrameRun = FrameRun { start: Gfn(0), count: 1000 };

    /// Write protection that protects nothing. During each call, the guest writes to consecutive
    /// frames.
    struct BusyGuestProtection {
        guest: Arc<MemoryGuest>,
        /// Frames written in each call.
        writes: Vec<u64>,
        times: AtomicU64,
        protected: Mutex<Vec<FrameSet>>,
    }

    impl BusyGuestProtection {
        fn written(&self, time: usize) -> FrameRun {
            let start = FIRST.end().0 + self.writes[..time].iter().sum::<u64>();
            FrameRun { start: Gfn(start), count: self.writes[time] }
        }
    }

    impl WriteProtection for BusyGuestProtection {
        fn protect(&self, frames: &[FrameRun]) -> Result<(), GuestError> {
            self.protected.lock().push(frames.iter().copied().collect());
            let written = self.written(self.times.fetch_add(1, SeqCst) as usize);
            (written.start.0..written.end().0).try_for_each(|gfn| self.guest.write(Gfn(gfn), &[1]))
        }

        fn unprotect(&self, _: FrameRun) -> Result<(), GuestError> {
            Ok(())
        }

        fn unprotect_all(&self) {}

        fn awaited(&self, _: Duration) -> Result<Option<FrameRun>, GuestError> {
            Ok(None)
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Rounds end when few frames change, or when the maximum number of rounds is reached.
        #[test]
        fn frames_written_during_protection_are_protected(
            writes in prop::collection::vec(prop_oneof![1..=AGAIN_FROM, AGAIN_FROM + 1..1000], 3),
        ) {
            let slot = Slot { id: SlotId(0), base: Gfn(0), frames: 4000 };
            let config = MemoryConfig { slots: vec![slot], ..MemoryConfig::still() };
            let guest = MemoryGuest::new(VmId::random(), config).unwrap();
            let mut subscription = guest.subscribe("test").unwrap();
            subscription.drain().commit();
            (FIRST.start.0..FIRST.end().0).for_each(|gfn| guest.write(Gfn(gfn), &[1]).unwrap());
            let early = subscription.drain();
            let (times, protected) = (AtomicU64::new(0), Mutex::default());
            let busy = BusyGuestProtection {
                guest: guest.clone(),
                writes: writes.clone(),
                times,
                protected,
            };
            let unprotected = FrameRun { start: Gfn(7), count: 3 };
            let list = Mutex::new(Some(vec![unprotected]));
            let protection = EpochProtection::new(&busy);
            let (policy, subscription) = (&CopyPolicy::DEFAULT, &mut subscription);
            let ahead =
                protect_ahead(&*guest, policy, &protection, &list, early, subscription)
                    .unwrap();

            let last = writes.iter().position(|n| *n <= AGAIN_FROM).unwrap_or(2);
            let mut wants = vec![FrameSet::from_iter([FIRST])];
            wants.extend((0..last).map(|time| FrameSet::from_iter([busy.written(time)])));
            if let Some(again) = wants.get_mut(1) {
                again.insert(unprotected);
            }
            prop_assert_eq!(&*busy.protected.lock(), &wants);
            let union = wants.iter().flat_map(FrameSet::iter).collect::<FrameSet>();
            prop_assert_eq!(ahead.frames, union);
            prop_assert_eq!(ahead.left.frames(), writes[last]);
            prop_assert!(ahead.left.contains_run(busy.written(last)));
            // A frame that is protected again is not late; otherwise it is.
            let late = if last > 0 { vec![] } else { vec![unprotected] };
            prop_assert_eq!(list.into_inner(), Some(late));
            let drained = ahead.drained.iter().map(DirtySet::frames).sum::<u64>();
            prop_assert_eq!(drained, 1000 + writes[..=last].iter().sum::<u64>());
        }
    }
}
