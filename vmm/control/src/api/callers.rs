//! Bounds the number of connections to the API, and to the metrics' own address.
//!
//! A connection is busy while a request on it is being answered. Every other connection is idle,
//! including a connection that has sent nothing, has sent half a request, or does not read its
//! answer. If [`IDLE`] connections are idle, a new connection displaces the oldest idle one, so
//! that silent clients cannot lock an operator out.
//!
//! The server answers a request once its whole body has arrived, within [`BODY_LIMIT`], unless the
//! limit of the request's [`Class`] is reached. The request runs to completion and counts until
//! then, even if its client disconnects: it may wait for a stuck disk, and clients that give up and
//! retry must not accumulate such waits. Only a request that waits for news ([`Class::Wait`]) ends
//! with its client, at most [`LOOK_EVERY`] after the client disconnects.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::extract::connect_info::{ConnectInfo, Connected};
use axum::http::{Method, StatusCode, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::serve::{IncomingStream, Listener};
use parking_lot::{Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::Shutdown;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

use super::fault::{Fault, read_body};
use super::transport::{Connection, Listening};

/// Maximum number of idle connections that stay open.
const IDLE: usize = 64;
/// Maximum number of concurrent requests of [`Class::Wait`], and of [`Class::Other`].
const BUSY: usize = 64;
/// Maximum number of concurrent requests of each other class.
const RESERVE: usize = 16;
/// Interval at which a waiting request checks whether its client has disconnected.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Limit for receiving a request's body.
const BODY_LIMIT: Duration = Duration::from_secs(10);
/// Delay after a connection could not be accepted, most likely because the process has no free file
/// descriptor.
const RETRY: Duration = Duration::from_millis(100);

/// A listening socket, and the connections to it.
#[derive(Debug)]
pub(super) struct Callers {
    listener: Listening,
    /// Longest time for which a connection stays open without a byte from or to its client.
    silence_limit: Option<Duration>,
    open: Arc<Open>,
}

/// The connections, in ascending order of the time at which they were last busy or, if never busy,
/// accepted.
#[derive(Debug, Default)]
struct Open(Mutex<Connections>);

#[derive(Debug, Default)]
struct Connections {
    places: Vec<Place>,
    /// Number of requests that are being answered, by class. Some of their connections may have
    /// ended.
    answering: [usize; Class::COUNT],
    /// Number of connections accepted so far; the last one's name.
    named: u64,
}

#[derive(Debug)]
struct Place {
    name: u64,
    /// Whether a request is being answered on the connection.
    busy: bool,
    /// Waker of the task that reads from the connection.
    reader: Option<Waker>,
    /// Waker of the task that writes to the connection.
    writer: Option<Waker>,
}

/// A group of requests with a limit of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Class {
    /// An operator reads the guest's state.
    Look,
    /// An operator ends the guest.
    Stop,
    /// An operator ends a job, or resolves a migration in doubt.
    End,
    /// A client waits for news.
    Wait,
    Other,
}

impl Class {
    const COUNT: usize = 5;

    fn of(method: &Method, uri: &Uri) -> Self {
        // A router that answers GET also answers HEAD in the same way.
        let reads = [Method::GET, Method::HEAD].contains(method);
        let path = uri.path();
        // Dropping either request changes nothing, except that dropping the first one ends an
        // attached run.
        let waits =
            path == "/checkpoint/hold" || uri.query().is_some_and(|q| q.contains("wait_ms="));
        match path {
            "/" | "/info" | "/metrics" if reads => Self::Look,
            "/stop" => Self::Stop,
            "/migration/resolve" => Self::End,
            _ if method == Method::DELETE => Self::End,
            _ if reads && waits => Self::Wait,
            _ => Self::Other,
        }
    }

    /// Returns the maximum number of concurrent requests of this class.
    fn limit(self) -> usize {
        match self {
            Self::Wait | Self::Other => BUSY,
            Self::Look | Self::Stop | Self::End => RESERVE,
        }
    }
}

/// A connection, as its requests see it.
#[derive(Clone, Debug)]
pub(super) struct Caller {
    open: Arc<Open>,
    name: u64,
    stream: Weak<Connection>,
}

/// A connection's byte stream. It ends when the connection is displaced, or silent for too long.
#[derive(Debug)]
pub(super) struct Stream {
    stream: Arc<Connection>,
    caller: Caller,
    silence: Option<Silence>,
}

/// The end of a connection over which nothing passes.
#[derive(Debug)]
struct Silence {
    limit: Duration,
    end: Pin<Box<Sleep>>,
}

impl Silence {
    fn new(limit: Duration) -> Self {
        Self { limit, end: Box::pin(sleep_until(Instant::now() + limit)) }
    }
}

impl Callers {
    /// Creates a server's callers, none yet. A connection over which nothing passes for
    /// `silence_limit` ends.
    pub(super) fn new(listener: Listening, silence_limit: Option<Duration>) -> Self {
        Self { listener, silence_limit, open: Arc::default() }
    }
}

impl Open {
    fn lock(&self) -> MutexGuard<'_, Connections> {
        self.0.lock()
    }
}

impl Connections {
    fn place(&mut self, name: u64) -> Option<&mut Place> {
        self.places.iter_mut().find(|place| place.name == name)
    }

    /// Makes room for one idle connection: displaces the oldest idle one if [`IDLE`] are open.
    fn make_room(&mut self) {
        if self.places.iter().filter(|place| !place.busy).count() < IDLE {
            return;
        }
        if let Some(oldest) = self.places.iter().position(|place| !place.busy) {
            let Place { reader, writer, .. } = self.places.remove(oldest);
            reader.into_iter().chain(writer).for_each(Waker::wake);
        }
    }
}

