//! Says where requests are answered. The job of an upgrade changes that, and the control thread
//! obeys.

use std::fmt;
use std::future::pending;
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use driftline_machine::socket::ListeningSocket;
use parking_lot::Mutex;
use tokio::sync::watch;

/// Holds requests on the API's socket and the metrics' address, and moves their connections to
/// another process. The request that asks for the upgrade has begun before, so it is answered here.
pub struct Relay {
    phase: watch::Sender<RelayPhase>,
    ends: Mutex<RelayEnds>,
}

/// Where requests are answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RelayPhase {
    Here {
        /// When requests were last held, here or in the process that had the guest before.
        held: Option<Instant>,
    },
    /// Nowhere yet: they wait.
    Held,
    /// In the process at the other end of the channel.
    Moved,
}

#[derive(Default)]
struct RelayEnds {
    /// The channel, until the control thread takes it.
    channel: Option<UnixStream>,
    socket: Weak<ListeningSocket>,
    /// The listener of the metrics' address.
    metrics: Option<TcpListener>,
    /// Whether the control thread takes no channel any more.
    is_over: bool,
}

impl Default for Relay {
    fn default() -> Self {
        let phase = watch::Sender::new(RelayPhase::Here { held: None });
        Self { phase, ends: Mutex::default() }
    }
}

impl fmt::Debug for Relay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relay").field("phase", &*self.phase.borrow()).finish_non_exhaustive()
    }
}

impl Relay {
    /// Holds requests from now on: a request that has not begun waits with its connection, and new
    /// connections wait to be accepted. Requests under way are answered, except for one that waits
    /// for news: it begins anew where the guest is then.
    pub fn hold(&self) {
        self.phase.send_if_modified(|phase| {
            let changes = phase.is_here();
            if changes {
                *phase = RelayPhase::Held;
            }
            changes
        });
    }

    /// Ends [`hold`](Self::hold), because the guest stays here: held requests are answered here.
    pub fn release(&self) {
        self.phase.send_if_modified(|phase| {
            let changes = *phase == RelayPhase::Held;
            if changes {
                *phase = RelayPhase::Here { held: Some(Instant::now()) };
            }
            changes
        });
    }

    /// Moves all connections to the process at the other end of `channel`, which has the guest, and
    /// leaves the API's socket file to it. Connections without a request, and held ones, are sent
    /// at once. Others are sent after the answer, or end if the client asked for that.
    ///
    /// The channel closes once no connection is left, or the [`Server`](crate::api::Server) ends.
    /// If the other process does not take a connection within 5 s, or closes the channel, the
    /// connections that are left are closed. Only the first call has an effect.
    pub fn move_to(&self, channel: UnixStream) {
        let mut ends = self.ends.lock();
        if *self.phase.borrow() == RelayPhase::Moved {
            return;
        }
        if let Some(socket) = ends.socket.upgrade() {
            socket.keep_file();
        }
        if !ends.is_over {
            ends.channel = Some(channel);
        }
        self.phase.send_replace(RelayPhase::Moved);
    }

    /// Returns the API's socket while it is served: its listener and its file are for the other
    /// process. The caller drops it soon, because the last owner removes the file.
    pub fn socket(&self) -> Option<Arc<ListeningSocket>> {
        self.ends.lock().socket.upgrade()
    }

    /// Returns the listener of the metrics' address, while it is served.
    pub(in crate::api) fn metrics(&self) -> Option<TcpListener> {
        self.ends.lock().metrics.as_ref().and_then(|listener| listener.try_clone().ok())
    }

    /// Sets what [`metrics`](Self::metrics) returns.
    pub(in crate::api) fn set_metrics(&self, listener: Option<TcpListener>) {
        self.ends.lock().metrics = listener;
    }

    /// Sets what [`socket`](Self::socket) returns.
    pub(in crate::api) fn set_socket(&self, socket: &Arc<ListeningSocket>) {
        self.ends.lock().socket = Arc::downgrade(socket);
    }

    /// Returns a view of where requests are answered.
    pub(in crate::api) fn gate(&self) -> RelayGate {
        RelayGate(self.phase.subscribe())
    }

    /// Takes the channel of [`move_to`](Self::move_to), if there is one that was not taken.
    pub(in crate::api) fn take_channel(&self) -> Option<UnixStream> {
        self.ends.lock().channel.take()
    }

    /// Closes a channel that was not taken, and each one that comes later.
    pub(in crate::api) fn end(&self) {
        let mut ends = self.ends.lock();
        ends.is_over = true;
        (ends.channel, ends.metrics) = (None, None);
    }

    /// Notes that connections arrive from a process that has held requests.
    pub(in crate::api) fn note_arrival(&self) {
        self.phase.send_if_modified(|phase| {
            if phase.is_here() {
                *phase = RelayPhase::Here { held: Some(Instant::now()) };
            }
            // Nothing waits for this.
            false
        });
    }
}

impl RelayPhase {
    fn is_here(self) -> bool {
        matches!(self, Self::Here { .. })
    }
}

/// What a task on the control thread sees of a [`Relay`].
#[derive(Clone, Debug)]
pub(in crate::api) struct RelayGate(watch::Receiver<RelayPhase>);

impl RelayGate {
    /// Returns whether requests are answered in another process.
    pub(in crate::api) fn has_moved(&self) -> bool {
        *self.0.borrow() == RelayPhase::Moved
    }

    /// Waits until requests are answered in another process.
    pub(in crate::api) async fn moved(&mut self) {
        self.wait(|phase| phase == RelayPhase::Moved).await;
    }

    /// Returns whether requests wait now.
    pub(in crate::api) fn holds(&self) -> bool {
        *self.0.borrow() == RelayPhase::Held
    }

    /// Returns whether requests are held, or were within `limit`.
    pub(in crate::api) fn held_within(&self, limit: Duration) -> bool {
        match *self.0.borrow() {
            RelayPhase::Here { held } => held.is_some_and(|at| at.elapsed() < limit),
            RelayPhase::Held => true,
            RelayPhase::Moved => false,
        }
    }

    /// Waits while requests are held.
    pub(in crate::api) async fn decided(&mut self) {
        self.wait(|phase| phase != RelayPhase::Held).await;
    }

    /// Waits until requests are answered here.
    pub(in crate::api) async fn here(&mut self) {
        self.wait(RelayPhase::is_here).await;
    }

    /// Waits until requests are not answered here.
    pub(in crate::api) async fn not_here(&mut self) {
        self.wait(|phase| !phase.is_here()).await;
    }

    /// Waits until `meets` returns true for the phase. Waits forever once the [`Relay`] is dropped.
    async fn wait(&mut self, meets: fn(RelayPhase) -> bool) {
        if self.0.wait_for(|phase| meets(*phase)).await.is_err() {
            pending().await
        }
    }
}
