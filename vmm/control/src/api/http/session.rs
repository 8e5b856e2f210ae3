//! Serves one connection of the API's socket or of the metrics' address. It has one request at a
//! time: requests that arrive together are answered one after the other, and each reply is one
//! write.
//!
//! | wait | limit | afterwards |
//! | --- | --- | --- |
//! | for a request | none; `connections` bounds the number of idle connections | |
//! | for the rest of a head | 30 s | refusal, and the connection ends |
//! | for a body | 10 s | refusal, and the connection ends |
//! | for a client that does not read its reply | 60 s | the connection ends |
//! | for the guest to change its process | none; the job of the upgrade has limits | |

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};
use tower_service::Service;

use super::decode::{HttpDecoder, HttpEvent, HttpPhase, HttpRequest, Persistence};
use super::dialect::{HttpDialect, HttpFault, READ_BYTES};
use super::reply::{HttpReply, permission};
use crate::api::app::App;
use crate::api::configuring::{self, FirecrackerAnswer};
use crate::api::connections::{BODY_LIMIT, BoundedStream, ConnectionHandle};
use crate::api::relay::RelayGate;
use crate::api::request_class::RequestClass;

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

/// What answers the requests on a socket.
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

    /// Creates a service that answers the requests to the metrics' address with `router`, in
    /// Driftline's dialect.
    pub(in crate::api) fn of_metrics(router: Router, app: Arc<App>) -> Self {
        Self { dialect: HttpDialect::Driftline, ..Self::new(router, app) }
    }

    /// Returns the maximum number of bytes that come with a connection from another process.
    pub(super) fn unanswered_limit(&self) -> usize {
        self.dialect.unanswered_limit()
    }

    async fn answer(&self, request: HttpRequest, connection: &ConnectionHandle) -> HttpReply {
        match request.is_firecracker {
            true => self.configure(request, connection).await,
            false => self.route(request, connection).await,
        }
    }

    async fn configure(&self, request: HttpRequest, connection: &ConnectionHandle) -> HttpReply {
        let HttpRequest { method, target, body, .. } = request;
        let _busy = match connection.begin_firecracker(&method, &target).await {
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
        routed.extensions_mut().insert(connection.clone());
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

/// How a session ends.
pub(super) enum SessionEnd {
    /// The connection is closed.
    Closed,
    /// The connection goes to the process that has the guest, with the bytes that were read from it
    /// and not answered.
    Moves(BoundedStream, Vec<u8>),
}

/// What a client's part of an exchange has led to.
enum SessionInput {
    Event(HttpEvent),
    /// The client has closed the connection.
    Closed,
    /// The next request is answered in another process.
    Moved,
}

/// A connection that is being served.
pub(super) struct ApiSession {
    stream: BoundedStream,
    connection: ConnectionHandle,
    decoder: HttpDecoder,
    service: ApiService,
    relay: RelayGate,
}

impl ApiSession {
    /// Creates a session on a connection from which `bytes` were read already.
    pub(super) fn new(
        stream: BoundedStream,
        connection: ConnectionHandle,
        bytes: &[u8],
        service: ApiService,
    ) -> Self {
        let mut decoder = HttpDecoder::new(service.dialect);
        decoder.push(bytes);
        let relay = service.app.relay().gate();
        Self { stream, connection, decoder, service, relay }
    }

    /// Serves the connection until it ends or moves, or the sender of `is_over` is dropped.
    pub(super) async fn run(mut self, is_over: watch::Receiver<()>) -> SessionEnd {
        match self.serve(is_over).await {
            Ok(false) => SessionEnd::Closed,
            Ok(true) => SessionEnd::Moves(self.stream, self.decoder.unanswered()),
            Err(e) => {
                let ended = || tracing::debug!("a connection of a client has ended: {e}");
                self.service.app.span().in_scope(ended);
                SessionEnd::Closed
            }
        }
    }

    /// Serves the connection until its end. Returns whether it moves to another process.
    async fn serve(&mut self, mut is_over: watch::Receiver<()>) -> io::Result<bool> {
        let dialect = self.service.dialect;
        let mut chunk = vec![0; READ_BYTES];
        loop {
            let event = tokio::select! {
                // A connection moves rather than ends if there is a reason for both.
                biased;
                received = self.receive(&mut chunk) => match received? {
                    SessionInput::Event(event) => event,
                    SessionInput::Closed => return Ok(false),
                    SessionInput::Moved => return Ok(true),
                },
                _ = is_over.changed() => return self.shut_down().await.map(|()| false),
            };
            let (reply, persistence) = match event {
                HttpEvent::Incomplete => continue,
                HttpEvent::Continue => {
                    self.write(&permission(dialect)).await?;
                    continue;
                }
                HttpEvent::Request(request) => {
                    tokio::select! {
                        biased;
                        () = self.decided() => {}
                        _ = is_over.changed() => return self.shut_down().await.map(|()| false),
                    }
                    let persistence = request.persistence;
                    match self.answer(*request).await {
                        Some(reply) => (reply, persistence),
                        None => return Ok(true),
                    }
                }
                HttpEvent::Fault(fault) => {
                    let stays = dialect.is_firecracker() && !fault.ends_connection();
                    let persistence = if stays { Persistence::Open } else { Persistence::Close };
                    (HttpReply::refusal(dialect, &fault), persistence)
                }
            };
            let ends = is_over.has_changed().is_err() && !self.relay.has_moved();
            let persistence = if ends { Persistence::Close } else { persistence };
            self.write(&reply.encode(dialect, persistence)).await?;
            if persistence == Persistence::Close {
                return self.shut_down().await.map(|()| false);
            }
        }
    }

    /// Waits while requests are held.
    async fn decided(&mut self) {
        let _held = self.relay.holds().then(|| self.connection.hold());
        self.relay.decided().await;
    }

    /// Returns the reply to a request, or `None` if the guest's new process answers it.
    async fn answer(&mut self, request: HttpRequest) -> Option<HttpReply> {
        let waits = waits_for_news(&request);
        while !self.relay.has_moved() {
            if !waits {
                return Some(self.service.answer(request, &self.connection).await);
            }
            tokio::select! {
                biased;
                // The news may be that the guest leaves this process. The request then begins anew
                // in the process that has the guest.
                () = self.relay.not_here() => {}
                reply = self.service.answer(request.clone(), &self.connection) => {
                    return Some(reply);
                }
            }
            self.decided().await;
        }
        None
    }

    /// Waits for the next event.
    async fn receive(&mut self, chunk: &mut [u8]) -> io::Result<SessionInput> {
        let mut phase = HttpPhase::Idle;
        let mut since = Instant::now();
        loop {
            match self.decoder.next() {
                HttpEvent::Incomplete => {}
                event => return Ok(SessionInput::Event(event)),
            }
            if self.decoder.phase() != phase {
                phase = self.decoder.phase();
                since = Instant::now();
            }
            let ClientLimits { head, body, .. } = self.service.limits;
            let limit = match phase {
                HttpPhase::Idle => None,
                HttpPhase::Head => Some(("head", head)),
                HttpPhase::Body => Some(("body", body)),
            };
            let read = read(&mut self.stream, chunk);
            let read = async {
                match limit {
                    None => Ok(read.await),
                    Some((part, limit)) => timeout_at(since + limit, read)
                        .await
                        .map_err(|_| HttpFault::Late { part, limit }),
                }
            };
            // Another process would not know that the rest of a body is to be skipped.
            let moves = !self.decoder.is_skipping();
            let read = tokio::select! {
                biased;
                () = self.relay.moved(), if moves => return Ok(SessionInput::Moved),
                read = read => read,
            };
            match read {
                Err(late) => return Ok(SessionInput::Event(HttpEvent::Fault(late))),
                Ok(read) => match read? {
                    0 => return Ok(SessionInput::Closed),
                    bytes => self.decoder.push(&chunk[..bytes]),
                },
            }
        }
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

async fn read(stream: &mut BoundedStream, chunk: &mut [u8]) -> io::Result<usize> {
    let mut buf = ReadBuf::new(chunk);
    poll_fn(|context| Pin::new(&mut *stream).poll_read(context, &mut buf)).await?;
    Ok(buf.filled().len())
}

/// Returns whether a request changes nothing and waits for news, so that another process may answer
/// it from its beginning.
fn waits_for_news(request: &HttpRequest) -> bool {
    let HttpRequest { method, target, is_firecracker, .. } = request;
    let class = target.parse::<Uri>().map(|uri| RequestClass::of(method, &uri));
    !is_firecracker && class.is_ok_and(|class| class == RequestClass::Wait)
}
