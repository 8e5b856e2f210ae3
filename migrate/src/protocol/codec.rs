//! Codecs of PACKED.

/// A codec; its value is its number in PACKED.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Codec {
    Lz4 = 1,
    Zstd = 2,
}

impl Codec {
    pub(crate) fn from_number(n: u32) -> Option<Self> {
        [Self::Lz4, Self::Zstd].into_iter().find(|codec| u32::from(*codec as u8) == n)
    }
}
