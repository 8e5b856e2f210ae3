//! Events for the thread that configures a guest over the API.

use tokio::sync::oneshot;

use crate::firecracker::{Answer, ApiFault, Operation};

/// What the API asks of the thread that configures the guest.
#[derive(Debug)]
pub enum ApiEvent {
    /// A request.
    Call(Caller, Operation),
    /// The process is to end, for this reason.
    Stop(String),
}

/// Sends the answer to a request's client. If this is dropped without an answer, the client is told
/// that the process ends.
#[derive(Debug)]
pub struct Caller(Option<oneshot::Sender<Answer>>);

impl Caller {
    pub(super) fn new(answer: oneshot::Sender<Answer>) -> Self {
        Self(Some(answer))
    }

    /// Returns the caller of a request that the process makes itself.
    pub fn own() -> Self {
        Self(None)
    }

    /// Returns whether the process makes the request itself. No client receives the answer.
    pub fn is_own(&self) -> bool {
        self.0.is_none()
    }

    /// Sends the answer. The client may have disconnected meanwhile.
    pub fn answer(self, answer: Answer) {
        let _ = self.0.map(|client| client.send(answer));
    }

    /// Refuses the request.
    pub fn refuse(self, fault: ApiFault) {
        self.answer(Answer::Fault(fault));
    }
}
