//! The words of a small epoch, as a list: no walk is needed while it names every leaf that is not
//! zero.
//!
//! # Protocol
//! An insert that gets the lock makes its whole insertion under it and puts its word on the list.
//! Any other insert, and one that finds the list full, goes straight into the tree and *afterwards*
//! makes sure that the list is known to be incomplete. A drain that gets the lock and finds the
//! list complete takes the list's leaves and nothing else: an insert that had returned is on the
//! list, for had it not been, the list would be known to be incomplete. A drain that walks declares
//! the list complete *before* it looks at the tree: an insert that it misses says otherwise after
//! that. So both sides store, then load, and all accesses are SeqCst.

use crate::sync::{self, AtomicBool, Mutex, MutexGuard, Ordering::SeqCst};

/// Words that a list holds: the leaves of up to 16,384 frames. More are found faster by a walk.
pub(super) const CAPACITY: usize = if cfg!(driftline_shuttle) { 2 } else { 256 };

/// Leaves drained by lists before a walk comes in between: lists leave the summaries set, and this
/// bounds what a walk spends on those. Under miri, where a tree that holds so many takes minutes,
/// fewer.
pub(super) const MAX_SPURIOUS: usize = if cfg!(miri) { 4 } else { 64 } * CAPACITY;

/// See the module.
#[derive(Debug)]
pub(super) struct WordList {
    incomplete: AtomicBool,
    list: Mutex<List>,
}

/// Leaf words.
#[derive(Debug)]
pub(super) struct List {
    words: Vec<u64>,
    /// Whether they are in order, each once.
    ascending: bool,
    spurious: usize,
}

impl WordList {
    pub(super) fn new() -> Self {
        let list = List { words: Vec::with_capacity(CAPACITY), ascending: true, spurious: 0 };
        Self { incomplete: AtomicBool::new(false), list: Mutex::new(list) }
    }

    /// For an insert: the list, if it has room and nobody else is at it.
    pub(super) fn try_list(&self) -> Option<MutexGuard<'_, List>> {
        if self.incomplete.load(SeqCst) {
            return None;
        }
        sync::try_lock(&self.list)
    }

    /// After an insert that is not on the list.
    pub(super) fn mark_incomplete(&self) {
        if !self.incomplete.load(SeqCst) {
            self.incomplete.store(true, SeqCst);
        }
    }

    /// For a drain: the list if it is all there is in the tree. Else the caller walks, and the list
    /// begins anew unless somebody else is at it.
    pub(super) fn complete(&self) -> Option<MutexGuard<'_, List>> {
        let mut list = sync::try_lock(&self.list)?;
        if !self.incomplete.load(SeqCst) && list.spurious < MAX_SPURIOUS {
            return Some(list);
        }
        list.begin();
        self.incomplete.store(false, SeqCst);
        None
    }

    /// Before a walk by the tree's only owner.
    pub(super) fn begin(&mut self) {
        sync::get_mut(&mut self.list).begin();
        self.incomplete.store(false, SeqCst);
    }
}

impl List {
    /// Adds `word`; whether it is on the list now.
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

    /// The words, ascending, each once.
    pub(super) fn words(&mut self) -> &[u64] {
        if !self.ascending {
            self.words.sort_unstable();
            self.words.dedup();
            self.ascending = true;
        }
        &self.words
    }

    /// The words have been drained.
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
