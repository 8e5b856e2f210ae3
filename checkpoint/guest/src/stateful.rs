//! The state of a guest besides memory: saved here, restored elsewhere.

use serde::{Deserialize, Serialize};

use crate::delegate::Delegate;
use crate::error::GuestError;
use crate::section::{Section, SectionHead};

/// A paused guest's state besides memory, or why it could not be saved.
pub type SavedState = Result<Vec<Section>, GuestError>;

/// Saves and restores a guest's state besides memory.
pub trait Stateful: Send + Sync {
    /// Returns the whole state besides memory, of a paused guest.
    ///
    /// # Errors
    ///
    /// The guest is not paused, or the host refuses a part of the state.
    fn save_state(&self) -> SavedState;

    /// Restores a saved state into a paused guest that has never run. Sections are hostile input.
    ///
    /// # Errors
    ///
    /// The state is malformed or does not fit this guest or this host. An unknown section that must
    /// be understood is refused by name.
    fn restore_state(&self, sections: &[Section], clock: Clock) -> Result<(), GuestError>;

    /// Returns the heads of the sections that [`save_state`](Self::save_state) returns. The guest
    /// may be running. Returns none if this guest cannot say before it is paused.
    fn state_heads(&self) -> Vec<SectionHead>;

    /// Refuses sections that [`restore_state`](Self::restore_state) would refuse for their heads,
    /// so that their guest need not be paused for that. They are hostile input. A guest that cannot
    /// judge heads accepts all.
    ///
    /// # Errors
    ///
    /// A section is unknown and must be understood, or has an unknown version; the error names it.
    fn check_state_heads(&self, heads: &[SectionHead]) -> Result<(), GuestError>;
}

impl<T: Delegate<dyn Stateful>> Stateful for T {
    fn save_state(&self) -> SavedState {
        self.delegate().save_state()
    }

    fn restore_state(&self, sections: &[Section], clock: Clock) -> Result<(), GuestError> {
        self.delegate().restore_state(sections, clock)
    }

    fn state_heads(&self) -> Vec<SectionHead> {
        self.delegate().state_heads()
    }

    fn check_state_heads(&self, heads: &[SectionHead]) -> Result<(), GuestError> {
        self.delegate().check_state_heads(heads)
    }
}

/// What the guest's clock does about the time in which the guest did not run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Clock {
    /// Advances by that time, unless it is implausibly long: for a migration, whose downtime the
    /// guest may notice.
    Advance,
    /// Advances by that time, however long it was: for a snapshot of any age.
    AdvanceAnyTime,
    /// Continues from where it stopped: for a restore, which may come a year later.
    Continue,
}
