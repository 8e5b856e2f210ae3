//! Guest state, stored: the [`Guest`] trait, its state sections, the epoch store and restore.
//!
//! `checkpoint` and `migrate` know a guest only through [`Guest`]. `vmm` implements it over KVM and,
//! for hosts without KVM and for tests, over host threads.
#![forbid(unsafe_code)]

pub mod format;
mod guest;
mod section;
#[cfg(feature = "testing")]
pub mod testing;

pub use guest::{Clock, Guest, GuestError, GuestFactory, GuestRam, Paused, RunState, VmId};
pub use section::{Section, SectionTag, section_tags};
