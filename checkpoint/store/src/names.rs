//! Names of a store's files.

use crate::backend::LOCK_FILE;
use crate::limits::MAX_GENERATION;

/// Names of files, except for [`LOCK_FILE`].
pub(crate) const MANIFEST: &str = "manifest";
pub(crate) const MANIFEST_NEW: &str = "manifest.tmp";
pub(crate) const LOG: &str = "log-";
pub(crate) const PAGES: &str = "pages-";
pub(crate) const WORKING_SET: &str = "working-set";
pub(crate) const WORKING_SET_NEW: &str = "working-set.tmp-";
/// Prefix of the names of files that a repair has kept: `damaged-1.log-2`.
const QUARANTINE: &str = "damaged-";
/// Suffix of the name of a list of files that a repair is to keep: `damaged-1.names`.
const LIST: &str = "names";

pub(crate) fn log_name(generation: u64) -> String {
    format!("{LOG}{generation}")
}

pub(crate) fn pages_name(generation: u64) -> String {
    format!("{PAGES}{generation}")
}

/// Returns the name under which repair `number` keeps the file `name`.
pub(crate) fn quarantine_name(number: u64, name: &str) -> String {
    format!("{QUARANTINE}{number}.{name}")
}

/// Returns the name of the list of files that repair `number` is to keep.
pub(crate) fn list_name(number: u64) -> String {
    quarantine_name(number, LIST)
}

/// Kind of a file, by its name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Named {
    Manifest,
    ManifestNew,
    Log(u64),
    Pages(u64),
    Lock,
    WorkingSet,
    WorkingSetNew,
    /// A file that a repair has kept, and the repair's number.
    Quarantined(u64),
    /// A list of the files that a repair is to keep, and the repair's number.
    QuarantineList(u64),
    Foreign,
}

pub(crate) fn parse_name(name: &str) -> Named {
    let number = |digits: &str| {
        let plain = digits.bytes().all(|b| b.is_ascii_digit()) && !digits.starts_with('0');
        digits.parse().ok().filter(|n| plain && (1..=MAX_GENERATION).contains(n))
    };
    match name {
        MANIFEST => return Named::Manifest,
        MANIFEST_NEW => return Named::ManifestNew,
        LOCK_FILE => return Named::Lock,
        WORKING_SET => return Named::WorkingSet,
        _ if name.starts_with(WORKING_SET_NEW) => return Named::WorkingSetNew,
        _ => {}
    }
    if let Some(n) = name.strip_prefix(LOG).and_then(number) {
        return Named::Log(n);
    }
    if let Some(n) = name.strip_prefix(PAGES).and_then(number) {
        return Named::Pages(n);
    }
    let quarantined = name.strip_prefix(QUARANTINE).and_then(|rest| rest.split_once('.'));
    if let Some((n, rest)) = quarantined.and_then(|(digits, rest)| Some((number(digits)?, rest))) {
        return if rest == LIST { Named::QuarantineList(n) } else { Named::Quarantined(n) };
    }
    Named::Foreign
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_one_meaning() {
        assert_eq!(parse_name(&log_name(42)), Named::Log(42));
        assert_eq!(parse_name(&pages_name(MAX_GENERATION)), Named::Pages(MAX_GENERATION));
        assert_eq!(parse_name(&pages_name(MAX_GENERATION + 1)), Named::Foreign);
        assert_eq!(parse_name(&pages_name(u64::MAX)), Named::Foreign);
        assert_eq!(parse_name(&quarantine_name(2, &log_name(1))), Named::Quarantined(2));
        assert_eq!(parse_name(&list_name(3)), Named::QuarantineList(3));
        assert_eq!(parse_name("working-set"), Named::WorkingSet);
        assert_eq!(parse_name("working-set.tmp-1"), Named::WorkingSetNew);
        for foreign in
            ["log-", "log-0", "log-01", "log-+1", "pages-1.bak", "epoch-7.dl", "notes.txt", ""]
        {
            assert_eq!(parse_name(foreign), Named::Foreign, "{foreign}");
        }
    }
}
