//! The SIMD level of x86-64 with AVX-512. Code that needs it takes an `Avx512`, which exists only
//! after CPU detection. Compiled by Rust 1.89 and later, see `build.rs`.

#![allow(clippy::incompatible_msrv, reason = "older compilers leave this module out")]

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::bmi::Bmi;
use super::portable::{Portable, Simd, SimdJob, WordFrames};
use crate::Gfn;
use crate::sync::AtomicU64;

/// A CPU with AVX-512 VBMI2 and VPOPCNTDQ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) struct Avx512(());

impl Avx512 {
    pub(super) fn detect() -> Option<Self> {
        let has_features = Bmi::detect().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vpopcntdq")
            && is_x86_feature_detected!("avx512vbmi2");
        has_features.then_some(Self(()))
    }
}

#[target_feature(
    enable = "bmi1,bmi2,lzcnt,popcnt,avx512f,avx512bw,avx512vl,avx512vbmi2,avx512vpopcntdq"
)]
pub(super) fn with_avx512(job: impl SimdJob, avx: Avx512) {
    job.run(avx);
}

/// The numbers 0 to 63, one byte each.
const NUMBERS: [u8; 64] = {
    let mut numbers = [0; 64];
    let mut i = 0;
    while i < 64 {
        numbers[i] = i as u8;
        i += 1;
    }
    numbers
};

impl Simd for Avx512 {
    const EIGHTS: bool = cfg!(not(any(driftline_loom, driftline_shuttle)));
    const IN_PLACE: usize = STREAM_FROM;

    /// Compresses the numbers 0 to 63 by the bits, and widens them sixteen at a time.
    #[inline(always)]
    fn expand(self, bits: u64, base: u32, room: &mut [u32; 64]) -> usize {
        // SAFETY: `self` exists only if the CPU has the features (here and below).
        unsafe { expand(bits, base, room) }
    }

    #[inline(always)]
    fn write(self, bits: u64, base: u64, room: &mut WordFrames) -> usize {
        // SAFETY: as above.
        unsafe { write(bits, base, room) }
    }

    #[cfg(not(any(driftline_loom, driftline_shuttle)))]
    #[inline(always)]
    fn expand_eight(
        self,
        words: &mut [AtomicU64],
        base: usize,
        offsets: &[u32; 8],
        first: u32,
        room: &mut [u32; 16],
    ) -> Option<usize> {
        // SAFETY: as above.
        unsafe { expand_eight(&mut words[base..], offsets, first, room) }
    }

    #[cfg(not(any(driftline_loom, driftline_shuttle)))]
    #[inline(always)]
    fn write_eight(
        self,
        words: &mut [AtomicU64],
        base: usize,
        offsets: &[u32; 8],
        first: (u32, u64),
        room: &mut [MaybeUninit<Gfn>; 16],
    ) -> Option<usize> {
        // SAFETY: as above.
        unsafe { write_eight(&mut words[base..], offsets, first, room) }
    }

    #[inline(always)]
    fn write_range(self, first: u64, room: &mut [MaybeUninit<Gfn>]) {
        // SAFETY: as above.
        unsafe { write_range(first, room) };
    }

    #[inline(always)]
    fn append(self, out: &mut Vec<Gfn>, frames: &[Gfn]) {
        if frames.len() < PIECE || out.len() + frames.len() < STREAM_FROM {
            return Portable.append(out, frames);
        }
        // SAFETY: as above.
        unsafe { stream_frames(out, frames) };
    }

    #[inline(always)]
    fn append_range(self, out: &mut Vec<Gfn>, first: u64, len: usize) {
        if len < PIECE || out.len() + len < STREAM_FROM {
            return Portable.append_range(out, first, len);
        }
        // SAFETY: as above.
        unsafe { stream_range(out, first, len) };
    }

    #[inline(always)]
    fn prefetch(self, word: &AtomicU64) {
        Portable.prefetch(word);
    }
}

