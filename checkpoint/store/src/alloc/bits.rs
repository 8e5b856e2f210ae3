//! The bitmap: one bit a slot, set if the slot is used. Bits past the last slot are set, so that no
//! search finds them.

const WORD: u64 = 64;

/// A bitmap. Positions and ends are in slots; an end is one past the last slot.
#[derive(Clone, Debug, Default)]
pub(super) struct Bits {
    words: Vec<u64>,
}

/// Returns the bits of word `w` that lie in `from..to`.
fn mask(w: u64, from: u64, to: u64) -> u64 {
    let low = from.saturating_sub(w * WORD).min(WORD);
    let high = to.saturating_sub(w * WORD).min(WORD);
    if low >= high { 0 } else { (u64::MAX >> (WORD - (high - low))) << low }
}

/// Returns the positions at which `count` set bits follow one another, 1 to 64. Each step doubles
/// the number of bits that a result bit covers.
fn starts(mut bits: u128, count: u32) -> u128 {
    let mut have = 1;
    while have < count {
        let step = have.min(count - have);
        bits &= bits >> step;
        have += step;
    }
    bits
}

/// Returns the bits of a word at multiples of `align`.
fn aligned(w: u64, align: u32) -> u64 {
    let align = u64::from(align);
    if align >= WORD {
        return u64::from((w * WORD).is_multiple_of(align));
    }
    // All ones divided by `align` ones has a one at each multiple of `align`.
    u64::MAX / (u64::MAX >> (WORD - align))
}

impl Bits {
    pub(super) fn grow(&mut self, old: u32, total: u32) {
        self.words.resize(u64::from(total).div_ceil(WORD) as usize, u64::MAX);
        self.clear(old.into(), total.into());
    }

    #[cfg(test)]
    pub(super) fn is_used(&self, slot: u32) -> bool {
        self.word(u64::from(slot) / WORD) >> (u64::from(slot) % WORD) & 1 != 0
    }

    /// Returns a word; words beyond the end count as used.
    pub(super) fn word(&self, w: u64) -> u64 {
        self.words.get(w as usize).copied().unwrap_or(u64::MAX)
    }

    pub(super) fn set(&mut self, from: u64, to: u64) {
        for w in from / WORD..to.div_ceil(WORD) {
            if let Some(word) = self.words.get_mut(w as usize) {
                *word |= mask(w, from, to);
            }
        }
    }

    pub(super) fn clear(&mut self, from: u64, to: u64) {
        for w in from / WORD..to.div_ceil(WORD) {
            if let Some(word) = self.words.get_mut(w as usize) {
                *word &= !mask(w, from, to);
            }
        }
    }

    pub(super) fn first_used(&self, from: u64, to: u64) -> Option<u32> {
        let hit = |w: u64| (w, self.word(w) & mask(w, from, to));
        let (w, bits) = (from / WORD..to.div_ceil(WORD)).map(hit).find(|(_, bits)| *bits != 0)?;
        Some((w * WORD) as u32 + bits.trailing_zeros())
    }

    pub(super) fn first_free(&self, from: u64, to: u64) -> Option<u32> {
        let hit = |w: u64| (w, !self.word(w) & mask(w, from, to));
        let (w, bits) = (from / WORD..to.div_ceil(WORD)).map(hit).find(|(_, bits)| *bits != 0)?;
        Some((w * WORD) as u32 + bits.trailing_zeros())
    }

    pub(super) fn last_used(&self, from: u64, to: u64) -> Option<u32> {
        let hit = |w: u64| (w, self.word(w) & mask(w, from, to));
        let mut words = (from / WORD..to.div_ceil(WORD)).rev().map(hit);
        let (w, bits) = words.find(|(_, bits)| *bits != 0)?;
        Some((w * WORD) as u32 + (WORD as u32 - 1) - bits.leading_zeros())
    }

    /// Returns the first run of `count` free slots that begins in `from..to` at a multiple of
    /// `align`, and ends at `end` or before.
    pub(super) fn find_run(
        &self,
        from: u64,
        to: u64,
        end: u64,
        count: u32,
        align: u32,
    ) -> Option<u32> {
        if u64::from(count) <= WORD {
            self.find_short(from, to, count, align)
        } else {
            self.find_long(from, to, end, count.into(), align.into())
        }
    }

    /// Finds a run of up to 64 slots, which lies in a word and the next. Slots past the end count
    /// as used.
    fn find_short(&self, from: u64, to: u64, count: u32, align: u32) -> Option<u32> {
        let mut free = !self.word(from / WORD);
        for w in from / WORD..to.div_ceil(WORD) {
            let next = !self.word(w + 1);
            if free != 0 {
                let pair = u128::from(next) << WORD | u128::from(free);
                let hits = starts(pair, count) as u64 & aligned(w, align) & mask(w, from, to);
                if hits != 0 {
                    return Some((w * WORD) as u32 + hits.trailing_zeros());
                }
            }
            free = next;
        }
        None
    }

    /// Finds a run of more slots: a used slot in the way moves the next attempt past the last of
    /// them.
    fn find_long(&self, from: u64, to: u64, end: u64, count: u64, align: u64) -> Option<u32> {
        let mut at = from.next_multiple_of(align);
        while at < to && at + count <= end {
            match self.last_used(at, at + count) {
                None => return Some(at as u32),
                Some(used) => at = (u64::from(used) + 1).next_multiple_of(align),
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_cover_their_part_of_a_word() {
        assert_eq!(mask(0, 0, 64), u64::MAX);
        assert_eq!(mask(1, 66, 68), 0b1100);
        assert_eq!((mask(1, 0, 64), mask(1, 128, 200)), (0, 0));
        assert_eq!(mask(2, 0, 1000), u64::MAX);
    }

    #[test]
    fn starts_of_runs_and_multiples() {
        assert_eq!(starts(0b1110_1111, 3), 0b0010_0011);
        assert_eq!(starts(u128::MAX, 64), u128::MAX >> 63);
        assert_eq!(aligned(3, 1), u64::MAX);
        assert_eq!(aligned(3, 16), 0x0001_0001_0001_0001);
        assert_eq!((aligned(3, 64), aligned(3, 128), aligned(4, 128)), (1, 0, 1));
    }
}
