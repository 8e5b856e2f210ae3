//! The reports of a checkpoint run that its readers may not have read yet.

use std::collections::VecDeque;

use driftline_checkpoint::{CadenceTotals, Tally};
use serde::{Deserialize, Serialize};

use crate::model::EpochOutcome;

/// Maximum number of reports kept for a reader that connects later: those of ten minutes with a
/// checkpoint every 10 ms.
const MAX_REPORTS: usize = 65_536;
/// Maximum number of reports in one answer.
pub(super) const MAX_PAGE: usize = 4_096;

/// Upper bound on the reports of a run in its life, and on its counts: one a millisecond for
/// thousands of years.
const MAX_MADE: u64 = 1 << 48;

/// The reports of a run. Serialized, they change their process with the run.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct ReportLog {
    /// Number of the first report kept.
    pub(super) first: u64,
    pub(super) reports: VecDeque<EpochOutcome>,
    pub(super) tally: Tally,
    /// Whether the run ended because the guest did.
    #[serde(skip)]
    pub(super) guest_ended: bool,
    /// Whether a client has read the end of the run.
    #[serde(skip)]
    pub(super) end_was_read: bool,
}

impl ReportLog {
    /// Returns the number of reports so far.
    pub(super) fn made(&self) -> u64 {
        self.first.saturating_add(self.reports.len() as u64)
    }

    /// Returns an empty log after `made` reports, which are elsewhere.
    pub(super) fn after(made: u64) -> Self {
        Self { first: made.min(MAX_MADE), ..Self::default() }
    }

    /// Returns whether another process can have written this log.
    pub(super) fn is_sound(&self) -> bool {
        let CadenceTotals { epochs, failed, early, skipped, .. } = self.tally.achieved();
        let counts = [self.first, epochs, failed, early, skipped];
        counts.into_iter().all(|count| count <= MAX_MADE) && self.reports.len() <= MAX_REPORTS
    }

    /// Returns the log of a run that continues in another process, with the reports that a client
    /// may not have read. They stay here, too, for readers that this process still answers.
    pub(super) fn moved(&self) -> Self {
        let older = self.reports.len().saturating_sub(MAX_PAGE);
        let reports = self.reports.iter().skip(older).cloned().collect();
        let (first, tally) = (self.first + older as u64, self.tally.clone());
        Self { first, reports, tally, ..Self::default() }
    }

    /// Adds a report; the oldest one is dropped if there are too many.
    pub(super) fn add(&mut self, outcome: EpochOutcome) {
        if self.reports.len() >= MAX_REPORTS {
            self.reports.pop_front();
            self.first += 1;
        }
        self.reports.push_back(outcome);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn counts_that_may_overflow_are_not_sound() {
        assert!(ReportLog::after(u64::MAX).is_sound());
        let log = serde_json::to_value(ReportLog::default()).unwrap();
        for count in ["taken", "failed", "early", "skipped"] {
            let mut log = log.clone();
            log["tally"]["achieved"][count] = json!(u64::MAX);
            let log: ReportLog = serde_json::from_value(log).unwrap();
            assert!(!log.is_sound(), "{count}");
        }
    }
}
