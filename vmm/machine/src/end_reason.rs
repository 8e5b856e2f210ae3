//! Why a guest ended.

use serde::{Deserialize, Serialize};

/// Why a guest ended.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EndReason {
    /// The guest powered itself off.
    PowerOff,
    /// The guest asked for a reset.
    Reset,
    /// Its kernel has panicked, and said so.
    Panicked,
    /// Someone stopped it; the text says who or why (an operator, a completed migration).
    Stopped(String),
    /// It cannot go on: a triple fault, an instruction that KVM cannot emulate, a failed ioctl.
    Crashed(String),
}
