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

impl FromStr for VmId {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match Uuid::parse_str(s) {
            Ok(id) if id.is_nil() => Err("the nil UUID is no guest's id".to_owned()),
            Ok(id) => Ok(Self(id)),
            Err(e) => Err(format!("\"{s}\" is no UUID: {e}")),
        }
    }
}

impl fmt::Display for VmId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
