//! Options of a process's sandbox, and the errors of applying them.

use std::path::PathBuf;

/// Restrictions to apply to the process. The default applies none.
#[derive(Clone, Debug, Default)]
pub struct SandboxOptions {
    /// Whether to filter system calls.
    pub seccomp: bool,
    /// Whether to restrict access to files.
    pub landlock: bool,
    /// Files and directories that may be read.
    pub read: Vec<PathBuf>,
    /// Files and directories that may be written.
    pub write: Vec<PathBuf>,
    /// Sockets that the process binds, now or later, and removes when it exits.
    pub sockets: Vec<PathBuf>,
    /// Directories for files that the operator names later. If empty, all directories except the
    /// system's own are allowed. These directories, like all other paths here, must already exist:
    /// landlock can allow only existing paths.
    pub allowed: Vec<PathBuf>,
}

/// Reason why a process cannot be restricted.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The kernel does not support seccomp filters.
    #[error("this host lacks seccomp filters: {0}; --no-seccomp runs without")]
    Seccomp(seccompiler::Error),
    /// The filter tables are invalid, which is a bug.
    #[error("the filters of system calls do not compile: {0}")]
    Filters(#[from] seccompiler::BackendError),
    /// The kernel has landlock, but refused the rules.
    #[error("the files of this process cannot be restricted: {0}; --no-landlock runs without")]
    Landlock(::landlock::RulesetError),
    /// An allowed directory does not exist.
    #[error("--allow-path {}: it does not exist", .0.display())]
    NoAllowedPath(PathBuf),
    /// An allowed directory cannot be opened.
    #[error("--allow-path {}: {cause}", path.display())]
    AllowPath {
        /// Path of the directory.
        path: PathBuf,
        /// The system's error.
        #[source]
        cause: ::landlock::PathFdError,
    },
}
