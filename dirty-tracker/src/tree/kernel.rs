//! How set bits become numbers, the one step of a walk that is worth vector instructions: for CPUs
//! with AVX-512 VBMI2, for x86-64 with BMI, and for any other. The only file of this crate with
//! unsafe code; `mod tests` below holds every kernel to the portable one.
#![allow(unsafe_code, reason = "vector instructions; each block says why it is sound")]

use std::ops::Range;

use crate::Gfn;
use crate::sync::AtomicU64;

/// What a walk asks of the CPU.
pub(super) trait Kernel: Copy {
    /// Writes `base` plus the number of each set bit of `bits` to `room`, ascending, and returns how
    /// many. What lies behind them in `room` is undefined afterwards.
    fn expand(self, bits: u64, base: u32, room: &mut [u32; 64]) -> usize;

    /// Appends the frames `base` plus each offset to a list.
    fn append(self, out: &mut Vec<Gfn>, base: u64, offsets: &[u32]);

    /// Begins to load a word.
    fn prefetch(self, word: &AtomicU64);

    /// Appends consecutive frames to a list.
    fn append_range(self, out: &mut Vec<Gfn>, frames: Range<u64>);
}

/// Work that is compiled once for each kernel. `run` and all that it calls must be inlined, or it
/// is not compiled with the kernel's instructions.
pub(super) trait Job {
    fn run<K: Kernel>(self, kernel: K);
}

/// The kernels, best last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Choice {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Bmi(x86::Bmi),
    #[cfg(target_arch = "x86_64")]
    Avx512(x86::Avx512),
}

impl Choice {
    /// Every kernel that this CPU can run.
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

    /// The best kernel for this CPU.
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

impl Kernel for Portable {
    /// Four or eight at a time, there or not: a branch or two a word instead of one a bit.
    #[inline(always)]
    fn expand(self, mut bits: u64, base: u32, room: &mut [u32; 64]) -> usize {
        if bits == u64::MAX {
            room.iter_mut().zip(0..).for_each(|(place, number)| *place = base + number);
            return 64;
        }
        let count = bits.count_ones() as usize;
        let mut next = |place: &mut u32| {
            *place = base.wrapping_add(bits.trailing_zeros());
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

    #[inline(always)]
    fn append(self, out: &mut Vec<Gfn>, base: u64, offsets: &[u32]) {
        out.extend(offsets.iter().map(|offset| Gfn(base + u64::from(*offset))));
    }

    #[inline(always)]
    fn append_range(self, out: &mut Vec<Gfn>, frames: Range<u64>) {
        out.extend(frames.map(Gfn));
    }

    #[inline(always)]
    fn prefetch(self, word: &AtomicU64) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a hint about a word that exists; every x86-64 has the instruction.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(word).cast()) };
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::ops::Range;

    use super::{Job, Kernel, Portable};
    use crate::Gfn;
    use crate::sync::AtomicU64;

    /// A CPU with BMI, POPCNT and LZCNT: the portable code in fewer instructions.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(in super::super) struct Bmi(());

    impl Bmi {
        pub(super) fn detect() -> Option<Self> {
            let there = is_x86_feature_detected!("bmi1")
                && is_x86_feature_detected!("bmi2")
                && is_x86_feature_detected!("lzcnt")
                && is_x86_feature_detected!("popcnt");
            there.then_some(Self(()))
        }
    }

    #[target_feature(enable = "bmi1,bmi2,lzcnt,popcnt")]
    pub(super) fn with_bmi(job: impl Job, _: Bmi) {
        job.run(Portable);
    }

    /// A CPU with AVX-512 VBMI2.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(in super::super) struct Avx512(());

    impl Avx512 {
        pub(super) fn detect() -> Option<Self> {
            let there = Bmi::detect().is_some()
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vbmi2");
            there.then_some(Self(()))
        }
    }

    #[target_feature(enable = "bmi1,bmi2,lzcnt,popcnt,avx512f,avx512bw,avx512vl,avx512vbmi2")]
    pub(super) fn with_avx512(job: impl Job, avx: Avx512) {
        job.run(avx);
    }

    /// The numbers 0 to 63, a byte each.
    const NUMBERS: [u8; 64] = {
        let mut numbers = [0; 64];
        let mut i = 0;
        while i < 64 {
            numbers[i] = i as u8;
            i += 1;
        }
        numbers
    };

    impl Kernel for Avx512 {
        /// Compresses the numbers 0 to 63 by the bits, and widens them sixteen at a time.
        #[inline(always)]
        fn expand(self, bits: u64, base: u32, room: &mut [u32; 64]) -> usize {
            // SAFETY: `self` exists only where the CPU has the features (here and below).
            unsafe { expand(bits, base, room) }
        }

        #[inline(always)]
        fn append(self, out: &mut Vec<Gfn>, base: u64, offsets: &[u32]) {
            if offsets.len() < PIECE || out.len() + offsets.len() < STREAM_FROM {
                return Portable.append(out, base, offsets);
            }
            // SAFETY: as above.
            unsafe { stream_offsets(out, base, offsets) };
        }

