//! Owns the refusal of a request that cannot be carried out, and reads request bodies.

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use driftline_guest::GuestError;
use serde::de::DeserializeOwned;

use super::app::AppError;
use crate::jobs::{JobError, OperatorError};
use crate::model::{FaultMessage, LimitError};

/// The largest request body, in bytes: Firecracker's default, because a client's metadata may need
/// it. Driftline's client sends a few hundred.
pub(super) const MAX_BODY_BYTES: usize = 51_200;

/// A refusal: status 400 with a sentence, as from Firecracker, or another status where HTTP has a
/// better one.
#[derive(Debug)]
pub(super) struct Fault {
    status: StatusCode,
    message: String,
}

impl Fault {
    /// Creates a refusal with status 400. `message` says why the request cannot be done.
    pub(super) fn new(message: impl Into<String>) -> Self {
        Self { status: StatusCode::BAD_REQUEST, message: message.into() }
    }

    /// Creates a refusal with another status than 400.
    pub(super) fn of(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }

    /// Creates a refusal because a part of this program failed.
    pub(super) fn internal(message: impl Into<String>) -> Self {
        Self { status: StatusCode::INTERNAL_SERVER_ERROR, message: message.into() }
    }
}

impl From<OperatorError> for Fault {
    fn from(e: OperatorError) -> Self {
        Self::new(e.to_string())
    }
}

impl From<GuestError> for Fault {
    fn from(e: GuestError) -> Self {
        Self::new(e.to_string())
    }
}

impl From<JobError> for Fault {
    fn from(e: JobError) -> Self {
        Self::new(e.to_string())
    }
}

impl From<AppError> for Fault {
    fn from(e: AppError) -> Self {
        Self::new(e.to_string())
    }
}

impl From<LimitError> for Fault {
    fn from(e: LimitError) -> Self {
        Self::new(e.to_string())
    }
}

impl IntoResponse for Fault {
    fn into_response(self) -> Response {
        (self.status, Json(FaultMessage { fault_message: self.message })).into_response()
    }
}

/// Reads a whole body of at most [`MAX_BODY_BYTES`] bytes.
pub(super) async fn read_body(body: Body) -> Result<Bytes, Fault> {
    axum::body::to_bytes(body, MAX_BODY_BYTES).await.map_err(|e| Fault {
        status: StatusCode::PAYLOAD_TOO_LARGE,
        message: format!("the body cannot be read within {MAX_BODY_BYTES} bytes: {e}"),
    })
}

/// A request's JSON body. Its size is limited before it is read.
pub(super) struct JsonBody<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for JsonBody<T> {
    type Rejection = Fault;

    async fn from_request(request: Request, _: &S) -> Result<Self, Fault> {
        let bytes = read_body(request.into_body()).await?;
        if bytes.is_empty() {
            return Err(Fault::new("the request body is empty; expected JSON"));
        }
        serde_json::from_slice(&bytes)
            .map(Self)
            .map_err(|e| Fault::new(format!("the request body is not what was expected: {e}")))
    }
}
