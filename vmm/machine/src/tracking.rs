//! The tracking modes and their names.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A way to track a guest's writes. It is part of a machine's configuration, because KVM requires
/// the choice of ring or bitmap before the first vCPU exists. Parses from and displays as its name
/// on the command line.
///
/// ```
/// use driftline_machine::tracking::TrackingMode;
/// assert_eq!("dirty-bitmap".parse(), Ok(TrackingMode::DirtyBitmap));
/// assert_eq!(TrackingMode::default().name(), "dirty-ring");
/// let unknown = "dirty".parse::<TrackingMode>().unwrap_err();
/// assert!(unknown.to_string().starts_with("unknown tracking mode \"dirty\""));
/// assert!(TrackingMode::ALL.iter().all(|mode| mode.to_string().parse() == Ok(*mode)));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TrackingMode {
    /// Per-vCPU KVM dirty rings.
    #[default]
    DirtyRing,
    /// `KVM_GET_DIRTY_LOG`.
    DirtyBitmap,
    /// No tracking: the guest supports neither checkpoints nor migration.
    None,
    // Stored configurations identify a mode by its position here, so new modes come last.
    /// `KVM_GET_DIRTY_LOG` that only reads, and `KVM_CLEAR_DIRTY_LOG` for the frames it reports.
    DirtyBitmapManual,
    /// Asynchronous write protection by userfaultfd, and `PAGEMAP_SCAN`: the dirty state in the
    /// host's page tables.
    UserfaultWp,
}

impl TrackingMode {
    /// All modes, for help texts and tests.
    pub const ALL: &[TrackingMode] = &[
        Self::DirtyRing,
        Self::DirtyBitmap,
        Self::DirtyBitmapManual,
        Self::UserfaultWp,
        Self::None,
    ];

    /// Returns the mode's name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::DirtyRing => "dirty-ring",
            Self::DirtyBitmap => "dirty-bitmap",
            Self::DirtyBitmapManual => "dirty-bitmap-manual",
            Self::UserfaultWp => "userfault-wp",
            Self::None => "none",
        }
    }
}

impl fmt::Display for TrackingMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The error for a name that is not a tracking mode, with that name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown tracking mode \"{0}\": use dirty-ring, dirty-bitmap, dirty-bitmap-manual, \
     userfault-wp or none"
)]
pub struct UnknownMode(pub String);

impl FromStr for TrackingMode {
    type Err = UnknownMode;

    fn from_str(s: &str) -> Result<Self, UnknownMode> {
        let found = Self::ALL.iter().find(|m| m.name() == s);
        found.copied().ok_or_else(|| UnknownMode(s.to_owned()))
    }
}
