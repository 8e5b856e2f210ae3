//! The words of a small epoch, as a list. While the list names every leaf that is not zero, a drain
//! needs no walk.
//!
//! # Protocol
//! No operation waits for the list's lock:
//!
//! - An insert that gets the lock makes its entire insertion under it and adds its word to the
//!   list.
//! - Any other insert, and one that finds the list full, inserts into the tree and *afterwards*
//!   marks the list as incomplete.
//! - A drain that gets the lock and finds the list complete takes the leaves of the list and
//!   nothing else. Every insert that had returned is on the list, because otherwise the list would
//!   be marked as incomplete.
//! - A drain that walks declares the list complete *before* it loads the tree. An insert that the
//!   walk misses marks the list as incomplete after that.
//!
//! So both sides store, then load, and all accesses are SeqCst.

use crate::sync::{self, AtomicBool, Mutex, MutexGuard, Ordering::SeqCst};

/// Capacity of a list in words: the leaves of up to 16,384 frames. 256, chosen: the list is 2 KiB
/// and stays in the first-level cache, and sorting so few words is cheap. The first table of the
/// bench `dirty` has 100 frames, which are listed, and 1,000, which are walked.
pub(super) const CAPACITY: usize = if cfg!(driftline_shuttle) { 2 } else { 256 };

/// Number of leaves drained by lists before a walk is forced. Lists leave the summaries set; this
/// bounds what a walk spends on such spurious summaries. 64 full lists, chosen: one drain in 64 at
/// most is a walk that a list could have replaced, and it visits at most 16,384 empty leaves.
/// Smaller under miri, where a tree with so many leaves takes minutes.
pub(super) const MAX_SPURIOUS: usize = if cfg!(miri) { 4 } else { 64 } * CAPACITY;

/// A list of words and whether it is complete; see the module.
#[derive(Debug)]
pub(super) struct WordList {
    incomplete: AtomicBool,
    list: Mutex<LeafWordList>,
}

/// Leaf words and their state.
#[derive(Debug)]
pub(super) struct LeafWordList {
    words: Vec<u64>,
    /// Whether the words are ascending and distinct.
    ascending: bool,
    spurious: usize,
}

impl WordList {
    pub(super) fn new() -> Self {
        let list =
            LeafWordList { words: Vec::with_capacity(CAPACITY), ascending: true, spurious: 0 };
        Self { incomplete: AtomicBool::new(false), list: Mutex::new(list) }
    }

    /// Returns the list to an insert, if the list may be complete and no other thread holds its
    /// lock.
    pub(super) fn try_list(&self) -> Option<MutexGuard<'_, LeafWordList>> {
        if self.incomplete.load(SeqCst) {
            return None;
        }
        sync::try_lock(&self.list)
    }

    /// Records an insert that is not on the list.
    pub(super) fn mark_incomplete(&self) {
        if !self.incomplete.load(SeqCst) {
            self.incomplete.store(true, SeqCst);
        }
    }

    /// Returns the list to a drain if it names every leaf that is not zero. Otherwise the caller
    /// walks, and the list starts anew unless another thread holds its lock.
    pub(super) fn complete(&self) -> Option<MutexGuard<'_, LeafWordList>> {
        let mut list = sync::try_lock(&self.list)?;
        if !self.incomplete.load(SeqCst) && list.spurious < MAX_SPURIOUS {
            return Some(list);
        }
        list.begin();
        self.incomplete.store(false, SeqCst);
        None
    }

    /// Starts the list anew before a walk by the tree's only owner.
    pub(super) fn begin(&mut self) {
        sync::get_mut(&mut self.list).begin();
        self.incomplete.store(false, SeqCst);
    }
}

impl LeafWordList {
    /// Adds `word`. Returns whether it is on the list now.
    pub(super) fn add(&mut self, word: u64) -> bool {
        let last = self.words.last();
        if last == Some(&word) {
            return true;
        }
        self.ascending &= last.is_none_or(|last| *last < word);
        let room = self.words.len() < CAPACITY;
        if room {
            self.words.push(word);
        }
        room
    }

    /// Returns the words, ascending and distinct.
    pub(super) fn words(&mut self) -> &[u64] {
        if !self.ascending {
            self.words.sort_unstable();
            self.words.dedup();
            self.ascending = true;
        }
        &self.words
    }

    /// Empties the list after its words have been drained.
    pub(super) fn drained(&mut self) {
        self.spurious += self.words.len();
        self.words.clear();
        self.ascending = true;
    }

    fn begin(&mut self) {
        self.words.clear();
        (self.ascending, self.spurious) = (true, 0);
    }
}
