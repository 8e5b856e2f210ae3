//! Whether frames and blocks can be copied in the background: after a failure they are copied in
//! the pause for some epochs.

use std::fmt;

use driftline_guest::{GuestContents, WriteProtection};

use crate::copy_policy::CopyPolicy;
use crate::report::{EpochFailure, EpochStep};

/// Whether frames can be copied in the background.
#[derive(Default)]
pub(crate) struct ProtectionAvailability {
    offer: ProtectionOffer,
    /// Number of epochs for which write protection is neither used nor requested.
    epochs_to_skip: u32,
}

#[derive(Default)]
enum ProtectionOffer {
    #[default]
    Unknown,
    /// The host or the guest does not offer it.
    Unsupported,
    Open(Box<dyn WriteProtection>),
}

impl ProtectionAvailability {
    /// Returns whether the next epoch uses write protection.
    pub(crate) fn is_used(&self) -> bool {
        self.epochs_to_skip == 0 && matches!(self.offer, ProtectionOffer::Open(_))
    }

    /// Returns the write protection for an epoch. Asks the guest the first time, and again some
    /// epochs after a failure.
    pub(crate) fn next(
        &mut self,
        policy: &CopyPolicy,
        guest: &dyn GuestContents,
    ) -> Option<&dyn WriteProtection> {
        if self.epochs_to_skip > 0 {
            self.epochs_to_skip -= 1;
            return None;
        }
        if let ProtectionOffer::Unknown = self.offer {
            match guest.write_protection() {
                Ok(Some(protection)) => self.offer = ProtectionOffer::Open(protection),
                Ok(None) => self.offer = ProtectionOffer::Unsupported,
                Err(e) => self.skip(policy.rest_after_failure, &e),
            }
        }
        match &self.offer {
            ProtectionOffer::Open(protection) => Some(&**protection),
            ProtectionOffer::Unknown | ProtectionOffer::Unsupported => None,
        }
    }

    /// Records that an epoch failed for `cause`. Returns whether the next ones do without it
    /// because of that.
    pub(crate) fn failed(
        &mut self,
        policy: &CopyPolicy,
        step: EpochStep,
        cause: &EpochFailure,
    ) -> bool {
        match (step, cause) {
            // Failures of drives do not concern it.
            (EpochStep::CopyDrives, _) => return false,
            (
                EpochStep::Protect | EpochStep::CopyInBackground,
                EpochFailure::Guest(_)
                | EpochFailure::NoThread { .. }
                | EpochFailure::ThreadEnded { .. },
            ) => {
                self.offer = ProtectionOffer::Unknown;
                self.skip(policy.rest_after_failure, cause);
            }
            (_, EpochFailure::Stalled(_)) => self.skip(policy.rest_after_stall, cause),
            _ => return false,
        }
        true
    }

    fn skip(&mut self, epochs: u32, why: &dyn fmt::Display) {
        tracing::warn!("changed pages are copied in the pause for {epochs} checkpoints: {why}");
        self.epochs_to_skip = epochs;
    }
}

/// Whether a write to a drive waits for room. After a write has waited for too long, writes do not
/// wait in the next epochs; their pauses are longer instead.
#[derive(Default)]
pub(crate) struct WaitAvailability {
    epochs_to_skip: u32,
}

impl WaitAvailability {
    /// Returns whether writes may wait in the next epoch.
    pub(crate) fn next_may_wait(&mut self) -> bool {
        let writes_may_wait = self.epochs_to_skip == 0;
        self.epochs_to_skip = self.epochs_to_skip.saturating_sub(1);
        writes_may_wait
    }

    /// Records that an epoch failed for `cause`.
    pub(crate) fn failed(&mut self, policy: &CopyPolicy, step: EpochStep, cause: &EpochFailure) {
        if let (EpochStep::CopyDrives, EpochFailure::Stalled(_)) = (step, cause) {
            self.epochs_to_skip = policy.rest_after_stall;
            tracing::warn!(
                "disks that change much are copied in the pause for {} checkpoints: {cause}",
                self.epochs_to_skip
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use driftline_guest::GuestError;

    use super::*;

    #[test]
    fn failed_background_copy_is_avoided_for_a_while() {
        let policy = CopyPolicy::default();
        let causes: [fn() -> EpochFailure; 3] = [
            || GuestError::unsupported("protecting", io::Error::other("refused")).into(),
            || EpochFailure::NoThread { thread: "copy", cause: io::Error::other("limit") },
            || EpochFailure::ThreadEnded { thread: "copy" },
        ];
        for step in [EpochStep::Protect, EpochStep::CopyInBackground] {
            for cause in causes {
                let mut availability = ProtectionAvailability::default();
                availability.failed(&policy, step, &cause());
                let skipped = availability.epochs_to_skip;
                assert_eq!(skipped, policy.rest_after_failure, "{step}: {}", cause());
            }
        }
        let mut availability = ProtectionAvailability::default();
        availability.failed(&policy, EpochStep::CopyDrives, &causes[2]());
        assert_eq!(availability.epochs_to_skip, 0, "a drive's failure does not concern it");
    }
}
