//! Owns the screen of `top`: the position and the content of each part. A pure function of the
//! view.
//!
//! Parts that do not fit are omitted from the bottom up; the map receives the space that the others
//! leave.

use driftline_control::model::{GuestState, VcpuWindow, WatchPage};
use driftline_dirty_tracker::PAGE_SIZE;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Paragraph, Sparkline, Widget, Wrap};

use super::heat;
use super::jobs::{self, Sentence};
use super::view::{LastAnswer, TopView, per_second};
use crate::output;
use crate::progress::receiving_line;

/// The cost of watching.
const WATCH_COST: &str = "watching slows the guest's writes as a migration does, at any interval";
/// Minimum number of lines of the map with its legend, reserved before other parts grow.
const MIN_MAP_LINES: u16 = 6;
/// Columns of a vCPU's figures, before its curve.
const FIGURE_COLUMNS: u16 = 69;

/// The whole screen.
pub(super) struct Screen<'a> {
    pub(super) view: &'a TopView,
    /// Whether the screen mentions keys.
    pub(super) keys: bool,
}

impl Widget for Screen<'_> {
    fn render(self, area: Rect, buffer: &mut Buffer) {
        if area.is_empty() {
            return;
        }
        let mut left = area;
        match &self.view.last_answer {
            None => {
                line(&mut left, "driftline top: waiting for the first window", self.bold(), buffer)
            }
            Some(LastAnswer::Arriving(info)) => {
                line(&mut left, "driftline top: there is no guest yet", self.bold(), buffer);
                let sentence = Sentence { text: receiving_line(&info.migration), alarming: false };
                self.sentence(&sentence, &mut left, buffer);
                self.footer(None, &mut left, buffer);
            }
            Some(LastAnswer::Page(page)) => self.page(page, left, buffer),
        }
    }
}

