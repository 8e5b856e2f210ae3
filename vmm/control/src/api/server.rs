//! Owns the control thread: a current-thread runtime that serves the API and turns signals into a
//! clean end. Blocking calls go to the runtime's blocking threads, never to this thread.

use std::io;
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use axum::middleware;
use driftline_machine::devices::was_ctrl_a_x;
use driftline_machine::socket::ListeningSocket;
use driftline_machine::{exit, signals};
use tokio::net::{TcpListener as TokioTcpListener, UnixListener};
use tokio::runtime::{Builder, Handle};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{oneshot, watch};

use super::app::App;
use super::connections::{self, BoundedListener};
use super::http::{self, ApiService, ServedSocket, ServedSockets};
use super::metrics;
use super::routes;
use super::transport::ServerSocket;

/// Time for requests under way to finish after the guest has ended.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(2);
/// Time for the threads that stop the guest to finish after it has ended. They have nothing left to
/// wait for, but a process with little processor time may have woken its main thread first.
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// Longest time for which a connection to the metrics' address stays open without a byte.
/// Collectors keep connections from one scrape to the next, and Prometheus forgets what is older
/// than this.
const SILENCE_LIMIT: Duration = Duration::from_secs(300);
/// Time after a signal within which further signals belong to the same request: `timeout` and
/// service managers signal a process and its group within microseconds.
const SAME_REQUEST: Duration = Duration::from_secs(1);

/// Handle of the control thread. Dropping the handle ends the control thread and the threads that
/// stop the guest, after the requests under way. None of these threads holds a reference to the
/// guest afterwards.
pub struct Server {
    runtime: Handle,
    serve: Option<oneshot::Sender<Serving>>,
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    /// The served app, once [`serve`](Self::serve) was called.
    app: Option<Arc<App>>,
}

/// The sockets of a server.
#[derive(Default, Debug)]
pub struct Listeners {
    /// The API's socket.
    pub api: Option<ListeningSocket>,
    /// A listener for `/metrics` alone. It must not block.
    pub metrics: Option<TcpListener>,
    /// The other end of the channel of [`Relay::move_to`](super::Relay::move_to), over which
    /// connections to both sockets arrive from the process that had the guest before. They are
    /// served like accepted ones. Those to a socket that is not served here are closed.
    pub adopted: Option<UnixStream>,
}

/// The control thread, for what has to be done on it. It ends with its [`Server`].
#[derive(Clone, Debug)]
pub struct ControlThread(Handle);

/// Upper bound on waiting for the control thread, which never blocks.
const CONTROL_LIMIT: Duration = Duration::from_secs(10);

impl ControlThread {
    /// Runs `work`, which must not block, on the control thread. Returns its result.
    ///
    /// # Errors
    ///
    /// The control thread has ended, or does not answer within 10 s.
    pub fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let (to, result) = mpsc::channel();
        self.0.spawn(async move {
            // The caller may have given up.
            let _ = to.send(work());
        });
        let result = result.recv_timeout(CONTROL_LIMIT);
        result.map_err(|_| io::Error::other("the control thread does not answer"))
    }
}

/// What [`Server::serve`] sends to the control thread.
struct Serving {
    app: Arc<App>,
    api: Option<ServerSocket>,
    metrics: Option<ServerSocket>,
    socket: Option<Arc<ListeningSocket>>,
    adopted: Option<UnixStream>,
}

