//! Bounds the number of connections to the API, and to the metrics' own address.
//!
//! A connection is busy while a request on it is being answered, or held until it is known which
//! process answers it. Every other connection is idle, including a connection that has sent
//! nothing, has sent half a request, or does not read its answer. If [`MAX_IDLE`] connections are
//! idle, a new connection displaces the oldest idle one, so that silent clients cannot lock an
//! operator out. Shortly after requests were held, no connection is displaced: it may have a held
//! request that has not begun, and so counts as idle.
//!
//! The server answers a request once its whole body has arrived, within [`BODY_LIMIT`], unless the
//! limit of the request's [`RequestClass`] is reached. Shortly after requests were held, a request
//! whose class is at its limit waits up to [`ROOM_LIMIT`] for another request of the class to end.
//! A request runs to completion and counts until then, even if its client disconnects: it may wait
//! for a stuck disk, and clients that give up and retry must not accumulate such waits. Only a
//! request that waits for news ([`RequestClass::Wait`]) ends with its client, at most
//! [`DISCONNECT_POLL`] after the client disconnects.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::Extension;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use parking_lot::{Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::Shutdown;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;
use tokio::time::{Instant, Sleep, sleep_until, timeout_at};

use super::fault::{Fault, read_body};
use super::relay::RelayGate;
use super::request_class::RequestClass;
use super::transport::{ServerSocket, ServerStream};

/// Maximum number of idle connections that stay open.
const MAX_IDLE: usize = 64;
/// Interval at which a waiting request checks whether its client has disconnected.
const DISCONNECT_POLL: Duration = Duration::from_millis(250);
/// Limit for receiving a request's body.
pub(super) const BODY_LIMIT: Duration = Duration::from_secs(10);
/// Time after requests were held in which no connection is displaced, and in which a request waits
/// for another one of its class to end: held requests begin at the same time, and may exceed both
/// limits.
const ROOM_LIMIT: Duration = Duration::from_secs(1);
/// Delay after a connection could not be accepted, most likely because the process has no free file
/// descriptor.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// A listening socket, and the connections to it.
#[derive(Debug)]
pub(super) struct BoundedListener {
    listener: ServerSocket,
    /// Longest time for which a connection stays open without a byte from or to its client.
    silence_limit: Option<Duration>,
    relay: RelayGate,
    table: Arc<ConnectionTable>,
}

/// The connections, in ascending order of the time at which they were last busy or, if never busy,
/// accepted.
#[derive(Debug)]
struct ConnectionTable {
    connections: Mutex<Connections>,
    relay: RelayGate,
    /// Notified when a request ends.
    room: Notify,
}

#[derive(Debug, Default)]
struct Connections {
    entries: Vec<ConnectionEntry>,
    /// Number of requests that are being answered, by class. Some of their connections may have
    /// ended.
    answering: [usize; RequestClass::COUNT],
    /// Number of connections accepted so far, which is the id of the last one.
    last_id: u64,
}

#[derive(Debug)]
struct ConnectionEntry {
    id: u64,
    /// Whether a request on the connection is being answered, or held.
    busy: bool,
    /// Waker of the task that reads from the connection.
    reader: Option<Waker>,
    /// Waker of the task that writes to the connection.
    writer: Option<Waker>,
}

/// A connection, as its requests see it.
#[derive(Clone, Debug)]
pub(super) struct ConnectionHandle {
    table: Arc<ConnectionTable>,
    id: u64,
    stream: Weak<ServerStream>,
}

/// A connection's byte stream. It ends when the connection is displaced, or silent for too long.
#[derive(Debug)]
pub(super) struct BoundedStream {
    stream: Arc<ServerStream>,
    connection: ConnectionHandle,
    silence: Option<SilenceTimer>,
}

/// Timer that ends a connection over which nothing passes.
#[derive(Debug)]
struct SilenceTimer {
    limit: Duration,
    end: Pin<Box<Sleep>>,
}

