//! Finds which guest frames changed, at a cost proportional to the number of dirty frames.
//!
//! A virtual machine monitor that migrates or checkpoints a running guest must know which of the
//! guest's 4 KiB frames changed since it last asked. This crate provides that and nothing else. It
//! makes no KVM calls and does no I/O. Its only unsafe code calls vector instructions and writes to
//! the spare capacity of lists. A dirty frame passes through these stages:
//!
//! ```text
//! ring      KVM's per-vCPU dirty ring: take DIRTY entries in order, mark them RESET   Harvester
//! list      that vCPU's preallocated list of frames                                   Harvest
//!           ... the caller reprotects (KVM_RESET_DIRTY_RINGS) ...                     Readable
//! tree      leaf bit, then summaries; one tree per subscriber                         Tracker
//! dirty set drained into ascending runs of frames: commit, or give back               DirtySet
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
//! let dirty = checkpoints.drain();
//! assert_eq!(dirty.runs().collect::<Vec<_>>(), [FrameRun { start: Gfn(4096), count: 512 }]);
//! dirty.commit(); // the frames are on disk
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # The structure
//!
//! A flat bitmap is cheap to write and expensive to search: 12 TiB of memory has 400 MB of bits,
//! and the ten bits that are set may be anywhere. Therefore a second bitmap lies above the first,
//! with one bit for each word of the first: set if that word is not zero. A third bitmap lies above
//! the second, and so on up to a single word. This is the tree of a guest with two slots, of 100
//! and of 5,000 frames, in which one frame is dirty:
//!
//! ```text
//! rings                     vCPU 0    vCPU 1 ..           the kernel appends written frames
//!                              |         |                harvest
//! lists                     [ .. ]    [ .. ] ..           preallocated, nothing shared
//!                              |         |                reprotect, by the caller; insert
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
//! Level 0 is, bit for bit, the bitmap that `KVM_GET_DIRTY_LOG` returns for each slot. KVM can
//! write it in place, and any consumer of that bitmap can read it. All levels lie one after the
//! other in one allocation, so there are no pointers: the word above word *w* is word *w* / 64 of
//! the next level, and its bit for *w* is bit *w* % 64.
//!
//! - An *insert* sets one bit in each level, from the leaf up: bits 32, 0 and 1 in the drawing. A
//!   bit that is already set costs a load. A run sets whole words.
//! - A *drain* takes words and leaves zeros, from the top down. It visits only words that are not
//!   zero. Inserts may run at the same time. An insert writes a word, then looks at the word above
//!   it. A drain clears a word, then looks at the words below it. At least one of the two sees the
//!   other, so nothing is lost (I1).
//! - A *small epoch* needs no search: a list names up to 256 leaf words that were inserted into.
//!   While the list is complete, the drain takes these words and does not read the summaries.
//!
//! ```
//! # use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tree};
//! let layout = Layout::new([
//!     Slot { id: SlotId(0), base: Gfn(0), frames: 100 },
//!     Slot { id: SlotId(1), base: Gfn(0x100000), frames: 5_000 },
//! ])?;
//! let tree = Tree::new(layout)?;
//! assert_eq!(tree.reserved_bytes(), 8 * (81 + 2 + 1));
//! tree.mark(FrameRun { start: Gfn(0x100000 + 4_000), count: 1 })?;
//! assert_eq!(tree.bitmap(SlotId(1))?.nth(64 - 2), Some(1 << 32));
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
//! | test a frame near the last | O(1) | [`Cursor`] |
//! | next run | O(1), or O(levels) if it is far away | [`Tree::iter`] |
//! | take a bitmap over | O(its words) | [`Tracker::absorb_bitmap`], [`Tree::absorb_bitmap`] |
//!
//! Up to 64 adjacent dirty words share one summary, so a drain usually costs close to O(dirty
//! words). Once the buffers have grown, inserting and draining allocate nothing (`tests/alloc.rs`).
//!
//! The leaves take 32 KiB for each GiB of guest memory. The summaries take 1/64 + 1/4096 + ... of
//! that: at most 2 % more, 400 MB in total for 12 TiB. This is address space. The system backs a
//! page when a bit in it is first set, and one page of leaves covers 128 MiB of guest memory. Guest
//! memory that is never written costs nothing.
//!
//! Most of the time of a walk goes into turning set bits into numbers. A tree detects the CPU's
//! vector instructions once, when it is made. With AVX-512 VBMI2 a word is compressed to the
//! numbers of its bits in one step, and lists of frames that exceed the cache (2 MiB) are written
//! with non-temporal stores. With BMI, LZCNT and POPCNT the portable code is compiled for these
//! instructions. Any other CPU runs the portable code. Compilers before Rust 1.89 lack the AVX-512
//! instructions. Tests compare all three (`tree/simd.rs`).
//!
//! # Invariants
//!
//! Comments and tests cite these by number.
//!
//! - **I1** A set leaf bit has all its summary bits set once its insert has returned. A spurious
//!   summary is legal; a missing one never is.
//! - **I2** Every harvested entry is in every subscriber's tree before the next reprotect of that
//!   ring begins.
//! - **I3** A frame's content is read only after its reprotect. The types rule out the other order:
//!   a [`Harvest`](ring::Harvest) shows no frames, only
//!   [`reprotected`](ring::Harvest::reprotected) turns it into a [`Readable`](ring::Readable), and
//!   only a `Readable` reaches a tree.
//! - **I4** A drained [`DirtySet`] is committed or given back, exactly once; dropping it gives it
//!   back. A failed send or write loses nothing.
//! - **I5** For the same writes, the leaves equal what `KVM_GET_DIRTY_LOG` of a second,
//!   bitmap-tracked run reports.
//! - **I6** A ring that was overrun is not trusted. (The kernel always leaves a reserve, so a ring
//!   in which every entry is dirty was overrun.) All memory then counts as dirty until the caller
//!   has reprotected all of it. The harvest reports the overrun. Tracking is exact again
//!   afterwards.
//!
//! # Source
//!
//! Lei Cao (Stratus) and Radim Krcmar proposed per-vCPU lists and the preallocated, packed radix
//! tree on the KVM list, April to June 2016: "Dirty memory tracking for performant checkpointing
//! and improved live migration". The tree is in Krcmar's reply of 5 May 2016. Its nodes are bytes;
//! here they are 64-bit words. The lists became KVM's dirty ring in Linux 5.11.
// Only `tree/simd.rs` and the modules below it allow unsafe code.
#![deny(unsafe_code)]

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod batch;
mod dirty_set;
mod frame_set;
mod gfn;
mod layout;
pub mod ring;
mod subscriber;
mod subscription;
mod sync;
mod tracker;
mod tree;
#[cfg(feature = "vm-memory")]
mod vm_memory;

#[cfg(feature = "vm-memory")]
pub use self::vm_memory::TrackedBitmap;
pub use dirty_set::{DirtyRuns, DirtySet};
pub use frame_set::FrameSet;
pub use gfn::{FrameRun, Gfn, PAGE_SHIFT, PAGE_SIZE, PageSize};
pub use layout::{Layout, LayoutError, OutOfSlot, Slot, SlotId};
pub use subscription::Subscription;
pub use tracker::{RelayoutError, Tracker, TrackerStats};
pub use tree::{Cursor, Element, Exclusive, Iter, NoMemory, Tree};
