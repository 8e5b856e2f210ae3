//! Owns `driftline top`: a live view of where, how fast and by which vCPU a guest's memory is
//! written, and of what its jobs do.
//!
//! `feed` sends the requests, `view` keeps the answers, and `screen` draws them together with
//! `heat`: a pure function of the view.

mod feed;
mod heat;
mod jobs;
mod screen;
mod terminal;
#[cfg(test)]
mod tests;
mod view;

use std::io::{self, IsTerminal};
use std::process::ExitCode;

use driftline_control::api::Client;
use driftline_control::model::WatchPage;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::widgets::Widget;

use super::args::TopArgs;
use super::client::block_on;
use super::end;
use super::failure::Failure;
use super::interrupts::Interrupts;
use super::output::{json_line, print_message, print_on};
use super::progress::receiving_line;
use feed::{Feed, Update};
use heat::Palette;
use screen::Screen;
use view::TopView;

/// The assumed size of the terminal if it cannot be determined.
const DEFAULT_SIZE: (u16, u16) = (80, 24);

/// `driftline top`.
pub(super) fn top(args: &TopArgs) -> Result<ExitCode, Failure> {
    let client = args.query.api.client();
    let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    let last = if args.once || args.query.json || (dumb && io::stdout().is_terminal()) {
        block_on(printed(client, args))??
    } else if io::stdout().is_terminal() {
        block_on(terminal::live(client, args.interval))??
    } else {
        return Err(Failure::error("top needs a terminal; use top --once, or top --json"));
    };
    if let Some(page) = last {
        print_message(closing_message(&page));
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints one window, or one after another until the guest ends or the reader closes its end.
/// Returns the page that reported the guest's end.
async fn printed(client: Client, args: &TopArgs) -> Result<Option<Box<WatchPage>>, Failure> {
    let mut feed = Feed::new(client);
    let result = print_windows(&mut feed, args).await;
    feed.end().await;
    result
}

async fn print_windows(feed: &mut Feed, args: &TopArgs) -> Result<Option<Box<WatchPage>>, Failure> {
    let mut view = TopView::new(args.interval, Palette::Signs);
    let mut interrupts = Interrupts::listen();
    loop {
        let update = tokio::select! {
            update = feed.next(args.interval) => update.map_err(|e| view.lost(e))?,
            _ = interrupts.pressed() => return Ok(None),
        };
        let text = match &update {
            Update::Page(page) if page.end.is_some() => None,
            Update::Page(page) if args.query.json => Some(json_line(page)?),
            Update::Arriving(info) if args.once => {
                let how = receiving_line(&info.migration);
                return Err(Failure::error(format_args!("there is no guest yet: {how}")));
            }
            Update::Arriving(info) if args.query.json => Some(json_line(info)?),
            Update::Arriving(info) => Some(receiving_line(&info.migration)),
            _ => None,
        };
        if let Some(page) = view.take(update) {
            return Ok(Some(page));
        }
        let text = text.unwrap_or_else(|| plain(&view) + if args.once { "" } else { "\n" });
        // A reader that has closed its end needs nothing more.
        if !print_on(text)? || args.once {
            return Ok(None);
        }
    }
}

/// Formats the screen as lines of text without trailing spaces.
fn plain(view: &TopView) -> String {
    let (width, height) = ratatui::crossterm::terminal::size()
        .ok()
        // A serial line may report a size of zero.
        .filter(|(width, height)| io::stdout().is_terminal() && *width > 0 && *height > 0)
        .unwrap_or(DEFAULT_SIZE);
    text_of(view, width, height)
}

/// Does the same for a screen of this size.
fn text_of(view: &TopView, width: u16, height: u16) -> String {
    let area = Rect::new(0, 0, width, height);
    let mut buffer = Buffer::empty(area);
    Screen { view, keys: false }.render(area, &mut buffer);
    let row = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    let rows: Vec<String> = (0..height).map(|y| row(y).trim_end().to_owned()).collect();
    let end = rows.iter().rposition(|row| !row.is_empty()).map_or(0, |last| last + 1);
    rows[..end].join("\n")
}

/// Describes how the guest ended.
fn closing_message(page: &WatchPage) -> String {
    match (&page.moved_to, &page.end) {
        (Some(to), _) => format!("the guest has moved to {to}"),
        (None, Some(reason)) => end::describe_end(reason),
        (None, None) => "the guest has ended; its VMM did not say why".to_owned(),
    }
}
