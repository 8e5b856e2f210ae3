//! Owns the options of `driftline plan`.

use clap::Args;

use super::api::QueryArgs;
use super::headings;
use crate::values;

#[derive(Args)]
pub(crate) struct PlanArgs {
    /// Bandwidth of the link to the destination, in bytes a second, such as 100M
    ///
    /// The default is 10 Gbit/s (1250000000).
    #[arg(long, value_name = "SIZE", value_parser = values::bandwidth,
          help_heading = headings::TRANSFER)]
    pub(crate) bandwidth: Option<u64>,
    /// Longest acceptable downtime, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 300, value_parser = values::downtime_ms,
          help_heading = headings::CONVERGENCE)]
    pub(crate) downtime_ms: u64,
    #[command(flatten)]
    pub(crate) query: QueryArgs,
}