impl SilenceTimer {
    fn new(limit: Duration) -> Self {
        Self { limit, end: Box::pin(sleep_until(Instant::now() + limit)) }
    }
}

impl BoundedListener {
    /// Creates a listener without connections, which accepts none unless `relay` says that requests
    /// are answered here. A connection over which nothing passes for `silence_limit` ends.
    pub(super) fn new(
        listener: ServerSocket,
        silence_limit: Option<Duration>,
        relay: RelayGate,
    ) -> Self {
        let table = ConnectionTable {
            connections: Mutex::default(),
            relay: relay.clone(),
            room: Notify::new(),
        };
        Self { listener, silence_limit, relay, table: Arc::new(table) }
    }

    /// Waits for a connection, and adds it.
    pub(super) async fn accept(&self) -> (BoundedStream, ConnectionHandle) {
        let mut relay = self.relay.clone();
        loop {
            relay.here().await;
            let accepted = tokio::select! {
                biased;
                () = relay.not_here() => continue,
                accepted = self.listener.accept() => accepted,
            };
            match accepted {
                Ok(stream) => return self.add(stream),
                Err(e) => {
                    tracing::debug!("a connection of a client cannot be accepted: {e}");
                    tokio::time::sleep(ACCEPT_RETRY).await;
                }
            }
        }
    }

    /// Adds an open connection, which is idle.
    pub(super) fn add(&self, stream: ServerStream) -> (BoundedStream, ConnectionHandle) {
        let mut table = self.table.lock();
        table.last_id += 1;
        let id = table.last_id;
        let entry = ConnectionEntry { id, busy: false, reader: None, writer: None };
        self.table.push_idle(&mut table, entry);
        drop(table);
        let stream = Arc::new(stream);
        let table = self.table.clone();
        let connection = ConnectionHandle { table, id, stream: Arc::downgrade(&stream) };
        let silence = self.silence_limit.map(SilenceTimer::new);
        (BoundedStream { stream, connection: connection.clone(), silence }, connection)
    }
}

impl ConnectionTable {
    fn lock(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock()
    }

    /// Adds an idle connection. Displaces the oldest idle ones beyond [`MAX_IDLE`], unless requests
    /// were held just now.
    fn push_idle(&self, connections: &mut Connections, entry: ConnectionEntry) {
        connections.entries.push(entry);
        if !self.relay.held_within(ROOM_LIMIT) {
            connections.displace_idle();
        }
    }
}

impl Connections {
    fn entry(&mut self, id: u64) -> Option<&mut ConnectionEntry> {
        self.entries.iter_mut().find(|entry| entry.id == id)
    }

    /// Displaces the oldest idle connections beyond [`MAX_IDLE`].
    fn displace_idle(&mut self) {
        let idle = self.entries.iter().filter(|entry| !entry.busy).count();
        for _ in MAX_IDLE..idle {
            if let Some(oldest) = self.entries.iter().position(|entry| !entry.busy) {
                let ConnectionEntry { reader, writer, .. } = self.entries.remove(oldest);
                reader.into_iter().chain(writer).for_each(Waker::wake);
            }
        }
    }
}

/// A request that is being answered.
#[derive(Debug)]
pub(super) struct BusyGuard {
    connection: ConnectionHandle,
    class: RequestClass,
}

/// A request that is held. Its connection is not displaced.
#[derive(Debug)]
pub(super) struct HeldGuard<'a>(&'a ConnectionHandle);

/// The reason why a request is not answered.
#[derive(PartialEq, Eq, Debug)]
enum Refusal {
    /// The limit of the request's class is reached.
    Full,
    /// The connection was displaced while the request's body arrived.
    Displaced,
}

