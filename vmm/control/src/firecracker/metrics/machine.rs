//! Firecracker's names for what COM1, the source of randomness and the vsock have counted.

use driftline_machine::devices::{RngCounts, SerialCounts, VsockCounts};

/// Name and value of each count of a group.
type NamedCounts<const N: usize> = [(&'static str, u64); N];

/// Returns the counts of the group `uart`.
pub(super) fn serial_counts(counts: SerialCounts) -> NamedCounts<5> {
    [
        ("read_count", counts.read_bytes),
        ("write_count", counts.written_bytes),
        ("missed_write_count", counts.lost_bytes),
        ("rate_limiter_dropped_bytes", counts.limited_bytes),
        ("error_count", counts.errors),
    ]
}

/// Returns the counts of the group `entropy`. Its rate limit has made the queue wait `throttles`
/// times.
pub(super) fn rng_counts(counts: RngCounts, throttles: u64) -> NamedCounts<5> {
    [
        ("entropy_event_count", counts.requests),
        ("entropy_bytes", counts.bytes),
        ("entropy_event_fails", counts.failures),
        ("host_rng_fails", counts.failures),
        ("entropy_rate_limiter_throttled", throttles),
    ]
}

/// Returns the counts of the group `vsock`, whose directions are those of the guest.
pub(super) fn vsock_counts(counts: VsockCounts) -> NamedCounts<6> {
    [
        ("rx_packets_count", counts.given_packets),
        ("rx_bytes_count", counts.given_bytes),
        ("tx_packets_count", counts.taken_packets),
        ("tx_bytes_count", counts.taken_bytes),
        ("conns_added", counts.connections_begun),
        ("conns_removed", counts.connections_ended),
    ]
}
