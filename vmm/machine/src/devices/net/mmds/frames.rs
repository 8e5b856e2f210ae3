//! Ethernet frames of a guest that asks for its metadata, and those that answer it.

use std::net::{Ipv4Addr, SocketAddrV4};

/// The Ethernet address of the metadata service, which Firecracker's guests see, too.
pub(super) const SERVICE_MAC: [u8; 6] = [0x06, 0x01, 0x23, 0x45, 0x67, 0x01];
/// The port of the metadata service.
pub(super) const SERVICE_PORT: u16 = 80;

/// Bytes of an Ethernet header.
pub(super) const ETHERNET: usize = 14;
const ARP: [u8; 2] = [0x08, 0x06];
const IPV4: [u8; 2] = [0x08, 0x00];
/// What an ARP packet of Ethernet and IPv4 begins with.
const ARP_ETHERNET_IPV4: [u8; 6] = [0, 1, 8, 0, 6, 4];
const ARP_REQUEST: [u8; 2] = [0, 1];
const ARP_REPLY: [u8; 2] = [0, 2];
/// Bytes of an ARP packet of Ethernet and IPv4.
const ARP_BYTES: usize = 28;
const TCP: u8 = 6;
/// Bits of a TCP header: a new connection.
const SYN: u8 = 2;
const ACK: u8 = 16;
/// Bytes of a TCP header without options.
const TCP_BYTES: usize = 20;

/// A frame of the guest that is for the metadata service.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum ServiceFrame {
    /// A request for the service's Ethernet address, with the frame that answers it.
    Arp(Vec<u8>),
    /// A TCP segment for the service's port.
    Segment {
        /// The Ethernet address of the sender.
        from: [u8; 6],
        source: SocketAddrV4,
        /// Whether it begins a connection.
        begins: bool,
    },
    /// An IPv4 packet that is not TCP.
    Other,
    /// A packet that is malformed, has a sender that cannot be answered, or is for another port.
    Bad,
}

/// Returns what `frame` is, if it is for the service at `address`.
pub(super) fn classify(frame: &[u8], address: Ipv4Addr) -> Option<ServiceFrame> {
    let (header, packet) = frame.split_at_checked(ETHERNET)?;
    let mut from = [0; 6];
    from.copy_from_slice(&header[6..12]);
    match [header[12], header[13]] {
        ARP => arp_reply(packet, address).map(ServiceFrame::Arp),
        IPV4 if packet.get(16..20) == Some(&address.octets()) => {
            if packet.get(9) != Some(&TCP) {
                return Some(ServiceFrame::Other);
            }
            Some(segment(packet, from).unwrap_or(ServiceFrame::Bad))
        }
        _ => None,
    }
}

/// Returns the frame that answers an ARP request for the service.
fn arp_reply(packet: &[u8], address: Ipv4Addr) -> Option<Vec<u8>> {
    let packet = packet.get(..ARP_BYTES)?;
    let (kind, rest) = packet.split_at(8);
    let (sender, target) = rest.split_at(10);
    if kind[..6] != ARP_ETHERNET_IPV4 || kind[6..] != ARP_REQUEST || target[6..] != address.octets()
    {
        return None;
    }
    let reply = [&ARP_ETHERNET_IPV4[..], &ARP_REPLY, &SERVICE_MAC, &address.octets(), sender];
    let mut frame = ethernet(&sender[..6], ARP);
    frame.extend(reply.concat());
    Some(frame)
}

/// Checks the fields of a TCP packet that the service needs before it passes the packet to TCP.
fn segment(packet: &[u8], from: [u8; 6]) -> Option<ServiceFrame> {
    let header = usize::from(packet[0] & 0xf) * 4;
    let source = Ipv4Addr::from(<[u8; 4]>::try_from(packet.get(12..16)?).ok()?);
    let target = Ipv4Addr::from(<[u8; 4]>::try_from(packet.get(16..20)?).ok()?);
    let tcp = packet.get(header..header + TCP_BYTES)?;
    let unanswerable = source.is_unspecified()
        || source.is_multicast()
        || source.is_loopback()
        || source.octets()[0] >= 240
        || source == target
        || from[0] & 1 != 0;
    if header < 20 || unanswerable || tcp[2..4] != SERVICE_PORT.to_be_bytes() {
        return None;
    }
    let source = SocketAddrV4::new(source, u16::from_be_bytes([tcp[0], tcp[1]]));
    Some(ServiceFrame::Segment { from, source, begins: tcp[13] & (SYN | ACK) == SYN })
}

