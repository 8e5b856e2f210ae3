//! How a guest is received: the options, with their defaults.

use std::path::PathBuf;
use std::time::Duration;

use super::copies;

/// The default of [`ReceiveOptions::disk_limit`].
const DISK_LIMIT: Duration = Duration::from_secs(8);
/// Upper bound on giving copies of disks up to a guest that is taken over, with the default
/// [`ReceiveOptions::disk_limit`].
pub const YIELD_LIMIT: Duration = DISK_LIMIT.saturating_add(copies::MARGIN);

/// How a guest is received. [`ReceiveOptions::new`] gives the defaults.
#[derive(Clone, Debug)]
pub struct ReceiveOptions {
    /// The directory of this host's hand-over records ([`Records`]).
    pub records: PathBuf,
    /// Time for a caller to introduce itself and to describe its guest. 5 s.
    pub handshake_timeout: Duration,
    /// How long the source may make no progress at all. 10 s.
    pub progress_timeout: Duration,
    /// The time in which the source has to move at least 256 KiB of memory or state: a peer that
    /// trickles does not keep this receiver for nothing. A minute.
    pub pace_window: Duration,
    /// How long building a guest may take, its disks opened and copies of drives made, after which
    /// it is refused: a disk hangs. 25 s: less than a source waits for READY, so that it hears
    /// why.
    pub build_limit: Duration,
    /// How long one operation on the copy of a drive may take, after which the guest is thrown
    /// away: its storage hangs. A wait for several operations may take a second more. 8 s: a
    /// source gives up before it hears why if it waits for less without progress, or in the
    /// pause.
    pub disk_limit: Duration,
    /// Time from PREPARED to COMMIT, after which the guest is thrown away. 10 s.
    pub commit_deadline: Duration,
    /// How long a receiver that threw a prepared guest away stays to tell the source. 30 s, or 2 s
    /// once it is cancelled.
    pub tell_limit: Duration,
    /// Take one source only: fail with it, wherever it fails before PREPARED, instead of waiting
    /// for another. False.
    pub once: bool,
}

impl ReceiveOptions {
    /// The defaults, with the directory for the hand-over record.
    pub fn new(records: impl Into<PathBuf>) -> Self {
        Self {
            records: records.into(),
            handshake_timeout: Duration::from_secs(5),
            progress_timeout: Duration::from_secs(10),
            pace_window: Duration::from_secs(60),
            build_limit: Duration::from_secs(25),
            disk_limit: DISK_LIMIT,
            commit_deadline: Duration::from_secs(10),
            tell_limit: Duration::from_secs(30),
            once: false,
        }
    }
}
