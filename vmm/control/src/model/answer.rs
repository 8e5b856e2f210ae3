//! JSON of the answers that many requests share.

use serde::{Deserialize, Serialize};

/// Body of every refusal.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct FaultMessage {
    /// What is wrong, as a sentence.
    pub fault_message: String,
}

/// Answer to `POST /v1/checkpoint` and `POST /v1/migration`: the job that was started.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct JobStarted {
    /// The job's number. `GET` and `DELETE` with `job=N` address this job and no later one.
    pub job: u64,
}
