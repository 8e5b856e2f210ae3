//! The walk that empties a tree: top down, one visit to each word that is not zero, by one thread
//! that shares the words or owns them.

use super::{SHIFT, Sink};
use crate::sync::{self, AtomicU64, Ordering::SeqCst};

/// How a walk takes the words of a tree.
pub(super) trait Words {
    /// Takes the word, leaving zero.
    fn take(&mut self, index: usize) -> u64;
}

/// While others insert: an exchange for each word that is not zero.
pub(super) struct Shared<'t>(pub(super) &'t [AtomicU64]);

impl Words for Shared<'_> {
    #[inline]
    fn take(&mut self, index: usize) -> u64 {
        let word = &self.0[index];
        if word.load(SeqCst) == 0 { 0 } else { word.swap(0, SeqCst) }
    }
}

/// While nobody else can: plain loads and stores.
pub(super) struct Owned<'t>(pub(super) &'t mut [AtomicU64]);

impl Words for Owned<'_> {
    #[inline]
    fn take(&mut self, index: usize) -> u64 {
        sync::take_mut(&mut self.0[index])
    }
}

/// Indices gathered on the way down: a few loads are then under way at once, and the loops over
/// them end where the processor expects it.
pub(super) struct Scratch {
    /// The level 1 words below one word of level 2.
    nodes: [u16; 64],
    /// The leaf words below them.
    leaves: [u16; 64 * 64],
}

impl Scratch {
    pub(super) fn new() -> Self {
        Self { nodes: [0; 64], leaves: [0; 64 * 64] }
    }
}

/// Takes everything below word `index` of `level`, ascending. `levels` are the first words of the
/// levels.
///
/// A summary is cleared before anything below it is looked at: what an insert adds below it
/// meanwhile has its summary set again by that insert (see the module above).
pub(super) fn walk<W: Words, S: Sink>(
    words: &mut W,
    levels: &[(usize, usize)],
    level: usize,
    index: u64,
    sink: &mut S,
    scratch: &mut Scratch,
) {
    let mut bits = words.take(levels[level].0 + index as usize);
    match level {
        // Leaf words lie at the start: their index is their place.
        0 => sink.word(index, bits),
        1 => {
            let count = expand(bits, 0, &mut scratch.nodes);
            for leaf in &scratch.nodes[..count] {
                let word = index << SHIFT | u64::from(*leaf);
                sink.word(word, words.take(word as usize));
            }
        }
        2 => {
            let below = levels[1].0 + (index << SHIFT) as usize;
            let nodes = expand(bits, 0, &mut scratch.nodes);
            let mut leaves = 0;
            for node in &scratch.nodes[..nodes] {
                let bits = words.take(below + usize::from(*node));
                let room = &mut scratch.leaves[leaves..leaves + 64];
                leaves += expand(bits, node << SHIFT, room);
            }
            for leaf in &scratch.leaves[..leaves] {
                let word = index << (2 * SHIFT) | u64::from(*leaf);
                sink.word(word, words.take(word as usize));
            }
        }
        _ => {
            while bits != 0 {
                let child = index << SHIFT | u64::from(bits.trailing_zeros());
                bits &= bits - 1;
                walk(words, levels, level - 1, child, sink, scratch);
            }
        }
    }
}

/// Writes `base` plus the number of each set bit to `room`, which holds 64, and says how many.
///
/// Four or eight at a time, there or not: a branch or two a word instead of one a bit.
#[inline]
fn expand(mut bits: u64, base: u16, room: &mut [u16]) -> usize {
    let count = bits.count_ones() as usize;
    let mut next = |place: &mut u16| {
        *place = base + bits.trailing_zeros() as u16;
        bits &= bits.wrapping_sub(1);
    };
    let (four, rest) = room[..64].split_at_mut(4);
    four.iter_mut().for_each(&mut next);
    for (eight, done) in rest.chunks_mut(8).zip((4..).step_by(8)) {
        if count <= done {
            break;
        }
        eight.iter_mut().for_each(&mut next);
    }
    count
}
