//! Outcomes of a migration: the destination's decision and answers, and the operator's resolution.

use serde::{Deserialize, Serialize};

/// A destination's answer about a token; its value is its number in ANSWER.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Verdict {
    /// Not decided yet; the source asks again.
    Undecided,
    /// The destination has decided to run the guest. The guest may not run yet, or may have ended.
    Committed,
    /// The destination has taken the guest over and runs it, or keeps it paused as it arrived.
    Running,
    /// The guest was durably discarded and can never run at the destination.
    Discarded,
    /// The token belongs to another site, and this one knows nothing of it.
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
    /// never will (its process is dead, or its host is off). Otherwise both hosts run it.
    Run,
    /// The guest here ends. If the destination does not run it, it is lost.
    Discard,
}
