//! Owns the control thread: a current-thread runtime that serves the API and turns signals into a
//! clean end. Calls that block go to the runtime's blocking threads, never onto this one.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::net::UnixListener;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

use super::app::App;
use super::routes;
use crate::devices::was_ctrl_a_x;
use crate::exit;
use crate::socket::ListeningSocket;

/// How long requests under way may take to finish once the guest has ended.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// How long after the first signal others are part of the same request: `timeout` and service
/// managers signal a process and its group within microseconds.
const SAME_REQUEST: Duration = Duration::from_secs(1);

/// The running control thread. Dropping it ends it, after the requests under way.
pub struct Server {
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves `app` on `socket`, if there is one, and passes it SIGINT, SIGTERM and SIGHUP.
    pub fn start(socket: Option<ListeningSocket>, app: Arc<App>) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        // Both before the thread starts, so that no signal and no early client is missed.
        let (signals, listener) = {
            let _entered = runtime.enter();
            let listen = |s: &ListeningSocket| UnixListener::from_std(s.listener()?);
            let listener = socket.as_ref().map(listen).transpose()?;
            (Signals::new()?, listener)
        };
        let (end, ended) = oneshot::channel();
        let thread = std::thread::Builder::new().name("control".into()).spawn(move || {
            serve(&runtime, app, listener, signals, ended);
            runtime.shutdown_timeout(LAST_WORDS);
            drop(socket);
        })?;
        Ok(Self { end: Some(end), thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.end.take());
        if self.thread.take().is_some_and(|t| t.join().is_err()) {
            tracing::error!("the control thread had panicked");
        }
    }
}

fn serve(
    runtime: &Runtime,
    app: Arc<App>,
    listener: Option<UnixListener>,
    signals: Signals,
    ended: oneshot::Receiver<()>,
) {
    runtime.block_on(async {
        tokio::spawn(forward(signals, app.clone()));
        let Some(listener) = listener else {
            // Only the end of the sender matters.
            let _ = ended.await;
            return;
        };
        let (last_words, begin_last_words) = oneshot::channel::<()>();
        let serving = axum::serve(listener, routes::all(app)).with_graceful_shutdown(async {
            let _ = ended.await;
            drop(last_words);
        });
        tokio::select! {
            served = serving.into_future() => {
                if let Err(e) = served {
                    tracing::error!("the API has stopped: {e}");
                }
            }
            () = async {
                let _ = begin_last_words.await;
                tokio::time::sleep(LAST_WORDS).await;
            } => tracing::debug!("requests were still under way"),
        }
    });
}

/// Signals that ask the process to end.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for one of them; why the guest ends, then.
    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.interrupt.recv() => "interrupted by SIGINT",
            _ = self.terminate.recv() => match was_ctrl_a_x() {
                true => "ended by Ctrl-A x",
                false => "interrupted by SIGTERM",
            },
            _ = self.hang_up.recv() => "interrupted by SIGHUP",
        }
    }
}

/// The first signal asks for a clean end. One that comes [`SAME_REQUEST`] later or more does not
/// wait for that end, even if the first was refused.
async fn forward(mut signals: Signals, app: Arc<App>) {
    let why = signals.next().await;
    let since = Instant::now();
    tracing::info!("{why}");
    tokio::task::spawn_blocking(move || {
        if let Err(refused) = app.interrupt(why) {
            tracing::error!("{why}, but this process does not end yet: {refused}");
        }
    });
    loop {
        let why = signals.next().await;
        if since.elapsed() >= SAME_REQUEST {
            tracing::warn!("{why} again: the process ends at once");
            exit::now(1);
        }
    }
}
