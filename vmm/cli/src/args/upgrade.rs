//! Owns the options of `upgrade`, and of the process that it starts.

use std::os::fd::RawFd;
use std::path::PathBuf;

use clap::Args;

use super::api::QueryArgs;
use super::headings;

#[derive(Args)]
pub(crate) struct UpgradeArgs {
    /// Program of the next process; by default this program
    #[arg(long, value_name = "FILE", help_heading = headings::MIGRATION)]
    pub(crate) binary: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) query: QueryArgs,
}

#[derive(Args)]
pub(crate) struct TakeOverArgs {
    /// Number of the listening socket with which this process was started
    #[arg(value_name = "DESCRIPTOR")]
    pub(crate) listener: RawFd,
}
