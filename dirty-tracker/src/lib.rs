//! Which guest frames changed, found at a cost proportional to what is dirty.
//!
//! A virtual machine monitor that migrates or checkpoints a running guest has to know which of its
//! 4 KiB frames changed since it last looked. This crate is that knowledge and nothing else: no
//! KVM calls, no I/O, no unsafe code. The way of a dirty frame through it:
//!
//! ```text
//! ring      KVM's per-vCPU dirty ring: take DIRTY entries in order, mark them RESET   harvest
//! list      that vCPU's preallocated list of frames                                   Harvest
//!           ... the caller reprotects (KVM_RESET_DIRTY_RINGS) ...                     Readable
//! tree      leaf bit, then summaries; one tree per subscriber                         Tracker
//! epoch     drained into ascending runs of frames: commit, or give back               Epoch
//! ```
//!
//! # Invariants
//!
//! Cited by number in comments and tests throughout the project.
//!
//! - **I1** A set leaf bit has all its summary bits set once its insert has returned. A spurious
//!   summary is legal; a missing one never is.
//! - **I2** Every harvested entry is in every subscriber's tree before the next reprotect of that
//!   ring begins.
//! - **I3** A frame's content is read only after its reprotect. The types make the other order
//!   impossible to write: a [`Harvest`] shows no frames, only [`Harvest::reprotected`] turns it
//!   into a [`Readable`], and only a `Readable` reaches a tree.
//! - **I4** An epoch is committed or given back, exactly once; dropping it gives it back. A failed
//!   send or write loses nothing.
//! - **I5** For the same writes, the leaves equal what `KVM_GET_DIRTY_LOG` of a second,
//!   bitmap-tracked run reports.
//! - **I6** A ring that was overrun (every entry dirty: the kernel always leaves a reserve) is not
//!   trusted: all memory counts as dirty for that epoch, the event is counted and logged, and
//!   tracking goes on correctly afterwards.
//! - **I7** At most one host runs the guest, whatever fails, and whenever it fails.
//!
//! # Source
//!
//! Per-vCPU lists and the preallocated packed radix tree: Lei Cao and Radim Krcmar on the KVM list,
//! April-June 2016 ("Dirty memory tracking for performant checkpointing and improved live
//! migration"). The lists became KVM's dirty ring in Linux 5.11.
// Vector instructions need it, in `tree/kernel.rs` alone.
#![deny(unsafe_code)]

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod addr;
#[cfg(feature = "vm-memory")]
mod bitmap;
mod epoch;
mod frame_set;
mod harvest;
mod layout;
mod list;
mod ring;
mod source;
mod sync;
mod tracker;
mod tree;

pub use addr::{FrameRun, Gfn, PAGE_SHIFT, PAGE_SIZE};
#[cfg(feature = "vm-memory")]
pub use bitmap::TrackedBitmap;
pub use epoch::Epoch;
pub use frame_set::FrameSet;
pub use harvest::{Absorbed, Harvest, Harvester, Readable};
pub use layout::{Layout, LayoutError, OutOfSlot, Slot, SlotId};
pub use list::{DirtyFrame, DirtyList};
pub use ring::{ENTRY_DIRTY, ENTRY_RESET, RingConsumer, RingEntry, RingFull, RingHarvest};
pub use source::{Collected, DirtySource, SourceError, TrackingMode, UnknownMode};
pub use tracker::{Subscription, Tracker, TrackerStats};
pub use tree::{Cursor, MissingSummary, RunLists, Slices, Tree};
