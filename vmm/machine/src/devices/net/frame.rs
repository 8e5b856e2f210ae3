//! Frames: their header, their limits, and the frame that the device sends by itself.

use crate::config::MacAddr;

/// Size in bytes of `struct virtio_net_hdr_v1`, which precedes each frame on the tap and in the
/// queues.
pub const HEADER: usize = 12;
/// Bytes of the header's field `num_buffers`.
pub(super) const NUM_BUFFERS: std::ops::Range<usize> = 10..12;
/// Most bytes of a frame with its header: 64 KiB of IP that is segmented later, Ethernet with a
/// VLAN tag, and the header.
pub(super) const MAX_FRAME: usize = 65_535 + 18 + HEADER;

/// Returns an announcement from which switches learn where the interface is: a broadcast RARP
/// request. It contains no IP address, which only the guest knows.
pub(super) fn announcement(mac: MacAddr) -> Vec<u8> {
    let MacAddr(mac) = mac;
    let mut frame = vec![0; HEADER];
    frame.extend([0xff; 6]);
    frame.extend(mac);
    // EtherType RARP; Ethernet and IPv4 addresses of 6 and 4 bytes; "request reverse".
    frame.extend([0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
    // Sender and target are the same, without an IP address.
    for _ in 0..2 {
        frame.extend(mac);
        frame.extend([0; 4]);
    }
    // Minimum size of an Ethernet frame without its checksum.
    frame.resize(HEADER + 60, 0);
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn announcement_is_a_rarp_frame() {
        let frame = announcement(MacAddr([2, 1, 2, 3, 4, 5]));
        assert_eq!(frame.len(), 72);
        assert_eq!(frame[..HEADER], [0; HEADER], "no offloads");
        assert_eq!(frame[12..18], [0xff; 6]);
        assert_eq!(frame[18..24], [2, 1, 2, 3, 4, 5]);
        assert_eq!(frame[24..34], [0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
        assert_eq!(frame[34..44], [2, 1, 2, 3, 4, 5, 0, 0, 0, 0]);
        assert_eq!(frame[44..54], frame[34..44]);
    }
}
