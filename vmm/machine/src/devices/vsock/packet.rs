//! Packets: their header and its fields.
//!
//! The queue reads and checks descriptor chains, as for every device. For this reason rust-vmm's
//! packet parser, which reads descriptors itself, is not used.

use driftline_guest::GuestRam;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::op;
use crate::devices::virtio::{Chain, RequestDefect, Violation};

/// Size of a header in bytes.
pub(super) const HEADER: usize = size_of::<PacketHeader>();
/// Context ID of the host.
pub(super) const HOST_CID: u64 = 2;
/// Byte stream, the only socket type that is supported.
pub(super) const STREAM: u16 = 1;
/// Flag of [`op::SHUTDOWN`]: the sender receives no more.
pub(super) const NO_RECEIVE: u32 = 1;
/// Flag of [`op::SHUTDOWN`]: the sender sends no more.
pub(super) const NO_SEND: u32 = 2;

/// `struct virtio_vsock_hdr`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct PacketHeader {
    pub(super) src_cid: U64,
    pub(super) dst_cid: U64,
    pub(super) src_port: U32,
    pub(super) dst_port: U32,
    /// Data bytes that follow the header.
    pub(super) len: U32,
    pub(super) kind: U16,
    pub(super) op: U16,
    pub(super) flags: U32,
    /// Size of the sender's receive buffer in bytes.
    pub(super) buf_alloc: U32,
    /// Bytes that the sender has taken out of its receive buffer in total.
    pub(super) fwd_cnt: U32,
}

const _: () = assert!(HEADER == 44);

impl PacketHeader {
    /// Reads the header of a packet that the driver sends, and checks that the chain contains its
    /// data.
    pub(super) fn read(chain: &Chain, queue: u16, ram: &GuestRam) -> Result<Self, Violation> {
        let mut header = Self::default();
        let len = chain.readable.read(ram, 0, header.as_mut_bytes())?;
        let (head, bytes) = (chain.head, chain.readable.len());
        if len < HEADER {
            let cause = RequestDefect::PacketHeader { head, bytes };
            return Err(Violation::Malformed { queue, cause });
        }
        let (bytes, len) = (bytes - HEADER as u32, header.len.get());
        if bytes < len {
            let cause = RequestDefect::PacketData { head, bytes, len };
            return Err(Violation::Malformed { queue, cause });
        }
        Ok(header)
    }

    /// Returns the packet that tells this packet's sender that there is no such connection.
    pub(super) fn refusal(&self) -> Self {
        Self {
            src_cid: self.dst_cid,
            dst_cid: self.src_cid,
            src_port: self.dst_port,
            dst_port: self.src_port,
            kind: self.kind,
            op: op::RST.into(),
            ..Self::default()
        }
    }
}
