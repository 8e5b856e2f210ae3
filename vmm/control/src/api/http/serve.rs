//! Owns the sessions of the API's socket and of the metrics' address: begins them with connections
//! that are accepted, or that another process has sent, and sends connections on once the guest has
//! changed its process.

use std::collections::VecDeque;
use std::future::pending;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet, yield_now};
use tokio::time::timeout;

use super::session::{ApiService, ApiSession, SessionEnd};
use crate::api::app::App;
use crate::api::connections::{BoundedListener, BoundedStream, ConnectionHandle};
use crate::api::relay::{RelayReceiver, RelaySender, RelayedConnection};
use crate::api::transport::ServerStream;

/// Number of parts into which the limit for requests under way at the end is divided.
const SHUTDOWN_PARTS: u32 = 20;

/// A listening socket, and what answers the requests on its connections.
pub(in crate::api) struct ServedSocket {
    pub(in crate::api) listener: BoundedListener,
    pub(in crate::api) service: ApiService,
}

/// The sockets that are served.
#[derive(Default)]
pub(in crate::api) struct ServedSockets {
    /// The API's, a unix socket.
    pub(in crate::api) api: Option<ServedSocket>,
    /// That of `/metrics` alone, a TCP socket.
    pub(in crate::api) metrics: Option<ServedSocket>,
}

impl ServedSockets {
    /// Waits for a connection to either socket.
    async fn accept(&self) -> ServedConnection<'_> {
        tokio::select! {
            accepted = accept(&self.api) => accepted,
            accepted = accept(&self.metrics) => accepted,
        }
    }

    /// Returns the socket to which `stream` belongs, if it is served.
    fn of(&self, stream: &ServerStream) -> Option<&ServedSocket> {
        match stream {
            ServerStream::Unix(_) => self.api.as_ref(),
            ServerStream::Tcp(_) => self.metrics.as_ref(),
        }
    }

    /// Returns the maximum number of bytes that come with a connection from another process.
    fn unanswered_limit(&self) -> usize {
        let served = self.api.iter().chain(&self.metrics);
        served.map(|socket| socket.service.unanswered_limit()).max().unwrap_or(0)
    }
}

/// A connection, and what answers the requests on it.
struct ServedConnection<'s> {
    stream: BoundedStream,
    handle: ConnectionHandle,
    service: &'s ApiService,
}

async fn accept(socket: &Option<ServedSocket>) -> ServedConnection<'_> {
    let Some(ServedSocket { listener, service }) = socket else { return pending().await };
    let (stream, handle) = listener.accept().await;
    ServedConnection { stream, handle, service }
}

