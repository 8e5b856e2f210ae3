//! What of a file the disk does not give back. A read of it takes a failing disk seconds, so none
//! of it is read twice, and a long stretch is not tried piece by piece.
//!
//! Up to [`EXACT`] units that follow one another each is tried. Where a longer stretch ends is
//! looked for in growing steps, then between the last two. What can be read in the middle of a
//! stretch of that length counts as unreadable, unless a step meets it.

use std::collections::BTreeMap;
use std::io;

use nix::libc;

/// Units that follow one another and are tried one by one.
const EXACT: u64 = 16;

/// The unreadable units of a file: sectors of a log, slots of a page file.
#[derive(Debug, Default)]
pub(super) struct Unreadable {
    /// Where each stretch begins, and behind its last unit.
    stretches: BTreeMap<u64, u64>,
    /// The system's answer to the last read that failed.
    errno: Option<i32>,
}

impl Unreadable {
    pub(super) fn has(&self, unit: u64) -> bool {
        self.next(unit) == Some(unit)
    }

    /// The first unreadable unit from `unit` on.
    pub(super) fn next(&self, unit: u64) -> Option<u64> {
        match self.stretches.range(..=unit).next_back() {
            Some((_, end)) if *end > unit => Some(unit),
            _ => self.stretches.range(unit..).next().map(|(start, _)| *start),
        }
    }

    /// The error of reading any of them.
    pub(super) fn error(&self) -> io::Error {
        io::Error::from_raw_os_error(self.errno.unwrap_or(libc::EIO))
    }

    /// Notes that a read of `unit` alone has failed, in a file of `end` units, and looks for the
    /// end of the stretch that it is in; `is_readable` tries a unit.
    pub(super) fn note(
        &mut self,
        unit: u64,
        end: u64,
        cause: &io::Error,
        is_readable: impl Fn(u64) -> bool,
    ) {
        self.errno = cause.raw_os_error();
        let (start, behind) = self.add(unit, unit + 1);
        let mut step = behind - start;
        if step < EXACT {
            return;
        }
        let mut bad = behind - 1;
        let good = loop {
            let next = bad.saturating_add(step).min(end.max(behind) - 1);
            if next == bad || is_readable(next) {
                break next;
            }
            (bad, step) = (next, step * 2);
        };
        let mut good = good.max(bad + 1);
        while good - bad > 1 {
            let middle = bad + (good - bad) / 2;
            match is_readable(middle) {
                true => good = middle,
                false => bad = middle,
            }
        }
        self.add(unit, bad + 1);
    }

    /// Adds a stretch to those that it touches; the one that comes of it.
    fn add(&mut self, mut start: u64, mut end: u64) -> (u64, u64) {
        let touched = |(_, to): &(&u64, &u64)| **to >= start;
        if let Some((from, _)) = self.stretches.range(..=start).next_back().filter(touched) {
            start = *from;
        }
        let gone = self.stretches.extract_if(start..=end, |_, _| true);
        end = gone.map(|(_, to)| to).max().map_or(end, |to| to.max(end));
        self.stretches.insert(start, end);
        (start, end)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn long_stretch_costs_few_reads() {
        const END: u64 = 1 << 31;
        for stretch in [3..4, 3..18, 3..19, 3..20, 7..1000, 5..END - 1, 5..END, END - 1..END] {
            let mut unreadable = Unreadable::default();
            let reads = Cell::new(0);
            let is_readable = |unit: u64| {
                assert!(unit < END);
                reads.set(reads.get() + 1);
                !stretch.contains(&unit)
            };
            for unit in stretch.clone().take(4 * EXACT as usize) {
                if !unreadable.has(unit) && !is_readable(unit) {
                    let cause = io::Error::from_raw_os_error(libc::EBADMSG);
                    unreadable.note(unit, END, &cause, is_readable);
                }
            }
            assert!(reads.get() < 100, "{stretch:?}: {} reads", reads.get());
            let expected = BTreeMap::from([(stretch.start, stretch.end)]);
            assert_eq!(unreadable.stretches, expected);
            assert_eq!(unreadable.next(0), Some(stretch.start));
            assert!(!unreadable.has(stretch.end) && unreadable.next(stretch.end).is_none());
            assert_eq!(unreadable.error().raw_os_error(), Some(libc::EBADMSG));
        }
    }

    #[test]
    fn sound_units_between_short_stretches_stay() {
        let mut unreadable = Unreadable::default();
        let is_bad = |unit: u64| unit % 7 < 3 || unit == 40;
        for unit in (0..100).rev().chain(0..100).filter(|unit| is_bad(*unit)) {
            unreadable.note(unit, 100, &io::Error::other("bad"), |unit| !is_bad(unit));
        }
        assert!((0..100).all(|unit| unreadable.has(unit) == is_bad(unit)));
    }
}
