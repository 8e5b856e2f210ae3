//! Work on a disk: what a request asks for and an engine does.

use crate::devices::virtio::Buffers;

/// What is to be done to a disk. Offsets are bytes, and all of it lies on the disk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Work {
    Read {
        offset: u64,
        to: Buffers,
    },
    Write {
        offset: u64,
        from: Buffers,
    },
    Flush,
    /// Offset and length of each range.
    Discard(Vec<(u64, u64)>),
    WriteZeroes(Vec<Range>),
    /// Not the engine's business: the disk's serial number goes there.
    Identify(Buffers),
}

impl Work {
    /// The parts of the disk that it changes: first byte, and bytes, of each.
    pub(super) fn writes(&self) -> Vec<(u64, u64)> {
        match self {
            Self::Write { offset, from } => vec![(*offset, from.len().into())],
            Self::Discard(ranges) => ranges.clone(),
            Self::WriteZeroes(ranges) => ranges.iter().map(|r| (r.offset, r.len)).collect(),
            Self::Read { .. } | Self::Flush | Self::Identify(_) => Vec::new(),
        }
    }

    /// Bytes that it moves between guest memory and disk.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Read { to: data, .. } | Self::Write { from: data, .. } => data.len().into(),
            _ => 0,
        }
    }
}

/// Work with the name by which its end is told.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Operation {
    pub(super) token: u64,
    pub(super) work: Work,
    /// What it changes is durable before it has ended.
    pub(super) durable: bool,
}

/// A range of a disk, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Range {
    pub(super) offset: u64,
    pub(super) len: u64,
    /// Its room may be given back.
    pub(super) unmap: bool,
}
