//! Which checkpoints may follow which. An id says which guest a checkpoint is of; a line says which
//! of several processes, all restored as that guest, took it.

use std::fmt;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::vm_id::VmId;

/// One life of a guest: from its start, or its restore, to its end, on every host that it moves to
/// meanwhile.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct LineId(pub Uuid);

impl LineId {
    /// A new, random one.
    pub fn random() -> Self {
        Self(Uuid::new_v4())
    }
}

impl fmt::Display for LineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A checkpoint, told from all others of all stores.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Origin {
    /// The guest that it is of.
    pub vm_id: VmId,
    /// Its number.
    pub epoch: u64,
    /// When it was taken: milliseconds since 1970, by that host's clock. A line takes one at a
    /// time, so this tells those of the same number in different stores apart.
    pub created_unix_ms: u64,
    /// The line that took it.
    pub line: LineId,
}

/// What a guest's checkpoints may follow in a store: those of its own line, and the one checkpoint
/// from which it was restored.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Line {
    /// Its own.
    pub own: LineId,
    /// Where it was restored from, as the same guest.
    pub from: Option<Origin>,
}

impl Line {
    /// The line of a new guest.
    pub fn begin() -> Self {
        Self { own: LineId::random(), from: None }
    }

    /// The line of a guest that goes on from this checkpoint.
    pub fn after(from: Origin) -> Self {
        Self { own: LineId::random(), from: Some(from) }
    }

    /// Whether its next checkpoint may stand right behind this one.
    pub fn follows(&self, last: &Origin) -> bool {
        self.own == last.line || self.from.as_ref() == Some(last)
    }
}
