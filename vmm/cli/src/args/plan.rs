//! Owns the options of `driftline plan`.

use clap::Args;

use super::api::QueryArgs;
use super::headings;
use crate::values;

#[derive(Args)]
pub(crate) struct PlanArgs {
    /// Bytes a second that the link to the destination carries, such as 100M
    ///
    /// Without it 10 Gbit/s (1250000000) are assumed.
    #[arg(long, value_name = "SIZE", value_parser = values::bandwidth,
          help_heading = headings::TRANSFER)]
    pub(crate) bandwidth: Option<u64>,
    /// Longest acceptable pause, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 300, value_parser = values::downtime_ms,
          help_heading = headings::CONVERGENCE)]
    pub(crate) downtime_ms: u64,
    #[command(flatten)]
    pub(crate) query: QueryArgs,
}
