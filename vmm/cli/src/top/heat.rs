//! Owns the heat map: guest memory as rows of equally large cells. A cell's heat is its write rate
//! on a logarithmic scale.

use driftline_control::model::WatchPage;
use driftline_dirty_tracker::PAGE_SIZE;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Style};

use crate::{colour, output};

/// The sign for a cell without writes; `SIGNS` are in ascending order of heat.
const COLD: &str = "\u{b7}";
const SIGNS: [&str; 9] = [":", "-", "=", "+", "o", "x", "X", "#", "@"];
/// The colours in ascending order of heat, for a terminal that has sixteen or 256.
const COLOURS_16: [Color; 9] = [
    Color::Blue,
    Color::LightBlue,
    Color::Cyan,
    Color::LightCyan,
    Color::Green,
    Color::LightGreen,
    Color::Yellow,
    Color::LightRed,
    Color::Red,
];
const COLOURS_256: [u8; 9] = [18, 20, 26, 31, 34, 148, 220, 208, 196];
/// Size of a page, for rates.
const PAGE_BYTES: f64 = PAGE_SIZE as f64;
/// Number of columns between an address and the first cell.
const GAP: u16 = 2;

/// How heat is displayed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Palette {
    /// With signs: colours are not wanted, or not available.
    Signs,
    /// With sixteen colours.
    Few,
    /// With 256 colours.
    Many,
}

impl Palette {
    /// Returns the palette that the environment requests and supports.
    pub(super) fn of_environment() -> Self {
        let var = |name| std::env::var(name).unwrap_or_default();
        Self::of(colour::is_refused(), &var("TERM"), &var("COLORTERM"))
    }

    fn of(no_colours: bool, term: &str, colorterm: &str) -> Self {
        match () {
            () if no_colours || term == "dumb" => Self::Signs,
            () if term.contains("256color") || !colorterm.is_empty() => Self::Many,
            () => Self::Few,
        }
    }

    /// Returns whether the palette has colours.
    pub(super) fn has_colours(self) -> bool {
        self != Self::Signs
    }

    fn put(self, level: usize, at: (u16, u16), buffer: &mut Buffer) {
        let Some(cell) = buffer.cell_mut(at) else { return };
        let Some(hot) = level.checked_sub(1).map(|hot| hot.min(SIGNS.len() - 1)) else {
            cell.set_symbol(COLD);
            return;
        };
        match self {
            Self::Signs => cell.set_symbol(SIGNS[hot]),
            Self::Few => cell.set_symbol(" ").set_style(Style::new().bg(COLOURS_16[hot])),
            Self::Many => {
                cell.set_symbol(" ").set_style(Style::new().bg(Color::Indexed(COLOURS_256[hot])))
            }
        };
    }
}

/// Memory divided into cells that fill an area.
#[derive(Debug)]
pub(super) struct HeatCells {
    /// Bytes of memory in a cell: the bins of a cell are a power of two.
    pub(super) bytes: u64,
    /// Write rate of each cell, in bytes/s.
    pub(super) rates: Vec<u64>,
    /// Length of the window, in seconds. A frame counts once per window, however often it was
    /// written.
    pub(super) window_s: f64,
}

impl HeatCells {
    /// Divides memory into at most `most` cells of whole bins of `page`. If there are fewer bins,
    /// each is one cell.
    pub(super) fn new(page: &WatchPage, most: usize) -> Self {
        let together = page.bin_frames.len().div_ceil(most.max(1)).next_power_of_two();
        let per_second = 1e3 / page.window_ms.max(1e-6) * PAGE_BYTES;
        let rate = |bins: &[u64]| (output::total(bins.iter().copied()) as f64 * per_second) as u64;
        Self {
            bytes: page.bin_bytes.saturating_mul(together as u64),
            rates: page.bin_frames.chunks(together).map(rate).collect(),
            window_s: page.window_ms / 1e3,
        }
    }

    /// Returns the rates from which a cell has the first and the last level: one frame per second,
    /// and all of its frames per second. If the window is longer than a second, both are per
    /// window, because a cell cannot be hotter than all of its frames in each window.
    fn scale(&self) -> (f64, f64) {
        let window_s = self.window_s.max(1.0);
        (PAGE_BYTES / window_s, (self.bytes as f64).max(PAGE_BYTES) / window_s)
    }

    /// Returns the level of a cell with this rate: 0 if nothing was written, otherwise 1 to 9. Each
    /// level is the previous one times a constant factor.
    pub(super) fn level(&self, rate: u64) -> usize {
        if rate == 0 {
            return 0;
        }
        let (least, most) = self.scale();
        let steps = (SIGNS.len() - 1) as f64;
        // A cell of one frame distinguishes only whether the frame is written.
        if most <= least {
            return SIGNS.len();
        }
        // The margin serves a rate that is exactly a level's in a window that was measured slightly
        // too long.
        let part = (rate as f64 * 1.05 / least).ln() / (most / least).ln();
        1 + (part * steps).floor().clamp(0.0, steps) as usize
    }
}

