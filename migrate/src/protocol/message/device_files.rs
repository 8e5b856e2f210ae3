//! FILES: the names of the open files of a guest's devices, whose descriptors come with it.

use driftline_guest::{MAX_DEVICE_FILES, MAX_FILE_NAME};
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::raw::{RawRuns, runs_head};
use super::runs::{fixed, malformed};
use crate::protocol::error::WireError;
use crate::protocol::tag::Tag;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawFile {
    name_bytes: U32,
    name: [u8; MAX_FILE_NAME],
}

// The limit of FILES depends on this size.
const _: () = assert!(size_of::<RawFile>() == 4 + MAX_FILE_NAME);

/// The names of the files, one for each descriptor, in their order. Each is of printable ASCII.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct DeviceFileNames(pub(crate) Vec<String>);

impl DeviceFileNames {
    /// Decodes all of the message except for the byte that carries the descriptors.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        let tag = Tag::Files;
        let (head, rest) = fixed::<RawRuns>(tag, bytes)?;
        let count = head.runs.get() as usize;
        if !(1..=MAX_DEVICE_FILES).contains(&count) {
            return Err(malformed(tag, "it has no files, or too many"));
        }
        let files = <[RawFile]>::ref_from_bytes_with_elems(rest, count)
            .map_err(|_| malformed(tag, "its table of files is not as long as the message"))?;
        files.iter().map(name).collect::<Result<_, _>>().map(Self)
    }

    /// Encodes the same. A name that is too long is cut, and then matches no device.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = runs_head(self.0.len()).as_bytes().to_vec();
        for text in &self.0 {
            let used = text.len().min(MAX_FILE_NAME);
            let mut name = [0; MAX_FILE_NAME];
            name[..used].copy_from_slice(&text.as_bytes()[..used]);
            let raw = RawFile { name_bytes: (used as u32).into(), name };
            bytes.extend_from_slice(raw.as_bytes());
        }
        bytes
    }
}

fn name(raw: &RawFile) -> Result<String, WireError> {
    let name = raw.name.get(..raw.name_bytes.get() as usize).unwrap_or_default();
    let is_printable = |byte: &u8| byte.is_ascii_graphic() || *byte == b' ';
    match std::str::from_utf8(name) {
        Ok(text) if !text.is_empty() && name.iter().all(is_printable) => Ok(text.to_owned()),
        _ => Err(malformed(Tag::Files, "a file's name is empty, too long or not printable")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> DeviceFileNames {
        DeviceFileNames(vec!["disk/root".to_owned(), "x".repeat(MAX_FILE_NAME)])
    }

    #[test]
    fn names_survive_encoding() {
        let bytes = names().to_bytes();
        assert_eq!(bytes.len(), 8 + 2 * (4 + MAX_FILE_NAME));
        assert_eq!(DeviceFileNames::parse(&bytes).unwrap(), names());
    }

    #[test]
    fn invalid_names_are_refused() {
        let bytes = names().to_bytes();
        let error = |bytes: &[u8]| DeviceFileNames::parse(bytes).unwrap_err().to_string();
        let with = |at: usize, byte: u8| {
            let mut bytes = bytes.clone();
            bytes[at] = byte;
            error(&bytes)
        };
        for (at, byte, why) in [
            (0, 0, "no files, or too many"),
            (0, MAX_DEVICE_FILES as u8 + 1, "no files, or too many"),
            (0, 1, "not as long as the message"),
            (0, 3, "not as long as the message"),
            (8, 0, "empty, too long or not printable"),
            (8, MAX_FILE_NAME as u8 + 1, "empty, too long or not printable"),
            (11, 1, "empty, too long or not printable"),
            (12, b'\n', "empty, too long or not printable"),
            (12, 0xff, "empty, too long or not printable"),
        ] {
            let error = with(at, byte);
            assert!(error.contains(why), "byte {at}: {error}");
        }
        assert!(error(&bytes[..7]).contains("too short"));
    }
}
