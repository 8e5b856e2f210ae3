//! Which guest frames changed, found at a cost proportional to what is dirty.
//!
//! A virtual machine monitor that migrates or checkpoints a running guest has to know which of its
//! 4 KiB frames changed since it last looked. This crate is that knowledge and nothing else: no
//! KVM calls, no I/O, and unsafe code only where vector instructions are called and where lists are
//! written behind their end. The way of a dirty frame through it:
//!
//! ```text
//! ring      KVM's per-vCPU dirty ring: take DIRTY entries in order, mark them RESET   Harvester
//! list      that vCPU's preallocated list of frames                                   Harvest
//!           ... the caller reprotects (KVM_RESET_DIRTY_RINGS) ...                     Readable
//! tree      leaf bit, then summaries; one tree per subscriber                         Tracker
//! epoch     drained into ascending runs of frames: commit, or give back               DirtySet
//! ```
//!
//! ```
//! use std::sync::Arc;
//! use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tracker};
//!
//! let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: 262_144 }])?; // 1 GiB
//! let tracker = Arc::new(Tracker::new(layout));
//! let mut checkpoints = tracker.subscribe("checkpoints")?;
//! tracker.mark(FrameRun { start: Gfn(4096), count: 512 })?;
//! let epoch = checkpoints.drain();
//! assert_eq!(epoch.runs().collect::<Vec<_>>(), [FrameRun { start: Gfn(4096), count: 512 }]);
//! epoch.commit(); // it is on disk
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # The structure
//!
//! A flat bitmap is cheap to write and dear to search: 12 TiB of memory have 400 MB of bits, and
//! the ten that are set may be anywhere. So over the bitmap lies a second one with a bit for each
//! of its words, *not zero*, over that a third, and so on up to one word. Here is the tree of a
//! guest with two slots, of 100 and of 5,000 frames, in which one frame is dirty:
//!
//! ```text
//! rings                     vCPU 0    vCPU 1 ..           the kernel appends what is written
//!                              |         |                harvest
//! lists                     [ .. ]    [ .. ] ..           preallocated, nothing shared
//!                              |         |                reprotect, by the caller; absorb
//!                              '----.----'                into one tree for each subscriber
//! level 2                         [ 0 ]                   bit 1: word 1 of level 1 is not zero
//!                              /         \
//! level 1               [ 0 ]                [ 1 ]        bit 0: word 64 of level 0 is not zero
//!                 /       |       \         /     \
//! level 0    [ 0 ][ 1 ] [ 2 ] .. [ 63 ] [ 64 ] .. [ 80 ]  bit 32: frame 4,000 of slot 1 is dirty
//!            '-slot 0-' '----------- slot 1 -----------'  each slot starts on its own word
//!
//! list       { 64 }                                       the words of a small epoch
//! ```
//!
//! Level 0 is, bit for bit, the bitmap that `KVM_GET_DIRTY_LOG` hands out for each slot: KVM can
//! write it in place and any old consumer can read it. All levels lie one behind the other in one
//! allocation, so there are no pointers: the word above word *w* is word *w* / 64 of the next
//! level, its bit *w* % 64.
//!
//! - An *insert* sets one bit a level, from the leaf up: bits 32, 0 and 1 in the drawing. Where a bit is
//!   there already, that is a load. A run sets whole words.
//! - A *drain* takes words and leaves zeros, from the top down, and visits only words that are not zero.
//!   Others insert meanwhile: an insert writes, then looks above; a drain clears, then looks
//!   below; so that one of them sees the other, and nothing is lost (I1).
//! - A *small epoch* needs no search: a list names the leaf words inserted into, up to 256. If those are
//!   all, the drain takes them and does not look above.
//!
//! ```
//! # use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tree};
//! let layout = Layout::new([
//!     Slot { id: SlotId(0), base: Gfn(0), frames: 100 },
//!     Slot { id: SlotId(1), base: Gfn(0x100000), frames: 5_000 },
//! ])?;
//! let mut tree = Tree::new(&layout)?;
//! assert_eq!(tree.reserved_bytes(), 8 * (81 + 2 + 1));
//! tree.mark(&layout, FrameRun { start: Gfn(0x100000 + 4_000), count: 1 })?;
//! assert_eq!(tree.bitmap(&layout, SlotId(1))?[64 - 2], 1 << 32);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What it costs
//!
//! With *levels* = log64 of the frames: 4 for 64 GiB, 6 for 12 TiB. A *word* is 64 frames.
//!
//! | | time | |
//! | --- | --- | --- |
//! | insert a frame | O(levels) | [`Tracker::mark`], [`Tree::mark`] |
//! | insert a run | O(its words + levels) | the same; nothing is done frame by frame |
//! | drain, clear, count | O(dirty words * levels) | [`Subscription::drain`], [`Tree::clear`], [`Tree::count`] |
//! | drain of a small epoch | O(its words) | the same call |
//! | test; next after a hit | O(1) | [`Cursor`]; O(levels) where the next frame is far away |
//! | take a bitmap over | O(its words) | [`Tree::absorb_bitmap`], [`Tree::adopt_bitmap`] |
//!
//! Above every 64 neighbours that are dirty stands one summary, so a drain is rarely far from
//! O(dirty words). In the steady state inserting and draining allocate nothing (`tests/alloc.rs`).
//!
//! In memory the leaves are 32 KiB for each GiB of guest, and the summaries 1/64 + 1/4096 + ... of
//! that: at most 2 % on top, 400 MB in all for 12 TiB. That is address space: the system backs a
//! page when a bit in it is first set, and a page of leaves is 128 MiB of guest. What nobody writes
//! costs nothing.
//!
//! Most of a walk is turning set bits into numbers. A tree asks the CPU for its instructions once,
//! when it is made: with AVX-512 VBMI2 a word is compressed to the numbers of its bits at once, and
//! lists of frames that have outgrown the cache (2 MiB) are written past it; with BMI, LZCNT and
//! POPCNT the portable code is compiled to those; any other CPU runs the portable code as it is.
//! Tests hold all to the same lists (`tree/simd.rs`).
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
//! Per-vCPU lists and the preallocated packed radix tree: Lei Cao (Stratus) and Radim Krcmar on the
//! KVM list, April-June 2016, "Dirty memory tracking for performant checkpointing and improved live
//! migration"; the tree is in Krcmar's reply of 5 May 2016, with bytes as nodes, here 64-bit words.
//! The lists became KVM's dirty ring in Linux 5.11.
// Vector instructions need it, in `tree/simd.rs` alone.
#![deny(unsafe_code)]

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod dirty_set;
mod frame_set;
mod gfn;
mod harvest;
mod layout;
mod list;
mod ring;
mod source;
mod subscriber_tree;
mod sync;
mod tracker;
mod tree;
#[cfg(feature = "vm-memory")]
mod vm_memory;

#[cfg(feature = "vm-memory")]
pub use self::vm_memory::TrackedBitmap;
pub use dirty_set::DirtySet;
pub use frame_set::FrameSet;
pub use gfn::{FrameRun, Gfn, PAGE_SHIFT, PAGE_SIZE};
pub use harvest::{Harvest, Harvester, Inserted, Readable};
pub use layout::{Layout, LayoutError, OutOfSlot, Slot, SlotId};
pub use list::{DirtyFrame, DirtyList};
pub use ring::{ENTRY_DIRTY, ENTRY_RESET, RingConsumer, RingEntry, RingFull, RingHarvest};
pub use source::{Collected, DirtySource, SourceError, TrackingMode, UnknownMode};
pub use tracker::{Subscription, Tracker, TrackerStats};
pub use tree::{Cursor, MissingSummary, NoMemory, RunLists, Slices, Tree};
