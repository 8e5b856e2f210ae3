//! A guest's identity.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// A guest's identity: the same in all its checkpoints and on every host that it moves to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct VmId(pub Uuid);

impl VmId {
    /// Creates a new, random identity.
    pub fn random() -> Self {
        Self(Uuid::new_v4())
    }
}

/// Why a text is not a guest's identity.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum VmIdError {
    /// It is the nil UUID.
    #[error("a guest's id cannot be the nil UUID")]
    Nil,
    /// It is not a UUID.
    #[error("\"{text}\" is not a UUID: {cause}")]
    Malformed {
        /// The text.
        text: String,
        /// What is wrong with it.
        #[source]
        cause: uuid::Error,
    },
}

impl FromStr for VmId {
    type Err = VmIdError;

    fn from_str(text: &str) -> Result<Self, VmIdError> {
        match Uuid::parse_str(text) {
            Ok(id) if id.is_nil() => Err(VmIdError::Nil),
            Ok(id) => Ok(Self(id)),
            Err(cause) => Err(VmIdError::Malformed { text: text.to_owned(), cause }),
        }
    }
}

impl fmt::Display for VmId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
