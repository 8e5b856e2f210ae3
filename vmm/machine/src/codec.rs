//! The encoding of a configuration and of a guest's state: postcard, with a version before each
//! value that is a unit of its own. The bytes are untrusted input. `checkpoint/FORMAT.md` describes
//! them.

use std::fmt::{self, Display};

use driftline_guest::GuestError;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The version of a value alone.
const VERSION: u16 = 1;
/// The version of a value that an addition follows. Values that can have one are written with
/// [`encode_with_addition`].
const VERSION_WITH_ADDITION: u16 = 2;
/// The version of a value that two additions follow, of which the first may be empty.
const VERSION_WITH_TWO_ADDITIONS: u16 = 3;
/// The version of a value that three additions follow, of which the first two may be empty.
const VERSION_WITH_THREE_ADDITIONS: u16 = 4;
/// Maximum length of an addition in bytes; the longest has about 2000. An item of a sequence can be
/// 64 times as large in memory as its bytes.
const MAX_ADDITION_BYTES: usize = 8192;

/// The reason why bytes cannot be decoded.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The bytes do not encode a value of the type.
    #[error(transparent)]
    Malformed(#[from] postcard::Error),
    /// This number of bytes follows the value.
    #[error("{0} bytes follow its end")]
    TrailingBytes(usize),
    /// The addition to the value has this number of bytes.
    #[error("its addition has {0} bytes, more than {max}", max = MAX_ADDITION_BYTES)]
    LongAddition(usize),
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
    let (version, rest) = take_version(&what, bytes)?;
    match version {
        VERSION => decode(rest).map_err(|e| GuestError::malformed(what, e)),
        _ => Err(unsupported(what, version, format_args!("version {VERSION}"))),
    }
}

/// Encodes `value` with version 1; with an addition, version 2, the value, and the addition. A
/// program that does not know the addition thus refuses the value.
pub(crate) fn encode_with_addition<T: Serialize, A: Serialize>(
    value: &T,
    addition: Option<&A>,
) -> Result<Vec<u8>, postcard::Error> {
    match addition {
        None => encode_versioned(value),
        Some(addition) => encode(&(VERSION_WITH_ADDITION, value, addition)),
    }
}

/// Decodes what [`encode_with_addition`] wrote on this host or another. `what` names the value in
/// errors.
pub(crate) fn decode_with_addition<T: DeserializeOwned, A: DeserializeOwned>(
    what: impl Display,
    bytes: &[u8],
) -> Result<(T, Option<A>), GuestError> {
    let (version, rest) = take_version(&what, bytes)?;
    let decoded = match version {
        VERSION => decode(rest).map(|value| (value, None)),
        VERSION_WITH_ADDITION => decode_both(rest).map(|(value, addition)| (value, Some(addition))),
        _ => {
            let read = format_args!("versions {VERSION} and {VERSION_WITH_ADDITION}");
            return Err(unsupported(what, version, read));
        }
    };
    decoded.map_err(|e| GuestError::malformed(what, e))
}

/// Encodes the value and its additions. The version is 1 plus the number of the last addition that
/// is there; earlier ones are then written even if they are empty.
pub(crate) fn encode_with_three_additions<T, A, B, C>(
    value: &T,
    (first, has_first): (&A, bool),
    (second, has_second): (&B, bool),
    third: Option<&C>,
) -> Result<Vec<u8>, postcard::Error>
where
    T: Serialize,
    A: Serialize,
    B: Serialize,
    C: Serialize,
{
    match third {
        None if has_second => encode(&(VERSION_WITH_TWO_ADDITIONS, value, (first, second))),
        None => encode_with_addition(value, has_first.then_some(first)),
        Some(third) => encode(&(VERSION_WITH_THREE_ADDITIONS, value, (first, second, third))),
    }
}

/// A value, and the additions that it has.
pub(crate) type WithAdditions<T, A, B, C> = (T, Option<A>, Option<B>, Option<C>);

