//! Limits on what a guest and the programs of its host can make the device keep, and on how long
//! it waits for the guest's driver.

use std::time::Duration;

/// Programs that may wait with an unfinished greeting. Beyond that, the oldest is dropped.
pub(super) const MAX_NEW_PROGRAMS: usize = 64;
/// Refusals that may wait for room in the guest. At this number the device takes no packets and
/// opens no connections.
pub(super) const MAX_REFUSALS: usize = 256;
/// Most data bytes in a packet.
pub(super) const MAX_DATA: usize = 64 << 10;
/// Most connections.
pub(super) const MAX_CONNECTIONS: usize = 1024;
/// Open files of this process that are reserved for other uses than connections.
const OTHER_FILES: u64 = 256;
/// Connections that are always allowed.
const MIN_CONNECTIONS: usize = 16;
/// Limit on how long packets wait until the driver has acknowledged the reset of its connections.
/// Linux does so within milliseconds; a guest whose memory comes from a slow place needs longer.
/// Pauses do not count.
pub(super) const RESET_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns the number of connections for a process that may open `files` files.
pub(super) fn max_connections(files: u64) -> usize {
    let left = usize::try_from(files.saturating_sub(OTHER_FILES)).unwrap_or(usize::MAX);
    left.clamp(MIN_CONNECTIONS, MAX_CONNECTIONS)
}