/// Serves the connections that `sockets` accept, and those that arrive over `adopted`, until the
/// sender of `is_over` is dropped, and then requests under way for at most `shutdown_limit`.
pub(in crate::api) async fn serve(
    sockets: ServedSockets,
    adopted: Option<UnixStream>,
    app: Arc<App>,
    mut is_over: watch::Receiver<()>,
    shutdown_limit: Duration,
) {
    let departures = Departures { app: app.clone(), channel: None, queue: VecDeque::new() };
    let arrivals = adopted.and_then(|channel| {
        app.relay().note_arrival();
        let arrivals = RelayReceiver::new(channel, sockets.unanswered_limit());
        arrivals.inspect_err(|e| tracing::warn!("no connection can be adopted: {e}")).ok()
    });
    let is_over_too = is_over.clone();
    let sessions = JoinSet::new();
    let mut all = Sessions { sessions, is_over: is_over_too, arrivals, departures };
    tokio::select! {
        _ = is_over.changed() => {}
        () = all.serve(&sockets) => {}
    }
    drop(sockets);
    if !ends_within(shutdown_limit, all.end()).await {
        app.span().in_scope(|| tracing::debug!("requests were still under way"));
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

/// The sessions, and the channels on which connections arrive and leave.
struct Sessions {
    sessions: JoinSet<SessionEnd>,
    is_over: watch::Receiver<()>,
    /// The channel from the process that had the guest before, until its end.
    arrivals: Option<RelayReceiver>,
    departures: Departures,
}

impl Sessions {
    /// Serves connections until the caller drops the future, which loses none of them.
    async fn serve(&mut self, sockets: &ServedSockets) {
        let mut relay = self.departures.app.relay().gate();
        let mut has_moved = false;
        loop {
            self.departures.send().await;
            if has_moved && self.sessions.is_empty() && self.arrivals.is_none() {
                self.departures.channel = None;
            }
            let (connection, bytes) = tokio::select! {
                Some(ended) = self.sessions.join_next() => {
                    self.departures.add(ended);
                    continue;
                }
                () = relay.moved(), if !has_moved => {
                    has_moved = true;
                    continue;
                }
                accepted = sockets.accept() => (accepted, Vec::new()),
                arrived = arrival(&self.arrivals) => {
                    let Some(RelayedConnection { stream, bytes }) = arrived else {
                        self.arrivals = None;
                        continue;
                    };
                    self.departures.app.relay().note_arrival();
                    let Some(socket) = sockets.of(&stream) else { continue };
                    let (stream, handle) = socket.listener.add(stream);
                    (ServedConnection { stream, handle, service: &socket.service }, bytes)
                }
            };
            self.begin(connection, &bytes);
            // Lets the session find its request before the next connection may displace it as idle.
            yield_now().await;
        }
    }

    fn begin(&mut self, connection: ServedConnection<'_>, bytes: &[u8]) {
        let ServedConnection { stream, handle, service } = connection;
        let session = ApiSession::new(stream, handle, bytes, service.clone());
        self.sessions.spawn(session.run(self.is_over.clone()));
    }

    /// Waits until all sessions have ended.
    async fn end(&mut self) {
        self.departures.send().await;
        while let Some(ended) = self.sessions.join_next().await {
            self.departures.add(ended);
            self.departures.send().await;
        }
    }
}

/// Waits for a connection from another process. Returns `None` at the end of the channel.
async fn arrival(channel: &Option<RelayReceiver>) -> Option<RelayedConnection> {
    match channel {
        Some(channel) => channel.receive().await,
        None => pending().await,
    }
}

/// Connections on their way to the process that has the guest.
struct Departures {
    app: Arc<App>,
    /// The channel to that process, once it is known and while it takes connections.
    channel: Option<RelaySender>,
    /// The connections, each with the bytes that were read from it and not answered.
    queue: VecDeque<(BoundedStream, Vec<u8>)>,
}

impl Departures {
    /// Adds the connection of a session that has ended, if it moves. A session that has panicked
    /// has lost only its connection.
    fn add(&mut self, ended: Result<SessionEnd, JoinError>) {
        if let Ok(SessionEnd::Moves(stream, bytes)) = ended {
            self.queue.push_back((stream, bytes));
        }
    }

    /// Sends all connections. Those that cannot be sent are closed.
    async fn send(&mut self) {
        if let Some(channel) = self.app.relay().take_channel() {
            let channel = RelaySender::new(channel);
            self.channel = channel.inspect_err(|e| self.warn("all connections", e)).ok();
        }
        while let Some((stream, bytes)) = self.queue.front() {
            if let Some(channel) = &self.channel
                && let Err(e) = channel.send(stream.as_fd(), bytes).await
            {
                self.warn("a connection", &e);
                let lost = [
                    io::ErrorKind::TimedOut,
                    io::ErrorKind::BrokenPipe,
                    io::ErrorKind::ConnectionReset,
                ];
                if lost.contains(&e.kind()) {
                    self.channel = None;
                }
            }
            self.queue.pop_front();
        }
    }

    fn warn(&self, what: &str, e: &io::Error) {
        let warn = || {
            tracing::warn!("closing {what}: cannot send to the guest's new process: {e}");
        };
        self.app.span().in_scope(warn);
    }
}
