//! The packed 64-ary radix tree of dirty bits.
//!
//! ```text
//! level 2                 [ 1 word  ]      bit i: word i of level 1 is not zero
//! level 1          [ word | word | .. ]    bit i: word i of level 0 is not zero
//! level 0   [ word | word | word | .. ]    KVM's bitmap of every slot, each on its own word
//! ```
//!
//! A *leaf* is a word of level 0, a *summary* a word above. All levels lie in one zeroed
//! allocation, so parts that were never dirty are never backed by memory. All positions are
//! computed.
//!
//! # Modules
//! `simd`, `run_lists` and `word_list` are leaves. `words` uses `simd`, `split` and `sink` use
//! `words`, and `walk` uses `sink`. `structure` owns the tree, and the operations above it are one
//! module each: `insert`, `drain`, `exclusive`, `parallel`, `cursor`.
//!
//! # Ordering
//! An insert writes the leaf, then loads each summary from the bottom up. A drain clears each
//! summary before it loads the words below, from the top down. Both store one word and then load
//! another, so all accesses are SeqCst. Either the inserter sees the cleared summary and sets it
//! again, or the drainer, going down after its clear, sees the leaf. An inserter loads the
//! summaries even when the leaf bit was already set: the thread that set the bit may not have
//! reached the summaries yet (I1).
//!
//! The frames themselves are plain memory beside the tree. A caller writes to a frame, then marks
//! it. A drainer takes the mark, then reads the frame. A mark that finds its bit set stores nothing
//! that the drainer could acquire, so each side has a fence. A mark fences, then loads the bit
//! (`fence_prior_writes`). Every kind of drain fences after its last exchange
//! (`fence_later_reads`). Either the mark sees the bit cleared and sets it again, or the drainer's
//! reads see the write. SeqCst on the exchange alone does not order a later plain read: AArch64 may
//! perform that read before the store of the exchange.
//!
//! Source: Radim Krcmar, KVM list, 5 May 2016. His nodes are bytes; here they are 64-bit words.

mod cursor;
mod drain;
mod element;
mod exclusive;
mod insert;
mod parallel;
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

pub use cursor::{Cursor, Iter};
pub use element::Element;
pub use exclusive::Exclusive;
pub(crate) use run_lists::{ListedRuns, RunLists};
pub use structure::{NoMemory, Tree};
pub(crate) use words::{masks, ones};
