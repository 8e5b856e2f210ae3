//! Tables of runs, and helpers for decoding messages.

use driftline_dirty_tracker::FrameRun;
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::raw::{RawRun, RawRuns};
use crate::protocol::error::WireError;
use crate::protocol::tag::Tag;

/// A table of runs as received. No run is empty; their positions are not checked.
#[derive(Clone, Copy)]
pub(crate) struct RunTable<'a>(pub(super) &'a [RawRun]);

impl std::fmt::Debug for RunTable<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl<'a> RunTable<'a> {
    pub(crate) fn iter(self) -> impl Iterator<Item = FrameRun> + Clone + 'a {
        self.0.iter().map(FrameRun::from)
    }

    pub(crate) fn len(self) -> usize {
        self.0.len()
    }

    /// Number of frames in all runs; `None` on overflow.
    pub(crate) fn frames(self) -> Option<u64> {
        self.iter().try_fold(0u64, |n, r| n.checked_add(r.count))
    }

    pub(super) fn parse(tag: Tag, bytes: &'a [u8]) -> Result<(Self, &'a [u8]), WireError> {
        let (head, rest) = fixed::<RawRuns>(tag, bytes)?;
        let count = head.runs.get() as usize;
        let (runs, rest) = <[RawRun]>::ref_from_prefix_with_elems(rest, count)
            .map_err(|_| malformed(tag, "its table of runs is longer than the message"))?;
        let runs = Self(runs);
        if count == 0 || runs.iter().any(|r| r.count == 0) {
            return Err(malformed(tag, "it has an empty run, or no run"));
        }
        Ok((runs, rest))
    }
}

pub(super) fn malformed(message: Tag, why: &'static str) -> WireError {
    WireError::Malformed { message, why }
}

pub(super) fn fixed<T: FromBytes + KnownLayout + Immutable + Unaligned>(
    tag: Tag,
    bytes: &[u8],
) -> Result<(&T, &[u8]), WireError> {
    T::ref_from_prefix(bytes).map_err(|_| malformed(tag, "it is too short"))
}

pub(super) fn exactly<T: FromBytes + KnownLayout + Immutable + Unaligned>(
    tag: Tag,
    bytes: &[u8],
) -> Result<&T, WireError> {
    T::ref_from_bytes(bytes).map_err(|_| malformed(tag, "its length is wrong"))
}

pub(super) fn text(tag: Tag, bytes: &[u8]) -> Result<&str, WireError> {
    std::str::from_utf8(bytes).map_err(|_| malformed(tag, "its text is not UTF-8"))
}

/// Returns a peer's text with spaces in place of control characters, line separators and changes of
/// direction, which would control the terminal that shows it, or forge lines of a log.
pub(crate) fn printable(text: &str) -> String {
    let controls = |c: char| {
        let is_separator = matches!(c, '\u{2028}' | '\u{2029}');
        let is_direction = matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        c.is_control() || is_separator || is_direction
    };
    text.chars().map(|c| if controls(c) { ' ' } else { c }).collect()
}
