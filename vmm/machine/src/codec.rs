//! The encoding of a configuration and of a guest's state: postcard, with a version before each
//! value that is a unit of its own. The bytes are untrusted input. `checkpoint/FORMAT.md` describes
//! them.

use std::fmt::{self, Display};
use std::marker::PhantomData;

use driftline_guest::GuestError;
use serde::de::{DeserializeOwned, Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

/// The version of every value.
pub(crate) const VERSION: u16 = 1;

/// The reason why bytes cannot be decoded.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DecodeError {
    /// The bytes do not encode a value of the type.
    #[error(transparent)]
    Malformed(#[from] postcard::Error),
    /// This number of bytes follows the value.
    #[error("{0} bytes follow its end")]
    TrailingBytes(usize),
}

/// A value has a version that this program does not read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("it has version {found}, and this version of Driftline reads version {VERSION}")]
struct UnknownVersion {
    found: u16,
}

/// Encodes a value without a version.
pub(crate) fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, postcard::Error> {
    postcard::to_stdvec(value)
}

/// Decodes what [`encode`] wrote. Bytes after the value are an error.
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, DecodeError> {
    match postcard::take_from_bytes(bytes)? {
        (value, []) => Ok(value),
        (_, rest) => Err(DecodeError::TrailingBytes(rest.len())),
    }
}

/// Encodes the version, then the value.
///
/// # Errors
///
/// The value has a part that cannot be encoded, such as a path that is not UTF-8.
pub fn encode_versioned<T: Serialize>(value: &T) -> Result<Vec<u8>, postcard::Error> {
    encode(&(VERSION, value))
}

/// Decodes what [`encode_versioned`] wrote on this host or another. `what` names the value in
/// errors.
///
/// # Errors
///
/// The bytes are malformed, or their version is not supported.
pub fn decode_versioned<T: DeserializeOwned>(
    what: impl Display,
    bytes: &[u8],
) -> Result<T, GuestError> {
    let (version, rest): (u16, &[u8]) = postcard::take_from_bytes(bytes)
        .map_err(|e| GuestError::malformed(&what, DecodeError::from(e)))?;
    check_version(&what, version)?;
    decode(rest).map_err(|e| GuestError::malformed(what, e))
}

/// Refuses a version that this program does not read. `what` names the value in errors.
pub(crate) fn check_version(what: impl Display, version: u16) -> Result<(), GuestError> {
    if version == VERSION {
        return Ok(());
    }
    Err(GuestError::unsupported(what, UnknownVersion { found: version }))
}

/// Deserializes a sequence of at most `MOST` items, for serde's `deserialize_with`. Nothing is
/// allocated for more.
pub(crate) fn at_most<'de, const MOST: usize, T, D>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    deserializer.deserialize_seq(AtMost::<MOST, T>(PhantomData))
}

/// Visits a sequence of at most `MOST` items.
struct AtMost<const MOST: usize, T>(PhantomData<T>);

impl<'de, const MOST: usize, T: Deserialize<'de>> Visitor<'de> for AtMost<MOST, T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at most {MOST} items")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<T>, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            if items.len() == MOST {
                return Err(A::Error::invalid_length(MOST + 1, &self));
            }
            items.push(item);
        }
        Ok(items)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_all_of_the_bytes() {
        let bytes = encode_versioned(&(300u16, "a")).unwrap();
        assert_eq!(bytes, b"\x01\xac\x02\x01a");
        let read = |bytes: &[u8]| {
            let value = decode_versioned::<(u16, String)>("it", bytes);
            value.map_err(|e| e.to_string())
        };
        assert_eq!(read(&bytes), Ok((300, "a".to_owned())));
        let refused = |bytes: &[u8]| read(bytes).unwrap_err();
        assert!(refused(&[&bytes[..], &[0; 3]].concat()).ends_with("3 bytes follow its end"));
        assert!(refused(b"\x02\xac\x02\x01a").contains("version 2, and this version of Driftline"));
        (0..bytes.len()).for_each(|n| assert!(refused(&bytes[..n]).contains("it is malformed")));
    }

    #[derive(Serialize, Deserialize)]
    struct Few {
        #[serde(deserialize_with = "at_most::<2, _, _>")]
        items: Vec<u64>,
    }

    #[test]
    fn longer_sequence_is_refused() {
        let read = |bytes: &[u8]| decode::<Few>(bytes).map(|few| few.items);
        assert_eq!(read(b"\x02\x07\x08"), Ok(vec![7, 8]));
        assert!(matches!(read(b"\x03\x07\x08\x09"), Err(DecodeError::Malformed(_))));
        // The items that it promises are not there.
        assert!(read(b"\xff\xff\xff\xff\x0f\x07").is_err());
    }
}
