//! Whether an epoch is copied behind the guest's back: what is known of the guest's shield, and when it is tried again.

use std::fmt;

use driftline_guest::{Guest, Shield};

use crate::report::{Cause, Phase};

/// How many epochs are copied in the pause after the guest's shield has failed, and after the store has made the guest wait
/// for too long. Then it is tried again.
const AFTER_FAILURE: u32 = 100;
const AFTER_STALL: u32 = 20;

/// Whether frames can be copied behind the guest's back.
#[derive(Default)]
pub(crate) struct Shielding {
    is: Shielded,
    /// For so many epochs it is not used, nor asked for.
    rests: u32,
}

#[derive(Default)]
enum Shielded {
    #[default]
    NotAsked,
    /// The host or the guest does not offer it.
    No,
    Yes(Box<dyn Shield>),
}

impl Shielding {
    /// Whether the next epoch has it.
    pub(crate) fn is_used(&self) -> bool {
        self.rests == 0 && matches!(self.is, Shielded::Yes(_))
    }

    /// For an epoch. Asks the guest the first time, and when it failed some epochs ago.
    pub(crate) fn ask(&mut self, guest: &dyn Guest) -> Option<&dyn Shield> {
        if self.rests > 0 {
            self.rests -= 1;
            return None;
        }
        if let Shielded::NotAsked = self.is {
            match guest.shield() {
                Ok(Some(shield)) => self.is = Shielded::Yes(shield),
                Ok(None) => self.is = Shielded::No,
                Err(e) => self.rest(AFTER_FAILURE, &e),
            }
        }
        match &self.is {
            Shielded::Yes(shield) => Some(&**shield),
            Shielded::NotAsked | Shielded::No => None,
        }
    }

    /// An epoch failed for `cause`.
    pub(crate) fn failed(&mut self, phase: Phase, cause: &Cause) {
        match (phase, cause) {
            // Drives have nothing to do with it.
            (Phase::CopyDrives, _) => {}
            (Phase::Protect | Phase::CopyBehind, Cause::Guest(_)) => {
                self.is = Shielded::NotAsked;
                self.rest(AFTER_FAILURE, cause);
            }
            (_, Cause::Stalled(_)) => self.rest(AFTER_STALL, cause),
            _ => {}
        }
    }

    fn rest(&mut self, epochs: u32, why: &dyn fmt::Display) {
        tracing::warn!("changed pages are copied in the pause for {epochs} checkpoints: {why}");
        self.rests = epochs;
    }
}