        #[inline(always)]
        fn prefetch(self, word: &AtomicU64) {
            Portable.prefetch(word);
        }

        #[inline(always)]
        fn append_range(self, out: &mut Vec<Gfn>, frames: Range<u64>) {
            let len = (frames.end - frames.start) as usize;
            if len < PIECE || out.len() + len < STREAM_FROM {
                return Portable.append_range(out, frames);
            }
            // SAFETY: as above.
            unsafe { stream_range(out, frames) };
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

    /// From this length on (2 MiB) a list has outgrown a core's own cache and is written past it: half the
    /// memory traffic, since lines are not read before they are overwritten.
    const STREAM_FROM: usize = 256 << 10;

    /// Shorter pieces are written through the cache all the same: each piece has to be fenced.
    const PIECE: usize = 1024;

    #[target_feature(enable = "avx512f")]
    fn stream_offsets(out: &mut Vec<Gfn>, base: u64, offsets: &[u32]) {
        let wide_base = _mm512_set1_epi64(base.cast_signed());
        let one = |at: usize| base + u64::from(offsets[at]);
        let eight = |at: usize| {
            let (eight, _) = offsets[at..].as_chunks::<8>();
            // SAFETY: 32 bytes are read from an array of eight words of four bytes.
            let eight = unsafe { _mm256_loadu_si256(eight[0].as_ptr().cast()) };
            _mm512_add_epi64(_mm512_cvtepu32_epi64(eight), wide_base)
        };
        stream(out, offsets.len(), one, eight);
    }

    #[target_feature(enable = "avx512f")]
    fn stream_range(out: &mut Vec<Gfn>, frames: Range<u64>) {
        let numbers = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
        let one = |at: usize| frames.start + at as u64;
        let eight = |at| _mm512_add_epi64(numbers, _mm512_set1_epi64(one(at).cast_signed()));
        stream(out, (frames.end - frames.start) as usize, one, eight);
    }

    /// Appends `len` frames past the cache. `one` answers with the frame at a place, `eight` with the eight
    /// from there on, and is asked only if there are eight.
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
            // SAFETY: 64 bytes are written to eight places of eight bytes, whose address is a
            // multiple of 64: the first places were left to `head`.
            unsafe { _mm512_stream_si512(line.as_mut_ptr().cast(), eight(at)) };
        }
        for (place, at) in tail.iter_mut().zip(in_lines..) {
            place.write(Gfn(one(at)));
        }
        // Streamed stores are ordered by nothing else; whoever gets the list must see them.
        _mm_sfence();
        let len = out.len() + len;
        // SAFETY: room for all was reserved and has been written, by the three loops above.
        unsafe { out.set_len(len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Expand<'a>(u64, u32, &'a mut Vec<u32>);

    impl Job for Expand<'_> {
        #[inline(always)]
        fn run<K: Kernel>(self, kernel: K) {
            let mut room = [0xdead; 64];
            let count = kernel.expand(self.0, self.1, &mut room);
            self.2.extend_from_slice(&room[..count]);
        }
    }

    /// The offsets, and then as many frames again as a range.
    struct Append<'a>(&'a mut Vec<Gfn>, u64, &'a [u32]);

    impl Job for Append<'_> {
        #[inline(always)]
        fn run<K: Kernel>(self, kernel: K) {
            kernel.append(self.0, self.1, self.2);
            let end = self.1 + u64::from(*self.2.last().unwrap()) + 1;
            kernel.append_range(self.0, end..end + self.2.len() as u64);
        }
    }

    #[test]
    fn every_kernel_finds_the_bits_that_are_set() {
        let mut seed = 1u64;
        let mut random = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            seed ^ seed >> 33
        };
        for round in 0..if cfg!(miri) { 48 } else { 2000 } {
            let sparse = random() & random() & random();
            let bits = match round % 4 {
                0 => random(),
                1 => sparse & random(),
                2 => random() | random() | random(),
                _ => [0, 1, u64::MAX, 1 << 63, u64::MAX >> 1, !1][round / 4 % 6],
            };
            let base = random() as u32 >> 1;
            let expected: Vec<u32> =
                (0..64).filter(|b| bits >> b & 1 == 1).map(|b| base + b).collect();
            for kernel in Choice::all() {
                let mut found = Vec::new();
                kernel.run(Expand(bits, base, &mut found));
                assert_eq!(found, expected, "{kernel:?} of {bits:#x}");
            }
        }
    }

    #[test]
    fn every_kernel_appends_what_it_was_given_however_long_the_list_is() {
        // Under miri there is one kernel, and half a million frames take for ever.
        let rounds = if cfg!(miri) { 4 } else { 400 };
        for kernel in Choice::all() {
            let mut list = Vec::new();
            let base = 1 << 35;
            let mut next = 0;
            for round in 0..rounds {
                let piece: Vec<u32> = (next..next + 997 + round % 23).collect();
                kernel.run(Append(&mut list, base, &piece));
                next += 2 * piece.len() as u32;
            }
            let expected = (0..u64::from(next)).map(|offset| Gfn(base + offset));
            assert!(list.iter().copied().eq(expected), "{kernel:?}");
        }
    }
}
