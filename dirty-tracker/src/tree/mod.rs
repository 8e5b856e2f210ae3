//! The packed 64-ary radix tree of dirty bits.
//!
//! ```text
//! level 2                 [ 1 word  ]      bit i: word i of level 1 is not zero
//! level 1          [ word | word | .. ]    bit i: word i of level 0 is not zero
//! level 0   [ word | word | word | .. ]    the KVM dirty bitmap of every slot, each on its own word
//! ```
//!
//! *Leaf*: a word of level 0. *Summary*: a word above. All levels lie in one zeroed allocation, so
//! parts that were never dirty are never backed by memory. Every place is found by arithmetic.
//!
//! # Ordering
//! Insert writes the leaf, then looks at each summary from the bottom up; drain clears each summary
//! before it looks below, from the top down. Both are store-then-load on two words, so all accesses
//! are SeqCst: either the inserter sees the summary cleared and sets it again, or the drainer,
//! going down after its clear, sees the leaf. Summaries are looked at even when the bit was already
//! there: the other inserter may not have got to them yet (I1).
//!
//! The frames themselves are plain memory beside the tree. A caller writes to a frame, then marks
//! it; a drainer takes the mark, then reads the frame. A mark that finds its bit set stores nothing
//! that the drainer could acquire, so each side has a fence: a mark fences, then looks at the bit
//! (`fence_prior_writes`); every kind of drain fences after its last exchange
//! (`fence_later_reads`). Either the mark sees the bit cleared and sets it again, or the drainer's
//! reads see the write. SeqCst on the exchange alone does not order a later plain read: AArch64 may
//! do that read before the store of the exchange.
//!
//! Source: Radim Krcmar, KVM list, 5 May 2016, with bytes as nodes; here with 64-bit words.

#[cfg(not(any(driftline_loom, driftline_shuttle)))]
mod bitmap;
mod cursor;
mod drain;
mod insert;
mod parallel;
mod partial_drain;
mod run_lists;
mod simd;
mod sink;
mod split;
mod structure;
#[cfg(test)]
mod tests;
mod walk;
mod word_list;
mod words;

pub use cursor::Cursor;
pub use partial_drain::Slices;
pub use run_lists::RunLists;
pub use structure::{MissingSummary, NoMemory, Tree};
