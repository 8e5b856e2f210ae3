//! The command line of a guest's process, or why no other process can continue with it.

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

/// Why no other process can continue with a guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NoProcessLine {
    /// The guest was configured over Firecracker's API, so that no command line describes it.
    #[error("its guest was configured over Firecracker's API")]
    ConfiguredOverApi,
    /// The process was started with `--die-with-parent`.
    #[error("it ends with the process that has started it")]
    EndsWithParent,
    /// The process is the first one of its PID namespace.
    #[error("it is the first process of its PID namespace, whose end ends all others")]
    FirstOfNamespace,
    /// The guest's serial port is a terminal.
    #[error(
        "its guest has the terminal, which belongs to one process group; use `--serial file:PATH` \
         or `--serial null`"
    )]
    Terminal,
    /// An argument is not UTF-8.
    #[error("its command line is not UTF-8")]
    Arguments,
    /// The path of the state directory is not UTF-8.
    #[error("its state directory is not UTF-8")]
    StateDirectory,
    /// The working directory no longer exists.
    #[error("its working directory was removed")]
    WorkingDirectory,
}
