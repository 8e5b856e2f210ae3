//! Owns the state of `top`: the last answer, the history that is drawn, and the user's display
//! settings.

use std::collections::VecDeque;
use std::time::Duration;

use driftline_control::api::ClientError;
use driftline_control::model::{ArrivingInfo, GuestState, WatchPage};

use super::feed::Update;
use super::heat::Palette;
use crate::args::{LONGEST_INTERVAL, SHORTEST_INTERVAL};
use crate::failure::Failure;

/// Number of windows kept for the small curves.
const MAX_RATES: usize = 240;

/// The last answer.
pub(super) enum LastAnswer {
    Page(Box<WatchPage>),
    Arriving(Box<ArrivingInfo>),
}

/// What `top` shows, and how.
pub(super) struct TopView {
    pub(super) last_answer: Option<LastAnswer>,
    /// The guest's state in the last answer, whether shown or not, and its destination while it
    /// migrates.
    pub(super) last_state: Option<(GuestState, Option<String>)>,
    /// Frames per second of each vCPU, oldest first.
    pub(super) rates: Vec<VecDeque<u64>>,
    /// Whether new answers are not shown.
    pub(super) paused: bool,
    pub(super) interval: Duration,
    pub(super) palette: Palette,
    /// Time since the last answer, if it is longer than it should be.
    pub(super) silent: Option<Duration>,
}

impl TopView {
    /// Returns the failure for missing answers. It names the guest's last known state.
    pub(super) fn lost(&self, e: ClientError) -> Failure {
        let Some((state, to)) = &self.last_state else { return e.into() };
        let to = to.as_ref().map(|to| format!(", to {to}")).unwrap_or_default();
        Failure::error(format!("{e}; at its last answer the guest was {}{to}", state.name()))
    }

    pub(super) fn new(interval: Duration, palette: Palette) -> Self {
        Self {
            last_answer: None,
            last_state: None,
            rates: Vec::new(),
            paused: false,
            interval,
            palette,
            silent: None,
        }
    }

    /// Stores an answer, and returns it if it reports the guest's end. Nothing new is shown while
    /// the view is paused.
    pub(super) fn take(&mut self, update: Update) -> Option<Box<WatchPage>> {
        if let Update::Page(page) = &update {
            let state = page.info.state;
            let moving = matches!(state, GuestState::Migrating | GuestState::InDoubt);
            let to = page.migration.as_ref().filter(|_| moving).map(|job| job.to.clone());
            self.last_state = Some((state, to));
        }
        match update {
            Update::Page(page) if page.end.is_some() => return Some(page),
            update if !self.paused => self.show(update),
            _ => {}
        }
        None
    }

    fn show(&mut self, update: Update) {
        self.last_answer = Some(match update {
            Update::Arriving(info) => LastAnswer::Arriving(info),
            Update::Page(page) => {
                self.rates.resize_with(page.vcpu.len(), VecDeque::new);
                for (rates, vcpu) in self.rates.iter_mut().zip(&page.vcpu) {
                    if rates.len() == MAX_RATES {
                        rates.pop_front();
                    }
                    rates.push_back(per_second(vcpu.dirtied_frames.unwrap_or(0), page.window_ms));
                }
                LastAnswer::Page(page)
            }
        });
    }

    /// Doubles the interval, up to the longest.
    pub(super) fn slower(&mut self) {
        self.interval = (self.interval * 2).min(LONGEST_INTERVAL);
    }

    /// Halves the interval, down to the shortest.
    pub(super) fn faster(&mut self) {
        self.interval = (self.interval / 2).max(SHORTEST_INTERVAL);
    }
}

/// Converts a count in a window of this length into a rate per second.
pub(super) fn per_second(count: u64, window_ms: f64) -> u64 {
    (count as f64 * 1e3 / window_ms.max(1e-6)).round() as u64
}
