//! Owns the options of `serve`.

use std::path::PathBuf;

use clap::Args;

use super::headings;
use crate::values;

#[derive(Args)]
pub(crate) struct ServeArgs {
    /// Listen for API requests on this Unix socket
    #[arg(long, value_name = "FILE", help_heading = headings::API)]
    pub(crate) api_sock: PathBuf,
    /// Id of the instance: 1 to 64 letters, digits and '-'
    #[arg(long, value_name = "ID", default_value = values::DEFAULT_ID,
          value_parser = values::instance_id, help_heading = headings::IDENTITY)]
    pub(crate) id: String,
}
