//! Owns the terminal while `top` uses it: the screen, the keys, and the terminal's restoration on
//! every way out.

use std::time::{Duration, Instant};

use driftline_control::api::{Client, ClientError};
use driftline_control::model::WatchPage;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};

use super::feed::{Feed, Update};
use super::heat::Palette;
use super::screen::Screen;
use super::view::TopView;
use crate::failure::Failure;

/// Interval at which the task checks whether an answer is overdue.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Delay from which an answer counts as overdue.
const OVERDUE: Duration = Duration::from_secs(3);
/// Limit for the end of the watch.
const END_LIMIT: Duration = Duration::from_secs(2);

/// Shows the guest until the user quits or the guest has ended. In the latter case, returns the
/// page that reported the end.
pub(super) async fn live(
    client: Client,
    interval: Duration,
) -> Result<Option<Box<WatchPage>>, Failure> {
    // Connect before changing the terminal's mode: an error such as a socket without a listener is
    // reported on the unchanged terminal.
    let mut feed = Feed::new(client);
    let first = feed.next(crate::args::SHORTEST_INTERVAL).await?;
    let mut signals = QuitSignals::new()?;
    let mut view = TopView::new(interval, Palette::of_environment());

    let (every, interval) = watch::channel(interval);
    let (sender, mut updates) = mpsc::channel(1);
    let (quit, quitting) = watch::channel(());
    let following = tokio::spawn(follow(feed, interval, sender, quitting));
    let terminal = RawTerminal::new()?;
    let result = show(terminal, &mut view, first, &every, &mut updates, &mut signals).await;
    drop((quit, updates));
    // The VMM may not answer. The watch then ends by itself.
    let _ = tokio::time::timeout(END_LIMIT, following).await;
    result
}

/// Requests one window after another until the receiver is dropped or the user quits.
async fn follow(
    mut feed: Feed,
    mut interval: watch::Receiver<Duration>,
    sender: mpsc::Sender<Result<Update, ClientError>>,
    mut quitting: watch::Receiver<()>,
) {
    loop {
        let every = *interval.borrow_and_update();
        let update = tokio::select! {
            update = feed.next(every) => update,
            // The request is repeated; the window continues.
            Ok(()) = interval.changed() => continue,
            _ = quitting.changed() => break,
        };
        let over = update.is_err() || matches!(&update, Ok(Update::Page(p)) if p.end.is_some());
        if sender.send(update).await.is_err() || over {
            break;
        }
    }
    feed.end().await;
}

async fn show(
    mut terminal: RawTerminal,
    view: &mut TopView,
    first: Update,
    every: &watch::Sender<Duration>,
    updates: &mut mpsc::Receiver<Result<Update, ClientError>>,
    signals: &mut QuitSignals,
) -> Result<Option<Box<WatchPage>>, Failure> {
    let mut keys = keys();
    let mut tick = tokio::time::interval(CHECK_INTERVAL);
    let mut last_update = Instant::now();
    let mut next = Some(first);
    loop {
        if let Some(page) = next.take().and_then(|update| view.take(update)) {
            return Ok(Some(page));
        }
        view.silent = Some(last_update.elapsed()).filter(|long| *long > view.interval + OVERDUE);
        terminal.0.draw(|frame| frame.render_widget(Screen { view, keys: true }, frame.area()))?;
        tokio::select! {
            update = updates.recv() => match update {
                Some(update) => {
                    next = Some(update.map_err(|e| view.lost(e))?);
                    last_update = Instant::now();
                }
                None => return Ok(None),
            },
            Some(event) = keys.recv() => match event {
                Event::Key(key) if key.kind != KeyEventKind::Release => {
                    if !press(view, &key) {
                        return Ok(None);
                    }
                    let interval = view.interval;
                    let replace = |every: &mut _| std::mem::replace(every, interval) != interval;
                    if every.send_if_modified(replace) {
                        last_update = Instant::now();
                    }
                }
                // The terminal was resized: redraw.
                _ => {}
            },
            () = signals.any() => return Ok(None),
            _ = tick.tick() => {}
        }
    }
}

/// Performs the action of a key. Returns whether `top` continues.
pub(super) fn press(view: &mut TopView, key: &KeyEvent) -> bool {
    match key.code {
        KeyCode::Char('c' | 'd') if key.modifiers.contains(KeyModifiers::CONTROL) => return false,
        KeyCode::Char('q' | 'Q') | KeyCode::Esc => return false,
        KeyCode::Char('p' | 'P' | ' ') => view.paused = !view.paused,
        KeyCode::Char('+' | '=') => view.faster(),
        KeyCode::Char('-' | '_') => view.slower(),
        _ => {}
    }
    true
}

/// Returns the terminal's events. The thread that waits for them ends with the process.
fn keys() -> mpsc::Receiver<Event> {
    let (sender, events) = mpsc::channel(16);
    let read = move || {
        while let Ok(event) = event::read() {
            if sender.blocking_send(event).is_err() {
                return;
            }
        }
    };
    // Without the thread, signals still end `top`.
    let _ = std::thread::Builder::new().name("keys".into()).spawn(read);
    events
}

/// The terminal in raw mode on its alternate screen. The terminal is restored when this is dropped,
/// and before a panic is printed.
struct RawTerminal(ratatui::DefaultTerminal);

impl RawTerminal {
    fn new() -> Result<Self, Failure> {
        if matches!(ratatui::crossterm::terminal::size(), Ok((0, _) | (_, 0))) {
            return Err(Failure::error(
                "this terminal reports a size of 0 rows or columns: set its size (stty rows 24 \
                 columns 80), or use --once",
            ));
        }
        ratatui::try_init().map(Self).map_err(|e| {
            ratatui::restore();
            Failure::error(format!("this terminal cannot be drawn on ({e}): use --once"))
        })
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // There is no place to report an error.
        let _ = self.0.show_cursor();
        ratatui::restore();
    }
}

/// The signals that end `top`.
struct QuitSignals([tokio::signal::unix::Signal; 3]);

impl QuitSignals {
    fn new() -> Result<Self, Failure> {
        Ok(Self([
            signal(SignalKind::terminate())?,
            signal(SignalKind::hangup())?,
            signal(SignalKind::interrupt())?,
        ]))
    }

    async fn any(&mut self) {
        let [terminate, hangup, interrupt] = &mut self.0;
        tokio::select! {
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
            _ = interrupt.recv() => {}
        }
    }
}