impl Screen<'_> {
    fn page(&self, page: &WatchPage, mut left: Rect, buffer: &mut Buffer) {
        line(&mut left, &self.title(page), self.bold(), buffer);
        line(&mut left, &machine(page), Style::new(), buffer);
        line(&mut left, &writes(page), Style::new(), buffer);
        self.footer(Some(page), &mut left, buffer);
        for sentence in jobs::sentences(page).iter().rev() {
            self.sentence(sentence, &mut left, buffer);
        }
        self.vcpus(page, &mut left, buffer);
        if !left.is_empty() {
            heat::draw(page, self.view.palette, left, buffer);
        }
    }

    fn title(&self, page: &WatchPage) -> String {
        let state = match (&page.end, page.info.state) {
            (Some(_), _) => "has ended",
            (None, state) => state.name(),
        };
        let mut title = format!("guest {} {state}", page.info.vm_id);
        if self.view.paused {
            title += "   view paused, p continues";
        }
        if let Some(long) = self.view.silent {
            title += &format!("   NO ANSWER for {} s", long.as_secs());
        }
        title
    }

    /// Draws the figures of each vCPU, and the sum of those that do not fit.
    fn vcpus(&self, page: &WatchPage, left: &mut Rect, buffer: &mut Buffer) {
        let room = left.height.saturating_sub(MIN_MAP_LINES + 1);
        if room == 0 || page.vcpu.is_empty() {
            return;
        }
        // Never more than half of the remaining space, so that many vCPUs do not hide the map.
        let room = usize::from(room.min(left.height / 2)).max(1);
        let fit = if page.vcpu.len() <= room { page.vcpu.len() } else { room - 1 };
        let lines = page.vcpu.len().min(room) as u16 + 1;
        let mut table = bottom(left, lines);
        let head = format!(
            "{:>6} {:>11} {:>12} {:>6} {:>11} {:>7} {:>9}",
            "vCPU", "pages/s", "bytes/s", "ring", "ring full", "exits/s", "throttled"
        );
        line(&mut table, &head, self.style(Color::Reset, Modifier::UNDERLINED), buffer);
        let first = table.y;
        for (number, vcpu) in page.vcpu.iter().enumerate().take(fit) {
            let total = page.info.vcpu.get(number).map_or(0, |v| v.ring_full_exits);
            let text = figures(page, &number.to_string(), vcpu, total);
            let style =
                if vcpu.ring_full_exits > 0 { self.colour(Color::Yellow) } else { Style::new() };
            line(&mut table, &text, style, buffer);
        }
        self.curves(first, fit, left.x, left.width, buffer);
        if fit < page.vcpu.len() {
            let rest = sum(&page.vcpu[fit..]);
            let full = page.info.vcpu.iter().skip(fit).map(|v| v.ring_full_exits);
            let total = output::total(full);
            line(&mut table, &figures(page, "others", &rest, total), Style::new(), buffer);
        }
    }

    /// Draws the history of the figures next to them, if there is room.
    fn curves(&self, first: u16, rows: usize, x: u16, width: u16, buffer: &mut Buffer) {
        let room = width.saturating_sub(FIGURE_COLUMNS);
        // A single window is not a curve.
        if room < 8 || self.view.rates.iter().all(|rates| rates.len() < 2) {
            return;
        }
        let most = self.view.rates.iter().flatten().max().copied().unwrap_or(0).max(1);
        for (y, rates) in (first..).zip(self.view.rates.iter().take(rows)) {
            let skip = rates.len().saturating_sub(room.into());
            let shown: Vec<u64> = rates.iter().skip(skip).copied().collect();
            let place = Rect::new(x + FIGURE_COLUMNS, y, room, 1).intersection(buffer.area);
            Sparkline::default()
                .data(shown)
                .max(most)
                .style(self.colour(Color::Cyan))
                .render(place, buffer);
        }
    }

    /// Draws a sentence in up to three lines.
    fn sentence(&self, sentence: &Sentence, left: &mut Rect, buffer: &mut Buffer) {
        let style = match sentence.alarming {
            true => self.style(Color::Red, Modifier::BOLD),
            false => Style::new(),
        };
        let text = Paragraph::new(sentence.text.as_str()).wrap(Wrap { trim: true }).style(style);
        let length = sentence.text.chars().count();
        // Words that do not fit go to the next line, so the text needs somewhat more space than its
        // letters alone.
        let lines =
            (length + length / 8).div_ceil(usize::from(left.width.max(1))).clamp(1, 3) as u16;
        if left.height > lines {
            text.render(bottom(left, lines), buffer);
        }
    }

    fn footer(&self, page: Option<&WatchPage>, left: &mut Rect, buffer: &mut Buffer) {
        let every = format!("every {}", duration_text(self.view.interval.as_millis()));
        if left.height > 3 && self.keys {
            let keys = format!("q quits, p pauses the view, + and - change the interval ({every})");
            let place = bottom(left, 1);
            Line::styled(keys, self.style(Color::Reset, Modifier::DIM)).render(place, buffer);
        }
        if left.height > 3 {
            let text = match page {
                Some(_) => WATCH_COST.to_owned(),
                None => format!("asking {every}"),
            };
            Line::styled(text, self.style(Color::Reset, Modifier::DIM))
                .render(bottom(left, 1), buffer);
        }
    }

    fn bold(&self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    fn colour(&self, colour: Color) -> Style {
        self.style(colour, Modifier::empty())
    }

    fn style(&self, colour: Color, modifier: Modifier) -> Style {
        let style = Style::new().add_modifier(modifier);
        if self.view.palette.has_colours() { style.fg(colour) } else { style }
    }
}

/// Returns the line that describes the machine.
fn machine(page: &WatchPage) -> String {
    let info = &page.info;
    let vcpus = if info.vcpus == 1 { "1 vCPU".to_owned() } else { format!("{} vCPUs", info.vcpus) };
    let others = match info.dirty.subscribers {
        0 | 1 => String::new(),
        2 => "; 1 other subscriber".to_owned(),
        all => format!("; {} other subscribers", all - 1),
    };
    format!(
        "{}, {vcpus}, {}, {}, here for {}{others}",
        output::bytes(info.mem_bytes),
        info.backend,
        info.tracking,
        duration_text(info.uptime_ms.into())
    )
}

