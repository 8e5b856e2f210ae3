//! The bounded number of connections to the API.
//!
//! A connection on which a request is being answered is busy, all others are idle, also those that
//! have said nothing, have sent half a request, or do not read their answer. A newcomer takes the
//! place of the oldest idle connection if [`IDLE`] of them are open, so that clients who say
//! nothing keep no operator out.
//!
//! A request is answered once all of it has come, for which it has [`BODY_LIMIT`], unless the limit
//! of its [`Class`] is reached. It runs to its end and counts until then, also when its client has
//! left: it may wait for a stuck disk, and clients that give up and come again must not pile such
//! waits up. Only a request that waits for news ends with its client.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::extract::connect_info::{ConnectInfo, Connected};
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::serve::{IncomingStream, Listener};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};

use super::fault::{Fault, read_body};

/// Idle connections that stay open.
const IDLE: usize = 64;
/// Requests of [`Class::Other`] that are answered at once.
const BUSY: usize = 64;
/// Requests of each other class that are answered at once.
const RESERVE: usize = 16;
/// `GET` of these waits for news, and changes nothing when it is dropped; to drop
/// `/checkpoint/hold` is to end an attached run.
const WAITS: [&str; 4] = ["/checkpoint", "/checkpoint/hold", "/dirty/watch", "/migration"];
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
    /// Requests that are being answered, by class; some of their connections may have ended.
    answering: [usize; Class::COUNT],
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
    /// Of the task that writes to it.
    writer: Option<Waker>,
}

/// Requests with a bound of their own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Class {
    /// An operator looks.
    Look,
    /// An operator ends the guest.
    Stop,
    Other,
}

impl Class {
    const COUNT: usize = 3;

    fn of(path: &str) -> Self {
        match path {
            "/" | "/info" => Self::Look,
            "/stop" => Self::Stop,
            _ => Self::Other,
        }
    }

    /// How many of them are answered at once.
    fn limit(self) -> usize {
        if self == Self::Other { BUSY } else { RESERVE }
    }
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
                Ok((stream, _)) => {
                    let mut open = self.open.lock();
                    open.make_room();
                    open.named += 1;
                    let name = open.named;
                    open.places.push(Place { name, busy: false, reader: None, writer: None });
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
#[derive(Debug)]
struct Busy {
    caller: Caller,
    class: Class,
}

/// Why a request is not answered.
#[derive(PartialEq, Eq, Debug)]
enum Refusal {
    /// As many of its class are being answered as may be.
    Full,
    /// Its connection gave way to another one while its body came.
    Displaced,
}

impl Caller {
    /// Makes the connection busy with a request.
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
}

impl Drop for Busy {
    fn drop(&mut self) {
        let Caller { open, name } = &self.caller;
        let mut open = open.lock();
        open.answering[self.class as usize] -= 1;
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
    let path = head.uri.path();
    let class = Class::of(path);
    let busy = match caller.begin(class) {
        Ok(busy) => busy,
        Err(refusal) => {
            let why = match refusal {
                Refusal::Full => format!("{} requests are being answered", class.limit()),
                Refusal::Displaced => "this connection gave way to another one".to_owned(),
            };
            let why = format!("{why}: try again");
            return Fault::of(StatusCode::SERVICE_UNAVAILABLE, why).into_response();
        }
    };
    let ends_with_client = head.method == Method::GET && WAITS.contains(&path);
    let answer = next.run(Request::from_parts(head, Body::from(body)));
    let answer = async move {
        let _busy = busy;
        answer.await
    };
    if ends_with_client {
        return answer.await;
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
    /// Keeps the waker of the task that waits for the connection. `false` if that was displaced.
    fn keep(&self, waker: &Waker, of: fn(&mut Place) -> &mut Option<Waker>) -> bool {
        let mut open = self.caller.open.lock();
        let kept = open.place(self.caller.name).map(of);
        kept.map(|kept| *kept = Some(waker.clone())).is_some()
    }

    /// The stream, to be written to.
    fn writable(&mut self, context: &Context<'_>) -> io::Result<Pin<&mut UnixStream>> {
        match self.keep(context.waker(), |place| &mut place.writer) {
            true => Ok(Pin::new(&mut self.stream)),
            false => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.keep(context.waker(), |place| &mut place.reader) {
            true => Pin::new(&mut self.stream).poll_read(context, buf),
            // As if the client had closed it.
            false => Poll::Ready(Ok(())),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.writable(context)?.poll_write(context, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.writable(context)?.poll_write_vectored(context, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.writable(context)?.poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;

    /// The API's socket, and a way to connect to it.
    fn listen() -> (Callers, impl Fn() -> std::os::unix::net::UnixStream) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        let listener = UnixListener::bind(&path).unwrap();
        (Callers::new(listener), move || {
            let _dir = &dir;
            std::os::unix::net::UnixStream::connect(&path).unwrap()
        })
    }

    #[tokio::test]
    async fn displaced_connection_ends_while_it_writes() {
        let (mut callers, connect) = listen();
        let _never_reads = connect();
        let (mut stream, _) = callers.accept().await;
        let piece = [0; 1 << 16];
        poll_fn(|context| {
            while Pin::new(&mut stream).poll_write(context, &piece).is_ready() {}
            Poll::Ready(())
        })
        .await;
        let writing = tokio::spawn(async move {
            let wrote = poll_fn(|context| Pin::new(&mut stream).poll_write(context, &piece)).await;
            let flushed = poll_fn(|context| Pin::new(&mut stream).poll_flush(context)).await;
            (wrote.map_err(|e| e.kind()), flushed.map_err(|e| e.kind()))
        });
        // It waits.
        tokio::task::yield_now().await;
        let mut others = Vec::new();
        for _ in 0..IDLE {
            let client = connect();
            others.push((client, callers.accept().await));
        }
        let ended = tokio::time::timeout(Duration::from_secs(60), writing).await;
        let broken = io::ErrorKind::BrokenPipe;
        assert_eq!(ended.expect("it still writes").unwrap(), (Err(broken), Err(broken)));
    }

    #[tokio::test]
    async fn displaced_caller_begins_nothing() {
        let (mut callers, connect) = listen();
        let _first = connect();
        let (_stream, caller) = callers.accept().await;
        let mut others = Vec::new();
        for _ in 0..IDLE {
            let client = connect();
            others.push((client, callers.accept().await));
        }
        assert_eq!(caller.begin(Class::Other).unwrap_err(), Refusal::Displaced);
    }

    #[tokio::test]
    async fn requests_count_by_class_until_they_end() {
        let (mut callers, connect) = listen();
        for class in [Class::Look, Class::Stop, Class::Other] {
            let mut begun = Vec::new();
            for _ in 0..class.limit() {
                let client = connect();
                let (stream, caller) = callers.accept().await;
                begun.push(caller.begin(class).unwrap());
                // It leaves; its request does not.
                drop((client, stream));
            }
            let _client = connect();
            let (_stream, caller) = callers.accept().await;
            assert_eq!(caller.begin(class).unwrap_err(), Refusal::Full, "{class:?}");
            drop(begun.pop());
            drop(caller.begin(class).unwrap());
        }
    }
}
