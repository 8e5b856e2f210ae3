//! Defines the cells to measure, and their order.

use std::path::PathBuf;

use driftline_machine::tracking::TrackingMode;
use serde::{Serialize, Serializer};

use super::way::{SinkKind, TrackingWay};

/// The guest of a cell.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum GuestKind {
    /// The embedded payload with this spec, which records what it writes.
    Payload(String),
    /// A kernel from a file, which does not record what it writes.
    Kernel(PathBuf),
}

impl GuestKind {
    /// Returns the payload's spec, or the kernel's path.
    pub fn spec(&self) -> String {
        match self {
            Self::Payload(spec) => spec.clone(),
            Self::Kernel(path) => format!("kernel {}", path.display()),
        }
    }

    /// Returns the name: `light guest` for one of the default guests, the spec for any other.
    pub fn name(&self) -> String {
        self.default_guest().map_or_else(|| self.spec(), |guest| format!("{} guest", guest.name))
    }

    /// Returns the name, with the spec beside it.
    pub(super) fn full_name(&self) -> String {
        match self.default_guest() {
            Some(guest) => format!("{} guest ({})", guest.name, guest.spec),
            None => self.spec(),
        }
    }

    /// Returns the name as a part of a sentence.
    pub(super) fn phrase(&self) -> String {
        self.default_guest()
            .map_or_else(|| self.spec(), |guest| format!("the {} guest", guest.name))
    }

    /// Describes the writes of a default guest.
    pub(super) fn description(&self) -> Option<&'static str> {
        self.default_guest().map(|guest| guest.writes)
    }

    fn default_guest(&self) -> Option<&'static DefaultGuest> {
        DEFAULT_GUESTS
            .iter()
            .find(|guest| matches!(self, Self::Payload(spec) if spec == guest.spec))
    }
}

impl Serialize for GuestKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.spec())
    }
}

/// A guest of the default matrix.
struct DefaultGuest {
    name: &'static str,
    spec: &'static str,
    writes: &'static str,
}

/// One machine to be measured.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct MatrixCell {
    /// How the guest's writes are tracked.
    pub way: TrackingWay,
    /// The guest.
    pub guest: GuestKind,
    /// Size of guest memory, in bytes.
    pub mem_bytes: u64,
}

/// The spec of the light guest, which dirties about 100 frames per epoch of 10 ms.
pub const LIGHT: &str = "payload,ws=2M,rate=40M";
/// The spec of the busy guest, which dirties up to 820 frames per epoch of 10 ms.
pub(super) const BUSY: &str = "payload,ws=32M,rate=320M";
/// The spec of the guest that writes as fast as it can.
pub(super) const FLAT_OUT: &str = "payload,ws=64M,rate=max,pattern=random";

/// The guests of the default matrix, from the lightest to the busiest.
const DEFAULT_GUESTS: [DefaultGuest; 3] = [
    DefaultGuest { name: "light", spec: LIGHT, writes: "writes 40 MiB/s to 2 MiB, in order" },
    DefaultGuest { name: "busy", spec: BUSY, writes: "writes 320 MiB/s to 32 MiB, in order" },
    DefaultGuest {
        name: "flat-out",
        spec: FLAT_OUT,
        writes: "writes to random pages of 64 MiB, as fast as it can",
    },
];

/// Memory sizes of the memory series.
const SIZES: [u64; 4] = [1 << 30, 4 << 30, 16 << 30, 64 << 30];

/// Returns the cells measured by default: three guests of 1 GiB with all of `ways`, and the
/// lightest guest with up to 64 GiB with those ways for which a curve over memory size is
/// informative. Without tracking, the memory size does not affect a paced guest.
pub fn default_cells(ways: &[TrackingWay]) -> Vec<MatrixCell> {
    let guests = DEFAULT_GUESTS.map(|guest| GuestKind::Payload(guest.spec.to_owned()));
    let mut cells = product(ways, &guests, &SIZES[..1]);
    let bitmap_tree = (TrackingMode::DirtyBitmap, Some(SinkKind::Tree));
    let is_plotted = |way: &TrackingWay| {
        way.tracks()
            && way.sink() != Some(SinkKind::List)
            && (way.source(), way.sink()) != bitmap_tree
    };
    let plotted: Vec<TrackingWay> = ways.iter().copied().filter(is_plotted).collect();
    cells.extend(product(&plotted, &guests[..1], &SIZES[1..]));
    cells
}

