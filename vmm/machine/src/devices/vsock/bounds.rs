//! Bounds on what a guest and the programs of its host can make the device keep.

/// Programs that have not yet said what they want; beyond that the first of them gives way.
pub(super) const MAX_CALLERS: usize = 64;
/// Refusals that wait for room in the guest. With so many, the device takes no packets and opens no
/// connections.
pub(super) const MAX_REFUSALS: usize = 256;
/// Most bytes of data in a packet.
pub(super) const MAX_DATA: usize = 64 << 10;
/// Connections at most.
const MAX_CONNECTIONS: usize = 1024;
/// Open files of this process that are not for connections: the rest of it needs some.
const OTHER_FILES: u64 = 256;
/// Connections for which there is room always.
const MIN_CONNECTIONS: usize = 16;

/// How many connections a process may have that can open `files` files.
pub(super) fn most_connections(files: u64) -> usize {
    let left = usize::try_from(files.saturating_sub(OTHER_FILES)).unwrap_or(usize::MAX);
    left.clamp(MIN_CONNECTIONS, MAX_CONNECTIONS)
}