#[inline]
#[target_feature(enable = "popcnt,avx512f,avx512bw,avx512vl,avx512vbmi2")]
fn expand(bits: u64, base: u32, room: &mut [u32; 64]) -> usize {
    let count = bits.count_ones() as usize;
    // SAFETY: 64 bytes are read from an array of 64 bytes.
    let numbers = unsafe { _mm512_loadu_si512(NUMBERS.as_ptr().cast()) };
    let packed = _mm512_maskz_compress_epi8(bits, numbers);
    let base = _mm512_set1_epi32(base.cast_signed());
    let (sixteens, _) = room.as_chunks_mut::<16>();
    let put = |place: &mut [u32; 16], bytes: __m128i| {
        let wide = _mm512_add_epi32(_mm512_cvtepu8_epi32(bytes), base);
        // SAFETY: 64 bytes are written to an array of sixteen words of four bytes.
        unsafe { _mm512_storeu_si512(place.as_mut_ptr().cast(), wide) };
    };
    put(&mut sixteens[0], _mm512_castsi512_si128(packed));
    if count > 16 {
        put(&mut sixteens[1], _mm512_extracti32x4_epi32::<1>(packed));
        if count > 32 {
            put(&mut sixteens[2], _mm512_extracti32x4_epi32::<2>(packed));
            put(&mut sixteens[3], _mm512_extracti32x4_epi32::<3>(packed));
        }
    }
    count
}

/// As `expand`, but widens eight numbers at a time.
#[inline]
#[target_feature(enable = "popcnt,avx512f,avx512bw,avx512vl,avx512vbmi2")]
fn write(bits: u64, base: u64, room: &mut WordFrames) -> usize {
    let count = bits.count_ones() as usize;
    // SAFETY: 64 bytes are read from an array of 64 bytes.
    let numbers = unsafe { _mm512_loadu_si512(NUMBERS.as_ptr().cast()) };
    let packed = _mm512_maskz_compress_epi8(bits, numbers);
    let base = _mm512_set1_epi64(base.cast_signed());
    let (eights, _) = room.as_chunks_mut::<8>();
    let mut put = |place: usize, bytes: __m128i| {
        store(&mut eights[place], _mm512_add_epi64(_mm512_cvtepu8_epi64(bytes), base));
        let bytes = _mm_unpackhi_epi64(bytes, bytes);
        store(&mut eights[place + 1], _mm512_add_epi64(_mm512_cvtepu8_epi64(bytes), base));
    };
    put(0, _mm512_castsi512_si128(packed));
    if count > 16 {
        put(2, _mm512_extracti32x4_epi32::<1>(packed));
        if count > 32 {
            put(4, _mm512_extracti32x4_epi32::<2>(packed));
            put(6, _mm512_extracti32x4_epi32::<3>(packed));
        }
    }
    count
}

/// The bits of eight words with at most two bits each.
#[cfg(not(any(driftline_loom, driftline_shuttle)))]
struct SparseWords {
    /// The number of the word's first bit in the lower half of a lane, that of the second in the
    /// upper half.
    bits: __m512i,
    /// Which halves are valid.
    mask: u16,
}

