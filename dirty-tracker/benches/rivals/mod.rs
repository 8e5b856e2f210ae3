//! Sets of frames that can be turned into a list: this crate's tree, the tree of 2016, and common
//! sets of today.

use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tree};
use hibitset::{BitSet, BitSetLike};
use roaring::RoaringBitmap;
use vm_memory::bitmap::AtomicBitmap;

/// A set of frames below a bound that is known at its creation.
pub trait Rival {
    fn insert(&mut self, frame: u64);
    /// Appends the frames to `out`, ascending (except for the plain list), and empties the set.
    fn drain(&mut self, out: &mut Vec<u64>);
    /// Drains; this call is timed.
    fn drain_timed(&mut self, out: &mut Vec<u64>) {
        self.drain(out);
    }
}

/// This crate's tree, with one owner or shared.
pub struct Ours {
    tree: Tree,
    shared: bool,
    frames: Vec<Gfn>,
}

impl Ours {
    pub fn new(frames: u64, shared: bool) -> Self {
        let slot = Slot { id: SlotId(0), base: Gfn(0), frames };
        let layout = Layout::new([slot]).expect("a layout");
        Self { tree: Tree::new(layout).unwrap(), shared, frames: Vec::new() }
    }

    /// As `drain`, to this crate's frame type.
    fn drain_own(&mut self) {
        self.frames.clear();
        if self.shared {
            self.tree.drain_into(&mut self.frames);
        } else {
            self.tree.exclusive().drain_into(&mut self.frames);
        }
    }
}

impl Rival for Ours {
    fn insert(&mut self, frame: u64) {
        let run = FrameRun { start: Gfn(frame), count: 1 };
        let done = if self.shared { self.tree.mark(run) } else { self.tree.exclusive().mark(run) };
        done.expect("inside the slot");
    }

    fn drain(&mut self, out: &mut Vec<u64>) {
        self.drain_own();
        out.extend(self.frames.iter().map(|g| g.0));
    }

    fn drain_timed(&mut self, _: &mut Vec<u64>) {
        self.drain_own();
    }
}

/// The per-vCPU list of 2016: unordered, with repetitions.
pub struct PlainList(pub Vec<u64>);

impl Rival for PlainList {
    fn insert(&mut self, frame: u64) {
        self.0.push(frame);
    }

    fn drain(&mut self, out: &mut Vec<u64>) {
        out.append(&mut self.0);
    }
}

/// The tree as described in 2016: nodes of one byte, packed level after level, searched bit by bit.
pub struct Radix8 {
    levels: Vec<Vec<u8>>,
}

impl Radix8 {
    pub fn new(frames: u64) -> Self {
        let mut levels = Vec::new();
        let mut len = frames as usize;
        while len > 1 {
            len = len.div_ceil(8);
            levels.push(vec![0u8; len]);
        }
        Self { levels }
    }

    fn visit(&mut self, level: usize, index: usize, out: &mut Vec<u64>) {
        let node = std::mem::take(&mut self.levels[level][index]);
        for bit in 0..8 {
            if node & (1 << bit) != 0 {
                let below = index * 8 + bit;
                if level == 0 { out.push(below as u64) } else { self.visit(level - 1, below, out) }
            }
        }
    }
}

impl Rival for Radix8 {
    fn insert(&mut self, frame: u64) {
        let mut at = frame as usize;
        for level in &mut self.levels {
            level[at / 8] |= 1 << (at % 8);
            at /= 8;
        }
    }

    fn drain(&mut self, out: &mut Vec<u64>) {
        self.visit(self.levels.len() - 1, 0, out);
    }
}

/// A flat bitmap, scanned word by word.
pub struct Flat(Vec<u64>);

/// A flat bitmap, scanned by lines of words. The compiler uses vector instructions to test whether
/// a line is empty.
pub struct FlatSimd(Vec<u64>);

/// Number of words that one step skips.
pub const LINE: usize = 32;

impl Flat {
    pub fn new(frames: u64) -> Self {
        Self(vec![0; frames.div_ceil(64) as usize])
    }
}

impl FlatSimd {
    pub fn new(frames: u64) -> Self {
        Self(vec![0; (frames.div_ceil(64) as usize).next_multiple_of(LINE)])
    }
}

fn take_word(word: &mut u64, base: u64, out: &mut Vec<u64>) {
    let mut bits = std::mem::take(word);
    while bits != 0 {
        out.push(base + u64::from(bits.trailing_zeros()));
        bits &= bits - 1;
    }
}

fn take_words(words: &mut [u64], first: usize, out: &mut Vec<u64>) {
    for (word, at) in words.iter_mut().zip(first..) {
        if *word != 0 {
            take_word(word, at as u64 * 64, out);
        }
    }
}

impl Rival for Flat {
    fn insert(&mut self, frame: u64) {
        self.0[(frame / 64) as usize] |= 1 << (frame % 64);
    }

    fn drain(&mut self, out: &mut Vec<u64>) {
        take_words(&mut self.0, 0, out);
    }
}

impl Rival for FlatSimd {
    fn insert(&mut self, frame: u64) {
        self.0[(frame / 64) as usize] |= 1 << (frame % 64);
    }

    fn drain(&mut self, out: &mut Vec<u64>) {
        let (lines, _) = self.0.as_chunks_mut::<LINE>();
        for (line, first) in lines.iter_mut().zip((0..).step_by(LINE)) {
            if line.iter().fold(0, |all, word| all | word) != 0 {
                take_words(line, first, out);
            }
        }
    }
}

/// hibitset: four layers of words.
pub struct Hibit(pub BitSet);

impl Rival for Hibit {
    fn insert(&mut self, frame: u64) {
        self.0.add(frame as u32);
    }

    fn drain(&mut self, out: &mut Vec<u64>) {
        // Faster than its `drain`. The next inserts pay for the layers that `clear` has truncated.
        out.extend((&self.0).iter().map(u64::from));
        self.0.clear();
    }
}

/// roaring: sorted containers of 65,536.
pub struct Roaring(pub RoaringBitmap);

impl Rival for Roaring {
    fn insert(&mut self, frame: u64) {
        self.0.insert(frame as u32);
    }

    fn drain(&mut self, out: &mut Vec<u64>) {
        out.extend(self.0.iter().map(u64::from));
        self.0.clear();
    }
}

/// vm-memory's bitmap, fetched and reset like its users do.
pub struct VmMemory(pub AtomicBitmap);

impl Rival for VmMemory {
    fn insert(&mut self, frame: u64) {
        self.0.set_bit(frame as usize);
    }

    fn drain(&mut self, out: &mut Vec<u64>) {
        for (i, mut word) in self.0.get_and_reset().into_iter().enumerate() {
            take_word(&mut word, i as u64 * 64, out);
        }
    }
}
