//! A way of tracking: a source of dirty frames, and the sink that stores them.

use std::fmt;
use std::io;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use driftline_machine::kvm::Capabilities;
use driftline_machine::memory::WriteWatch;
use driftline_machine::tracking::TrackingMode;

/// The structure that stores a set of dirty frames until it is drained.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SinkKind {
    /// The tracker's packed tree.
    Tree,
    /// A list, sorted and deduplicated when it is drained.
    List,
    /// A bitmap of all memory, scanned when it is drained.
    Flat,
}

impl SinkKind {
    const ALL: [SinkKind; 3] = [Self::Tree, Self::List, Self::Flat];

    /// Returns its name, which follows the `+`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tree => "tree",
            Self::List => "list",
            Self::Flat => "flat",
        }
    }
}

/// A source and a sink. Parses from, and displays as, `dirty-ring+tree`; the source alone parses as
/// the source with a tree.
///
/// ```
/// use driftline_compare::TrackingWay;
/// let way: TrackingWay = "dirty-bitmap+flat".parse().unwrap();
/// assert_eq!(way.to_string(), "dirty-bitmap+flat");
/// assert_eq!("dirty-ring".parse::<TrackingWay>().unwrap().to_string(), "dirty-ring+tree");
/// assert_eq!("none".parse::<TrackingWay>().unwrap(), TrackingWay::NONE);
/// let error = "bogus".parse::<TrackingWay>().unwrap_err().to_string();
/// assert!(error.starts_with("unknown way to track \"bogus\": use one of dirty-ring+"));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TrackingWay {
    source: TrackingMode,
    sink: Option<SinkKind>,
}

impl TrackingWay {
    /// No tracking, the baseline of the comparison.
    pub const NONE: TrackingWay = TrackingWay { source: TrackingMode::None, sink: None };

    /// Returns the source of dirty frames.
    pub const fn source(self) -> TrackingMode {
        self.source
    }

    /// Returns the sink; `None` without tracking.
    pub const fn sink(self) -> Option<SinkKind> {
        self.sink
    }

    /// Returns every useful combination, `none` last.
    ///
    /// All three sinks work with a ring and with a bitmap. The list of a bitmap only moves the scan
    /// to an earlier step. Sources that do not use KVM's dirty log deliver only to trees.
    pub fn all() -> impl Iterator<Item = TrackingWay> {
        TrackingMode::ALL.iter().flat_map(|source| {
            let sinks: &[SinkKind] = match source {
                TrackingMode::DirtyRing | TrackingMode::DirtyBitmap => &SinkKind::ALL,
                TrackingMode::None => &[],
                TrackingMode::DirtyBitmapManual | TrackingMode::UserfaultWp => &[SinkKind::Tree],
            };
            let none = sinks.is_empty().then_some(TrackingWay { source: *source, sink: None });
            sinks.iter().map(|sink| TrackingWay { source: *source, sink: Some(*sink) }).chain(none)
        })
    }

    /// Returns the ways of the default matrix: all but the list of a bitmap.
    pub fn usual() -> impl Iterator<Item = TrackingWay> {
        Self::all()
            .filter(|w| (w.source, w.sink) != (TrackingMode::DirtyBitmap, Some(SinkKind::List)))
    }

    /// Returns whether writes are tracked.
    pub fn tracks(self) -> bool {
        self.source != TrackingMode::None
    }

    /// Returns the reason why a host with these `capabilities` cannot track this way with rings of
    /// `entries` entries, or `None` if it can.
    pub fn lacking(self, capabilities: &Capabilities, entries: u32) -> Option<WayUnavailable> {
        match (self.source, capabilities.dirty_ring()) {
            (TrackingMode::DirtyRing, None) => Some(WayUnavailable::NoRings),
            (TrackingMode::DirtyRing, Some((_, most))) if most < entries => {
                Some(WayUnavailable::SmallRings { entries, most })
            }
            (TrackingMode::DirtyBitmapManual, _) if capabilities.manual_dirty_log().is_none() => {
                Some(WayUnavailable::NoManualProtection)
            }
            (TrackingMode::UserfaultWp, _) => {
                WriteWatch::probe().err().map(WayUnavailable::NoWriteWatch)
            }
            _ => None,
        }
    }
}

/// The reason why a host cannot track in a way.
#[derive(Debug, thiserror::Error)]
pub enum WayUnavailable {
    /// KVM has no dirty rings.
    #[error("this host's KVM has no dirty rings (KVM_CAP_DIRTY_LOG_RING)")]
    NoRings,
    /// KVM's dirty rings are too small.
    #[error("this host's KVM has no dirty rings of {entries} entries, but of {most} at most")]
    SmallRings {
        /// Number of entries that are needed.
        entries: u32,
        /// Number of entries that KVM allows.
        most: u32,
    },
    /// KVM cannot reprotect pages on request, but only while it reads the bitmap.
    #[error("this host's KVM reprotects while it reads (no KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2)")]
    NoManualProtection,
    /// The kernel cannot record writes without reporting each fault.
    #[error("this host has no asynchronous write protection of userfaultfd: {0}")]
    NoWriteWatch(io::Error),
}

impl fmt::Display for TrackingWay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.sink {
            Some(sink) => f.pad(&format!("{}+{}", self.source, sink.name())),
            None => f.pad(self.source.name()),
        }
    }
}

/// There is no way of tracking of this name.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("unknown way to track \"{name}\": use one of {}", all_names())]
pub struct UnknownWay {
    name: String,
}

fn all_names() -> String {
    TrackingWay::all().map(|way| way.to_string()).collect::<Vec<_>>().join(", ")
}

impl FromStr for TrackingWay {
    type Err = UnknownWay;

    fn from_str(text: &str) -> Result<Self, UnknownWay> {
        let alone = |way: &TrackingWay| matches!(way.sink, None | Some(SinkKind::Tree));
        let found = Self::all()
            .find(|way| way.to_string() == text || (alone(way) && way.source.name() == text));
        found.ok_or_else(|| UnknownWay { name: text.to_owned() })
    }
}

impl Serialize for TrackingWay {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use driftline_machine::testing::capabilities_with_rings;

    #[test]
    fn names_round_trip_and_sources_are_names() {
        assert!(TrackingWay::all().all(|way| way.to_string().parse() == Ok(way)));
        for source in TrackingMode::ALL {
            assert_eq!(source.name().parse::<TrackingWay>().map(TrackingWay::source), Ok(*source));
        }
        for wrong in ["none+tree", "dirty-ring+", "+tree", "dirty-ring+bush", ""] {
            let error = wrong.parse::<TrackingWay>().unwrap_err().to_string();
            assert!(error.contains("dirty-ring+flat"), "{error}");
        }
    }

    #[test]
    fn missing_rings_exclude_only_the_ring() {
        let lacking = |caps: &Capabilities, way: &str| {
            way.parse::<TrackingWay>().unwrap().lacking(caps, 4096)
        };
        let without = capabilities_with_rings(0);
        assert!(
            lacking(&without, "dirty-ring+flat").unwrap().to_string().contains("no dirty rings")
        );
        assert!(lacking(&without, "dirty-bitmap+flat").is_none());
        let small = capabilities_with_rings(1024);
        assert!(
            lacking(&small, "dirty-ring")
                .unwrap()
                .to_string()
                .contains("4096 entries, but of 1024")
        );
        assert!(lacking(&capabilities_with_rings(4096), "dirty-ring").is_none());
    }
}
