//! Outcomes of a migration: in the destination's records, in its answers, and from the operator.

use serde::{Deserialize, Serialize};

/// A destination's answer about a token.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Not settled yet; ask again.
    Undecided,
    /// The decision to run is durable, but the guest may not run yet, or any more.
    Committed,
    /// The guest was taken over and has run (or stays paused, as it came) there.
    Running,
    /// The guest was discarded, durably: it can never run there.
    Discarded,
    /// The token belongs to another site; nothing is known here.
    Unknown,
}

impl Verdict {
    pub(crate) const ALL: [Verdict; 5] =
        [Self::Undecided, Self::Committed, Self::Running, Self::Discarded, Self::Unknown];
}

/// A destination's final decision.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Decision {
    /// To run the guest.
    Committed,
    /// To discard it.
    Discarded,
}

/// The operator's resolution of a migration in doubt.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Resolution {
    /// The guest runs here. The operator has made sure that the destination does not run it and
    /// never will (its process is dead, its host is off); otherwise two run.
    Run,
    /// The guest here ends. If the destination does not run it, it is lost.
    Discard,
}
