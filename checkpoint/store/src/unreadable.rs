//! The parts of a file that its disk cannot read. A failing disk may take seconds for each failing
//! read.
//!
//! Each unit that a reader needs is tried once, as long as failed reads have taken less than
//! [`FAILED_READ_LIMIT`] in total. After that, a reader that salvages guesses. Once [`EXACT`]
//! consecutive units are unreadable, it looks for the end of the stretch in growing steps, and then
//! between the last two steps. It does not try units between two that failed. Any other reader ends
//! with the disk's error.

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use rustix::io::Errno;

use crate::backend::is_media_error;
use crate::damage::Damage;

/// Limit of the total time of failing reads of a file, after which units are given up untried.
pub(super) const FAILED_READ_LIMIT: Duration = Duration::from_secs(60);
/// Number of consecutive units that are still tried one by one after [`FAILED_READ_LIMIT`].
const EXACT: u64 = 16;

/// Stretches of units: the first unit of each, mapped to one past its last unit.
#[derive(Debug, Default)]
struct Stretches(BTreeMap<u64, u64>);

/// The unreadable units of a file: sectors of a log, slots of a page file.
#[derive(Debug)]
pub(super) struct UnreadableUnits {
    /// Units whose read failed, and units that were not tried.
    given_up: Stretches,
    failed: Stretches,
    /// Error number of the last failed read.
    errno: Option<i32>,
    /// Total time of failed reads.
    spent: Duration,
    failed_read_limit: Duration,
    /// Whether units may be given up untried.
    guesses: bool,
}

impl UnreadableUnits {
    /// Returns the state of a reader that spends `failed_read_limit` on failing reads, and then
    /// guesses or ends.
    pub(super) fn new(failed_read_limit: Duration, guesses: bool) -> Self {
        let (given_up, failed) = Default::default();
        Self { given_up, failed, errno: None, spent: Duration::ZERO, failed_read_limit, guesses }
    }

    pub(super) fn has(&self, unit: u64) -> bool {
        self.given_up.has(unit)
    }

    /// Returns the first unreadable unit from `unit` on.
    pub(super) fn next(&self, unit: u64) -> Option<u64> {
        self.given_up.next(unit)
    }

    /// Returns the error of reading an unreadable unit.
    pub(super) fn error(&self) -> io::Error {
        io::Error::from_raw_os_error(self.errno.unwrap_or(Errno::IO.raw_os_error()))
    }

    /// Returns why `unit` was given up.
    pub(super) fn damage(&self, unit: u64) -> Damage {
        match self.has(unit) && !self.failed.has(unit) {
            true => Damage::NotTried { failing: self.spent },
            false => Damage::Unreadable { cause: self.error() },
        }
    }

    /// Forgets which units are unreadable, but not the time spent on them.
    pub(super) fn forget(&mut self) {
        (self.given_up, self.failed) = Default::default();
    }

    /// Notes the time of a failed read.
    pub(super) fn add_time(&mut self, time: Duration) {
        self.spent = self.spent.saturating_add(time);
    }

    /// Returns whether failed reads have taken all of their time.
    fn is_over(&self) -> bool {
        self.spent >= self.failed_read_limit
    }

    /// Returns whether the reader must end.
    pub(super) fn must_end(&self) -> bool {
        self.is_over() && !self.guesses
    }

    /// Notes that a read of `unit` alone has failed, in a file of `end` units. If it is time to
    /// guess, looks for the end of the stretch that the unit is in; `read` reads a unit.
    ///
    /// # Errors
    ///
    /// The error of `read`, if it does not come from the disk.
    pub(super) fn note(
        &mut self,
        unit: u64,
        end: u64,
        cause: &io::Error,
        read: impl Fn(u64) -> io::Result<()>,
    ) -> io::Result<()> {
        self.errno = cause.raw_os_error();
        self.failed.add(unit, unit + 1);
        let (start, after) = self.given_up.add(unit, unit + 1);
        let mut step = after - start;
        if step < EXACT || !self.is_over() || !self.guesses {
            return Ok(());
        }
        let failed = &mut self.failed;
        let mut is_readable = |unit: u64| match read(unit) {
            Ok(()) => Ok(true),
            Err(e) if is_media_error(&e) => {
                failed.add(unit, unit + 1);
                Ok(false)
            }
            // The unit was cut off meanwhile.
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(true),
            Err(e) => Err(e),
        };
        let mut bad = after - 1;
        let good = loop {
            let next = bad.saturating_add(step).min(end.max(after) - 1);
            if next == bad || is_readable(next)? {
                break next;
            }
            (bad, step) = (next, step * 2);
        };
        let mut good = good.max(bad + 1);
        while good - bad > 1 {
            let middle = bad + (good - bad) / 2;
            match is_readable(middle)? {
                true => good = middle,
                false => bad = middle,
            }
        }
        self.given_up.add(unit, bad + 1);
        Ok(())
    }
}

impl Stretches {
    fn has(&self, unit: u64) -> bool {
        self.next(unit) == Some(unit)
    }