impl Server {
    /// Starts the control thread, which handles SIGINT, SIGTERM and SIGHUP from now on. Before
    /// [`serve`](Self::serve) there is no guest to end: a signal ends the process immediately,
    /// after its terminal is restored and its sockets are removed.
    ///
    /// # Errors
    ///
    /// The system's error if it cannot provide the thread or the descriptors.
    pub fn begin() -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let signals = {
            let _entered = runtime.enter();
            Signals::new()?
        };
        let handle = runtime.handle().clone();
        let (serve, served) = oneshot::channel();
        let (end, ended) = oneshot::channel();
        let span = tracing::Span::current();
        let thread = std::thread::Builder::new().name("control".into()).spawn(move || {
            let socket = runtime.block_on(control(signals, served, ended, &span));
            runtime.shutdown_timeout(SHUTDOWN_LIMIT);
            drop(socket);
        })?;
        signals::block_termination();
        let (serve, end, thread) = (Some(serve), Some(end), Some(thread));
        Ok(Self { runtime: handle, serve, end, thread, app: None })
    }

    /// Serves `app` on `listeners`, and forwards the signals to `app`.
    ///
    /// # Errors
    ///
    /// The system's error for a socket.
    pub fn serve(&mut self, listeners: Listeners, app: Arc<App>) -> io::Result<()> {
        let Listeners { api: socket, metrics, adopted } = listeners;
        app.relay().set_metrics(metrics.as_ref().map(TcpListener::try_clone).transpose()?);
        let (api, metrics) = {
            let _entered = self.runtime.enter();
            let listen = |s: &ListeningSocket| UnixListener::from_std(s.listener()?);
            let api = socket.as_ref().map(listen).transpose()?;
            let metrics = metrics.map(TokioTcpListener::from_std).transpose()?;
            (api.map(ServerSocket::Unix), metrics.map(ServerSocket::Tcp))
        };
        self.app = Some(app.clone());
        let socket = socket.map(Arc::new);
        socket.iter().for_each(|socket| app.relay().set_socket(socket));
        let serving = Serving { app, api, metrics, socket, adopted };
        match self.serve.take().is_some_and(|to| to.send(serving).is_ok()) {
            true => Ok(()),
            false => Err(io::Error::other("the control thread has ended")),
        }
    }

    /// Leaves the file of the API's socket to the process that continues with the guest.
    pub fn leave_socket(&self) {
        if let Some(socket) = self.app.as_ref().and_then(|app| app.relay().socket()) {
            socket.keep_file();
        }
    }

    /// Returns the control thread.
    pub fn control_thread(&self) -> ControlThread {
        ControlThread(self.runtime.clone())
    }

    /// Calls [`begin`](Self::begin), then [`serve`](Self::serve).
    ///
    /// # Errors
    ///
    /// Those of both.
    pub fn start(listeners: Listeners, app: Arc<App>) -> io::Result<Self> {
        let mut server = Self::begin()?;
        server.serve(listeners, app)?;
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // First, while the API still sends answers: a request to stop is answered only after the
        // guest has ended.
        if let Some(app) = &self.app {
            app.close();
            app.join_stops(STOP_LIMIT);
        }
        drop((self.serve.take(), self.end.take()));
        if self.thread.take().is_some_and(|t| t.join().is_err()) {
            tracing::error!("the control thread has panicked");
        }
        // No other thread of this kind is started after this point.
        if let Some(app) = self.app.take() {
            app.join_stops(SHUTDOWN_LIMIT);
        }
    }
}

/// Body of the control thread. Returns the socket; the caller closes it once the answers are sent.
async fn control(
    mut signals: Signals,
    served: oneshot::Receiver<Serving>,
    ended: oneshot::Receiver<()>,
    span: &tracing::Span,
) -> Option<Arc<ListeningSocket>> {
    let serving = tokio::select! {
        serving = served => serving.ok()?,
        EndRequest { why, .. } = signals.next() => {
            span.in_scope(|| tracing::error!("{why} before the guest ran"));
            exit::now(1);
        }
    };
    let Serving { app, api, metrics, socket, adopted } = serving;
    tokio::spawn(forward(signals, app.clone()));
    tokio::spawn(expect_client(app.clone()));
    let (over, is_over) = watch::channel(());
    let closing = app.clone();
    let end = async move {
        // Only the disconnection of the sender matters.
        let _ = ended.await;
        closing.close();
        drop(over);
    };
    let sockets = served_sockets(&app, api, metrics);
    let serve = async {
        http::serve(sockets, adopted, app.clone(), is_over, SHUTDOWN_LIMIT).await;
        app.relay().end();
    };
    tokio::join!(end, serve);
    socket
}

fn served_sockets(
    app: &Arc<App>,
    api: Option<ServerSocket>,
    metrics: Option<ServerSocket>,
) -> ServedSockets {
    let listener = |on, silence_limit| BoundedListener::new(on, silence_limit, app.relay().gate());
    let api = api.map(|on| {
        let routes = routes::all(app.clone()).layer(middleware::from_fn(connections::admit));
        let service = ApiService::new(routes, app.clone());
        ServedSocket { listener: listener(on, None), service }
    });
    let metrics = metrics.map(|on| {
        let routes = metrics::route().with_state(app.clone());
        let routes = routes.layer(middleware::from_fn(connections::admit));
        let service = ApiService::of_metrics(routes, app.clone());
        ServedSocket { listener: listener(on, Some(SILENCE_LIMIT)), service }
    });
    ServedSockets { api, metrics }
}

