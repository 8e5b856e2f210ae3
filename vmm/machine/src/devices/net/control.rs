//! The control queue: requests of a driver to the interface itself.

use driftline_guest::GuestRam;
use virtio_bindings::virtio_net::*;

use crate::devices::virtio::{Chain, RequestDefect, Violation};

/// Request of a driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ControlRequest {
    /// Use this number of queue pairs.
    Pairs(u16),
    /// The driver has announced itself.
    Announced,
    /// A request that the device does not offer.
    Unknown { class: u8, command: u8 },
}

impl ControlRequest {
    /// Reads the request in `chain` of queue `queue` and checks that it has room for the answer.
    pub(super) fn read(chain: &Chain, queue: u16, ram: &GuestRam) -> Result<Self, Violation> {
        let mut bytes = [0; 4];
        let len = chain.readable.read(ram, 0, &mut bytes)?;
        if len < 2 || chain.writable.len() == 0 {
            let (bytes, room) = (chain.readable.len(), chain.writable.len());
            let cause = RequestDefect::Control { head: chain.head, bytes, room };
            return Err(Violation::Malformed { queue, cause });
        }
        let [class, command, low, high] = bytes;
        Ok(match (u32::from(class), u32::from(command), len) {
            (VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET, 4) => {
                Self::Pairs(u16::from_le_bytes([low, high]))
            }
            (VIRTIO_NET_CTRL_ANNOUNCE, VIRTIO_NET_CTRL_ANNOUNCE_ACK, _) => Self::Announced,
            _ => Self::Unknown { class, command },
        })
    }
}
