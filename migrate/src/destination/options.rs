//! Options of `receive`, with their defaults.

use std::path::PathBuf;
use std::time::Duration;

use super::copies;
use crate::error::Cause;
use crate::transport::listener::Listener;
use crate::transport::protection::ReceiveTls;

/// The default of [`ReceiveOptions::disk_limit`].
const DISK_LIMIT: Duration = Duration::from_secs(8);
/// Upper bound on yielding copies of disks to a guest during its take-over, with the default
/// [`ReceiveOptions::disk_limit`].
pub const YIELD_LIMIT: Duration = DISK_LIMIT.saturating_add(copies::MARGIN);

/// Options of [`receive`](crate::receive). [`ReceiveOptions::new`] gives the defaults.
#[derive(Clone, Debug)]
pub struct ReceiveOptions {
    /// Directory of this host's hand-over records ([`Records`](crate::Records)).
    pub records: PathBuf,
    /// Upper bound on a caller's HELLO, and again on the description of its guest. Default: 5 s.
    pub handshake_timeout: Duration,
    /// Longest time without progress of the source. Default: 10 s.
    pub progress_timeout: Duration,
    /// Time in which the source must move at least 256 KiB of memory, disks or state, so that a
    /// slow peer cannot occupy the receiver. Default: one minute.
    pub pace_window: Duration,
    /// Upper bound on building a guest, including opening disks and making copies, after which the
    /// source is refused. Default: 25 s, which is less than a source waits for READY, so that it
    /// receives the reason.
    pub build_limit: Duration,
    /// Upper bound on one operation on a copy of a disk, after which the guest is discarded.
    /// Waiting for several operations may take a second more. A source with a shorter progress
    /// timeout, or in the pause, gives up before it receives the reason. Default: 8 s.
    pub disk_limit: Duration,
    /// Upper bound on the time from PREPARED to COMMIT, after which the guest is discarded.
    /// Default: 10 s.
    pub commit_deadline: Duration,
    /// Upper bound on the wait for the question of a source in doubt, after a prepared guest was
    /// discarded; at most 2 s once the receiver is cancelled. Default: 30 s.
    pub answer_timeout: Duration,
    /// TLS of all connections. `None`, the default: no TLS, and only loopback, unix sockets and
    /// inherited sockets are accepted, unless [`insecure`](Self::insecure) is set.
    pub tls: Option<ReceiveTls>,
    /// Whether to wait on an address of other hosts without TLS. Default: false.
    pub insecure: bool,
    /// Whether to accept one source only, and to fail if it fails before PREPARED. Default: false.
    /// A receiver at an inherited connection does so in any case.
    pub once: bool,
}

impl ReceiveOptions {
    /// Returns the defaults, with the directory of hand-over records.
    pub fn new(records: impl Into<PathBuf>) -> Self {
        Self {
            records: records.into(),
            handshake_timeout: Duration::from_secs(5),
            progress_timeout: Duration::from_secs(10),
            pace_window: Duration::from_secs(60),
            build_limit: Duration::from_secs(25),
            disk_limit: DISK_LIMIT,
            commit_deadline: Duration::from_secs(10),
            answer_timeout: Duration::from_secs(30),
            tls: None,
            insecure: false,
            once: false,
        }
    }

    /// Fails if other hosts reach `listener` without TLS, unless that was asked for, or if the TLS
    /// files cannot be used now: they would refuse every source. [`receive`](crate::receive) checks
    /// this first.
    ///
    /// # Errors
    ///
    /// [`Cause::Unprotected`] has the address, [`Cause::Tls`] the file.
    pub fn check_protection(&self, listener: &Listener) -> Result<(), Cause> {
        match &self.tls {
            Some(tls) => tls.check().map_err(|e| Cause::Tls(e.into())),
            None if self.insecure => Ok(()),
            None => Ok(listener.check_stays_here()?),
        }
    }
}
