//! The spare capacity of a list, into which a walk writes frames.

use std::mem::MaybeUninit;

use super::portable::Simd;
use crate::Gfn;
use crate::sync::AtomicU64;

/// The spare capacity of a list while it is being filled. It never allocates: frames without room
/// are not written.
pub(in super::super) struct SpareRoom<'l> {
    list: &'l mut Vec<Gfn>,
    /// The places past the list's end, of which the first `len` are initialized.
    places: *mut MaybeUninit<Gfn>,
    count: usize,
    len: usize,
}

impl<'l> SpareRoom<'l> {
    /// Creates room of at most `bound` places of the list's spare capacity.
    #[inline(always)]
    pub(in super::super) fn new(list: &'l mut Vec<Gfn>, bound: usize) -> Self {
        let spare = list.spare_capacity_mut();
        let (places, count) = (spare.as_mut_ptr(), spare.len().min(bound));
        Self { list, places, count, len: 0 }
    }

    /// Returns the number of frames for which there is room.
    #[inline(always)]
    pub(in super::super) fn left(&self) -> usize {
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
    pub(in super::super) fn write(&mut self, simd: impl Simd, bits: u64, base: u64) {
        if let Some(room) = self.free().first_chunk_mut() {
            self.len += simd.write(bits, base, room);
        }
    }

    /// As [`write`](Self::write), if `bits` has at most two bits and there is room for two frames.
    /// Returns whether it wrote them.
    #[inline(always)]
    pub(in super::super) fn write_two(&mut self, bits: u64, base: u64) -> bool {
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
    pub(in super::super) fn write_eight(
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
    pub(in super::super) fn write_range(&mut self, simd: impl Simd, first: u64, len: usize) {
        if let Some(room) = self.free().get_mut(..len) {
            simd.write_range(first, room);
            self.len += len;
        }
    }

    /// Adds the frames that were written to the list.
    #[inline(always)]
    pub(in super::super) fn commit(self) {
        let len = self.list.len() + self.len;
        // SAFETY: `len` counts places from the list's end on. They lie within its capacity and are
        // initialized.
        unsafe { self.list.set_len(len) };
    }
}
