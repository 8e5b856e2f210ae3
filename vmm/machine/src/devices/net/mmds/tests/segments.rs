//! Tests in which a guest without a TCP stack sends single segments.

use proptest::prelude::*;

use super::*;

/// First sequence number of a guest without a TCP stack.
const ISN: u32 = 1000;
const SYN: u8 = 2;
const RST: u8 = 4;
const ACK: u8 = 16;

fn raw_stack(value: Value) -> MmdsStack {
    let store = MetadataStore::default();
    store.put(value).unwrap();
    let version = MetadataVersion::V1;
    MmdsStack::new(NetMetadata { address: ADDRESS, version, imds_compat: false }, MTU, store, 1)
}

/// Returns a TCP header from its sequence number on.
fn tcp_header(sequence: u32, acknowledged: u32, flags: u8, options: &[u8]) -> Vec<u8> {
    let mut header = [sequence.to_be_bytes(), acknowledged.to_be_bytes()].concat();
    header.extend([(5 + options.len() as u8 / 4) << 4, flags, 0xff, 0xff, 0, 0, 0, 0]);
    header.extend(options);
    header
}

/// Returns the segment that begins a connection with these options.
fn beginning(port: u16, options: &[u8]) -> Vec<u8> {
    segment(&tcp_header(ISN, 0, SYN, options), port)
}

/// Returns a TCP segment for the service with these bytes after its ports.
fn segment(rest: &[u8], source_port: u16) -> Vec<u8> {
    let mut frame = [&SERVICE_MAC[..], &GUEST_MAC, &[8, 0]].concat();
    let len = 20 + 4 + rest.len() as u16;
    frame.extend([0x45, 0]);
    frame.extend(len.to_be_bytes());
    frame.extend([0, 0, 0, 0, 64, 6, 0, 0, 169, 254, 1, 1]);
    frame.extend(ADDRESS.octets());
    frame.extend(source_port.to_be_bytes());
    frame.extend(80u16.to_be_bytes());
    frame.extend(rest);
    frame
}

/// A guest without a TCP stack, with one connection.
struct RawPeer {
    port: u16,
    /// The next sequence number of the guest, and the next one of the service.
    numbers: (u32, u32),
}

impl RawPeer {
    fn connected(stack: &mut MmdsStack, port: u16) -> Self {
        stack.take(&beginning(port, &[]), Duration::ZERO);
        let frame = stack.next_frame(Duration::ZERO).expect("it answers");
        let theirs = u32::from_be_bytes(frame[ETHERNET + 24..][..4].try_into().unwrap());
        let numbers = (ISN + 1, theirs.wrapping_add(1));
        stack.take(&segment(&tcp_header(numbers.0, numbers.1, ACK, &[]), port), Duration::ZERO);
        Self { port, numbers }
    }

    /// Sends `request`, with which it acknowledges what came before. Returns the first segment's
    /// data.
    fn ask(&mut self, stack: &mut MmdsStack, request: &[u8], now: Duration) -> Vec<u8> {
        let header = tcp_header(self.numbers.0, self.numbers.1, ACK, &[]);
        stack.take(&segment(&[&header, request].concat(), self.port), now);
        let mut data = std::iter::from_fn(|| stack.next_frame(now)).map(|frame| {
            let tcp = &frame[ETHERNET + 20..];
            tcp[usize::from(tcp[12] >> 4) * 4..].to_vec()
        });
        let data = data.find(|data| !data.is_empty()).unwrap_or_default();
        self.numbers.0 = self.numbers.0.wrapping_add(request.len() as u32);
        self.numbers.1 = self.numbers.1.wrapping_add(data.len() as u32);
        data
    }
}