/// Returns the guest physical address of a byte of memory, whose offset `at` does not count holes.
pub(super) fn gpa(page: &WatchPage, mut at: u64) -> u64 {
    for range in &page.memory {
        if at < range.bytes {
            return range.gpa.saturating_add(at);
        }
        at -= range.bytes;
    }
    0
}

/// Returns the start of the hottest bin, and its write rate in bytes/s.
pub(super) fn hottest(page: &WatchPage) -> Option<(u64, u64)> {
    let (bin, frames) = page.bin_frames.iter().enumerate().rev().max_by_key(|(_, n)| **n)?;
    let rate = (*frames as f64 * PAGE_BYTES * 1e3 / page.window_ms.max(1e-6)) as u64;
    (*frames > 0).then(|| (gpa(page, page.bin_bytes.saturating_mul(bin as u64)), rate))
}

/// Draws the map, and its legend in the last two lines.
pub(super) fn draw(page: &WatchPage, palette: Palette, area: Rect, buffer: &mut Buffer) {
    let legend = if area.height > 3 { 2 } else { area.height.saturating_sub(1).min(1) };
    let last = page.memory.last().map_or(0, |range| range.gpa.saturating_add(range.bytes));
    let digits = (64 - last.leading_zeros() as u16).div_ceil(4).max(8);
    let label = if area.width > digits + 2 + GAP + 8 { digits + 2 + GAP } else { 0 };
    let (width, rows) = (area.width - label, area.height - legend);
    // A multiple of eight, where there is room, so that the addresses of the rows are round.
    let width = if width >= 8 { width / 8 * 8 } else { width };
    let cells = HeatCells::new(page, usize::from(width) * usize::from(rows));
    for (row, rates) in (0..rows).zip(cells.rates.chunks(usize::from(width).max(1))) {
        let y = area.y + row;
        if label > 0 {
            let at = (u64::from(row) * u64::from(width)).saturating_mul(cells.bytes);
            let text = format!("0x{:0digits$x}", gpa(page, at), digits = usize::from(digits));
            buffer.set_stringn(area.x, y, text, usize::from(label), Style::new());
        }
        for (x, rate) in (area.x + label..).zip(rates) {
            palette.put(cells.level(*rate), (x, y), buffer);
        }
    }
    if legend > 0 {
        let (y, levels) = (area.y + rows, SIGNS.len() as u16);
        let (x, most) = (area.x, usize::from(area.width));
        let text = format!("each cell {}; {COLD} not written, ", output::bytes(cells.bytes));
        let (mut x, _) = buffer.set_stringn(x, y, text, most, Style::new());
        for level in 1..=levels {
            if x < area.right() {
                palette.put(level.into(), (x, y), buffer);
                x += 1;
            }
        }
        let (least, most) = cells.scale();
        let range = format!(
            "from {} to {} and more",
            output::bytes_per_s(least as u64),
            output::bytes_per_s(most as u64)
        );
        let step = (most / least).powf(1.0 / f64::from(levels - 1));
        let beside = match legend {
            1 => format!(" {range}"),
            _ => format!(" each step {step:.1} times the last,"),
        };
        buffer.set_stringn(x, y, beside, usize::from(area.right().saturating_sub(x)), Style::new());
        if legend > 1 {
            buffer.set_stringn(area.x, y + 1, range, usize::from(area.width), Style::new());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn palette_follows_the_environment() {
        let of = Palette::of;
        assert_eq!(of(true, "xterm-256color", "truecolor"), Palette::Signs);
        assert_eq!(of(false, "dumb", ""), Palette::Signs);
        assert_eq!(of(false, "xterm-256color", ""), Palette::Many);
        assert_eq!(of(false, "xterm", "truecolor"), Palette::Many);
        assert_eq!(of(false, "linux", ""), Palette::Few);
        assert!(!Palette::Signs.has_colours() && Palette::Few.has_colours());
    }

    #[test]
    fn levels_are_logarithmic_from_frame_to_cell() {
        let cells = HeatCells { bytes: 1 << 20, rates: Vec::new(), window_s: 0.5 };
        assert_eq!([0, 1, 4095, 4096].map(|rate| cells.level(rate)), [0, 1, 1, 1]);
        // Eight steps from 4 KiB to 1 MiB: each is twice the one before.
        for step in 0..8u32 {
            let rate = 4096u64 << step;
            assert_eq!(cells.level(rate), 1 + step as usize, "{rate}");
            assert_eq!(cells.level(rate * 7 / 4), 1 + step as usize, "{rate} and most of as much");
        }
        assert_eq!([1 << 20, 1 << 30, u64::MAX].map(|rate| cells.level(rate)), [9; 3]);
        let one_frame = HeatCells { bytes: 4096, rates: Vec::new(), window_s: 1.0 };
        assert_eq!([0, 1, 4096].map(|rate| one_frame.level(rate)), [0, 9, 9]);
        // Written continuously, with windows of ten seconds.
        let long = HeatCells { bytes: 1 << 20, rates: Vec::new(), window_s: 10.0 };
        assert_eq!([409, (1 << 20) / 20, (1 << 20) / 10].map(|rate| long.level(rate)), [1, 8, 9]);
    }
}
