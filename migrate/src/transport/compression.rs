//! Compression of contents, message by message.
//!
//! Off by default, because its benefit depends on the link and the guest. Buffers are allocated
//! once.

use std::fmt;
use std::str::FromStr;

use driftline_dirty_tracker::PAGE_SIZE;
use serde::{Deserialize, Serialize};

use super::error::TransportError;
use crate::protocol::codec::Codec;
use crate::protocol::error::WireError;
use crate::protocol::limits::MAX_PAGES;
use crate::protocol::tag::Tag;

/// Upper bound on the content of one message, bytes.
const MOST: usize = (MAX_PAGES * PAGE_SIZE) as usize;

/// zstd's fastest level that is not negative; lz4 is better than the negative ones.
const ZSTD_LEVEL: i32 = 1;

/// How the contents of frames are compressed on the wire.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Compression {
    /// No compression.
    #[default]
    None,
    /// LZ4 blocks, the faster codec.
    Lz4,
    /// Zstandard, level 1, the codec that compresses more.
    Zstd,
}

/// The name of a compression that does not exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown compression \"{0}\": use none, lz4 or zstd")]
pub struct UnknownCompression(String);

impl FromStr for Compression {
    type Err = UnknownCompression;

    fn from_str(s: &str) -> Result<Self, UnknownCompression> {
        match s {
            "none" => Ok(Self::None),
            "lz4" => Ok(Self::Lz4),
            "zstd" => Ok(Self::Zstd),
            _ => Err(UnknownCompression(s.to_owned())),
        }
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
        })
    }
}

/// Compresses contents.
pub(crate) struct Packer {
    codec: Codec,
    zstd: Option<zstd::bulk::Compressor<'static>>,
    packed: Vec<u8>,
}

impl Packer {
    /// Returns a compressor; `None` for [`Compression::None`].
    pub(crate) fn new(compression: Compression) -> Result<Option<Self>, TransportError> {
        let codec = match compression {
            Compression::None => return Ok(None),
            Compression::Lz4 => Codec::Lz4,
            Compression::Zstd => Codec::Zstd,
        };
        let zstd = match codec {
            Codec::Lz4 => None,
            Codec::Zstd => Some(zstd::bulk::Compressor::new(ZSTD_LEVEL).map_err(unusable)?),
        };
        let most = lz4_flex::block::get_maximum_output_size(MOST)
            .max(zstd::zstd_safe::compress_bound(MOST));
        Ok(Some(Self { codec, zstd, packed: vec![0; most] }))
    }

    pub(crate) fn codec(&self) -> Codec {
        self.codec
    }

    /// Compresses `contents`; `None` unless that saves at least an eighth.
    pub(crate) fn pack(&mut self, contents: &[u8]) -> Option<&[u8]> {
        let room = &mut self.packed[..];
        let length = match &mut self.zstd {
            None => lz4_flex::block::compress_into(contents, room).ok()?,
            Some(zstd) => zstd.compress_to_buffer(contents, room).ok()?,
        };
        let worth = contents.len() - contents.len() / 8;
        self.packed.get(..length).filter(|packed| packed.len() <= worth)
    }
}

/// Decompresses contents.
pub(crate) struct Unpacker {
    zstd: Option<zstd::bulk::Decompressor<'static>>,
    contents: Vec<u8>,
}

impl Unpacker {
    /// Returns a decompressor, which allocates on first use.
    pub(crate) fn new() -> Self {
        Self { zstd: None, contents: Vec::new() }
    }

    /// Decompresses the content of `frames` frames, at most [`MAX_PAGES`]. Fails if `packed`, which
    /// the peer sent, has any other length.
    pub(crate) fn unpack(
        &mut self,
        codec: Codec,
        packed: &[u8],
        frames: u64,
    ) -> Result<&[u8], TransportError> {
        let malformed = |why| WireError::Malformed { message: Tag::Packed, why };
        let expected = (frames.min(MAX_PAGES) * PAGE_SIZE) as usize;
        self.contents.resize(MOST, 0);
        let room = &mut self.contents[..expected];
        let length = match codec {
            Codec::Lz4 => lz4_flex::block::decompress_into(packed, room).ok(),
            Codec::Zstd => {
                let zstd = match &mut self.zstd {
                    Some(zstd) => zstd,
                    none => none.insert(zstd::bulk::Decompressor::new().map_err(unusable)?),
                };
                zstd.decompress_to_buffer(packed, room).ok()
            }
        };
        match length {
            Some(length) if length == expected => Ok(&self.contents[..expected]),
            _ => Err(malformed("its content does not unpack to the length of its runs").into()),
        }
    }
}

fn unusable(cause: std::io::Error) -> TransportError {
    TransportError::System { what: "starting a compression", cause }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODECS: [Compression; 2] = [Compression::Lz4, Compression::Zstd];

    #[test]
    fn packing_round_trips_and_skips_noise() {
        let mut unpacker = Unpacker::new();
        for compression in CODECS {
            let mut packer = Packer::new(compression).unwrap().unwrap();
            let contents: Vec<u8> = (0..3 * PAGE_SIZE).map(|i| (i / 100) as u8).collect();
            let packed = packer.pack(&contents).unwrap().to_vec();
            assert!(packed.len() < contents.len() / 4, "{compression}");
            assert_eq!(unpacker.unpack(packer.codec(), &packed, 3).unwrap(), contents);
            // Neither codec compresses a linear congruential sequence.
            let mut state = 1u64;
            let noise: Vec<u8> = (0..PAGE_SIZE)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (state >> 56) as u8
                })
                .collect();
            assert!(packer.pack(&noise).is_none(), "{compression}");
        }
    }

    #[test]
    fn wrongly_packed_contents_are_an_error() {
        let mut unpacker = Unpacker::new();
        for compression in CODECS {
            let mut packer = Packer::new(compression).unwrap().unwrap();
            let packed = packer.pack(&[7; 4096]).unwrap().to_vec();
            let codec = packer.codec();
            // Shorter or longer than its runs, truncated, of another codec, invalid, empty.
            unpacker.unpack(codec, &packed, 2).unwrap_err();
            let two = packer.pack(&[7; 8192]).unwrap().to_vec();
            unpacker.unpack(codec, &two, 1).unwrap_err();
            unpacker.unpack(codec, &packed[..packed.len() - 1], 1).unwrap_err();
            let other = if codec == Codec::Lz4 { Codec::Zstd } else { Codec::Lz4 };
            unpacker.unpack(other, &packed, 1).unwrap_err();
            unpacker.unpack(codec, &[0xff; 100], 1).unwrap_err();
            unpacker.unpack(codec, &[], 1).unwrap_err();
        }
    }

    #[test]
    fn compressions_have_names() {
        for compression in [Compression::None, Compression::Lz4, Compression::Zstd] {
            assert_eq!(compression.to_string().parse(), Ok(compression));
        }
        let e = "gzip".parse::<Compression>().unwrap_err().to_string();
        assert_eq!(e, "unknown compression \"gzip\": use none, lz4 or zstd");
    }
}
