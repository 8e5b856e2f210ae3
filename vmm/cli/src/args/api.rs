//! Owns the options of commands that ask a running VMM.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::headings;
use crate::values;

/// Where a running VMM listens.
#[derive(Args)]
pub(crate) struct ApiArgs {
    /// The API socket of the guest's VMM
    #[arg(long, value_name = "FILE", help_heading = headings::API)]
    pub(crate) api_sock: PathBuf,
    /// How long to wait for an answer, such as 500ms, 30s or 5m
    ///
    /// The limit applies to each request. The waits for the end of a migration, for checkpoints and
    /// for the next view of top have no limit.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = values::duration,
          help_heading = headings::WAITING)]
    pub(crate) timeout: Duration,
}

impl ApiArgs {
    /// Returns a client of that VMM.
    pub(crate) fn client(&self) -> driftline_control::api::Client {
        driftline_control::api::Client::new(&self.api_sock).with_timeout(self.timeout)
    }
}

#[derive(Args)]
pub(crate) struct StopArgs {
    #[command(flatten)]
    pub(crate) query: QueryArgs,
    /// Wait until the VMM's process has ended, for at most --timeout
    #[arg(long, help_heading = headings::WAITING)]
    pub(crate) wait: bool,
}

/// A request to a running VMM that has one result.
#[derive(Args)]
pub(crate) struct QueryArgs {
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    /// Print one JSON object
    #[arg(long, help_heading = headings::OUTPUT)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub(crate) struct BalloonArgs {
    /// New size of the balloon: whole MiB, such as 256M
    #[arg(long, value_name = "SIZE", value_parser = values::size,
          help_heading = headings::MEMORY)]
    pub(crate) size: Option<u64>,
    #[command(flatten)]
    pub(crate) query: QueryArgs,
}
