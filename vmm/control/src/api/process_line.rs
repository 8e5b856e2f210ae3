//! The command line of a guest's process.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The command line of a guest's process, with which the next process of the guest continues.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ProcessLine {
    /// The arguments, without the program's name.
    pub arguments: Vec<String>,
    /// The working directory, to which paths in the arguments are relative.
    pub directory: PathBuf,
}
