//! Turns set bits into numbers, the one step of a walk that is worth vector instructions. There are
//! three levels: CPUs with AVX-512 VBMI2, x86-64 with BMI, and any other. This module and `x86.rs`
//! below it contain all unsafe code of the crate. The tests below compare every level with the
//! portable one.
#![allow(
    unsafe_code,
    reason = "vector instructions and the spare capacity of lists; each block says why it is sound"
)]

use std::mem::MaybeUninit;

use crate::Gfn;
use crate::sync::AtomicU64;

/// Room for the frames of one word.
type Places = [MaybeUninit<Gfn>; 64];

/// The operations that a walk needs from the CPU.
pub(super) trait Simd: Copy {
    /// Whether sparse words are taken in groups of eight.
    const EIGHTS: bool = false;

    /// Number of frames of a list that are written directly into the list. Frames beyond it are
    /// gathered first and appended in pieces.
    const IN_PLACE: usize;

    /// Writes `base` plus the number of each set bit of `bits` to `room`, ascending. Returns how
    /// many it wrote. The rest of `room` is undefined afterwards.
    fn expand(self, bits: u64, base: u32, room: &mut [u32; 64]) -> usize;

    /// As [`expand`](Self::expand), but writes frames. It initializes as many places as it returns.
    fn write(self, bits: u64, base: u64, room: &mut Places) -> usize;

    /// Takes the words `base` plus each offset and leaves zeros. Writes the number of each of their
    /// bits, ascending, as [`expand`](Self::expand) does; the number of a word's first bit is 64
    /// times its offset minus `first`. Returns how many it wrote. Returns `None` and changes
    /// nothing if a word has more than two bits, or if the CPU lacks fast instructions for this.
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

    /// As [`expand_eight`](Self::expand_eight), but writes frames. `base` is the frame at offset
    /// `first`.
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

/// The spare capacity of a list while it is being filled. It never allocates: frames without room
/// are not written.
pub(super) struct Room<'l> {
    list: &'l mut Vec<Gfn>,
    /// The places behind the list's end, of which the first `len` are initialized.
    places: *mut MaybeUninit<Gfn>,
    count: usize,
    len: usize,
}

impl<'l> Room<'l> {
    /// Creates room of at most `bound` places of the list's spare capacity.
    #[inline(always)]
    pub(super) fn new(list: &'l mut Vec<Gfn>, bound: usize) -> Self {
        let spare = list.spare_capacity_mut();
        let (places, count) = (spare.as_mut_ptr(), spare.len().min(bound));
        Self { list, places, count, len: 0 }
    }

    /// Returns the number of frames for which there is room.
    #[inline(always)]
    pub(super) fn left(&self) -> usize {
        self.count - self.len
    }

    #[inline(always)]
    fn free(&mut self) -> &mut [MaybeUninit<Gfn>] {
        // SAFETY: `len` is at most `count`, and there are `count` places.
        let start = unsafe { self.places.add(self.len) };
        // SAFETY: this is the rest of the list's spare capacity, which is exclusively borrowed with
        // the list.
        unsafe { std::slice::from_raw_parts_mut(start, self.count - self.len) }
    }

    /// Writes `base` plus the number of each set bit of `bits`, if there is room for 64 frames.
    #[inline(always)]
    pub(super) fn write(&mut self, simd: impl Simd, bits: u64, base: u64) {
        if let Some(room) = self.free().first_chunk_mut() {
            self.len += simd.write(bits, base, room);
        }
    }

    /// As [`write`](Self::write), if `bits` has at most two bits and there is room for two frames.
    /// Returns whether it wrote them.
    #[inline(always)]
    pub(super) fn write_two(&mut self, bits: u64, base: u64) -> bool {
        let second = bits & bits.wrapping_sub(1);
        if second & second.wrapping_sub(1) != 0 {
            return false;
        }
        let Some([one, two]) = self.free().first_chunk_mut() else { return false };
        one.write(Gfn(base.wrapping_add(u64::from(bits.trailing_zeros()))));
        two.write(Gfn(base.wrapping_add(u64::from(second.trailing_zeros()))));
        // At most two, as checked above.
        self.len += bits.count_ones() as usize;
        true
    }

    /// Calls [`Simd::write_eight`] if there is room for sixteen frames. Returns whether it wrote
    /// them.
    #[inline(always)]
    pub(super) fn write_eight(
        &mut self,
        simd: impl Simd,
        words: &mut [AtomicU64],
        base: usize,
        offsets: &[u32; 8],
        first: (u32, u64),
    ) -> bool {
        let Some(room) = self.free().first_chunk_mut() else { return false };
        let written = simd.write_eight(words, base, offsets, first, room);
        self.len += written.unwrap_or(0);
        written.is_some()
    }

    /// Writes `len` consecutive frames from `first` on, if there is room for them.
    #[inline(always)]
    pub(super) fn write_range(&mut self, simd: impl Simd, first: u64, len: usize) {
        if let Some(room) = self.free().get_mut(..len) {
            simd.write_range(first, room);
            self.len += len;
        }
    }

    /// Adds the frames that were written to the list.
    #[inline(always)]
    pub(super) fn keep(self) {
        let len = self.list.len() + self.len;
        // SAFETY: `len` counts places from the list's end on. They lie within its capacity and are
        // initialized.
        unsafe { self.list.set_len(len) };
    }
}

/// Work that is compiled once for each level. `run` and everything that it calls must be inlined,
/// or it is not compiled with the instructions of the level.
pub(super) trait Job {
    fn run<K: Simd>(self, simd: K);
}

/// The SIMD levels, best last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SimdLevel {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Bmi(x86::Bmi),
    #[cfg(target_arch = "x86_64")]
    Avx512(x86::Avx512),
}

impl SimdLevel {
    /// Returns every level that this CPU supports.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        let portable = std::iter::once(Self::Portable);
        #[cfg(target_arch = "x86_64")]
        {
            let bmi = x86::Bmi::detect().map(Self::Bmi);
            portable.chain(bmi).chain(x86::Avx512::detect().map(Self::Avx512))
        }
        #[cfg(not(target_arch = "x86_64"))]
        portable
    }

    /// Returns the best level for this CPU.
    pub(super) fn best() -> Self {
        Self::all().last().unwrap_or(Self::Portable)
    }

    pub(super) fn run(self, job: impl Job) {
        match self {
            Self::Portable => job.run(Portable),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a `Bmi` exists only on CPUs with the instructions for which `with_bmi` is
            // compiled.
            Self::Bmi(bmi) => unsafe { x86::with_bmi(job, bmi) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: an `Avx512` exists only on CPUs with the instructions for which `with_avx512`
            // is compiled.
            Self::Avx512(avx) => unsafe { x86::with_avx512(job, avx) },
        }
    }
}

/// The level for any CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Portable;

impl Simd for Portable {
    const IN_PLACE: usize = usize::MAX;

    #[inline(always)]
    fn expand(self, bits: u64, base: u32, room: &mut [u32; 64]) -> usize {
        each_bit(bits, room, |place, bit| *place = base.wrapping_add(bit))
    }

    #[inline(always)]
    fn write(self, bits: u64, base: u64, room: &mut Places) -> usize {
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

#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;
