//! Owns the control thread: a current-thread runtime that serves the API and turns signals into a
//! clean end. Calls that block go to the runtime's blocking threads, never onto this one.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::net::UnixListener;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

use super::app::App;
use super::routes;
use crate::socket::ListeningSocket;

/// How long requests under way may take to finish once the guest has ended.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// The running control thread. Dropping it ends it, after the requests under way.
pub struct Server {
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves `app` on `socket`, if there is one, and passes it SIGINT and SIGTERM.
    pub fn start(socket: Option<ListeningSocket>, app: Arc<App>) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        // Both before the thread starts, so that no signal and no early client is missed.
        let (interrupt, terminate, listener) = {
            let _entered = runtime.enter();
            let listen = |s: &ListeningSocket| UnixListener::from_std(s.listener()?);
            let listener = socket.as_ref().map(listen).transpose()?;
            (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?, listener)
        };
        let (end, ended) = oneshot::channel();
        let thread = std::thread::Builder::new().name("control".into()).spawn(move || {
            serve(&runtime, app, listener, [interrupt, terminate], ended);
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
    [interrupt, terminate]: [Signal; 2],
    ended: oneshot::Receiver<()>,
) {
    runtime.block_on(async {
        tokio::spawn(forward("SIGINT", interrupt, app.clone()));
        tokio::spawn(forward("SIGTERM", terminate, app.clone()));
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

/// The first signal of a kind asks for a clean end, the second does not wait for it; nor does it care
/// that the first one was refused.
async fn forward(name: &'static str, mut signal: Signal, app: Arc<App>) {
    let mut refused = false;
    while signal.recv().await.is_some() {
        tracing::info!("{name}");
        let app = app.clone();
        let stopping =
            tokio::task::spawn_blocking(move || app.interrupt(&format!("interrupted by {name}")));
        tokio::select! {
            stopped = stopping => match stopped {
                Ok(Err(_)) if refused => std::process::exit(1),
                Ok(Err(why)) => {
                    refused = true;
                    tracing::error!("{name} does not end this process, another one does: {why}");
                }
                Ok(Ok(())) | Err(_) => {}
            },
            _ = signal.recv() => std::process::exit(1),
        }
    }
}
