//! Every SIMD level against the portable one, and the portable one against plain arithmetic.

use super::*;
use crate::Gfn;
use crate::sync::AtomicU64;

struct ExpandJob<'a>(u64, u32, &'a mut Vec<u32>);

impl SimdJob for ExpandJob<'_> {
    #[inline(always)]
    fn run<K: Simd>(self, simd: K) {
        let mut room = [0xdead; 64];
        let count = simd.expand(self.0, self.1, &mut room);
        self.2.extend_from_slice(&room[..count]);
    }
}

/// The same through a list's room, twice for words of at most two bits.
struct WriteJob<'a>(u64, u64, &'a mut Vec<Gfn>);

impl SimdJob for WriteJob<'_> {
    #[inline(always)]
    fn run<K: Simd>(self, simd: K) {
        let mut room = SpareRoom::new(self.2, usize::MAX);
        let few = room.write_two(self.0, self.1);
        assert_eq!(few, self.0.count_ones() <= 2);
        if !few {
            room.write(simd, self.0, self.1);
        }
        room.write(simd, self.0, self.1);
        room.commit();
    }
}

/// A range into a list's room, as far as there is room.
struct WriteRangeJob<'a>(&'a mut Vec<Gfn>, u64, usize, usize);

impl SimdJob for WriteRangeJob<'_> {
    #[inline(always)]
    fn run<K: Simd>(self, simd: K) {
        let mut room = SpareRoom::new(self.0, self.3);
        room.write_range(simd, self.1, self.2);
        room.commit();
    }
}

/// The frames, and then as many again as a range.
struct AppendJob<'a>(&'a mut Vec<Gfn>, &'a [Gfn]);

impl SimdJob for AppendJob<'_> {
    #[inline(always)]
    fn run<K: Simd>(self, simd: K) {
        simd.append(self.0, self.1);
        let last = self.1.last().unwrap().0;
        simd.append_range(self.0, last + 1, self.1.len());
    }
}

#[test]
fn every_simd_level_finds_the_set_bits() {
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
        let expected: Vec<u32> = (0..64).filter(|b| bits >> b & 1 == 1).map(|b| base + b).collect();
        for simd in SimdLevel::all() {
            let mut found = Vec::new();
            simd.run(ExpandJob(bits, base, &mut found));
            assert_eq!(found, expected, "{simd:?} of {bits:#x}");
            let (far, mut list) = (1 << 40 | u64::from(base), Vec::with_capacity(192));
            simd.run(WriteJob(bits, far, &mut list));
            let expected = |bit: &u64| bits >> bit & 1 == 1;
            let expected: Vec<Gfn> = (0..64).filter(expected).map(|b| Gfn(far + b)).collect();
            assert_eq!(list, [&expected[..], &expected].concat(), "{simd:?} of {bits:#x}");
        }
    }
}

#[test]
fn every_simd_level_appends_to_any_list() {
    // Under miri there is one level, and half a million frames take too long.
    let rounds = if cfg!(miri) { 4 } else { 400 };
    for simd in SimdLevel::all() {
        let mut list = Vec::new();
        let base = 1u64 << 35;
        let mut next = base;
        for round in 0..rounds {
            let piece: Vec<Gfn> = (next..next + 997 + round % 23).map(Gfn).collect();
            simd.run(AppendJob(&mut list, &piece));
            next += 2 * piece.len() as u64;
        }
        assert!(list.iter().copied().eq((base..next).map(Gfn)), "{simd:?}");
    }
}

#[test]
fn every_simd_level_writes_ranges_within_the_room() {
    for simd in SimdLevel::all() {
        let mut list = Vec::with_capacity(2000);
        let (places, mut next) = (list.as_ptr(), 1u64 << 40);
        for len in [1, 7, 8, 9, 64, 65, 128, 640].into_iter().chain(10..18) {
            simd.run(WriteRangeJob(&mut list, next, len, len - 1));
            assert_eq!(list.len() as u64, next - (1 << 40), "{simd:?}: written without room");
            simd.run(WriteRangeJob(&mut list, next, len, len));
            next += len as u64;
        }
        simd.run(WriteRangeJob(&mut list, next, 2000, usize::MAX));
        assert!(list.iter().copied().eq((1 << 40..next).map(Gfn)), "{simd:?}");
        assert_eq!((list.as_ptr(), list.capacity()), (places, 2000), "{simd:?}");
    }
}

