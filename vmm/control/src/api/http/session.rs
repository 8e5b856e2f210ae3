//! Serves the connections of the API's socket. Each connection has one request at a time: requests
//! that arrive together are answered one after the other, and each reply is one write.
//!
//! | wait | limit | afterwards |
//! | --- | --- | --- |
//! | for a request | none; `connections` bounds the number of idle connections | |
//! | for the rest of a head | 30 s | refusal, and the connection ends |
//! | for a body | 10 s | refusal, and the connection ends |
//! | for a client that does not read its reply | 60 s | the connection ends |

use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::extract::connect_info::ConnectInfo;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};
use tower_service::Service;

use super::decode::{HttpDecoder, HttpEvent, HttpPhase, HttpRequest, Persistence};
use super::dialect::{HttpDialect, HttpFault};
use super::reply::{HttpReply, permission};
use crate::api::app::App;
use crate::api::configuring::{self, FirecrackerAnswer};
use crate::api::connections::{BODY_LIMIT, BoundedListener, BoundedStream, ConnectionHandle};

/// Number of bytes that one read takes at most.
const READ_BYTES: usize = 2048;
/// Number of parts of the limit for requests under way at the end.
const SHUTDOWN_PARTS: u32 = 20;

/// Limits for a client's part of an exchange.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClientLimits {
    /// For the head of a request, once it has begun.
    pub(super) head: Duration,
    /// For the body.
    pub(super) body: Duration,
    /// For reading the reply.
    pub(super) reply: Duration,
}

impl Default for ClientLimits {
    fn default() -> Self {
        Self { head: Duration::from_secs(30), body: BODY_LIMIT, reply: Duration::from_secs(60) }
    }
}

/// What answers the requests on the API's socket.
#[derive(Clone)]
pub(in crate::api) struct ApiService {
    router: Router,
    app: Arc<App>,
    dialect: HttpDialect,
    pub(super) limits: ClientLimits,
}

impl ApiService {
    /// Creates a service that answers Driftline's own requests with `router`. If the guest of `app`
    /// is configured over the API, the service speaks Firecracker's dialect, and `app` answers
    /// Firecracker's requests.
    pub(in crate::api) fn new(router: Router, app: Arc<App>) -> Self {
        let dialect = match app.payload_limit() {
            None => HttpDialect::Driftline,
            Some(payload_limit) => HttpDialect::Firecracker { payload_limit },
        };
        Self { router: router.with_state(()), app, dialect, limits: ClientLimits::default() }
    }

    async fn answer(&self, request: HttpRequest, connection: &ConnectionHandle) -> HttpReply {
        match request.is_firecracker {
            true => self.configure(request, connection).await,
            false => self.route(request, connection).await,
        }
    }

    async fn configure(&self, request: HttpRequest, connection: &ConnectionHandle) -> HttpReply {
        let HttpRequest { method, target, body, .. } = request;
        let _busy = match connection.begin_firecracker(&method, &target) {
            Ok(busy) => busy,
            Err(refusal) => return collect(refusal.into_response()).await,
        };
        let answer = configuring::answer(&self.app, method.as_str(), &target, &body).await;
        let FirecrackerAnswer { answer, is_deprecated } = answer;
        let status = StatusCode::from_u16(answer.status()).unwrap_or(StatusCode::BAD_REQUEST);
        HttpReply::json(status, answer.into_body().unwrap_or_default(), is_deprecated)
    }

    async fn route(&self, request: HttpRequest, connection: &ConnectionHandle) -> HttpReply {
        let HttpRequest { method, target, headers, body, .. } = request;
        let Ok(uri) = target.parse::<Uri>() else {
            let why = HttpFault::Uri("It is neither a path nor an address.");
            let refusal = HttpReply::fault(StatusCode::BAD_REQUEST, why.to_string());
            return if method == Method::HEAD { refusal.without_body() } else { refusal };
        };
        let mut routed = Request::new(Body::from(body));
        *routed.method_mut() = method;
        *routed.uri_mut() = uri;
        *routed.headers_mut() = headers;
        routed.extensions_mut().insert(ConnectInfo(connection.clone()));
        match self.router.clone().call(routed).await {
            Ok(response) => collect(response).await,
            Err(never) => match never {},
        }
    }
}

/// Turns an answer of the router into a reply. No route streams, so the body is here already.
async fn collect(response: Response) -> HttpReply {
    let (head, body) = response.into_parts();
    match to_bytes(body, usize::MAX).await {
        Ok(body) => HttpReply::routed(head.status, head.headers, body),
        Err(e) => {
            let why = format!("the answer cannot be read: {e}");
            HttpReply::fault(StatusCode::INTERNAL_SERVER_ERROR, why)
        }
    }
}

