//! The metadata service of an interface: frames of a guest whose TCP mostly follows the service's,
//! so that requests get through.

use std::net::Ipv4Addr;
use std::time::Duration;

use serde_json::json;

use super::input::FuzzInput;
use crate::config::{MetadataVersion, NetMetadata};
use crate::devices::net::{MAX_CONNECTIONS, MAX_WAITING, MmdsStack};
use crate::metadata::MetadataStore;

const ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const PSH: u8 = 8;
const ACK: u8 = 16;
/// Number of the guest's ports: more than there are connections.
const PORTS: usize = 2 * MAX_CONNECTIONS;
/// Most steps of one run.
const MAX_STEPS: usize = 500;
/// Parts of requests.
const PARTS: [&[u8]; 12] = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET /a/b HTTP/1.0\r\n",
    b"GET /large HTTP/1.1\r\nAccept: application/json\r\n\r\n",
    b"PUT /latest/api/token HTTP/1.1\r\n",
    b"X-metadata-token-ttl-seconds: 60\r\n",
    b"X-metadata-token: 00\r\n",
    b"Content-Length: 5\r\n",
    b"Connection: close\r\n",
    b"\r\n",
    b"a: b\r\n",
    b"X-Forwarded-For: a\r\n",
    b"POST ",
];

/// A guest and the service.
pub(super) struct FuzzedMetadata {
    stack: MmdsStack,
    mtu: u16,
    now: Duration,
    /// The next sequence number of each port, and the one that it expects.
    numbers: [(u32, u32); PORTS],
}

impl FuzzedMetadata {
    pub(super) fn new(from: &mut FuzzInput<'_>) -> Self {
        let store = MetadataStore::default();
        store.put(json!({ "a": { "b": "text" }, "large": "v".repeat(20_000) })).unwrap();
        let version = from.one_of(&[MetadataVersion::V1, MetadataVersion::V2]);
        let config = NetMetadata { address: ADDRESS, version, imds_compat: from.flip() };
        let mtu = from.one_of(&[1500, 1500, 68, 576]);
        let stack = MmdsStack::new(config, mtu, store, 1);
        Self { stack, mtu, now: Duration::ZERO, numbers: [(0, 0); PORTS] }
    }

    pub(super) fn run(&mut self, from: &mut FuzzInput<'_>) {
        for _ in 0..MAX_STEPS {
            if from.is_empty() {
                break;
            }
            match from.u8() % 16 {
                0 => self.send_anything(from),
                1..9 => self.send_segment(from),
                9..13 => self.take_frames(from.u8().into()),
                13 => {
                    let due = self.stack.due_in(self.now);
                    self.pass(due.unwrap_or_default());
                }
                14 => self.pass(Duration::from_millis(from.u16().into())),
                _ if from.u8() == 0 => self.stack.reset(),
                _ => {}
            }
            assert!(self.stack.waiting_frames() <= MAX_WAITING);
            assert!(self.stack.open_connections() <= MAX_CONNECTIONS);
        }
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.stack.tick(self.now);
    }

    /// Sends a frame that is mostly for the service, whatever else it is.
    fn send_anything(&mut self, from: &mut FuzzInput<'_>) {
        let len = from.u8();
        let mut frame = from.bytes(len.into()).to_vec();
        let ipv4 = [8, 0, 0x45];
        let places = [(12, &ipv4[..]), (30, &ADDRESS.octets()[..]), (23, &[6])];
        for (at, bytes) in places.into_iter().take(usize::from(from.u8() % 4)) {
            if let Some(place) = frame.get_mut(at..at + bytes.len()) {
                place.copy_from_slice(bytes);
            }
        }
        self.stack.take(&frame, self.now);
    }

    fn send_segment(&mut self, from: &mut FuzzInput<'_>) {
        let port = usize::from(from.u8()) % PORTS;
        let flags = from.one_of(&[SYN, ACK, ACK | PSH, ACK | PSH, ACK, ACK | FIN, RST | ACK]);
        let flags = if from.u8() < 250 { flags } else { from.u8() };
        let data = match from.u8() % 4 {
            _ if flags & PSH == 0 => &[],
            0 => {
                let len = from.u8();
                from.bytes(len.into())
            }
            _ => from.one_of(&PARTS),
        };
        let (sequence, expected) = self.numbers[port];
        let shift = if from.u8() < 240 { 0 } else { from.u32() };
        let window = from.one_of(&[u16::MAX, u16::MAX, 1000, 1, 0]);
        let options: &[u8] = match from.u8() % 4 {
            _ if flags & SYN == 0 => &[],
            0 => &[2, 4, 5, 0xb4],
            1 => &[2, 4, 0, from.u8(), 3, 3, 14, 0, 4, 2, 0, 0],
            _ => &[],
        };
        let mut frame = [&[0; 6][..], &MAC, &[8, 0, 0x45, 0]].concat();
        let len = 40 + options.len() + data.len();
        frame.extend((len as u16).to_be_bytes());
        frame.extend([0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 2]);
        frame.extend(ADDRESS.octets());
        frame.extend((port as u16 + 1).to_be_bytes());
        frame.extend([0, 80]);
        frame.extend(sequence.wrapping_add(shift).to_be_bytes());
        frame.extend(expected.wrapping_add(shift >> 16).to_be_bytes());
        frame.extend([(5 + options.len() as u8 / 4) << 4, flags]);
        frame.extend(window.to_be_bytes());
        frame.extend([0; 4]);
        frame.extend(options);
        frame.extend(data);
        assert!(self.stack.take(&frame, self.now));
        let ends = u32::from(flags & SYN != 0) + u32::from(flags & FIN != 0);
        self.numbers[port].0 = sequence.wrapping_add(data.len() as u32 + ends);
    }

    /// Takes frames, and what they say of their connections.
    fn take_frames(&mut self, most: usize) {
        for _ in 0..most {
            let Some(frame) = self.stack.next_frame(self.now) else { return };
            assert!(frame.len() <= 14 + usize::from(self.mtu));
            if frame[12..14] != [8, 0] {
                continue;
            }
            assert_eq!(frame[26..34], [&ADDRESS.octets()[..], &frame[30..34]].concat());
            let tcp = &frame[34..];
            let number = |at: usize| u32::from_be_bytes(tcp[at..at + 4].try_into().unwrap());
            let port = usize::from(u16::from_be_bytes([tcp[2], tcp[3]]));
            let data = tcp.len() - usize::from(tcp[12] >> 4) * 4;
            let ends = u32::from(tcp[13] & SYN != 0) + u32::from(tcp[13] & FIN != 0);
            if let Some(numbers) = port.checked_sub(1).and_then(|i| self.numbers.get_mut(i)) {
                numbers.1 = number(4).wrapping_add(data as u32 + ends);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first bytes choose V1 and the MTU; then a connection asks for the large value.
    #[test]
    fn requests_get_through() {
        let mut bytes = vec![0, 0, 0];
        // A new connection, the service's answer, a request, and the frames of the value.
        bytes.extend([1, 7, 0, 0, 0, 0, 0, 3]);
        bytes.extend([9, 200]);
        bytes.extend([1, 7, 1, 0, 0, 0, 0, 0]);
        bytes.extend([1, 7, 2, 0, 1, 2, 0, 0, 0]);
        let mut input = FuzzInput::new(&bytes);
        let mut run = FuzzedMetadata::new(&mut input);
        run.run(&mut input);
        assert_eq!(run.stack.open_connections(), 1);
        assert!(run.stack.waiting_frames() > 4, "{}", run.stack.waiting_frames());
    }
}
