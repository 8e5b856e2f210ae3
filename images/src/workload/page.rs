//! The format of a page, and the diagnosis of a page with wrong content.
//!
//! ```text
//! word   0 frame number   1 generation   2 writer (vCPU)   3 checksum over the three and the seed
//!   4..511 body: zero, or words derived from seed and frame number from the first touch on
//!      511 stamp: derived from the checksum, so a page whose halves are of different ages shows
//! ```
//! A page of generation 0 has never been written and is all zero.

use core::ops::Range;

/// Bytes in a page.
pub const PAGE_SIZE: u64 = 4096;
/// Number of 64-bit words in a page.
pub const PAGE_WORDS: usize = 512;
/// Last word of a page, which must agree with its head.
pub const STAMP_WORD: usize = PAGE_WORDS - 1;
/// Word that counts how often the page has been written.
pub(super) const GENERATION_WORD: usize = 1;
/// The words between head and stamp.
const BODY: Range<usize> = 4..STAMP_WORD;

/// The memory that a workload writes: pages of the working set, by number.
///
/// Each read must access memory (volatile or atomic). Otherwise the workload checks the compiler,
/// not the machine.
pub trait PageMemory {
    /// Returns the guest frame number of `page`.
    fn gfn(&self, page: u64) -> u64;

    /// Reads one word of `page`.
    fn read_u64(&self, page: u64, word: usize) -> u64;

    /// Writes one word of `page`.
    fn write_u64(&mut self, page: u64, word: usize, value: u64);

    /// Announces that `page` is about to be visited. This is only a hint.
    #[inline(always)]
    fn prefetch(&self, _page: u64) {}

    /// Announces that a visit has made all of its writes to `page`, for memory that tracks dirty
    /// pages itself.
    #[inline(always)]
    fn wrote(&mut self, _page: u64) {}

    /// Writes `value(word)` to each of `words`.
    #[inline(always)]
    fn fill(&mut self, page: u64, words: Range<usize>, value: impl Fn(usize) -> u64) {
        for word in words {
            self.write_u64(page, word, value(word));
        }
    }

    /// Returns the first of `words` that does not hold `expected(word)`.
    #[inline(always)]
    fn find_mismatch(
        &self,
        page: u64,
        words: Range<usize>,
        expected: impl Fn(usize) -> u64,
    ) -> Option<usize> {
        let mut start = words.start;
        while start < words.end {
            // One branch for eight words: in nearly all pages all words are right.
            let end = words.end.min(start + 8);
            let mut difference = 0;
            for word in start..end {
                difference |= self.read_u64(page, word) ^ expected(word);
            }
            if difference != 0 {
                return (start..end).find(|&word| self.read_u64(page, word) != expected(word));
            }
            start = end;
        }
        None
    }
}

/// The ways in which a page is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MismatchKind {
    /// The page as it was written at another time: a write was lost, or an older copy came back.
    Stale,
    /// All zero although it has been written.
    Lost,
    /// Head and end of the page are of different ages.
    Torn,
    /// A well-formed page that belongs to another frame or writer.
    Misplaced,
    /// Anything else in head or stamp.
    Corrupt,
    /// Head and stamp are right, the words between are not.
    Body,
}

impl MismatchKind {
    /// Returns the word that error lines use for it.
    pub fn as_str(self) -> &'static str {
        match self {
            MismatchKind::Stale => "stale",
            MismatchKind::Lost => "lost",
            MismatchKind::Torn => "torn",
            MismatchKind::Misplaced => "misplaced",
            MismatchKind::Corrupt => "corrupt",
            MismatchKind::Body => "body",
        }
    }

    /// Returns the kind whose [`as_str`](Self::as_str) is `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        [
            MismatchKind::Stale,
            MismatchKind::Lost,
            MismatchKind::Torn,
            MismatchKind::Misplaced,
            MismatchKind::Corrupt,
            MismatchKind::Body,
        ]
        .into_iter()
        .find(|kind| kind.as_str() == name)
    }
}

/// A page whose content differs from its writer's last write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Guest frame number of the page.
    pub gfn: u64,
    /// Kind of error.
    pub kind: MismatchKind,
    /// Expected generation.
    pub expected_generation: u64,
    /// Generation in its head.
    pub found_generation: u64,
    /// Index of the first wrong word.
    pub word: usize,
    /// Expected value of that word.
    pub expected: u64,
    /// Actual value of that word.
    pub found: u64,
}

/// The five words that identify a page and its age: its head and its stamp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageHead {
    /// Frame number.
    pub gfn: u64,
    /// How often the page has been written.
    pub generation: u64,
    /// The vCPU that wrote it.
    pub writer: u64,
    /// Checksum over seed, frame number, generation and writer.
    pub checksum: u64,
    /// Derived from the checksum; the last word of the page.
    pub stamp: u64,
}

impl PageHead {
    /// Head of a page that has never been written.
    const UNTOUCHED: PageHead =
        PageHead { gfn: 0, generation: 0, writer: 0, checksum: 0, stamp: 0 };

    /// Returns the head of a page that `writer` has written `generation` times (0: all zero).
    #[inline(always)]
    pub fn expected(seed: u64, gfn: u64, generation: u32, writer: u32) -> PageHead {
        if generation == 0 {
            return PageHead::UNTOUCHED;
        }
        let checksum = checksum(seed, gfn, u64::from(generation), u64::from(writer));
        PageHead {
            gfn,
            generation: u64::from(generation),
            writer: u64::from(writer),
            checksum,
            stamp: stamp(checksum),
        }
    }