/// The guest acknowledges an answer with its next request, so that TCP holds as much after each.
#[test]
fn busy_connection_does_not_end() {
    let mut stack = raw_stack(json!({ "a": "x" }));
    let mut peer = RawPeer::connected(&mut stack, 1);
    let mut now = Duration::ZERO;
    while now <= 2 * IDLE_LIMIT {
        let answer = peer.ask(&mut stack, b"GET /a HTTP/1.1\r\n\r\n", now);
        assert!(answer.ends_with(b"x"), "after {now:?}");
        now += IDLE_LIMIT / 4;
        stack.tick(now);
        while stack.next_frame(now).is_some() {}
    }
    assert_eq!(stack.open_connections(), 1);
}

#[test]
fn repeated_beginning_is_one_connection() {
    let mut stack = raw_stack(json!({}));
    for port in [1, 2] {
        stack.take(&beginning(port, &[]), Duration::ZERO);
    }
    // The socket of the first one is free again, and comes before that of the second one.
    stack.take(&segment(&tcp_header(ISN + 1, 0, RST, &[]), 1), Duration::ZERO);
    assert_eq!(stack.open_connections(), 1);
    for port in [3, 2, 2] {
        stack.take(&beginning(port, &[]), Duration::ZERO);
    }
    assert_eq!(stack.open_connections(), 2);
}

#[test]
fn connection_begins_without_the_last_ones_limits() {
    let value = "v".repeat(400);
    let mut stack = raw_stack(json!({ "a": value }));
    // Its largest segment has 64 bytes.
    stack.take(&beginning(1, &[2, 4, 0, 64]), Duration::ZERO);
    stack.take(&segment(&tcp_header(ISN + 1, 0, RST, &[]), 1), Duration::ZERO);
    assert_eq!(stack.open_connections(), 0);
    while stack.next_frame(Duration::ZERO).is_some() {}
    let mut peer = RawPeer::connected(&mut stack, 2);
    let answer = peer.ask(&mut stack, b"GET /a HTTP/1.1\r\n\r\n", Duration::ZERO);
    assert!(answer.ends_with(value.as_bytes()), "the first segment has all of it");
}

proptest! {
    #[test]
    fn hostile_segments_stay_within_bounds(
        segments in proptest::collection::vec(
            (
                0..40u16,
                proptest::collection::vec(any::<u8>(), 8),
                5..16u8,
                prop_oneof![Just(2u8), Just(16), Just(17), Just(4), any::<u8>()],
                proptest::collection::vec(any::<u8>(), 6..80),
                any::<bool>(),
            ),
            1..200,
        ),
    ) {
        let version = MetadataVersion::V1;
        let config = NetMetadata { address: ADDRESS, version, imds_compat: true };
        let mut stack = MmdsStack::new(config, 68, MetadataStore::default(), 1);
        let mut now = Duration::ZERO;
        for (port, numbers, offset, flags, rest, takes) in segments {
            let bytes = [&numbers[..], &[offset << 4, flags], &rest].concat();
            prop_assert!(stack.take(&segment(&bytes, port), now));
            if takes {
                while stack.next_frame(now).is_some() {}
                now += stack.due_in(now).unwrap_or_default();
                stack.tick(now);
            }
            prop_assert!(stack.waiting_frames() <= MAX_WAITING);
            prop_assert!(stack.open_connections() <= MAX_CONNECTIONS);
        }
    }

    #[test]
    fn hostile_frames_are_harmless(frames in proptest::collection::vec(
        proptest::collection::vec(any::<u8>(), 0..100), 1..50,
    )) {
        let version = MetadataVersion::V2;
        let config = NetMetadata { address: ADDRESS, version, imds_compat: false };
        let mut stack = MmdsStack::new(config, 1500, MetadataStore::default(), 1);
        for mut frame in frames {
            // Most of them are for the service.
            let own = [(12, 8), (13, 0), (23, 6), (30, 169), (31, 254), (32, 169), (33, 254)];
            for (at, byte) in own {
                if let Some(place) = frame.get_mut(at) {
                    *place = byte;
                }
            }
            stack.take(&frame, Duration::ZERO);
            prop_assert!(stack.waiting_frames() <= MAX_WAITING);
        }
    }
}