impl ConnectionHandle {
    /// Marks the connection as busy with a request of `class`.
    fn begin(&self, class: RequestClass) -> Result<BusyGuard, Refusal> {
        let mut table = self.table.lock();
        let Connections { entries, answering, .. } = &mut *table;
        let entry = entries.iter_mut().find(|entry| entry.id == self.id);
        let entry = entry.ok_or(Refusal::Displaced)?;
        let answering = &mut answering[class as usize];
        if *answering >= class.limit() {
            return Err(Refusal::Full);
        }
        *answering += 1;
        entry.busy = true;
        Ok(BusyGuard { connection: self.clone(), class })
    }

    /// Marks the connection as busy with a request that is held.
    pub(super) fn hold(&self) -> HeldGuard<'_> {
        if let Some(entry) = self.table.lock().entry(self.id) {
            entry.busy = true;
        }
        HeldGuard(self)
    }

    /// Marks the connection as busy with a request of `class`. Shortly after requests were held,
    /// this waits until the class has room.
    async fn begin_with_room(&self, class: RequestClass) -> Result<BusyGuard, Refusal> {
        let until = Instant::now() + ROOM_LIMIT;
        loop {
            let room = self.table.room.notified();
            match self.begin(class) {
                Err(Refusal::Full)
                    if self.table.relay.held_within(ROOM_LIMIT)
                        && timeout_at(until, room).await.is_ok() => {}
                begun => return begun,
            }
        }
    }

    /// Marks the connection as busy with a request of `class`, or returns the refusal.
    async fn begin_or_refuse(&self, class: RequestClass) -> Result<BusyGuard, Fault> {
        self.begin_with_room(class).await.map_err(|refusal| {
            let why = match refusal {
                Refusal::Full => {
                    format!("{} requests of this kind are being answered", class.limit())
                }
                Refusal::Displaced => "this connection was displaced by a newer one".to_owned(),
            };
            Fault::of(StatusCode::SERVICE_UNAVAILABLE, format!("{why}: try again"))
        })
    }

    /// Marks the connection as busy with a request for Firecracker's part of the API.
    pub(super) async fn begin_firecracker(
        &self,
        method: &Method,
        path: &str,
    ) -> Result<BusyGuard, Fault> {
        let is_status = *method == Method::GET && path == "/";
        let class = if is_status { RequestClass::Status } else { RequestClass::Other };
        self.begin_or_refuse(class).await
    }

    /// Waits until the client has disconnected. Nothing reads from the connection meanwhile, and
    /// bytes after the request would hide its end.
    async fn disconnected(&self) {
        let closed_by_client = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        while let Some(stream) = self.stream.upgrade() {
            let mut polled = [PollFd::new(&*stream, closed_by_client)];
            // A failed poll says nothing about the client.
            let _ = poll(&mut polled, Some(&Timespec::default()));
            if polled[0].revents().intersects(closed_by_client) {
                return;
            }
            drop(stream);
            tokio::time::sleep(DISCONNECT_POLL).await;
        }
    }
}

impl Drop for HeldGuard<'_> {
    fn drop(&mut self) {
        if let Some(entry) = self.0.table.lock().entry(self.0.id) {
            entry.busy = false;
        }
    }
}

impl Drop for BusyGuard {
    fn drop(&mut self) {
        let ConnectionHandle { table, id, .. } = &self.connection;
        let mut table = table.lock();
        table.answering[self.class as usize] -= 1;
        if let Some(at) = table.entries.iter().position(|entry| entry.id == *id) {
            let entry = table.entries.remove(at);
            self.connection.table.push_idle(&mut table, ConnectionEntry { busy: false, ..entry });
        }
        self.connection.table.room.notify_waiters();
    }
}

