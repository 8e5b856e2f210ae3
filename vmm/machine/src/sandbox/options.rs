//! What a process asks of its sandbox, and why it does not get it.

use std::path::PathBuf;

/// How a process is to be restricted. By default not at all.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Filter system calls.
    pub seccomp: bool,
    /// Restrict files.
    pub landlock: bool,
    /// Files and directories to read.
    pub read: Vec<PathBuf>,
    /// Files and directories to write to.
    pub write: Vec<PathBuf>,
    /// Sockets that are bound, now or later, and removed at the end.
    pub sockets: Vec<PathBuf>,
    /// Directories for whatever the operator names later; if there are none, all but the system's
    /// own. They are there already, as is all else: only what exists can be let through.
    pub allowed: Vec<PathBuf>,
}

/// Why a process is not restricted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The kernel takes no filters.
    #[error("this host lacks seccomp filters: {0}; --no-seccomp runs without")]
    Seccomp(seccompiler::Error),
    /// A defect of the tables.
    #[error("the filters of system calls do not compile: {0}")]
    Filters(#[from] seccompiler::BackendError),
    /// The kernel has landlock, and refuses.
    #[error("the files of this process cannot be restricted: {0}; --no-landlock runs without")]
    Landlock(::landlock::RulesetError),
    /// An allowed directory that is not there.
    #[error("--allow-path {}: {why}", path.display())]
    Given {
        /// The directory.
        path: PathBuf,
        /// The system's answer.
        why: String,
    },
}