/// Returns a frame for `to` with the IPv4 packet that `fill` writes into its `len` bytes.
pub(super) fn ipv4_frame<T>(
    to: [u8; 6],
    len: usize,
    fill: impl FnOnce(&mut [u8]) -> T,
) -> (Vec<u8>, T) {
    let mut frame = ethernet(&to, IPV4);
    frame.resize(ETHERNET + len, 0);
    let result = fill(&mut frame[ETHERNET..]);
    (frame, result)
}

fn ethernet(to: &[u8], kind: [u8; 2]) -> Vec<u8> {
    [to, &SERVICE_MAC, &kind].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);
    const GUEST: [u8; 6] = [2, 0, 0, 0, 0, 1];

    fn arp(operation: u8, target: Ipv4Addr) -> Vec<u8> {
        let mut frame =
            [&[0xff; 6][..], &GUEST, &ARP, &ARP_ETHERNET_IPV4, &[0, operation]].concat();
        frame.extend(GUEST);
        frame.extend([10, 0, 0, 2]);
        frame.extend([0; 6]);
        frame.extend(target.octets());
        frame
    }

    /// Returns a segment without data.
    fn tcp(port: u16, flags: u8) -> Vec<u8> {
        let mut frame = [&SERVICE_MAC[..], &GUEST, &IPV4].concat();
        frame.extend([0x45, 0, 0, 40, 0, 0, 0, 0, 64, TCP, 0, 0, 10, 0, 0, 2]);
        frame.extend(ADDRESS.octets());
        frame.extend([0x80, 0]);
        frame.extend(port.to_be_bytes());
        frame.extend([0; 8]);
        frame.extend([0x50, flags, 0, 0, 0, 0, 0, 0]);
        frame
    }

    #[test]
    fn arp_request_is_answered() {
        let Some(ServiceFrame::Arp(reply)) = classify(&arp(1, ADDRESS), ADDRESS) else {
            panic!("it is not answered")
        };
        let mut expected = [&GUEST[..], &SERVICE_MAC, &ARP, &ARP_ETHERNET_IPV4, &[0, 2]].concat();
        expected.extend(SERVICE_MAC);
        expected.extend(ADDRESS.octets());
        expected.extend(GUEST);
        expected.extend([10, 0, 0, 2]);
        assert_eq!(reply, expected);
    }

    #[test]
    fn frames_for_others_stay_with_the_tap() {
        assert_eq!(classify(&arp(1, Ipv4Addr::new(10, 0, 0, 1)), ADDRESS), None);
        assert_eq!(classify(&arp(2, ADDRESS), ADDRESS), None, "an answer");
        assert_eq!(classify(&tcp(80, SYN), Ipv4Addr::new(169, 254, 1, 1)), None);
        let mut ipv6 = tcp(80, SYN);
        ipv6[12..14].copy_from_slice(&[0x86, 0xdd]);
        assert_eq!(classify(&ipv6, ADDRESS), None);
    }

    #[test]
    fn packets_for_the_service_are_told_apart() {
        let source = SocketAddrV4::new(Ipv4Addr::new(10, 0, 0, 2), 0x8000);
        let segment = |begins| Some(ServiceFrame::Segment { from: GUEST, source, begins });
        assert_eq!(classify(&tcp(80, SYN), ADDRESS), segment(true));
        assert_eq!(classify(&tcp(80, SYN | ACK), ADDRESS), segment(false));
        assert_eq!(classify(&tcp(81, SYN), ADDRESS), Some(ServiceFrame::Bad));
        let mut udp = tcp(80, SYN);
        udp[ETHERNET + 9] = 17;
        assert_eq!(classify(&udp, ADDRESS), Some(ServiceFrame::Other));
        for source in [[0; 4], [224, 0, 0, 1], [255; 4], [127, 0, 0, 1], ADDRESS.octets()] {
            let mut frame = tcp(80, SYN);
            frame[ETHERNET + 12..ETHERNET + 16].copy_from_slice(&source);
            assert_eq!(classify(&frame, ADDRESS), Some(ServiceFrame::Bad), "{source:?}");
        }
    }

    #[test]
    fn cut_frames_are_harmless() {
        for frame in [arp(1, ADDRESS), tcp(80, SYN)] {
            for len in 0..frame.len() {
                let found = classify(&frame[..len], ADDRESS);
                assert!(
                    matches!(found, None | Some(ServiceFrame::Bad | ServiceFrame::Other)),
                    "{len}"
                );
            }
        }
    }
}
