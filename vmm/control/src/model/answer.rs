//! The JSON of answers that many requests share.

use serde::{Deserialize, Serialize};

/// Any refusal.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FaultMessage {
    /// What is wrong, as a sentence.
    pub fault_message: String,
}

/// The answer to `POST /checkpoint` and `POST /migration`: what has been begun.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct JobBegun {
    /// The job's number: `GET` and `DELETE` with `job=N` mean this one and no later one.
    pub job: u64,
}