/// Returns the line with the guest's total writes.
fn writes(page: &WatchPage) -> String {
    let mut text = format!(
        "writes {}, {} pages in {:.0} ms",
        output::bytes_per_s(page.dirty_rate_bytes_per_s),
        page.frames,
        page.window_ms
    );
    if let Some((gpa, rate)) = heat::hottest(page) {
        text += &format!("; most at {gpa:#x}, {}", output::bytes_per_s(rate));
    } else if page.info.state == GuestState::Paused {
        text += "; it is paused";
    }
    if page.info.ring_overruns > 0 {
        let overruns = page.info.ring_overruns;
        text += &format!("; {overruns} rings overran so far: all memory counted as written then");
    }
    text
}

/// Returns the line of one vCPU, or of several.
fn figures(page: &WatchPage, name: &str, vcpu: &VcpuWindow, full: u64) -> String {
    let rate = |n| per_second(n, page.window_ms);
    let unknown = || "-".to_owned();
    let frames = vcpu.dirtied_frames.map(rate);
    let bytes = frames.map(|n| output::bytes(n.saturating_mul(PAGE_SIZE)));
    let fill = vcpu.ring_peak_entries.zip(page.ring_entries.filter(|n| *n > 0));
    let fill =
        fill.map(|(peak, entries)| format!("{} %", peak.saturating_mul(100) / u64::from(entries)));
    let full = match vcpu.ring_full_exits {
        _ if page.ring_entries.is_none() => unknown(),
        0 => full.to_string(),
        now => format!("{full} (+{now})"),
    };
    format!(
        "{name:>6} {:>11} {:>12} {:>6} {full:>11} {:>7} {:>7.0} %",
        frames.map_or_else(unknown, |n| n.to_string()),
        bytes.unwrap_or_else(unknown),
        fill.unwrap_or_else(unknown),
        rate(vcpu.exits),
        (vcpu.throttled_ms as f64 / page.window_ms.max(1.0) * 100.0).min(100.0),
    )
}

/// Combines several vCPUs: rates add up, the fullest ring counts, and throttling is averaged.
fn sum(vcpus: &[VcpuWindow]) -> VcpuWindow {
    let total = |of: fn(&VcpuWindow) -> u64| output::total(vcpus.iter().map(of));
    let frames: Option<Vec<u64>> = vcpus.iter().map(|v| v.dirtied_frames).collect();
    VcpuWindow {
        dirtied_frames: frames.map(output::total),
        exits: total(|v| v.exits),
        ring_full_exits: total(|v| v.ring_full_exits),
        ring_peak_entries: vcpus.iter().filter_map(|v| v.ring_peak_entries).max(),
        throttled_ms: total(|v| v.throttled_ms) / vcpus.len().max(1) as u64,
    }
}

/// Formats a duration in its largest two units.
fn duration_text(ms: u128) -> String {
    match (ms / 1000, ms % 1000) {
        (0, ms) => format!("{ms} ms"),
        (s @ 1..60, 0) => format!("{s} s"),
        (s @ 1..10, ms) => format!("{:.1} s", s as f64 + ms as f64 / 1e3),
        (s @ ..60, _) => format!("{s} s"),
        (s @ ..3600, _) => format!("{} min {} s", s / 60, s % 60),
        (s @ ..86400, _) => format!("{} h {} min", s / 3600, s / 60 % 60),
        (s, _) => format!("{} d {} h", s / 86400, s / 3600 % 24),
    }
}

/// Draws a line at the top of the remaining area.
fn line(left: &mut Rect, text: &str, style: Style, buffer: &mut Buffer) {
    if left.is_empty() {
        return;
    }
    buffer.set_stringn(left.x, left.y, text, left.width.into(), style);
    left.y += 1;
    left.height -= 1;
}

/// Takes lines from the bottom of the remaining area.
fn bottom(left: &mut Rect, lines: u16) -> Rect {
    let lines = lines.min(left.height);
    left.height -= lines;
    Rect { y: left.bottom(), height: lines, ..*left }
}