/// Takes eight words, or none if one has more than two bits. The number of a word's first bit is
/// `64 * (offset - first)`.
#[cfg(not(any(driftline_loom, driftline_shuttle)))]
#[inline]
#[target_feature(enable = "bmi2,avx512f,avx512vl,avx512vpopcntdq")]
fn take_eight(words: &mut [AtomicU64], offsets: &[u32; 8], first: u32) -> Option<SparseWords> {
    let offset_list = offsets;
    // SAFETY: 32 bytes are read from an array of eight words of four bytes.
    let offsets = unsafe { _mm256_loadu_si256(offsets.as_ptr().cast()) };
    let places = _mm512_cvtepu32_epi64(offsets);
    let len = _mm512_set1_epi64(words.len() as i64);
    if _mm512_cmplt_epu64_mask(places, len) != 0xff {
        return None;
    }
    let start = words.as_mut_ptr().cast::<i64>();
    // SAFETY: all places are below the length, and the words are exclusively borrowed, so they can
    // be accessed like plain words.
    let found = unsafe { _mm512_i64gather_epi64::<8>(places, start) };
    let ones = _mm512_set1_epi64(-1);
    let below = _mm512_add_epi64(found, ones);
    let second = _mm512_and_si512(found, below);
    let below_second = _mm512_add_epi64(second, ones);
    if _mm512_test_epi64_mask(second, below_second) != 0 {
        return None;
    }
    for offset in offset_list {
        // SAFETY: as above.
        unsafe { *words.get_unchecked_mut(*offset as usize).get_mut() = 0 };
    }
    let base = _mm256_sub_epi32(offsets, _mm256_set1_epi32(first.cast_signed()));
    let base = _mm512_cvtepu32_epi64(_mm256_slli_epi32::<6>(base));
    let number = _mm512_add_epi64(base, _mm512_popcnt_epi64(_mm512_andnot_si512(found, below)));
    let (here, twice) =
        (_mm512_test_epi64_mask(found, found), _mm512_test_epi64_mask(second, second));
    let mut mask = _pdep_u32(u32::from(here), 0x5555);
    let mut bits = number;
    if twice != 0 {
        mask |= _pdep_u32(u32::from(twice), 0xaaaa);
        let number = _mm512_popcnt_epi64(_mm512_andnot_si512(second, below_second));
        let number = _mm512_slli_epi64::<32>(_mm512_add_epi64(base, number));
        bits = _mm512_or_si512(bits, number);
    }
    Some(SparseWords { bits, mask: mask as u16 })
}

#[cfg(not(any(driftline_loom, driftline_shuttle)))]
#[inline]
#[target_feature(enable = "popcnt,bmi2,avx512f,avx512vl,avx512vpopcntdq")]
fn expand_eight(
    words: &mut [AtomicU64],
    offsets: &[u32; 8],
    first: u32,
    room: &mut [u32; 16],
) -> Option<usize> {
    let few = take_eight(words, offsets, first)?;
    let packed = _mm512_maskz_compress_epi32(few.mask, few.bits);
    // SAFETY: 64 bytes are written to an array of sixteen words of four bytes.
    unsafe { _mm512_storeu_si512(room.as_mut_ptr().cast(), packed) };
    Some(few.mask.count_ones() as usize)
}