/// Answers a request once its body has arrived, if the request's class is below its limit.
pub(super) async fn admit(
    Extension(connection): Extension<ConnectionHandle>,
    request: Request,
    next: Next,
) -> Response {
    let (head, body) = request.into_parts();
    let body = match tokio::time::timeout(BODY_LIMIT, read_body(body)).await {
        Ok(Ok(body)) => body,
        Ok(Err(fault)) => return fault.into_response(),
        Err(_) => {
            let why = format!("the request's body did not come within {BODY_LIMIT:?}");
            return Fault::of(StatusCode::REQUEST_TIMEOUT, why).into_response();
        }
    };
    let class = RequestClass::of(&head.method, &head.uri);
    let busy = match connection.begin_or_refuse(class).await {
        Ok(busy) => busy,
        Err(fault) => return fault.into_response(),
    };
    let answer = next.run(Request::from_parts(head, Body::from(body)));
    let answer = async move {
        let _busy = busy;
        answer.await
    };
    if class == RequestClass::Wait {
        return tokio::select! {
            answer = answer => answer,
            () = connection.disconnected() => {
                Fault::new("its client has disconnected").into_response()
            }
        };
    }
    let failed = |e| Fault::internal(format!("the request failed: {e}")).into_response();
    tokio::spawn(answer).await.unwrap_or_else(failed)
}

impl Drop for BoundedStream {
    fn drop(&mut self) {
        let id = self.connection.id;
        self.connection.table.lock().entries.retain(|entry| entry.id != id);
    }
}

impl AsFd for BoundedStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl BoundedStream {
    /// Stores the waker of the task that waits for the connection. Returns `false` if the
    /// connection was displaced.
    fn store_waker(
        &self,
        waker: &Waker,
        of: fn(&mut ConnectionEntry) -> &mut Option<Waker>,
    ) -> bool {
        let mut table = self.connection.table.lock();
        let slot = table.entry(self.connection.id).map(of);
        slot.map(|slot| *slot = Some(waker.clone())).is_some()
    }

    /// Returns whether nothing has passed over the connection for too long. If not, the task is
    /// woken at that time.
    fn is_silent(&mut self, context: &mut Context<'_>) -> bool {
        self.silence.as_mut().is_some_and(|silence| silence.end.as_mut().poll(context).is_ready())
    }

    fn note_traffic(&mut self) {
        if let Some(SilenceTimer { limit, end }) = &mut self.silence {
            end.as_mut().reset(Instant::now() + *limit);
        }
    }

    /// Calls `write` as soon as the stream is writable.
    fn poll_with(
        &mut self,
        context: &mut Context<'_>,
        write: impl Fn(&ServerStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        let broken = || Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        if !self.store_waker(context.waker(), |entry| &mut entry.writer) {
            return broken();
        }
        loop {
            match self.stream.poll_write_ready(context) {
                Poll::Ready(ready) => ready?,
                Poll::Pending if self.is_silent(context) => return broken(),
                Poll::Pending => return Poll::Pending,
            }
            match write(&self.stream) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                wrote => {
                    self.note_traffic();
                    return Poll::Ready(wrote);
                }
            }
        }
    }
}

impl AsyncRead for BoundedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // The same as if the client had closed the connection.
        let closed = Poll::Ready(Ok(()));
        if !self.store_waker(context.waker(), |entry| &mut entry.reader) {
            return closed;
        }
        loop {
            match self.stream.poll_read_ready(context) {
                Poll::Ready(ready) => ready?,
                Poll::Pending if self.is_silent(context) => return closed,
                Poll::Pending => return Poll::Pending,
            }
            match self.stream.try_read(buf.initialize_unfilled()) {
                Ok(bytes) => {
                    buf.advance(bytes);
                    self.note_traffic();
                    return Poll::Ready(Ok(()));
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => return Poll::Ready(Err(e)),
            }
        }
    }
}

impl AsyncWrite for BoundedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_with(context, |stream| stream.try_write(buf))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_with(context, |stream| stream.try_write_vectored(bufs))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        // This type buffers nothing. A displaced connection fails nevertheless.
        Poll::Ready(match self.store_waker(context.waker(), |entry| &mut entry.writer) {
            true => Ok(()),
            false => Err(io::ErrorKind::BrokenPipe.into()),
        })
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(rustix::net::shutdown(&*self.stream, Shutdown::Write).map_err(io::Error::from))
    }
}

#[cfg(test)]
mod tests;
