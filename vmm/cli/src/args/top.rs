//! Owns the options of `driftline top`.

use std::time::Duration;

use clap::Args;

use super::api::QueryArgs;
use super::headings;
use crate::values;

/// Bounds of the interval.
pub(crate) const SHORTEST_INTERVAL: Duration = Duration::from_millis(100);
pub(crate) const LONGEST_INTERVAL: Duration = Duration::from_secs(60);

#[derive(Args)]
pub(crate) struct TopArgs {
    /// Interval between two views: from 100ms to 60s
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = interval,
          help_heading = headings::TIMING)]
    pub(crate) interval: Duration,
    /// Print one view as plain text, after one interval, and end
    ///
    /// With --json, the view is an object. --json without --once prints an object each interval.
    #[arg(long, help_heading = headings::OUTPUT)]
    pub(crate) once: bool,
    #[command(flatten)]
    pub(crate) query: QueryArgs,
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = values::duration(text)?;
    match (SHORTEST_INTERVAL..=LONGEST_INTERVAL).contains(&interval) {
        true => Ok(interval),
        false => Err("an interval is from 100ms to 60s".to_owned()),
    }
}
