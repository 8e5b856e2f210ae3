//! Owns the threads that watch a guest's writes. Each has its own subscription, so that it takes no
//! frame from another watch, a migration or a checkpoint.
//!
//! A thread runs the requests of its clients. It ends on request, when no client has sent a
//! request for a while, or when the guest has ended and the thread has reported that.

use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use driftline_dirty_tracker::Subscription;
use driftline_guest::{RunState, VcpuWrites};
use driftline_machine::actor::{Handle, Inbox, Next};
use driftline_machine::vm::{VcpuInfo, Vm};
use parking_lot::Mutex;

use super::bins::Bins;
use crate::model::VcpuWindow;

/// Time after which a watch ends if no client sends a request. Shorter in unit tests, which wait
/// for it.
const IDLE_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 5 });
/// Time after which a watch ends once the guest has ended. A live client sends its next request
/// immediately.
const ENDED_IDLE_LIMIT: Duration = Duration::from_secs(1);
/// Interval at which a thread checks whether the guest still exists.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The watches of a guest.
#[derive(Default)]
pub(super) struct DirtyWatches {
    /// Held while a watch is started, which may take time. Reading other watches never waits for
    /// it.
    pub(super) starting: Mutex<()>,
    pub(super) open: Mutex<OpenWatches>,
}

/// The watches that have not ended.
#[derive(Default)]
pub(super) struct OpenWatches {
    /// Number of the last watch that was started.
    pub(super) last_number: u64,
    pub(super) watches: Vec<WatchHandle>,
}

/// One watch.
pub(super) struct WatchHandle {
    pub(super) number: u64,
    /// `None` once the watch's end was requested.
    pub(super) handle: Option<Handle<DirtyWatch>>,
    /// Each request that waits for the ones before it has a clone.
    pub(super) queue: Arc<()>,
    pub(super) thread: JoinHandle<()>,
}

impl DirtyWatches {
    /// Returns whether all threads have ended and released everything that they owned.
    pub(super) fn are_over(&self) -> bool {
        self.open.lock().watches.iter().all(|watch| watch.thread.is_finished())
    }
}

/// State of a watch's thread. It holds only a weak reference to the guest, so that it does not keep
/// the guest alive.
pub(super) struct DirtyWatch {
    pub(super) number: u64,
    vm: Weak<dyn Vm>,
    pub(super) bins: Bins,
    writes: Subscription,
    window_start: Instant,
    /// The vCPUs' counters at the start of the window.
    vcpu_writes: Vec<VcpuWrites>,
    vcpu_infos: Vec<VcpuInfo>,
    /// Whether the guest's end was reported to a client.
    pub(super) has_reported_end: bool,
}

/// What was written in a window.
pub(super) struct WatchWindow {
    pub(super) seconds: f64,
    /// Number of distinct frames.
    pub(super) frames: u64,
    /// Number of distinct frames, for each bin.
    pub(super) bin_frames: Vec<u64>,
    /// The vCPUs' counters at the end of the window.
    pub(super) vcpu_writes: Vec<VcpuWrites>,
}

impl DirtyWatch {
    /// Creates the state of a watch whose first window starts now.
    pub(super) fn new(number: u64, vm: &Arc<dyn Vm>, bins: Bins, writes: Subscription) -> Self {
        Self {
            number,
            vm: Arc::downgrade(vm),
            bins,
            writes,
            window_start: Instant::now(),
            vcpu_writes: vm.vcpu_writes(),
            vcpu_infos: vm.info().vcpu,
            has_reported_end: false,
        }
    }

    /// Runs requests until the watch ends.
    pub(super) fn serve(mut self, inbox: &Inbox<Self>) {
        let mut last_request = Instant::now();
        let mut ended: Option<Instant> = None;
        loop {
            match inbox.recv_timeout(POLL_INTERVAL) {
                Next::Job(request) => {
                    request(&mut self);
                    if self.has_reported_end {
                        return;
                    }
                    last_request = Instant::now();
                }
                Next::Nothing => {
                    let Some(over) = self.is_over() else { return };
                    // Applies even if the last request was long ago: the client may be about to
                    // send one.
                    let since_end = over.then(|| ended.get_or_insert_with(Instant::now).elapsed());
                    if since_end.is_some_and(|long| long > ENDED_IDLE_LIMIT)
                        || last_request.elapsed() > IDLE_LIMIT
                    {
                        return;
                    }
                }
                Next::End => return,
            }
        }
    }

    /// Returns whether the guest has ended, or `None` if it no longer exists.
    fn is_over(&self) -> Option<bool> {
        Some(self.vm.upgrade()?.run_state() == RunState::Stopped)
    }

    /// Waits until the window is as long as `length`, or the guest has ended. Returns `false` if
    /// the client has disconnected, or the guest no longer exists. The window then continues, for
    /// another request that may still arrive.
    pub(super) fn await_window(&self, length: Duration, has_left: impl Fn() -> bool) -> bool {
        loop {
            let Some(over) = self.is_over() else { return false };
            let left = length.saturating_sub(self.window_start.elapsed());
            if over || left.is_zero() {
                return true;
            }
            if has_left() {
                return false;
            }
            thread::sleep(left.min(POLL_INTERVAL));
        }
    }

    /// Ends the window and starts the next one.
    pub(super) fn end_window(&mut self, vm: &dyn Vm) -> WatchWindow {
        let epoch = self.writes.drain();
        // Read immediately after the drain: a frame that is harvested in between counts in this
        // window for its vCPU, and in the next one for its bin.
        let vcpu_writes = vm.vcpu_writes();
        let start = std::mem::replace(&mut self.window_start, Instant::now());
        let seconds = self.window_start.saturating_duration_since(start).as_secs_f64();
        let (frames, bin_frames) = (epoch.frames(), self.bins.count(epoch.runs()));
        epoch.commit();
        WatchWindow { seconds, frames, bin_frames, vcpu_writes }
    }

    /// Returns each vCPU's figures, less their values at the start of the window.
    pub(super) fn vcpus(&mut self, writes: Vec<VcpuWrites>, infos: &[VcpuInfo]) -> Vec<VcpuWindow> {
        let before = std::mem::replace(&mut self.vcpu_infos, infos.to_vec());
        let wrote = std::mem::replace(&mut self.vcpu_writes, writes);
        let one = |(vcpu, (now, then)): (usize, (&VcpuInfo, &VcpuInfo))| VcpuWindow {
            dirtied_frames: self
                .vcpu_writes
                .get(vcpu)
                .zip(wrote.get(vcpu))
                .map(|(now, then)| now.dirtied_frames.saturating_sub(then.dirtied_frames)),
            exits: now.exits.saturating_sub(then.exits),
            ring_full_exits: now.ring_full_exits.saturating_sub(then.ring_full_exits),
            ring_peak_entries: now.ring_peak_entries,
            throttled_ms: now.throttled_ms.saturating_sub(then.throttled_ms),
        };
        infos.iter().zip(&before).enumerate().map(one).collect()
    }
}
