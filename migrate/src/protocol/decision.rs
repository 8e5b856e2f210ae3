//! What can become of a migration: the words of the destination's records, of its answers, and of
//! the operator.

use serde::{Deserialize, Serialize};

/// What a destination says about a token.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Not settled yet: ask again.
    Undecided,
    /// The decision to run is durable, and nothing says that the guest runs yet, or still.
    Committed,
    /// The guest was taken over and has run (or stays paused, as it came) there.
    Running,
    /// The guest was thrown away, durably: it can never run there.
    Discarded,
    /// Another place, or another set of records: nothing is known here.
    Unknown,
}

impl Verdict {
    pub(crate) const ALL: [Verdict; 5] =
        [Self::Undecided, Self::Committed, Self::Running, Self::Discarded, Self::Unknown];
}

/// What a destination decided, for good.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Decision {
    /// To run the guest.
    Committed,
    /// To throw it away.
    Discarded,
}

/// The operator's word on a migration in doubt.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Resolution {
    /// The guest shall run here. The operator has made sure that the destination does not run it
    /// and never will (its process is dead, its host is off); otherwise two run.
    Run,
    /// The guest here shall end. If the destination does not run it, it is lost.
    Discard,
}