/// Ends a checkpoint run that has come from another process, if the connection of the run's client
/// does not arrive in time.
async fn expect_client(app: Arc<App>) {
    let Ok(jobs) = app.jobs() else { return };
    if let Some(run) = jobs.checkpoint_run() {
        jobs.expect_client(run).await;
    }
}

/// A signal's request to end.
struct EndRequest {
    /// The reason for the guest's end.
    why: &'static str,
    /// The signal's number, unless the operator caused it at the terminal.
    signal: Option<i32>,
}

/// Signals that ask the process to end.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
    /// `None` if the process was started with SIGHUP ignored, as `nohup` does.
    hang_up: Option<Signal>,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hang_up: match signals::ignores_hang_up() {
                true => None,
                false => Some(signal(SignalKind::hangup())?),
            },
        })
    }

    /// Waits for one of the signals.
    async fn next(&mut self) -> EndRequest {
        let hang_up = async {
            match &mut self.hang_up {
                Some(signal) => signal.recv().await,
                None => std::future::pending().await,
            }
        };
        let by = |why, kind: SignalKind| EndRequest { why, signal: Some(kind.as_raw_value()) };
        tokio::select! {
            _ = self.interrupt.recv() => by("interrupted by SIGINT", SignalKind::interrupt()),
            _ = self.terminate.recv() => match was_ctrl_a_x() {
                true => EndRequest { why: "ended by Ctrl-A x", signal: None },
                false => by("interrupted by SIGTERM", SignalKind::terminate()),
            },
            _ = hang_up => by("interrupted by SIGHUP", SignalKind::hangup()),
        }
    }
}

/// Turns a signal into a request for a clean end. The next signal, at least [`SAME_REQUEST`] later,
/// does not wait for that end: the process ends immediately. If the first request was refused, the
/// next signal asks again; if that one is also refused, a third signal ends the process.
async fn forward(mut signals: Signals, app: Arc<App>) {
    let mut last_request: Option<Instant> = None;
    let refusals = Arc::new(AtomicU32::new(0));
    // Number of refusals before the request under way.
    let mut before = 0;
    loop {
        let EndRequest { why, signal } = signals.next().await;
        if last_request.is_some_and(|since| since.elapsed() < SAME_REQUEST) {
            continue;
        }
        let refused = refusals.load(Ordering::SeqCst);
        if last_request.is_some() && (refused == before || refused > 1) {
            app.span().in_scope(|| tracing::warn!("{why} again: the process ends immediately"));
            exit::now(1);
        }
        app.span().in_scope(|| tracing::info!("{why}"));
        if let Some(signal) = signal {
            app.termination().note(signal);
        }
        (last_request, before) = (Some(Instant::now()), refused);
        let (app, refusals) = (app.clone(), refusals.clone());
        tokio::spawn(async move {
            if let Err(refused) = app.clone().interrupt_aside(why).await {
                let refused = format_args!("{why}, but this process does not end yet: {refused}");
                app.span().in_scope(|| tracing::error!("{refused}"));
                refusals.fetch_add(1, Ordering::SeqCst);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::api::Arriving;

    #[test]
    fn threads_that_stop_are_joined() {
        let (begin, begun) = mpsc::channel();
        let app = App::waiting(Arriving::default, move |_| {
            let _ = begin.send(());
            // Long enough to expose a server that does not wait.
            std::thread::sleep(Duration::from_millis(300));
            false
        });
        let server = Server::start(Listeners::default(), app.clone()).unwrap();
        let stopping = server.runtime.spawn(app.clone().interrupt_aside("requested by the test"));
        begun.recv().unwrap();
        drop((server, stopping));
        assert_eq!(Arc::strong_count(&app), 1, "a thread holds a reference to the guest");
    }

    #[test]
    fn request_to_stop_is_answered_at_the_end() {
        let (begin, begun) = mpsc::channel();
        let app = App::waiting(Arriving::default, move |_| {
            let _ = begin.send(());
            // The end begins meanwhile, and the limit for other requests passes.
            std::thread::sleep(SHUTDOWN_LIMIT + Duration::from_millis(100));
            true
        });
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        let api = Some(ListeningSocket::bind(&path).unwrap());
        let server = Server::start(Listeners { api, ..Listeners::default() }, app).unwrap();
        let mut stream = UnixStream::connect(&path).unwrap();
        stream.write_all(b"POST /v1/stop HTTP/1.1\r\n\r\n").unwrap();
        begun.recv().unwrap();
        drop(server);
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 204 "), "{answer}");
    }
}
