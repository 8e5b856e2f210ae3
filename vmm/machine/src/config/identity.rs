//! The identity of a disk, which every host that shares the disk reports.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::error::ConfigError;

/// Maximum length of a block device's name, in bytes. Vendors' names have some dozens.
const MAX_NAME_BYTES: usize = 256;

/// Identity of a disk. Every host that shares the disk reports the same identity.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiskIdentity {
    /// A file.
    File {
        /// The inode number in its file system.
        inode: u64,
        /// Creation time in nanoseconds since 1970, if the file system reports one.
        born_ns: Option<u64>,
    },
    /// A block device, by the name from its vendor or its volume manager.
    Device(String),
}

impl DiskIdentity {
    /// Returns the identity of a block device of this name, if the name is valid.
    pub(crate) fn device(name: &str) -> Option<Self> {
        let identity = Self::Device(name.trim().to_owned());
        identity.check().is_ok().then_some(identity)
    }

    /// Returns whether `other` is certainly another disk. The creation time of a file counts only
    /// if both hosts report it.
    pub fn differs(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::File { inode: a, born_ns: x }, Self::File { inode: b, born_ns: y }) => {
                a != b || x.zip(*y).is_some_and(|(x, y)| x != y)
            }
            (a, b) => a != b,
        }
    }

    /// Checks that a disk can have this identity.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let Self::Device(name) = self else { return Ok(()) };
        let printable = name.chars().all(|c| c == ' ' || c.is_ascii_graphic());
        if name.is_empty() || name.len() > MAX_NAME_BYTES || !printable {
            let form = format!("it has 1 to {MAX_NAME_BYTES} printable ASCII characters");
            return Err(ConfigError::malformed("name of a block device", name, form));
        }
        Ok(())
    }
}

impl fmt::Display for DiskIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SECOND: u64 = 1_000_000_000;
        match self {
            Self::File { inode, born_ns: None } => write!(f, "inode {inode}"),
            Self::File { inode, born_ns: Some(ns) } => {
                write!(f, "inode {inode} made at {}.{:09}", ns / SECOND, ns % SECOND)
            }
            Self::Device(name) => write!(f, "device {name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_differ_by_what_both_hosts_report() {
        let file = |inode, born_ns| DiskIdentity::File { inode, born_ns };
        let device = |name| DiskIdentity::device(name).unwrap();
        let same = [
            (file(1, Some(5)), file(1, Some(5))),
            (file(1, Some(5)), file(1, None)),
            (file(1, None), file(1, None)),
            (device("naa.5"), device(" naa.5\n")),
        ];
        for (a, b) in same {
            assert!(!a.differs(&b) && !b.differs(&a), "{a}, {b}");
        }
        let others = [
            (file(1, Some(5)), file(1, Some(6))),
            (file(1, Some(5)), file(2, Some(5))),
            (file(1, None), file(2, Some(5))),
            (device("naa.5"), device("naa.6")),
            (device("1"), file(1, None)),
        ];
        for (a, b) in others {
            assert!(a.differs(&b) && b.differs(&a), "{a}, {b}");
        }
        for name in ["", " \n", "a\u{7f}b", &"a".repeat(257)] {
            assert_eq!(DiskIdentity::device(name), None, "{name:?}");
        }
        let message =
            |name: &str| DiskIdentity::Device(name.to_owned()).check().unwrap_err().to_string();
        let long = message(&"\u{7f}".repeat(1 << 20));
        assert!(long.len() < 1000 && long.contains("\"... of 1048576 bytes"), "{long}");
        assert!(message("").contains("\"\" is not a valid name"));
        assert_eq!(file(7, Some(1_500_000_000)).to_string(), "inode 7 made at 1.500000000");
    }
}
