//! The bounded number of connections to the API.
//!
//! A connection on which a request is being answered is busy, all others are idle: those that have said
//! nothing, or half a request, too. A newcomer takes the place of the oldest idle connection if [`IDLE`] of
//! them are open, so that clients who say nothing keep no operator out. A request is answered once all of it
//! has come, for which it has [`BODY_LIMIT`]. With [`BUSY`] others being answered it is refused,
//! unless it only looks or ends the guest.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::extract::connect_info::{ConnectInfo, Connected};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::serve::{IncomingStream, Listener};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};

use super::fault::{Fault, read_body};

/// Idle connections that stay open.
const IDLE: usize = 64;
/// Requests that are answered at once.
const BUSY: usize = 64;
/// Requests of which there is always one more: an operator looks, or ends the guest.
const RESERVED: [&str; 3] = ["/", "/info", "/stop"];
/// Time for a request's body to come.
const BODY_LIMIT: Duration = Duration::from_secs(10);
/// Pause after a connection could not be accepted, most likely for want of file descriptors.
const RETRY: Duration = Duration::from_millis(100);

/// The API's socket, and the connections to it.
#[derive(Debug)]
pub(super) struct Callers {
    listener: UnixListener,
    open: Arc<Open>,
}

/// The connections, ascending by the time at which they were last busy, or came.
#[derive(Debug, Default)]
struct Open(Mutex<Connections>);

#[derive(Debug, Default)]
struct Connections {
    places: Vec<Place>,
    /// Their number is the next one's name.
    named: u64,
}

#[derive(Debug)]
struct Place {
    name: u64,
    /// A request is being answered.
    busy: bool,
    /// Of the task that reads from it.
    reader: Option<Waker>,
}

/// A connection, for its requests.
#[derive(Clone, Debug)]
pub(super) struct Caller {
    open: Arc<Open>,
    name: u64,
}

/// A connection's bytes. It ends when it gives way to another one.
#[derive(Debug)]
pub(super) struct Stream {
    stream: UnixStream,
    caller: Caller,
}

impl Callers {
    pub(super) fn new(listener: UnixListener) -> Self {
        Self { listener, open: Arc::default() }
    }
}

impl Open {
    fn lock(&self) -> MutexGuard<'_, Connections> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Connections {
    fn place(&mut self, name: u64) -> Option<&mut Place> {
        self.places.iter_mut().find(|place| place.name == name)
    }

    /// Makes room for one idle connection.
    fn make_room(&mut self) {
        if self.places.iter().filter(|place| !place.busy).count() < IDLE {
            return;
        }
        if let Some(oldest) = self.places.iter().position(|place| !place.busy) {
            let displaced = self.places.remove(oldest);
            displaced.reader.into_iter().for_each(Waker::wake);
        }
    }
}

impl Listener for Callers {
    type Io = Stream;
    type Addr = Caller;

    async fn accept(&mut self) -> (Stream, Caller) {
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    let mut open = self.open.lock();
                    open.make_room();
                    open.named += 1;
                    let name = open.named;
                    open.places.push(Place { name, busy: false, reader: None });
                    drop(open);
                    let caller = Caller { open: self.open.clone(), name };
                    return (Stream { stream, caller: caller.clone() }, caller);
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
struct Busy(Caller);

impl Caller {
    /// Makes the connection busy, unless too many are.
    fn begin(&self, reserved: bool) -> Option<Busy> {
        let mut open = self.open.lock();
        if !reserved && open.places.iter().filter(|place| place.busy).count() >= BUSY {
            return None;
        }
        // One that was displaced meanwhile is not heard, but answered.
        if let Some(place) = open.place(self.name) {
            place.busy = true;
        }
        Some(Busy(self.clone()))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let Caller { open, name } = &self.0;
        let mut open = open.lock();
        if let Some(at) = open.places.iter().position(|place| place.name == *name) {
            let place = open.places.remove(at);
            open.make_room();
            open.places.push(Place { busy: false, ..place });
        }
    }
}

/// Has a request answered once its body is here, if there is room for it.
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
    let Some(_busy) = caller.begin(RESERVED.contains(&head.uri.path())) else {
        let why = format!("{BUSY} requests are being answered: try again");
        return Fault::of(StatusCode::SERVICE_UNAVAILABLE, why).into_response();
    };
    next.run(Request::from_parts(head, Body::from(body))).await
}

impl Drop for Stream {
    fn drop(&mut self) {
        let name = self.caller.name;
        self.caller.open.lock().places.retain(|place| place.name != name);
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.caller.open.lock().place(self.caller.name) {
            Some(place) => place.reader = Some(context.waker().clone()),
            // Displaced: as if it had been closed there.
            None => return Poll::Ready(Ok(())),
        }
        Pin::new(&mut self.stream).poll_read(context, buf)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
