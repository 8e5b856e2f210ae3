//! How set bits become numbers, the one step of a walk that is worth vector instructions: for CPUs
//! with AVX-512 VBMI2, for x86-64 with BMI, and for any other. With its `x86.rs` the only module of
//! this crate with unsafe code; `mod tests` below holds every simd to the portable one.
#![allow(
    unsafe_code,
    reason = "vector instructions, and lists that are written behind their end; each block says why it is sound"
)]

use std::mem::MaybeUninit;

use crate::Gfn;
use crate::sync::AtomicU64;

/// Places for the frames of one word.
type Places = [MaybeUninit<Gfn>; 64];

/// What a walk asks of the CPU.
pub(super) trait Simd: Copy {
    /// Whether sparse words are best taken eight at once.
    const EIGHTS: bool = false;

    /// So many frames of a list are best written where they belong; what follows is best gathered,
    /// and appended in pieces.
    const IN_PLACE: usize;

    /// Writes `base` plus the number of each set bit of `bits` to `room`, ascending, and returns
    /// how many. What lies behind them in `room` is undefined afterwards.
    fn expand(self, bits: u64, base: u32, room: &mut [u32; 64]) -> usize;

    /// As [`expand`](Self::expand), to frames. As many places as it returns are initialized.
    fn write(self, bits: u64, base: u64, room: &mut Places) -> usize;

    /// Takes the words `base` plus each offset and writes for each of their bits, ascending, the
    /// number that [`expand`](Self::expand) gives it if the word's first bit is 64 times its offset
    /// less `first`. Returns how many, and leaves zeros; or changes nothing, if a word has more
    /// than two bits or the CPU can't do this well.
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

    /// As [`expand_eight`](Self::expand_eight), to frames: `base` is that of offset `first`.
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

    /// Begins to load a word.
    fn prefetch(self, word: &AtomicU64);
}

/// The room behind a list's end, being filled. Nothing is allocated: what finds no room is not
/// written.
pub(super) struct Room<'l> {
    list: &'l mut Vec<Gfn>,
    /// The places behind the list's end, of which the first `len` are initialized.
    places: *mut MaybeUninit<Gfn>,
    count: usize,
    len: usize,
}

impl<'l> Room<'l> {
    /// At most `bound` places of what the list has.
    #[inline(always)]
    pub(super) fn new(list: &'l mut Vec<Gfn>, bound: usize) -> Self {
        let spare = list.spare_capacity_mut();
        let (places, count) = (spare.as_mut_ptr(), spare.len().min(bound));
        Self { list, places, count, len: 0 }
    }

    /// How many frames find room.
    #[inline(always)]
    pub(super) fn left(&self) -> usize {
        self.count - self.len
    }

    #[inline(always)]
    fn free(&mut self) -> &mut [MaybeUninit<Gfn>] {
        // SAFETY: `len` is at most `count`, and so many places are there.
        let start = unsafe { self.places.add(self.len) };
        // SAFETY: the rest of the list's spare room, which nobody touches while it is borrowed.
        unsafe { std::slice::from_raw_parts_mut(start, self.count - self.len) }
    }

    /// Writes `base` plus the number of each set bit of `bits`, if 64 frames find room.
    #[inline(always)]
    pub(super) fn write(&mut self, simd: impl Simd, bits: u64, base: u64) {
        if let Some(room) = self.free().first_chunk_mut() {
            self.len += simd.write(bits, base, room);
        }
    }

    /// As [`write`](Self::write), if `bits` are at most two and two frames find room; whether it
    /// was so.
    #[inline(always)]
    pub(super) fn write_two(&mut self, bits: u64, base: u64) -> bool {
        let second = bits & bits.wrapping_sub(1);
        if second & second.wrapping_sub(1) != 0 {
            return false;
        }
        let Some([one, two]) = self.free().first_chunk_mut() else { return false };
        one.write(Gfn(base.wrapping_add(u64::from(bits.trailing_zeros()))));
        two.write(Gfn(base.wrapping_add(u64::from(second.trailing_zeros()))));
        // At most two, as was asked above.
        self.len += bits.count_ones() as usize;
        true
    }

    /// [`Simd::write_eight`], if sixteen frames find room; whether it was done.
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

    /// Writes `len` consecutive frames from `first` on, if they find room.
    #[inline(always)]
    pub(super) fn write_range(&mut self, simd: impl Simd, first: u64, len: usize) {
        if let Some(room) = self.free().get_mut(..len) {
            simd.write_range(first, room);
            self.len += len;
        }
    }

    /// What has been written is the list's.
    #[inline(always)]
    pub(super) fn keep(self) {
        let len = self.list.len() + self.len;
        // SAFETY: the places from the list's end on that `len` counts lie in its capacity and are
        // initialized.
        unsafe { self.list.set_len(len) };
    }
}

/// Work that is compiled once for each simd. `run` and all that it calls must be inlined, or it
/// is not compiled with the simd's instructions.
pub(super) trait Job {
    fn run<K: Simd>(self, simd: K);
}

/// The kernels, best last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SimdLevel {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Bmi(x86::Bmi),
    #[cfg(target_arch = "x86_64")]
    Avx512(x86::Avx512),
}

impl SimdLevel {
    /// Every simd that this CPU can run.
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

    /// The best simd for this CPU.
    pub(super) fn best() -> Self {
        Self::all().last().unwrap_or(Self::Portable)
    }

    pub(super) fn run(self, job: impl Job) {
        match self {
            Self::Portable => job.run(Portable),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a `Bmi` exists only on CPUs that have what `with_bmi` is compiled for.
            Self::Bmi(bmi) => unsafe { x86::with_bmi(job, bmi) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: an `Avx512` exists only on CPUs that have what `with_avx512` is compiled for.
            Self::Avx512(avx) => unsafe { x86::with_avx512(job, avx) },
        }
    }
}

/// Any CPU.
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
            // SAFETY: a hint about a word that exists; every x86-64 has the instruction.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(word).cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = word;
    }
}

/// Puts the number of each set bit to a place, ascending; returns how many. Four or eight at a
/// time, there or not: a branch or two a word instead of one a bit.
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
