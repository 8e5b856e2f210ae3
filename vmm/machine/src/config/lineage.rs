//! A guest's identity apart from its id: the operator's name for it, the checkpoint that it began
//! as, and its line.

use std::fmt;
use std::str::FromStr;

use driftline_guest::{Line, Origin, VmId};
use serde::{Deserialize, Serialize};

use super::error::ConfigError;

/// Maximum length of a name, in bytes: the length of Firecracker's ids.
const MAX_NAME: usize = 64;

/// A name that an operator gave to a guest.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GuestName(String);

impl GuestName {
    /// Checks that the name is valid.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let Self(name) = self;
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if (1..=MAX_NAME).contains(&name.len())
            && name.chars().all(allowed)
            && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        {
            return Ok(());
        }
        let form = format!(
            "it has 1 to {MAX_NAME} of the characters a-z, A-Z, 0-9, '-', '_' and '.', and begins \
             with a letter or a digit"
        );
        Err(ConfigError::malformed("name of a guest", name, form))
    }
}

impl fmt::Display for GuestName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for GuestName {
    type Err = ConfigError;

    fn from_str(s: &str) -> Result<Self, ConfigError> {
        let name = Self(s.to_owned());
        name.check().map(|()| name)
    }
}

/// The checkpoint that a guest began as.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Lineage {
    /// The guest from which the checkpoint was taken.
    pub parent: VmId,
    /// The checkpoint's number.
    pub checkpoint: u64,
}

impl fmt::Display for Lineage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "checkpoint {} of {}", self.checkpoint, self.parent)
    }
}

/// A guest's identity apart from its id.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Identity {
    /// The operator's name for the guest.
    pub name: Option<GuestName>,
    /// The checkpoint that the guest began as. `None` for a guest that was booted.
    pub lineage: Option<Lineage>,
    /// The guest's line: it decides which checkpoints a store accepts from the guest.
    pub line: Line,
}

impl Identity {
    /// Returns the identity of a guest that is booted.
    pub fn booted(name: Option<GuestName>) -> Self {
        Self { name, lineage: None, line: Line::begin() }
    }
}

impl Default for Identity {
    /// Returns the identity of a guest that is booted without a name.
    fn default() -> Self {
        Self::booted(None)
    }
}

/// The identity of a guest that is restored.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Restored {
    /// Whether the guest continues as the checkpoint's guest. Otherwise it is a new guest.
    pub same: bool,
    /// The new name, if one is given.
    pub name: Option<GuestName>,
}

impl Restored {
    /// Returns the id and the identity of the guest that is restored from `from`. `before` is the
    /// identity in the checkpoint.
    pub(crate) fn of(&self, from: &Origin, before: Identity) -> (VmId, Identity) {
        let name = self.name.clone();
        if self.same {
            let name = name.or(before.name);
            return (from.vm_id, Identity { name, line: Line::after(*from), ..before });
        }
        let lineage = Some(Lineage { parent: from.vm_id, checkpoint: from.epoch });
        (VmId::random(), Identity { lineage, ..Identity::booted(name) })
    }
}

/// Returns the span of every log line about a guest: its id and name, and the checkpoint that it
/// began as.
pub fn guest_span(vm_id: VmId, identity: &Identity) -> tracing::Span {
    let vm_name = identity.name.as_ref().map(tracing::field::display);
    let vm_parent = identity.lineage.map(|lineage| tracing::field::display(lineage.parent));
    let vm_parent_checkpoint = identity.lineage.map(|lineage| lineage.checkpoint);
    // At error level, so that every filter that passes an event also passes the guest's id.
    // A root, so that a thread that is in the span already does not log it twice.
    tracing::error_span!(parent: None, "guest", %vm_id, vm_name, vm_parent, vm_parent_checkpoint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_name_is_bounded_and_plain() {
        for name in ["a", "web-1.prod_2", "7", &"a".repeat(64)] {
            assert_eq!(name.parse::<GuestName>().unwrap().to_string(), name);
        }
        for name in ["", "-a", ".", "a b", "a\n", "\u{e4}", &"a".repeat(65), "a\"}"] {
            assert!(name.parse::<GuestName>().is_err(), "{name:?}");
        }
    }

    #[test]
    fn restored_guest_is_new_by_default() {
        let name = |name: &str| Some(name.parse().unwrap());
        let line = Line::begin();
        let from = Origin { vm_id: VmId::random(), epoch: 7, created_unix_ms: 1, line: line.own };
        let before = Identity { name: name("a"), lineage: None, line };
        let (id, new) = Restored::default().of(&from, before.clone());
        assert!(id != from.vm_id && new.name.is_none() && !new.line.follows(&from));
        assert_eq!(new.lineage, Some(Lineage { parent: from.vm_id, checkpoint: 7 }));
        let same = Restored { same: true, name: None };
        let (id, on) = same.of(&from, before.clone());
        assert!(id == from.vm_id && on.name == before.name && on.lineage.is_none());
        assert!(on.line.follows(&from) && on.line.own != line.own);
        let renamed = Restored { same: true, name: name("b") }.of(&from, before).1;
        assert_eq!(renamed.name, name("b"));
    }
}
