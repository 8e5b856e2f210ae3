//! The token and the secret of a migration.

use std::fmt;

use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use subtle::ConstantTimeEq;
use uuid::Uuid;

/// Bytes of a [`Secret`].
pub(crate) const SECRET_BYTES: usize = 32;

/// The token that identifies a migration. The source makes it. Every message of the
/// hand-over carries it, and logs and names of files show it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct Token(pub Uuid);

impl Token {
    /// Returns a new random token.
    pub(crate) fn random() -> Self {
        Self(Uuid::new_v4())
    }
}

impl std::fmt::Display for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// The secret of one migration. The destination makes it, and its READY carries it to the source.
/// JOIN and QUERY prove with it that their caller is that source.
#[derive(Clone, Copy)]
pub(crate) struct Secret([u8; SECRET_BYTES]);

impl Secret {
    /// Returns a new random secret.
    pub(crate) fn random() -> Result<Self, rustix::io::Errno> {
        let mut bytes = [0; SECRET_BYTES];
        let mut filled = 0;
        while filled < SECRET_BYTES {
            filled += getrandom(&mut bytes[filled..], GetRandomFlags::empty())?;
        }
        Ok(Self(bytes))
    }

    pub(crate) const fn from_bytes(bytes: [u8; SECRET_BYTES]) -> Self {
        Self(bytes)
    }

    pub(crate) fn as_bytes(&self) -> &[u8; SECRET_BYTES] {
        &self.0
    }

    /// Whether both are the same. Takes the same time for any two.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl fmt::Debug for Secret {
    /// Keeps the secret out of logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&Hex(&self.0))
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        let parse = |i: usize| u8::from_str_radix(text.get(2 * i..2 * i + 2)?, 16).ok();
        let bytes: Option<Vec<u8>> = (0..SECRET_BYTES).map(parse).collect();
        let whole = bytes.filter(|_| text.len() == 2 * SECRET_BYTES);
        let bytes = whole.and_then(|bytes| bytes.try_into().ok());
        bytes.map(Self).ok_or_else(|| de::Error::custom("a secret has 64 hexadecimal digits"))
    }
}

struct Hex<'a>(&'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_differ_and_survive_a_record() {
        let (one, other) = (Secret::random().unwrap(), Secret::random().unwrap());
        assert!(!one.is(&other));
        let text = serde_json::to_string(&one).unwrap();
        assert!(serde_json::from_str::<Secret>(&text).unwrap().is(&one));
        assert_eq!(format!("{one:?}"), "Secret(..)");
        let longer = text.replacen('"', "\"00", 1);
        for bad in ["\"\"", "\"xx\"", &longer] {
            assert!(serde_json::from_str::<Secret>(bad).is_err(), "{bad}");
        }
    }
}