/// Decodes what [`encode_with_three_additions`] wrote on this host or another. `what` names the
/// value in errors.
pub(crate) fn decode_with_three_additions<T, A, B, C>(
    what: impl Display,
    bytes: &[u8],
) -> Result<WithAdditions<T, A, B, C>, GuestError>
where
    T: DeserializeOwned,
    A: DeserializeOwned,
    B: DeserializeOwned,
    C: DeserializeOwned,
{
    let (version, rest) = take_version(&what, bytes)?;
    let decoded = match version {
        VERSION => decode(rest).map(|value| (value, None, None, None)),
        VERSION_WITH_ADDITION => decode_both(rest).map(|(value, a)| (value, Some(a), None, None)),
        VERSION_WITH_TWO_ADDITIONS => {
            decode_both(rest).map(|(value, (a, b))| (value, Some(a), Some(b), None))
        }
        VERSION_WITH_THREE_ADDITIONS => {
            decode_both(rest).map(|(value, (a, b, c))| (value, Some(a), Some(b), Some(c)))
        }
        _ => {
            let read = format_args!("versions {VERSION} to {VERSION_WITH_THREE_ADDITIONS}");
            return Err(unsupported(what, version, read));
        }
    };
    decoded.map_err(|e| GuestError::malformed(what, e))
}

/// Decodes a value and its addition.
fn decode_both<T: DeserializeOwned, A: DeserializeOwned>(
    bytes: &[u8],
) -> Result<(T, A), DecodeError> {
    let (value, addition): (T, &[u8]) = postcard::take_from_bytes(bytes)?;
    match addition.len() {
        0..=MAX_ADDITION_BYTES => Ok((value, decode(addition)?)),
        bytes => Err(DecodeError::LongAddition(bytes)),
    }
}

/// Splits `bytes` into the version and the rest.
fn take_version<'b>(what: &impl Display, bytes: &'b [u8]) -> Result<(u16, &'b [u8]), GuestError> {
    postcard::take_from_bytes(bytes).map_err(|e| GuestError::malformed(what, DecodeError::from(e)))
}

fn unsupported(what: impl Display, version: u16, read: fmt::Arguments<'_>) -> GuestError {
    let why = format!("it has version {version}, and this version of Driftline reads {read}");
    GuestError::unsupported(what, why)
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

    #[test]
    fn an_addition_makes_version_2() {
        let read =
            |bytes: &[u8]| decode_with_addition::<u8, u8>("it", bytes).map_err(|e| e.to_string());
        assert_eq!(encode_with_addition(&7u8, None::<&u8>).unwrap(), b"\x01\x07");
        assert_eq!(encode_with_addition(&7u8, Some(&9u8)).unwrap(), b"\x02\x07\x09");
        assert_eq!(read(b"\x01\x07"), Ok((7, None)));
        assert_eq!(read(b"\x02\x07\x09"), Ok((7, Some(9))));
        assert!(read(b"\x02\x07").unwrap_err().contains("it is malformed"));
        assert!(read(b"\x01\x07\x09").unwrap_err().ends_with("1 bytes follow its end"));
        assert!(read(b"\x02\x07\x09\x01").unwrap_err().ends_with("1 bytes follow its end"));
        assert!(read(b"\x03\x07").unwrap_err().ends_with("reads versions 1 and 2"));
        let long = [&b"\x02\x07"[..], &[0; MAX_ADDITION_BYTES + 1]].concat();
        assert!(read(&long).unwrap_err().ends_with("has 8193 bytes, more than 8192"));
    }

    #[test]
    fn further_additions_make_versions_3_and_4() {
        let write = |first, second, third: Option<&u8>| {
            encode_with_three_additions(&7u8, (&9u8, first), (&11u8, second), third).unwrap()
        };
        let read = |bytes: &[u8]| {
            decode_with_three_additions::<u8, u8, u8, u8>("it", bytes).map_err(|e| e.to_string())
        };
        for (bytes, value) in [
            (&b"\x01\x07"[..], (7, None, None, None)),
            (b"\x02\x07\x09", (7, Some(9), None, None)),
            (b"\x03\x07\x09\x0b", (7, Some(9), Some(11), None)),
            (b"\x04\x07\x09\x0b\x0d", (7, Some(9), Some(11), Some(13))),
        ] {
            assert_eq!(write(value.1.is_some(), value.2.is_some(), value.3.as_ref()), bytes);
            assert_eq!(read(bytes), Ok(value));
        }
        assert_eq!(write(false, true, None), b"\x03\x07\x09\x0b");
        assert_eq!(write(false, false, Some(&13)), b"\x04\x07\x09\x0b\x0d");
        assert!(read(b"\x03\x07\x09").unwrap_err().contains("it is malformed"));
        assert!(read(b"\x03\x07\x09\x0b\x01").unwrap_err().ends_with("1 bytes follow its end"));
        assert!(read(b"\x04\x07\x09\x0b").unwrap_err().contains("it is malformed"));
        assert!(read(b"\x05\x07").unwrap_err().ends_with("reads versions 1 to 4"));
    }
}