/// Serves the connections that `listener` accepts until the sender of `is_over` is dropped, and
/// then requests under way for at most `shutdown_limit`.
pub(in crate::api) async fn serve(
    mut listener: BoundedListener,
    service: ApiService,
    mut is_over: watch::Receiver<()>,
    shutdown_limit: Duration,
) {
    let mut sessions = JoinSet::new();
    loop {
        let (stream, connection) = tokio::select! {
            _ = is_over.changed() => break,
            // A session that has panicked has lost only its connection.
            Some(_) = sessions.join_next() => continue,
            accepted = listener.accept() => accepted,
        };
        let (service, is_over) = (service.clone(), is_over.clone());
        let session = async move {
            let mut session = ApiSession {
                stream,
                connection,
                decoder: HttpDecoder::new(service.dialect),
                service,
            };
            if let Err(e) = session.run(is_over).await {
                let ended = || tracing::debug!("a connection to the API has ended: {e}");
                session.service.app.span().in_scope(ended);
            }
        };
        sessions.spawn(session);
    }
    drop(listener);
    let ended = async { while sessions.join_next().await.is_some() {} };
    if !ends_within(shutdown_limit, ended).await {
        service.app.span().in_scope(|| tracing::debug!("requests were still under way"));
    }
}

/// Waits until `work` ends, for `limit` at most. Returns whether it has ended.
///
/// The limit is waited for in parts, and between two parts this thread does all that is ready. A
/// process that gets no processor for that long therefore still sends the answers that it has: to
/// it, one long wait would look as if its sessions had not answered.
async fn ends_within(limit: Duration, work: impl Future<Output = ()>) -> bool {
    let mut work = pin!(work);
    for _ in 0..SHUTDOWN_PARTS {
        if timeout(limit / SHUTDOWN_PARTS, &mut work).await.is_ok() {
            return true;
        }
    }
    false
}

/// A connection that is being served.
struct ApiSession {
    stream: BoundedStream,
    connection: ConnectionHandle,
    decoder: HttpDecoder,
    service: ApiService,
}

impl ApiSession {
    /// Serves the connection until it ends or the sender of `is_over` is dropped.
    async fn run(&mut self, mut is_over: watch::Receiver<()>) -> io::Result<()> {
        let dialect = self.service.dialect;
        let mut chunk = vec![0; READ_BYTES];
        loop {
            let event = tokio::select! {
                event = self.receive(&mut chunk) => event?,
                _ = is_over.changed() => return self.shut_down().await,
            };
            let (reply, persistence) = match event {
                None => return Ok(()),
                Some(HttpEvent::Incomplete) => continue,
                Some(HttpEvent::Continue) => {
                    self.write(&permission(dialect)).await?;
                    continue;
                }
                Some(HttpEvent::Request(request)) => {
                    let persistence = request.persistence;
                    (self.service.answer(*request, &self.connection).await, persistence)
                }
                Some(HttpEvent::Fault(fault)) => {
                    let stays = dialect.is_firecracker() && !fault.ends_connection();
                    let persistence = if stays { Persistence::Open } else { Persistence::Close };
                    (HttpReply::refusal(dialect, &fault), persistence)
                }
            };
            let ends = is_over.has_changed().is_err();
            let persistence = if ends { Persistence::Close } else { persistence };
            self.write(&reply.encode(dialect, persistence)).await?;
            if persistence == Persistence::Close {
                return self.shut_down().await;
            }
        }
    }

    /// Waits for the next event. Returns `None` if the client closes the connection.
    async fn receive(&mut self, chunk: &mut [u8]) -> io::Result<Option<HttpEvent>> {
        let mut phase = HttpPhase::Idle;
        let mut since = Instant::now();
        loop {
            match self.decoder.next() {
                HttpEvent::Incomplete => {}
                event => return Ok(Some(event)),
            }
            if self.decoder.phase() != phase {
                phase = self.decoder.phase();
                since = Instant::now();
            }
            let ClientLimits { head, body, .. } = self.service.limits;
            let read = match phase {
                HttpPhase::Idle => Ok(self.read(chunk).await),
                HttpPhase::Head => {
                    let late = HttpFault::Late { part: "head", limit: head };
                    timeout_at(since + head, self.read(chunk)).await.map_err(|_| late)
                }
                HttpPhase::Body => {
                    let late = HttpFault::Late { part: "body", limit: body };
                    timeout_at(since + body, self.read(chunk)).await.map_err(|_| late)
                }
            };
            match read {
                Err(late) => return Ok(Some(HttpEvent::Fault(late))),
                Ok(read) => match read? {
                    0 => return Ok(None),
                    bytes => self.decoder.push(&chunk[..bytes]),
                },
            }
        }
    }

    async fn read(&mut self, chunk: &mut [u8]) -> io::Result<usize> {
        let mut buf = ReadBuf::new(chunk);
        poll_fn(|context| Pin::new(&mut self.stream).poll_read(context, &mut buf)).await?;
        Ok(buf.filled().len())
    }

    /// Writes all bytes, in one write if the socket takes them.
    async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let limit = self.service.limits.reply;
        let stream = &mut self.stream;
        let write = async {
            let mut left = bytes;
            while !left.is_empty() {
                let wrote = poll_fn(|context| Pin::new(&mut *stream).poll_write(context, left));
                left = &left[wrote.await?..];
            }
            Ok(())
        };
        timeout(limit, write).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }

    async fn shut_down(&mut self) -> io::Result<()> {
        poll_fn(|context| Pin::new(&mut self.stream).poll_shutdown(context)).await
    }
}
