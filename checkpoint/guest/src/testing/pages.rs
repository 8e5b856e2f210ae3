//! The expected content of each page. The content follows from the frame and its generation, and
//! the generation from the number of steps.
//!
//! A writer owns every n-th frame of the working set and visits its share in passes. A pass visits
//! each frame once, in a scattered order; the generation that a pass writes is its number. So the
//! content of every frame follows from the number of steps alone.

use std::fmt;

use driftline_dirty_tracker::{Gfn, Layout};

use crate::blocks::PAGE_BYTES;

/// One page in this many is written as zeros.
const ZERO_EVERY: u64 = 8;

/// Scrambles `x`: the finalizer of SplitMix64.
pub fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Fills `page` with the content of frame `gfn` in `generation`: frame number, generation, checksum
/// of the rest, and the rest. Generation 0 and some others are all zeros.
pub(super) fn fill(page: &mut [u8; PAGE_BYTES], gfn: Gfn, generation: u64) {
    let seed = mix(gfn.0 ^ mix(generation));
    page.fill(0);
    if generation == 0 || seed.is_multiple_of(ZERO_EVERY) {
        return;
    }
    let mut x = seed;
    // Words are stored whole: copied as slices, each would be checked in the builds of tests.
    for word in page[24..].as_chunks_mut::<8>().0 {
        x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
        *word = (x ^ (x >> 29)).to_le_bytes();
    }
    page[..8].copy_from_slice(&gfn.0.to_le_bytes());
    page[8..16].copy_from_slice(&generation.to_le_bytes());
    let checksum = u64::from(crc32c::crc32c(&page[24..]));
    page[16..24].copy_from_slice(&checksum.to_le_bytes());
}

/// A writer's walk over its share of `frames` frames.
#[derive(Clone, Copy, Debug)]
pub(super) struct PageSweep {
    frames: u64,
    stride: u64,
    /// The stride's inverse modulo `frames`.
    inverse: u64,
    seed: u64,
}

impl PageSweep {
    /// Creates a walk over `frames` frames, at least one.
    pub(super) fn new(frames: u64, seed: u64) -> Self {
        let frames = frames.max(1);
        let mut stride = (mix(seed) % frames).max(1);
        loop {
            if let Some(inverse) = inverse(stride, frames) {
                return Self { frames, stride, inverse, seed };
            }
            stride = stride % frames + 1;
        }
    }

    fn offset(&self, pass: u64) -> u64 {
        mix(self.seed.wrapping_add(pass)) % self.frames
    }

    /// Returns the frame of the share that step `step` writes, and the generation that it writes
    /// there.
    pub(super) fn step(&self, step: u64) -> (u64, u64) {
        let (pass, at) = (step / self.frames, step % self.frames);
        let index = mul_mod(at, self.stride, self.frames) + self.offset(pass);
        (index % self.frames, pass + 1)
    }

    /// Returns the generation of frame `index` of the share after `steps` steps.
    pub(super) fn generation(&self, index: u64, steps: u64) -> u64 {
        let (passes, at) = (steps / self.frames, steps % self.frames);
        let from_start = index + self.frames - self.offset(passes);
        let visited_at = mul_mod(from_start % self.frames, self.inverse, self.frames);
        passes + u64::from(visited_at < at)
    }
}

fn mul_mod(a: u64, b: u64, m: u64) -> u64 {
    (u128::from(a) * u128::from(b) % u128::from(m)) as u64
}

/// Returns the inverse of `a` modulo `m`, if there is one; both are at least 1.
fn inverse(a: u64, m: u64) -> Option<u64> {
    let (mut r, mut next_r) = (i128::from(m), i128::from(a % m));
    let (mut t, mut next_t) = (0i128, 1i128);
    while next_r != 0 {
        let q = r / next_r;
        (r, next_r) = (next_r, r - q * next_r);
        (t, next_t) = (next_t, t - q * next_t);
    }
    (r == 1).then(|| t.rem_euclid(i128::from(m)) as u64)
}

/// Returns the `n`-th frame of all slots, ascending.
pub(super) fn nth_frame(layout: &Layout, mut n: u64) -> Option<Gfn> {
    for slot in layout.slots() {
        if n < slot.frames {
            return Some(Gfn(slot.base.0 + n));
        }
        n -= slot.frames;
    }
    None
}

/// A frame that does not hold what was written to it last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WrongFrame {
    /// The frame.
    pub gfn: Gfn,
    /// The generation that it must hold; 0 for a frame never written.
    pub expected: u64,
    /// The frame number found in it.
    pub found_gfn: u64,
    /// The generation found in it.
    pub found: u64,
}

/// Memory that does not hold what was written.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub struct WrongMemory {
    /// Number of wrong frames.
    pub frames: u64,
    /// The first few of them.
    pub first: Vec<WrongFrame>,
    /// Frames that the writers found wrong before they overwrote them.
    pub writer_errors: u64,
}

impl fmt::Display for WrongMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (frames, seen) = (self.frames, self.writer_errors);
        write!(f, "{frames} frames are wrong and writers found {seen} wrong ones")?;
        for w in &self.first {
            let WrongFrame { gfn, expected, found_gfn, found } = w;
            write!(f, "; {gfn}: generation {expected} expected, found {found} of {found_gfn:#x}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generations_follow_from_the_steps() {
        for (frames, seed) in [(1, 0), (2, 9), (7, 3), (64, 4), (100, 5), (257, 6)] {
            let sweep = PageSweep::new(frames, seed);
            let mut written = vec![0; frames as usize];
            for step in 0..4 * frames + 3 {
                for (i, &g) in written.iter().enumerate() {
                    assert_eq!(sweep.generation(i as u64, step), g, "{frames} {seed} {step} {i}");
                }
                let (index, generation) = sweep.step(step);
                assert_eq!(generation, written[index as usize] + 1, "each frame once a pass");
                written[index as usize] = generation;
            }
        }
    }
}