    fn next(&self, unit: u64) -> Option<u64> {
        match self.0.range(..=unit).next_back() {
            Some((_, end)) if *end > unit => Some(unit),
            _ => self.0.range(unit..).next().map(|(start, _)| *start),
        }
    }

    /// Adds a stretch, and merges it with those that it touches. Returns the merged stretch.
    fn add(&mut self, mut start: u64, mut end: u64) -> (u64, u64) {
        let touched = |(_, to): &(&u64, &u64)| **to >= start;
        if let Some((from, _)) = self.0.range(..=start).next_back().filter(touched) {
            start = *from;
        }
        let merged = self.0.extract_if(start..=end, |_, _| true);
        end = merged.map(|(_, to)| to).max().map_or(end, |to| to.max(end));
        self.0.insert(start, end);
        (start, end)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn bad() -> io::Error {
        io::Error::from(Errno::BADMSG)
    }

    #[test]
    fn long_stretch_costs_few_reads() {
        const END: u64 = 1 << 31;
        for stretch in [3..4, 3..18, 3..19, 3..20, 7..1000, 5..END - 1, 5..END, END - 1..END] {
            let mut unreadable = UnreadableUnits::new(Duration::ZERO, true);
            let reads = Cell::new(0);
            let read = |unit: u64| {
                assert!(unit < END);
                reads.set(reads.get() + 1);
                if stretch.contains(&unit) { Err(bad()) } else { Ok(()) }
            };
            for unit in stretch.clone().take(4 * EXACT as usize) {
                if !unreadable.has(unit) && read(unit).is_err() {
                    unreadable.note(unit, END, &bad(), read).unwrap();
                }
            }
            assert!(reads.get() < 100, "{stretch:?}: {} reads", reads.get());
            let expected = BTreeMap::from([(stretch.start, stretch.end)]);
            assert_eq!(unreadable.given_up.0, expected);
            assert_eq!(unreadable.next(0), Some(stretch.start));
            assert!(!unreadable.has(stretch.end) && unreadable.next(stretch.end).is_none());
            assert_eq!(unreadable.error().raw_os_error(), Some(libc::EBADMSG));
        }
    }

    #[test]
    fn sound_units_between_short_stretches_stay() {
        let mut unreadable = UnreadableUnits::new(Duration::ZERO, true);
        let is_bad = |unit: u64| unit % 7 < 3 || unit == 40;
        let read = |unit: u64| if is_bad(unit) { Err(bad()) } else { Ok(()) };
        for unit in (0..100).rev().chain(0..100).filter(|unit| is_bad(*unit)) {
            unreadable.note(unit, 100, &bad(), read).unwrap();
        }
        assert!((0..100).all(|unit| unreadable.has(unit) == is_bad(unit)));
    }

    /// Each unit that a step lands on is bad, and all units between are good.
    #[test]
    fn only_an_expired_salvage_skips_untried_units() {
        let is_bad = |unit: u64| unit < EXACT || [31, 63, 127].contains(&unit);
        let read = |unit: u64| if is_bad(unit) { Err(bad()) } else { Ok(()) };
        for (failed_read_limit, guesses) in [(60, true), (60, false), (0, true), (0, false)] {
            let mut unreadable =
                UnreadableUnits::new(Duration::from_secs(failed_read_limit), guesses);
            unreadable.add_time(Duration::from_secs(7));
            for unit in 0..200 {
                if !unreadable.has(unit) && is_bad(unit) {
                    unreadable.note(unit, 200, &bad(), read).unwrap();
                }
            }
            let guessed = failed_read_limit == 0 && guesses;
            assert!((0..200).all(|unit| unreadable.has(unit) == is_bad(unit)) != guessed);
            assert_eq!(unreadable.must_end(), failed_read_limit == 0 && !guesses);
            let Damage::Unreadable { cause } = unreadable.damage(31) else { panic!("{guesses}") };
            assert_eq!(cause.raw_os_error(), bad().raw_os_error());
            if guessed {
                let why = "it cannot be read: not tried, since other reads failed for 7 s";
                assert_eq!(unreadable.damage(32).to_string(), why);
            }
        }
    }

    #[test]
    fn refusal_of_the_system_makes_no_unit_unreadable() {
        let mut unreadable = UnreadableUnits::new(Duration::ZERO, true);
        let read = |_| Err(io::Error::from_raw_os_error(libc::ENOMEM));
        for unit in 0..EXACT - 1 {
            unreadable.note(unit, 100, &bad(), read).unwrap();
        }
        let e = unreadable.note(EXACT - 1, 100, &bad(), read).unwrap_err();
        assert_eq!(e.raw_os_error(), Some(libc::ENOMEM));
        // The file ends there by now.
        let read = |_| Err(io::ErrorKind::UnexpectedEof.into());
        unreadable.note(EXACT, 100, &bad(), read).unwrap();
        assert!((0..100).all(|unit| unreadable.has(unit) == (unit <= EXACT)));
    }
}