    /// Reads the head and stamp of `page`.
    #[inline(always)]
    pub fn read<M: PageMemory>(memory: &M, page: u64) -> PageHead {
        PageHead {
            gfn: memory.read_u64(page, 0),
            generation: memory.read_u64(page, GENERATION_WORD),
            writer: memory.read_u64(page, 2),
            checksum: memory.read_u64(page, 3),
            stamp: memory.read_u64(page, STAMP_WORD),
        }
    }

    /// Writes the head and stamp of `page`.
    #[inline(always)]
    pub fn write<M: PageMemory>(&self, memory: &mut M, page: u64) {
        memory.write_u64(page, 0, self.gfn);
        memory.write_u64(page, GENERATION_WORD, self.generation);
        memory.write_u64(page, 2, self.writer);
        memory.write_u64(page, 3, self.checksum);
        memory.write_u64(page, STAMP_WORD, self.stamp);
    }

    /// Returns whether all five words agree; one branch in the common case.
    #[inline(always)]
    pub fn matches(&self, found: &PageHead) -> bool {
        ((self.gfn ^ found.gfn)
            | (self.generation ^ found.generation)
            | (self.writer ^ found.writer)
            | (self.checksum ^ found.checksum)
            | (self.stamp ^ found.stamp))
            == 0
    }

    /// Diagnoses `found`, where `self` is expected in frame `gfn`.
    #[cold]
    #[inline(never)]
    pub fn diagnose(&self, found: &PageHead, seed: u64, gfn: u64) -> Mismatch {
        let well_formed = found.generation != 0
            && found.checksum == checksum(seed, found.gfn, found.generation, found.writer);
        let kind = if PageHead::UNTOUCHED.matches(found) {
            MismatchKind::Lost
        } else if well_formed && found.stamp != stamp(found.checksum) {
            MismatchKind::Torn
        } else if well_formed
            && (found.gfn != gfn || (self.generation != 0 && found.writer != self.writer))
        {
            MismatchKind::Misplaced
        } else if well_formed {
            MismatchKind::Stale
        } else if found.stamp == self.stamp && self.generation != 0 {
            MismatchKind::Torn
        } else {
            MismatchKind::Corrupt
        };
        let (word, expected, actual) = self.first_difference(found);
        Mismatch {
            gfn,
            kind,
            expected_generation: self.generation,
            found_generation: found.generation,
            word,
            expected,
            found: actual,
        }
    }

    fn first_difference(&self, found: &PageHead) -> (usize, u64, u64) {
        if self.gfn != found.gfn {
            (0, self.gfn, found.gfn)
        } else if self.generation != found.generation {
            (GENERATION_WORD, self.generation, found.generation)
        } else if self.writer != found.writer {
            (2, self.writer, found.writer)
        } else if self.checksum != found.checksum {
            (3, self.checksum, found.checksum)
        } else {
            (STAMP_WORD, self.stamp, found.stamp)
        }
    }
}

/// Fills the body of a page at its first touch.
#[inline(never)]
pub(super) fn fill_body<M: PageMemory>(memory: &mut M, page: u64, seed: u64, gfn: u64) {
    let key = body_key(seed, gfn);
    memory.fill(page, BODY, |word| body_word(key, word));
}

/// Returns the first wrong word of a body, its expected and its actual value.
#[inline(never)]
pub(super) fn check_body<M: PageMemory>(
    memory: &M,
    page: u64,
    seed: u64,
    gfn: u64,
    random: bool,
) -> Option<(usize, u64, u64)> {
    let key = body_key(seed, gfn);
    let (word, expected) = if random {
        let word = memory.find_mismatch(page, BODY, |word| body_word(key, word))?;
        (word, body_word(key, word))
    } else {
        (memory.find_mismatch(page, BODY, |_| 0)?, 0)
    };
    Some((word, expected, memory.read_u64(page, word)))
}

const ODD_A: u64 = 0x9e37_79b9_7f4a_7c15;
const ODD_B: u64 = 0xd1b5_4a32_d192_ed03;
const ODD_C: u64 = 0xaef1_7502_108e_f2d9;

#[inline(always)]
fn checksum(seed: u64, gfn: u64, generation: u64, writer: u64) -> u64 {
    let identity = gfn.wrapping_mul(ODD_A) ^ seed;
    let age = (generation.rotate_left(24) ^ writer).wrapping_mul(ODD_B);
    let sum = identity.wrapping_add(age);
    (sum ^ (sum >> 31)).wrapping_mul(ODD_C) | 1
}

#[inline(always)]
fn stamp(checksum: u64) -> u64 {
    !checksum.rotate_left(17)
}

#[inline(always)]
fn body_key(seed: u64, gfn: u64) -> u64 {
    mix(seed ^ gfn.wrapping_mul(ODD_B))
}

#[inline(always)]
fn body_word(key: u64, word: usize) -> u64 {
    let point = key.wrapping_add((word as u64).wrapping_mul(ODD_A));
    (point ^ (point >> 29)).wrapping_mul(ODD_C)
}

/// Spreads the bits of `value` over the whole word.
#[inline(always)]
pub(super) fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 32)).wrapping_mul(ODD_B);
    let value = (value ^ (value >> 29)).wrapping_mul(ODD_C);
    value ^ (value >> 32)
}

/// The increment of the generator in [`super::pattern`].
pub(super) const GENERATOR_STEP: u64 = ODD_A;