/// Eight words, to numbers and to frames.
struct EightWordsJob<'a> {
    words: &'a [u64],
    base: usize,
    offsets: [u32; 8],
    /// The numbers found, if the words were taken, and the words afterwards; then the same for
    /// frames.
    found: Vec<(Option<Vec<u64>>, Vec<u64>)>,
    attempted: bool,
}

impl SimdJob for &mut EightWordsJob<'_> {
    #[inline(always)]
    fn run<K: Simd>(self, simd: K) {
        let fresh = || self.words.iter().map(|word| AtomicU64::new(*word)).collect::<Vec<_>>();
        let after = |words: Vec<AtomicU64>| words.into_iter().map(AtomicU64::into_inner).collect();
        let (base, first) = (self.base, self.offsets[0]);
        let (mut words, mut room) = (fresh(), [0xdead; 16]);
        let count = simd.expand_eight(&mut words, base, &self.offsets, first, &mut room);
        let numbers = |count| room[..count].iter().map(|number| u64::from(*number)).collect();
        let expanded = (count.map(numbers), after(words));
        let (mut words, mut list) = (fresh(), Vec::with_capacity(16));
        let mut room = SpareRoom::new(&mut list, 16);
        let start = (first, 1 << 40);
        let written = room.write_eight(simd, &mut words, base, &self.offsets, start);
        room.commit();
        let frames = written.then(|| list.iter().map(|frame| frame.0 - (1 << 40)).collect());
        self.attempted = K::EIGHTS;
        self.found = vec![expanded, (frames, after(words))];
    }
}

#[test]
fn only_eight_sparse_words_are_taken_together() {
    let mut seed = 1u64;
    let mut random = |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 33) % below
    };
    let (mut done, mut refused) = (0, 0);
    for round in 0..if cfg!(miri) { 8 } else { 2000 } {
        let mut word = || {
            (0..random(if round % 4 == 0 { 5 } else { 3 }))
                .fold(0, |bits, _| bits | 1 << random(64))
        };
        let words: Vec<u64> = (0..64).map(|_| word()).collect();
        let base = random(8) as usize;
        let mut next = 0;
        let offsets = [(); 8].map(|()| {
            next += 1 + random(7) as u32;
            next
        });
        let place = |offset: &u32| base + *offset as usize;
        let few = |offset: &u32| words.get(place(offset)).is_some_and(|w| w.count_ones() <= 2);
        let possible = offsets.iter().all(few);
        for simd in SimdLevel::all() {
            let mut eight =
                EightWordsJob { words: &words, base, offsets, found: vec![], attempted: false };
            simd.run(&mut eight);
            for (found, after) in eight.found {
                assert_eq!(found.is_some(), possible && eight.attempted, "{simd:?}");
                let Some(found) = found else {
                    assert_eq!(after, words, "{simd:?}");
                    refused += 1;
                    continue;
                };
                let bits = |o: &u32| {
                    let (first, bits) = (u64::from(o - offsets[0]) * 64, words[place(o)]);
                    (0..64).filter(move |b| bits >> b & 1 == 1).map(move |b| first + b)
                };
                assert_eq!(found, offsets.iter().flat_map(bits).collect::<Vec<_>>(), "{simd:?}");
                let mut expected = words.clone();
                offsets.iter().for_each(|offset| expected[place(offset)] = 0);
                assert_eq!(after, expected, "{simd:?}");
                done += 1;
            }
        }
    }
    let eights = cfg!(target_arch = "x86_64") && !cfg!(miri) && SimdLevel::all().count() == 3;
    assert!(refused > 0 && (done > 0 || !eights), "{done} done, {refused} refused");
}
