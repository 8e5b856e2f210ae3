//! What a walk needs from the CPU, and the level for any CPU.

use std::mem::MaybeUninit;

use crate::Gfn;
use crate::sync::AtomicU64;

/// Room for the frames of one word.
pub(super) type WordFrames = [MaybeUninit<Gfn>; 64];

/// The operations that a walk needs from the CPU.
pub(in super::super) trait Simd: Copy {
    /// Whether sparse words are taken in groups of eight.
    const EIGHTS: bool = false;

    /// Number of frames of a list that are written directly into the list. Frames beyond it are
    /// gathered first and appended in pieces.
    const IN_PLACE: usize;

    /// Writes `base` plus the number of each set bit of `bits` to `room`, ascending. Returns how
    /// many it wrote. The rest of `room` is undefined afterwards.
    fn expand(self, bits: u64, base: u32, room: &mut [u32; 64]) -> usize;

    /// As [`expand`](Self::expand), but writes frames. It initializes as many places as it returns.
    fn write(self, bits: u64, base: u64, room: &mut WordFrames) -> usize;

    /// Takes the words `base` plus each offset and leaves zeros. Writes the number of each of their
    /// bits, ascending, as [`expand`](Self::expand) does; the number of a word's first bit is `64 *
    /// (offset - first)`. Returns how many it wrote. Returns `None` and changes nothing if a word
    /// has more than two bits, or if the CPU lacks fast instructions for this.
    fn expand_eight(
        self,
        _words: &mut [AtomicU64],
        _base: usize,
        _offsets: &[u32; 8],
        _first: u32,
        _room: &mut [u32; 16],
    ) -> Option<usize> {
        None
    }

    /// As [`expand_eight`](Self::expand_eight), but writes frames. `first` is an offset, and the
    /// first frame of the word at that offset.
    fn write_eight(
        self,
        _words: &mut [AtomicU64],
        _base: usize,
        _offsets: &[u32; 8],
        _first: (u32, u64),
        _room: &mut [MaybeUninit<Gfn>; 16],
    ) -> Option<usize> {
        None
    }

    /// Writes consecutive frames from `first` on to all of `room`.
    fn write_range(self, first: u64, room: &mut [MaybeUninit<Gfn>]);

    /// Appends frames to a list.
    fn append(self, out: &mut Vec<Gfn>, frames: &[Gfn]);

    /// Appends `len` consecutive frames from `first` on to a list.
    fn append_range(self, out: &mut Vec<Gfn>, first: u64, len: usize);

    /// Prefetches a word.
    fn prefetch(self, word: &AtomicU64);
}

/// Work that is compiled once for each level. `run` and everything that it calls must be inlined,
/// or it is not compiled with the instructions of the level.
pub(in super::super) trait SimdJob {
    fn run<K: Simd>(self, simd: K);
}

/// The level for any CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Portable;

impl Simd for Portable {
    const IN_PLACE: usize = usize::MAX;

    #[inline(always)]
    fn expand(self, bits: u64, base: u32, room: &mut [u32; 64]) -> usize {
        each_bit(bits, room, |place, bit| *place = base.wrapping_add(bit))
    }

    #[inline(always)]
    fn write(self, bits: u64, base: u64, room: &mut WordFrames) -> usize {
        each_bit(bits, room, |place, bit| {
            place.write(Gfn(base.wrapping_add(u64::from(bit))));
        })
    }

    #[inline(always)]
    fn write_range(self, first: u64, room: &mut [MaybeUninit<Gfn>]) {
        room.iter_mut().zip(first..).for_each(|(place, frame)| {
            place.write(Gfn(frame));
        });
    }

    #[inline(always)]
    fn append(self, out: &mut Vec<Gfn>, frames: &[Gfn]) {
        out.extend_from_slice(frames);
    }

    #[inline(always)]
    fn append_range(self, out: &mut Vec<Gfn>, first: u64, len: usize) {
        out.extend((first..first + len as u64).map(Gfn));
    }

    #[inline(always)]
    fn prefetch(self, word: &AtomicU64) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a prefetch of a word that exists. Every x86-64 CPU has the instruction.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(word).cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = word;
    }
}

/// Puts the number of each set bit into a place, ascending, and returns how many there are. It puts
/// four or eight numbers at a time, whether there are as many or not: one or two branches for each
/// word instead of one for each bit.
#[inline(always)]
fn each_bit<T>(mut bits: u64, room: &mut [T; 64], put: impl Fn(&mut T, u32)) -> usize {
    if bits == u64::MAX {
        room.iter_mut().zip(0..).for_each(|(place, bit)| put(place, bit));
        return 64;
    }
    let count = bits.count_ones() as usize;
    let mut next = |place: &mut T| {
        put(place, bits.trailing_zeros());
        bits &= bits.wrapping_sub(1);
    };
    let (four, rest) = room.split_at_mut(4);
    four.iter_mut().for_each(&mut next);
    for (eight, done) in rest.chunks_mut(8).zip((4..).step_by(8)) {
        if count <= done {
            break;
        }
        eight.iter_mut().for_each(&mut next);
    }
    count
}