#[cfg(not(any(driftline_loom, driftline_shuttle)))]
#[inline]
#[target_feature(enable = "popcnt,bmi2,avx512f,avx512vl,avx512vpopcntdq")]
fn write_eight(
    words: &mut [AtomicU64],
    offsets: &[u32; 8],
    first: (u32, u64),
    room: &mut [MaybeUninit<Gfn>; 16],
) -> Option<usize> {
    let few = take_eight(words, offsets, first.0)?;
    let base = _mm512_set1_epi64(first.1.cast_signed());
    let (eights, _) = room.as_chunks_mut::<8>();
    if few.mask == 0x5555 {
        // The usual case: one bit in each word.
        store(&mut eights[0], _mm512_add_epi64(few.bits, base));
        return Some(8);
    }
    let packed = _mm512_maskz_compress_epi32(few.mask, few.bits);
    let low = _mm512_cvtepu32_epi64(_mm512_castsi512_si256(packed));
    let high = _mm512_cvtepu32_epi64(_mm512_extracti64x4_epi64::<1>(packed));
    store(&mut eights[0], _mm512_add_epi64(low, base));
    store(&mut eights[1], _mm512_add_epi64(high, base));
    Some(few.mask.count_ones() as usize)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(place: &mut [MaybeUninit<Gfn>; 8], frames: __m512i) {
    // SAFETY: 64 bytes are written to eight places of eight bytes.
    unsafe { _mm512_storeu_si512(place.as_mut_ptr().cast(), frames) };
}

/// Returns `first` and the seven frames after it.
#[inline]
#[target_feature(enable = "avx512f")]
fn eight_from(first: u64) -> __m512i {
    let numbers = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
    _mm512_add_epi64(numbers, _mm512_set1_epi64(first.cast_signed()))
}

/// Writes whole cache lines, and both ends with stores of the same width that overlap them.
#[inline]
#[target_feature(enable = "avx512f")]
fn write_range(first: u64, room: &mut [MaybeUninit<Gfn>]) {
    let len = room.len();
    let Some(head) = room.first_chunk_mut() else { return Portable.write_range(first, room) };
    store(head, eight_from(first));
    let unaligned = room.as_ptr().align_offset(64).min(len);
    let mut frames = eight_from(first + unaligned as u64);
    for line in room[unaligned..].as_chunks_mut().0 {
        store(line, frames);
        frames = _mm512_add_epi64(frames, _mm512_set1_epi64(8));
    }
    if let Some(tail) = room.last_chunk_mut() {
        store(tail, eight_from(first + len as u64 - 8));
    }
}

/// Length, in frames, from which on (2 MiB) a list has outgrown a core's own cache and is written
/// with non-temporal stores. This halves the memory traffic, since lines are not read before they
/// are overwritten.
const STREAM_FROM: usize = 256 << 10;

/// Shorter pieces are written through the cache even then, because each piece needs a fence.
const PIECE: usize = 1024;

#[target_feature(enable = "avx512f")]
fn stream_frames(out: &mut Vec<Gfn>, frames: &[Gfn]) {
    let eight = |at: usize| {
        let (eight, _) = frames[at..].as_chunks::<8>();
        // SAFETY: 64 bytes are read from an array of eight frames of eight bytes.
        unsafe { _mm512_loadu_si512(eight[0].as_ptr().cast()) }
    };
    stream(out, frames.len(), |at| frames[at].0, eight);
}

#[target_feature(enable = "avx512f")]
fn stream_range(out: &mut Vec<Gfn>, first: u64, len: usize) {
    let one = |at: usize| first + at as u64;
    stream(out, len, one, |at| eight_from(one(at)));
}

/// Appends `len` frames with non-temporal stores. `one` returns the frame at a position. `eight`
/// returns the eight frames from a position on, and is called only if there are eight.
#[inline]
#[target_feature(enable = "avx512f")]
fn stream(
    out: &mut Vec<Gfn>,
    len: usize,
    one: impl Fn(usize) -> u64,
    eight: impl Fn(usize) -> __m512i,
) {
    out.reserve(len);
    let room = &mut out.spare_capacity_mut()[..len];
    let unaligned = room.as_ptr().align_offset(64).min(len);
    let (head, rest) = room.split_at_mut(unaligned);
    let (lines, tail) = rest.as_chunks_mut::<8>();
    let in_lines = unaligned + lines.len() * 8;
    for (place, at) in head.iter_mut().zip(0..) {
        place.write(Gfn(one(at)));
    }
    for (line, at) in lines.iter_mut().zip((unaligned..).step_by(8)) {
        // SAFETY: 64 bytes are written to eight places of eight bytes. Their address is a multiple
        // of 64, because the first places were left to `head`.
        unsafe { _mm512_stream_si512(line.as_mut_ptr().cast(), eight(at)) };
    }
    for (place, at) in tail.iter_mut().zip(in_lines..) {
        place.write(Gfn(one(at)));
    }
    // Nothing else orders non-temporal stores. The thread that receives the list must see them.
    _mm_sfence();
    let len = out.len() + len;
    // SAFETY: room for all frames was reserved, and the three loops above have written it.
    unsafe { out.set_len(len) };
}
