//! The rules by which one checkpoint may follow another in a store. An id identifies the guest of a
//! checkpoint. A line distinguishes the processes that were restored as that guest.

use std::fmt;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::vm_id::VmId;

/// One life of a guest: from its start or restore to its end, on every host that it moves to
/// meanwhile.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct LineId(pub Uuid);

impl LineId {
    /// Creates a new, random id.
    pub fn random() -> Self {
        Self(Uuid::new_v4())
    }
}

impl fmt::Display for LineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Identifies a checkpoint among those of all stores.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Origin {
    /// The guest of the checkpoint.
    pub vm_id: VmId,
    /// Its number.
    pub epoch: u64,
    /// Time at which it was taken: milliseconds since 1970, by that host's clock. A line takes one
    /// at a time, so this tells checkpoints with the same number in different stores apart.
    pub created_unix_ms: u64,
    /// The line that took it.
    pub line: LineId,
}

/// What a guest's checkpoints may follow in a store: checkpoints of its own line, and the one from
/// which it was restored.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Line {
    /// Its own line.
    pub own: LineId,
    /// The checkpoint from which it was restored as the same guest.
    pub from: Option<Origin>,
}

impl Line {
    /// Creates the line of a new guest.
    pub fn begin() -> Self {
        Self { own: LineId::random(), from: None }
    }

    /// Creates the line of a guest that continues from this checkpoint.
    pub fn after(from: Origin) -> Self {
        Self { own: LineId::random(), from: Some(from) }
    }

    /// Returns whether its next checkpoint may directly follow `last`.
    pub fn follows(&self, last: &Origin) -> bool {
        self.own == last.line || self.from.as_ref() == Some(last)
    }
}
