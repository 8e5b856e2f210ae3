//! Owns the client end of the API socket: each request uses one connection and has one answer.

use std::error::Error;
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

/// The largest answer, in bytes. The reports of a long checkpoint run arrive in pages that are far
/// smaller.
const ANSWER_LIMIT: usize = 16 << 20;

/// The reason why a request has no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The socket cannot be connected to.
    #[error("{}", unreachable(socket, cause))]
    Connect {
        /// The socket's path.
        socket: PathBuf,
        /// The error of the connection attempt.
        #[source]
        cause: io::Error,
    },
    /// The connection ended, or the received bytes are not an answer.
    #[error("the VMM on {} has ended, or did not answer properly: {cause}", socket.display())]
    Broken {
        /// The socket's path.
        socket: PathBuf,
        /// What went wrong.
        #[source]
        cause: Box<dyn Error + Send + Sync>,
    },
    /// No answer arrived within the limit.
    #[error(
        "the VMM on {} has not answered {request} in {limit:?}: its process may be stopped (`ps` \
         shows it as T) or its host overloaded; --timeout waits longer",
        socket.display()
    )]
    Silent {
        /// The socket's path.
        socket: PathBuf,
        /// Method and path.
        request: String,
        /// Upper bound on the wait: the request's own limit, or what was left until the deadline of
        /// several requests, in tenths of a second.
        limit: Duration,
    },
    /// The server refused the request; the text is the server's.
    #[error("{0}")]
    Fault(String),
}

/// Returns the message that says why a socket cannot be connected to and what to check.
fn unreachable(socket: &Path, cause: &io::Error) -> String {
    let path = socket.display();
    match cause.kind() {
        io::ErrorKind::NotFound => format!(
            "{path} does not exist: is the guest running, and was it started with --api-sock \
             {path}?"
        ),
        io::ErrorKind::ConnectionRefused => {
            format!(
                "nothing listens on {path}: it is not a socket, or belongs to a VMM that has died"
            )
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
    /// Time by which all requests must be answered.
    deadline: Option<Instant>,
}

/// Default limit for an answer: more than twice the time that a VMM takes to refuse a pause because
/// a device is stuck.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval at which the client repeats a request that the server refused because its class was at
/// its limit.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);

impl Client {
    /// Creates a client of the API on `socket`. Opens nothing yet.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), timeout: DEFAULT_TIMEOUT, deadline: None }
    }

    /// Sets the limit for each request. A request that asks the VMM to delay its answer (`wait_ms`
    /// in its path) has that time in addition.
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Makes all further requests share one timeout, which starts now.
    pub fn within_timeout(self) -> Self {
        Self { deadline: Instant::now().checked_add(self.timeout), ..self }
    }

    /// Returns the id of the process that listens on the socket, or `None` if the system does not
    /// report it.
    ///
    /// # Errors
    ///
    /// [`ClientError::Connect`] if the socket cannot be connected to.
    pub async fn process(&self) -> Result<Option<i32>, ClientError> {
        let connected = UnixStream::connect(&self.socket).await;
        let peer = connected.and_then(|stream| stream.peer_cred());
        let failed = |cause| ClientError::Connect { socket: self.socket.clone(), cause };
        Ok(peer.map_err(failed)?.pid().filter(|pid| *pid > 0))
    }

    /// Returns the socket's path.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Sends `GET path`.
    ///
    /// # Errors
    ///
    /// Those of [`call`](Self::call).
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.call(Method::GET, path, None::<&()>).await
    }

    /// Sends one request. An empty answer reads as `null`, which is the JSON of `()`.
    ///
    /// # Errors
    ///
    /// A [`ClientError`]: the server is unreachable, broken, silent, or has refused the request.
    pub async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, ClientError> {
        let limit = self.timeout.saturating_add(requested_wait(path));
        let request = format!("{method} {}", path.split('?').next().unwrap_or(path));
        let until_deadline = self.deadline.map(|at| at.saturating_duration_since(Instant::now()));
        let left = until_deadline.map_or(limit, |left| left.min(limit));
        let until = Instant::now() + left.saturating_sub(RETRY_INTERVAL).min(DEFAULT_TIMEOUT);
        let exchange = async {
            loop {
                let answer = self.exchange(method.clone(), path, body).await?;
                // The VMM has not started the request.
                if answer.0 != StatusCode::SERVICE_UNAVAILABLE || Instant::now() >= until {
                    return Ok(answer);
                }
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
        };
        let exchange = tokio::time::timeout(left, exchange).await;
        let limit = until_deadline.map_or(limit, |left| rounded_up(left).min(limit));
        let silent = |_| ClientError::Silent { socket: self.socket.clone(), request, limit };
        let (status, bytes) = exchange.map_err(silent).flatten()?;
        let json: &[u8] = if bytes.is_empty() { b"null" } else { &bytes };
        if status.is_success() {
            return serde_json::from_slice(json).map_err(|e| self.broken(e));
        }
        let fault = serde_json::from_slice::<FaultMessage>(json);
        let message =
            fault.map_or_else(|_| format!("the VMM answered {status}"), |f| f.fault_message);
        Err(ClientError::Fault(message))
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
        // The answer is complete, so the way the connection ends does not matter.
        let _ = driver.await;
        Ok((status, bytes))
    }

    fn broken(&self, cause: impl Into<Box<dyn Error + Send + Sync>>) -> ClientError {
        ClientError::Broken { socket: self.socket.clone(), cause: cause.into() }
    }
}

/// Returns how long a request asks the VMM to delay its answer.
fn requested_wait(path: &str) -> Duration {
    let query = path.split_once('?').map_or("", |(_, query)| query);
    let wait = query.split('&').find_map(|parameter| parameter.strip_prefix("wait_ms="));
    Duration::from_millis(wait.and_then(|ms| ms.parse().ok()).unwrap_or(0))
}

/// Returns `time`, rounded up to tenths of a second.
fn rounded_up(time: Duration) -> Duration {
    let ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    Duration::from_millis(ms.div_ceil(100).saturating_mul(100))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[tokio::test]
    async fn shared_deadline_limits_the_reported_wait() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        // No process accepts its connections.
        let _listener = UnixListener::bind(&path).unwrap();
        let client = Client { deadline: Some(Instant::now()), ..Client::new(path) };
        let silent = client.get::<()>("/v1/info").await.unwrap_err();
        let ClientError::Silent { limit, .. } = silent else { panic!("{silent}") };
        assert_eq!(limit, Duration::ZERO);
    }
}
