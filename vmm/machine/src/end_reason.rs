//! The reasons for which a guest ends.

use serde::{Deserialize, Serialize};

/// The reason for which a guest ended.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EndReason {
    /// The guest powered itself off.
    PowerOff,
    /// The guest requested a reset.
    Reset,
    /// The guest's kernel panicked and reported it.
    Panicked,
    /// The guest was stopped. The text says by what or why (an operator, a completed migration).
    Stopped(String),
    /// The guest cannot continue: a triple fault, an instruction that KVM cannot emulate, a failed
    /// ioctl.
    Crashed(String),
}
