//! Frames: their header, their bounds, and the one that a device writes by itself.

use crate::config::MacAddr;

/// Bytes of `struct virtio_net_hdr_v1`, before each frame, on the tap as in the queues.
pub(super) const HEADER: usize = 12;
/// `num_buffers` in it.
pub(super) const NUM_BUFFERS: std::ops::Range<usize> = 10..12;
/// Most bytes of a frame with its header: 64 KiB of IP that segmentation is left to others,
/// Ethernet with a VLAN tag, and the header.
pub(super) const MAX_FRAME: usize = 65_535 + 18 + HEADER;

/// Who the interface is, for switches to learn where it is: a RARP request to all. It names no IP
/// address, which only the guest knows.
pub(super) fn announcement(mac: MacAddr) -> Vec<u8> {
    let MacAddr(mac) = mac;
    let mut frame = vec![0; HEADER];
    frame.extend([0xff; 6]);
    frame.extend(mac);
    // EtherType RARP; Ethernet and IPv4 addresses of 6 and 4 bytes; "request reverse".
    frame.extend([0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
    // Sender and target are the same, at no IP address.
    for _ in 0..2 {
        frame.extend(mac);
        frame.extend([0; 4]);
    }
    // The least that Ethernet sends, without its checksum.
    frame.resize(HEADER + 60, 0);
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_announcement_is_a_frame_of_rarp() {
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
