//! Work on a disk: what a request asks for and an engine does.

use crate::devices::virtio::Buffers;

/// Work on a disk. Offsets are in bytes, and every range lies on the disk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum DiskWork {
    Read {
        offset: u64,
        to: Buffers,
    },
    Write {
        offset: u64,
        from: Buffers,
    },
    Flush,
    /// Offset and length of each range, in bytes.
    Discard(Vec<(u64, u64)>),
    WriteZeroes(Vec<ZeroRange>),
    /// Gets the disk's serial number. The device does this itself, not the engine.
    Identify(Buffers),
}

impl DiskWork {
    /// Returns the parts of the disk that the work changes: offset and length of each, in bytes.
    pub(super) fn writes(&self) -> Vec<(u64, u64)> {
        match self {
            Self::Write { offset, from } => vec![(*offset, from.len().into())],
            Self::Discard(ranges) => ranges.clone(),
            Self::WriteZeroes(ranges) => ranges.iter().map(|r| (r.offset, r.len)).collect(),
            Self::Read { .. } | Self::Flush | Self::Identify(_) => Vec::new(),
        }
    }

    /// Returns the number of bytes that the work moves between guest memory and disk.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Read { to: data, .. } | Self::Write { from: data, .. } => data.len().into(),
            _ => 0,
        }
    }
}

/// Work with the token that its completion carries.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct DiskOperation {
    pub(super) token: u64,
    pub(super) work: DiskWork,
    /// Whether the changes must be durable before the operation ends.
    pub(super) durable: bool,
}

/// A range of a disk, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ZeroRange {
    pub(super) offset: u64,
    pub(super) len: u64,
    /// Whether the range's storage may be given back to the host.
    pub(super) unmap: bool,
}
