//! KVM's dirty rings: harvest, reprotect, insert, in this order (I2, I3).
//!
//! A [`Harvester`] is the consumer of all rings of a guest. It gives a [`Harvest`]. Once the kernel
//! has reprotected these entries, the harvest becomes a [`Readable`], whose frames enter the trees.
//! `consumer` describes the protocol, and what happens when a ring is overrun (I6).

mod consumer;
mod entry;
mod harvest;
mod list;
mod parts;

pub use entry::{ENTRY_DIRTY, ENTRY_RESET, RingEntry, RingFull};
pub use harvest::{Harvest, Harvester, Inserted, Readable};
pub use parts::SlotParts;