impl Listener for Callers {
    type Io = Stream;
    type Addr = Caller;

    async fn accept(&mut self) -> (Stream, Caller) {
        loop {
            match self.listener.accept().await {
                Ok(stream) => {
                    let mut open = self.open.lock();
                    open.make_room();
                    open.named += 1;
                    let name = open.named;
                    open.places.push(Place { name, busy: false, reader: None, writer: None });
                    drop(open);
                    let stream = Arc::new(stream);
                    let open = self.open.clone();
                    let caller = Caller { open, name, stream: Arc::downgrade(&stream) };
                    let silence = self.silence_limit.map(Silence::new);
                    return (Stream { stream, caller: caller.clone(), silence }, caller);
                }
                Err(e) => {
                    tracing::debug!("the API cannot accept a connection: {e}");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<Caller> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl Connected<IncomingStream<'_, Callers>> for Caller {
    fn connect_info(stream: IncomingStream<'_, Callers>) -> Self {
        stream.remote_addr().clone()
    }
}

/// A request that is being answered.
#[derive(Debug)]
struct Busy {
    caller: Caller,
    class: Class,
}

/// The reason why a request is not answered.
#[derive(PartialEq, Eq, Debug)]
enum Refusal {
    /// The limit of the request's class is reached.
    Full,
    /// The connection was displaced while the request's body arrived.
    Displaced,
}

impl Caller {
    /// Marks the connection as busy with a request of `class`.
    fn begin(&self, class: Class) -> Result<Busy, Refusal> {
        let mut open = self.open.lock();
        let Connections { places, answering, .. } = &mut *open;
        let place = places.iter_mut().find(|place| place.name == self.name);
        let place = place.ok_or(Refusal::Displaced)?;
        let answering = &mut answering[class as usize];
        if *answering >= class.limit() {
            return Err(Refusal::Full);
        }
        *answering += 1;
        place.busy = true;
        Ok(Busy { caller: self.clone(), class })
    }

    /// Waits until the client has disconnected. The server itself does not notice that if the
    /// client has sent a byte more than its request.
    async fn departure(&self) {
        let left = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        while let Some(stream) = self.stream.upgrade() {
            let mut polled = [PollFd::new(&*stream, left)];
            // A failed poll says nothing about the client.
            let _ = poll(&mut polled, Some(&Timespec::default()));
            if polled[0].revents().intersects(left) {
                return;
            }
            drop(stream);
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let Caller { open, name, .. } = &self.caller;
        let mut open = open.lock();
        open.answering[self.class as usize] -= 1;
        if let Some(at) = open.places.iter().position(|place| place.name == *name) {
            let place = open.places.remove(at);
            open.make_room();
            open.places.push(Place { busy: false, ..place });
        }
    }
}

/// Answers a request once its body has arrived, if the request's class is below its limit.
pub(super) async fn admit(
    ConnectInfo(caller): ConnectInfo<Caller>,
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
    let class = Class::of(&head.method, &head.uri);
    let busy = match caller.begin(class) {
        Ok(busy) => busy,
        Err(refusal) => {
            let why = match refusal {
                Refusal::Full => format!("{} requests like it are being answered", class.limit()),
                Refusal::Displaced => "this connection gave way to another one".to_owned(),
            };
            let why = format!("{why}: try again");
            return Fault::of(StatusCode::SERVICE_UNAVAILABLE, why).into_response();
        }
    };
    let answer = next.run(Request::from_parts(head, Body::from(body)));
    let answer = async move {
        let _busy = busy;
        answer.await
    };
    if class == Class::Wait {
        return tokio::select! {
            answer = answer => answer,
            () = caller.departure() => Fault::new("its client has left").into_response(),
        };
    }
    let failed = |e| Fault::internal(format!("the request failed: {e}")).into_response();
    tokio::spawn(answer).await.unwrap_or_else(failed)
}

impl Drop for Stream {
    fn drop(&mut self) {
        let name = self.caller.name;
        self.caller.open.lock().places.retain(|place| place.name != name);
    }
}

impl Stream {
    /// Stores the waker of the task that waits for the connection. Returns `false` if the
    /// connection was displaced.
    fn keep(&self, waker: &Waker, of: fn(&mut Place) -> &mut Option<Waker>) -> bool {
        let mut open = self.caller.open.lock();
        let kept = open.place(self.caller.name).map(of);
        kept.map(|kept| *kept = Some(waker.clone())).is_some()
    }

    /// Returns whether nothing has passed over the connection for too long, or wakes its task then.
    fn is_silent(&mut self, context: &mut Context<'_>) -> bool {
        self.silence.as_mut().is_some_and(|silence| silence.end.as_mut().poll(context).is_ready())
    }

    fn note_traffic(&mut self) {
        if let Some(Silence { limit, end }) = &mut self.silence {
            end.as_mut().reset(Instant::now() + *limit);
        }
    }

    /// Calls `write` as soon as the stream is writable.
    fn poll_with(
        &mut self,
        context: &mut Context<'_>,
        write: impl Fn(&Connection) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        let broken = || Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        if !self.keep(context.waker(), |place| &mut place.writer) {
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

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // The same as if the client had closed the connection.
        let closed = Poll::Ready(Ok(()));
        if !self.keep(context.waker(), |place| &mut place.reader) {
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

impl AsyncWrite for Stream {
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
        Poll::Ready(match self.keep(context.waker(), |place| &mut place.writer) {
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
