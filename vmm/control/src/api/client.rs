//! Owns the other end of the API socket: one request, one connection, one answer.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

use crate::model::FaultMessage;

/// The largest answer: reports of a long checkpoint run come in pieces that are far smaller.
const ANSWER_LIMIT: usize = 16 << 20;

/// Why a request has no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// Nobody listens there.
    #[error("{}", unreachable(socket, cause))]
    Connect {
        /// The socket's path.
        socket: PathBuf,
        /// The system's answer.
        cause: io::Error,
    },
    /// The connection ended, or what came is no answer.
    #[error("the VMM on {} has ended, or did not answer properly: {why}", socket.display())]
    Broken {
        /// The socket's path.
        socket: PathBuf,
        /// What happened.
        why: String,
    },
    /// No answer came in time.
    #[error(
        "the VMM on {} has not answered {request} in {limit:?}: its process may be stopped (`ps` shows it as T) or its host \
         overloaded; --timeout waits longer",
        socket.display()
    )]
    Silent {
        /// The socket's path.
        socket: PathBuf,
        /// Method and path.
        request: String,
        /// How long was waited.
        limit: Duration,
    },
    /// The request was refused, in the server's words.
    #[error("{0}")]
    Fault(String),
}

/// Why a socket cannot be connected to, and what to look at.
fn unreachable(socket: &Path, cause: &io::Error) -> String {
    let path = socket.display();
    match cause.kind() {
        io::ErrorKind::NotFound => format!(
            "{path} does not exist: is the guest running, and was it started with --api-sock {path}?"
        ),
        io::ErrorKind::ConnectionRefused => {
            format!("nothing listens on {path}: it is no socket, or that of a VMM that has died")
        }
        io::ErrorKind::PermissionDenied => {
            format!("cannot connect to {path}: {cause}; the VMM runs as another user")
        }
        _ => format!("cannot connect to {path}: {cause}"),
    }
}

/// A client of one API socket.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
    timeout: Duration,
    /// When all requests have to be answered.
    deadline: Option<Instant>,
}

/// How long a request waits for its answer unless said otherwise: more than twice what a VMM takes
/// to refuse a pause because a device is stuck.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Interval at which a request is sent again of which as many are being answered as may be.
const RETRY: Duration = Duration::from_millis(200);

impl Client {
    /// A client of the API on `socket`. Nothing is opened yet.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), timeout: TIMEOUT, deadline: None }
    }

    /// The same, with another limit for each request. One that asks the VMM to hold its answer back
    /// (`wait_ms` in its path) has that time on top.
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// The same, for several requests that have the time of one together, from now on.
    pub fn within_timeout(self) -> Self {
        Self { deadline: Instant::now().checked_add(self.timeout), ..self }
    }

    /// The number of the process that listens on the socket; `None` where the system does not tell.
    pub async fn process(&self) -> Result<Option<i32>, ClientError> {
        let connected = UnixStream::connect(&self.socket).await;
        let peer = connected.and_then(|stream| stream.peer_cred());
        let failed = |cause| ClientError::Connect { socket: self.socket.clone(), cause };
        Ok(peer.map_err(failed)?.pid().filter(|pid| *pid > 0))
    }

    /// Where it connects to.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// `GET path`.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.call(Method::GET, path, None::<&()>).await
    }

    /// One request; an empty answer reads as `null`, which is what `()` is in JSON.
    pub async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, ClientError> {
        let limit = self.timeout.saturating_add(wait_of(path));
        let request = format!("{method} {}", path.split('?').next().unwrap_or(path));
        let left = self.deadline.map(|at| at.saturating_duration_since(Instant::now()));
        let left = left.map_or(limit, |left| left.min(limit));
        let until = Instant::now() + left.saturating_sub(RETRY).min(TIMEOUT);
        let exchange = async {
            loop {
                let answer = self.exchange(method.clone(), path, body).await?;
                // The VMM has not begun with it.
                if answer.0 != StatusCode::SERVICE_UNAVAILABLE || Instant::now() >= until {
                    return Ok(answer);
                }
                tokio::time::sleep(RETRY).await;
            }
        };
        let exchange = tokio::time::timeout(left, exchange).await;
        let silent = |_| ClientError::Silent { socket: self.socket.clone(), request, limit };
        let (status, bytes) = exchange.map_err(silent).flatten()?;
        let json: &[u8] = if bytes.is_empty() { b"null" } else { &bytes };
        if status.is_success() {
            return serde_json::from_slice(json).map_err(|e| self.broken(e));
        }
        let fault = serde_json::from_slice::<FaultMessage>(json);
        let told = fault.map_or_else(|_| format!("it answered {status}"), |f| f.fault_message);
        Err(ClientError::Fault(told))
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<(StatusCode, Bytes), ClientError> {
        let stream = UnixStream::connect(&self.socket)
            .await
            .map_err(|cause| ClientError::Connect { socket: self.socket.clone(), cause })?;
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(|e| self.broken(e))?;
        let driver = tokio::spawn(connection);
        let body = match body {
            None => Bytes::new(),
            Some(body) => serde_json::to_vec(body).map_err(|e| self.broken(e))?.into(),
        };
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, "localhost")
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .map_err(|e| self.broken(e))?;
        let response = sender.send_request(request).await.map_err(|e| self.broken(e))?;
        let status = response.status();
        let body = Limited::new(response.into_body(), ANSWER_LIMIT).collect().await;
        let bytes = body.map_err(|e| self.broken(e))?.to_bytes();
        drop(sender);
        // The answer is complete: how the connection ends does not matter.
        let _ = driver.await;
        Ok((status, bytes))
    }

    fn broken(&self, why: impl ToString) -> ClientError {
        ClientError::Broken { socket: self.socket.clone(), why: why.to_string() }
    }
}

/// How long a request asks the VMM to hold its answer back.
fn wait_of(path: &str) -> Duration {
    let query = path.split_once('?').map_or("", |(_, query)| query);
    let wait = query.split('&').find_map(|parameter| parameter.strip_prefix("wait_ms="));
    Duration::from_millis(wait.and_then(|ms| ms.parse().ok()).unwrap_or(0))
}