/// Returns every combination of a way, a guest and a size.
pub fn product(ways: &[TrackingWay], guests: &[GuestKind], sizes: &[u64]) -> Vec<MatrixCell> {
    let mut cells = Vec::new();
    for mem_bytes in sizes {
        for guest in guests {
            let cell = |way: &TrackingWay| MatrixCell {
                way: *way,
                guest: guest.clone(),
                mem_bytes: *mem_bytes,
            };
            cells.extend(ways.iter().map(cell));
        }
    }
    cells
}

/// Returns the order of the runs, as pairs of round and cell. Each round contains every cell once
/// and begins at a different cell, so that neither drift nor the position in a round favours a
/// cell.
pub fn interleaved(cells: usize, rounds: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rounds).flat_map(move |round| {
        let shift = (cells * round).checked_div(rounds).unwrap_or(0);
        // Every other round runs backwards, so that neighbours exchange their order.
        let order = move |i: usize| match round % 2 {
            0 => (i + shift) % cells,
            _ => (cells - 1 - i + shift) % cells,
        };
        (0..cells).map(move |i| (round, order(i)))
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn round_has_every_cell_once(cells in 1usize..40, rounds in 1usize..8) {
            let runs: Vec<_> = interleaved(cells, rounds).collect();
            prop_assert_eq!(runs.len(), cells * rounds);
            for (round, chunk) in runs.chunks(cells).enumerate() {
                prop_assert!(chunk.iter().all(|(r, _)| *r == round));
                let all: HashSet<usize> = chunk.iter().map(|(_, cell)| *cell).collect();
                prop_assert_eq!(all, (0..cells).collect::<HashSet<_>>());
            }
        }
    }

    #[test]
    fn cells_change_their_position_between_rounds() {
        let places: HashSet<usize> = interleaved(8, 4)
            .enumerate()
            .filter(|(_, (_, cell))| *cell == 0)
            .map(|(i, _)| i % 8)
            .collect();
        assert!(places.len() >= 3, "{places:?}");
        assert_eq!(interleaved(0, 3).count() + interleaved(3, 0).count(), 0);
    }

    #[test]
    fn default_matrix_has_guests_sizes_no_duplicates() {
        let ways: Vec<TrackingWay> = TrackingWay::usual().collect();
        let cells = default_cells(&ways);
        for way in &ways {
            let of_way =
                |mem: u64| cells.iter().filter(|c| c.way == *way && c.mem_bytes == mem).count();
            assert_eq!(of_way(SIZES[0]), 3);
            assert!(of_way(SIZES[3]) <= usize::from(way.tracks()));
        }
        for way in ["dirty-ring+tree", "dirty-bitmap+flat"] {
            let sizes =
                cells.iter().filter(|c| c.way == way.parse().unwrap() && c.guest.spec() == LIGHT);
            assert_eq!(sizes.map(|c| c.mem_bytes).collect::<Vec<_>>(), SIZES);
        }
        assert_eq!(cells.iter().collect::<HashSet<_>>().len(), cells.len());
        for guest in DEFAULT_GUESTS.map(|guest| guest.spec) {
            assert!(guest.parse::<driftline_images::PayloadSpec>().is_ok(), "{guest}");
        }
    }

    #[test]
    fn default_guests_have_names_and_others_their_spec() {
        let payload = |spec: &str| GuestKind::Payload(spec.to_owned());
        assert_eq!(payload(FLAT_OUT).name(), "flat-out guest");
        assert_eq!(payload(BUSY).phrase(), "the busy guest");
        assert_eq!(payload("payload,ws=3M").phrase(), "payload,ws=3M");
        assert_eq!(GuestKind::Kernel("vmlinux".into()).name(), "kernel vmlinux");
    }
}
