//! Describes a guest's migration and its checkpoints for `top`, in a few sentences each.

use driftline_checkpoint::Percentiles;
use driftline_control::model::{
    CheckpointSummary, EpochOutcome, MigrationPage, MigrationState, WatchPage,
};

use crate::output;
use crate::progress::progress_line;

/// A sentence, and whether it needs attention.
pub(super) struct Sentence {
    pub(super) text: String,
    pub(super) alarming: bool,
}

/// Describes all jobs that are, or were, under way, or says that there are none.
pub(super) fn sentences(page: &WatchPage) -> Vec<Sentence> {
    let mut all: Vec<Sentence> = page.migration.iter().map(migration).collect();
    all.extend(page.checkpoints.iter().map(checkpoints));
    if all.is_empty() {
        let text = "no migration and no checkpoints so far".to_owned();
        all.push(Sentence { text, alarming: false });
    }
    all
}

fn migration(page: &MigrationPage) -> Sentence {
    let to = &page.to;
    let (text, alarming) = match page.state {
        MigrationState::Sending => {
            (format!("migration to {to}: {}", progress_line(&page.progress)), false)
        }
        MigrationState::InDoubt => {
            (format!("migration to {to}: {}", progress_line(&page.progress)), true)
        }
        MigrationState::Completed => (format!("migration to {to}: completed"), false),
        MigrationState::Failed => {
            let why = page.failure.as_ref().map_or("unknown reason", |f| &f.message);
            let cancelled = page.failure.as_ref().is_some_and(|f| f.cancelled);
            let how = if cancelled { "was cancelled" } else { "has failed" };
            (format!("the last migration, to {to}, {how}: {why}"), !cancelled)
        }
    };
    Sentence { text, alarming }
}

fn checkpoints(run: &CheckpointSummary) -> Sentence {
    let done = &run.achieved;
    let ms = |us: u64| us as f64 / 1e3;
    let percentiles =
        |s: &Percentiles| format!("p50 {:.1} p99 {:.1} ms", ms(s.p50_us), ms(s.p99_us));
    let head = if run.running { "checkpoints" } else { "checkpoints, over" };
    let mut text = format!("{head}: ");
    let mut alarming = done.failed > 0 && run.running;
    match &run.last {
        None => text += "the first is being taken",
        Some(EpochOutcome::Stored(line)) => {
            text += &format!(
                "checkpoint {} is durable ({})",
                line.report.epoch,
                output::count(line.report.frames, "page")
            );
        }
        Some(EpochOutcome::Failed(why)) => {
            text += &format!("the last one has failed: {why}");
            alarming = true;
        }
    }
    if done.epochs > 0 {
        text += &format!(
            "; pause {}, durable after {}",
            percentiles(&done.pause),
            percentiles(&done.write)
        );
        // A single checkpoint has no interval.
        if done.interval.p50_us > 0 {
            text += &format!(", every {:.0} ms", ms(done.interval.p50_us));
        }
    }
    let counts = [(done.failed, "failed"), (done.skipped, "skipped"), (done.early, "early")];
    let counts = counts.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!(", {n} {what}"));
    text += &format!("; {} taken{}", done.epochs, counts.collect::<String>());
    text += &format!(", in {}", run.store.display());
    Sentence { text, alarming }
}
