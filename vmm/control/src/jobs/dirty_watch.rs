//! Requests for the watches of a running guest's writes: starts and ends them, and fills their
//! pages with the figures of the guest's jobs.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::PAGE_SIZE;
use driftline_guest::RunState;
use driftline_machine::actor::inbox;
use driftline_machine::config::BackendKind;
use driftline_machine::log;
use driftline_machine::tracking::TrackingMode;
use driftline_migrate::SendStatus;
use tokio::sync::oneshot;

use super::Jobs;
use super::bins::Bins;
use super::error::JobError;
use super::watches::{DirtyWatch, WatchHandle};
use crate::model::WatchPage;

/// Maximum number of concurrent watches. Each adds one tree and one insert per dirty frame.
const MAX_WATCHES: usize = 4;
/// Maximum number of requests to a watch that wait for the one before them.
const MAX_QUEUED: usize = 4;
/// Limit for waiting, once the guest has ended, for the reason of its end, and for the migration's
/// outcome, which says where the guest is.
const END_REASON_LIMIT: Duration = Duration::from_secs(1);

/// The answer to a request for a window.
type WindowReply = oneshot::Sender<Result<WatchPage, JobError>>;

impl Jobs {
    /// Starts a watch of the guest's writes, counted in at most `bins` ranges of its memory.
    /// Returns the watch's number.
    ///
    /// # Errors
    ///
    /// The watch cannot be started.
    pub(crate) fn begin_watch(&self, bins: u32) -> Result<u64, JobError> {
        let _starting = self.watches.starting.lock();
        let number = {
            let mut open = self.watches.open.lock();
            open.watches.retain(|watch| !watch.thread.is_finished());
            (open.watches.len() < MAX_WATCHES).then_some(open.last_number + 1)
        };
        let Some(number) = number else {
            return Err(JobError::TooManyWatches(MAX_WATCHES));
        };
        if self.vm.run_state() == RunState::Stopped {
            return Err(JobError::Ended);
        }
        let writes = self.vm.subscribe("watch")?;
        // A watch drains as often as a screen is drawn, and must not cause any vCPU to be
        // throttled.
        writes.set_passive();
        let (handle, requests) = inbox(format!("watch {number}"));
        let watch = DirtyWatch::new(number, &self.vm, Bins::new(self.vm.layout(), bins), writes);
        let purpose = "to watch the guest's writes";
        let thread = log::spawn("dirty-watch", move || watch.serve(&requests))
            .map_err(|cause| JobError::Thread { purpose, cause })?;
        let mut open = self.watches.open.lock();
        open.last_number = number;
        open.watches.push(WatchHandle {
            number,
            handle: Some(handle),
            queue: Arc::default(),
            thread,
        });
        Ok(number)
    }

    /// Requests what was written since the last answer of watch `number`. The answer arrives once
    /// `wait` has passed since the last answer. No answer arrives if the watch ends earlier.
    ///
    /// # Errors
    ///
    /// There is no such watch, or its queue of requests is full.
    pub(crate) fn ask_watch(
        self: &Arc<Self>,
        number: u64,
        wait: Duration,
    ) -> Result<oneshot::Receiver<Result<WatchPage, JobError>>, JobError> {
        let open = self.watches.open.lock();
        let none = || JobError::NoWatch(number);
        let watch = open.watches.iter().find(|watch| watch.number == number).ok_or_else(none)?;
        let handle = watch.handle.as_ref().ok_or_else(none)?;
        if Arc::strong_count(&watch.queue) > MAX_QUEUED {
            return Err(JobError::TooManyRequests { watch: number, requests: MAX_QUEUED });
        }
        let (reply, answer) = oneshot::channel();
        let (jobs, queued) = (Arc::downgrade(self), watch.queue.clone());
        let is_there = handle.tell(move |watch| {
            drop(queued);
            answer_request(watch, &jobs, wait, reply);
        });
        is_there.then_some(answer).ok_or_else(none)
    }

    /// Ends watch `number`.
    ///
    /// # Errors
    ///
    /// There is no such watch.
    pub(crate) fn end_watch(&self, number: u64) -> Result<(), JobError> {
        let mut open = self.watches.open.lock();
        let watch = open.watches.iter_mut().find(|watch| watch.number == number);
        let handle = watch.and_then(|watch| watch.handle.take());
        handle.map(|handle| handle.end()).ok_or(JobError::NoWatch(number))
    }

    /// Ends a watch's window and returns its page.
    fn watch_page(&self, watch: &mut DirtyWatch) -> Result<WatchPage, JobError> {
        let vm = &self.vm;
        if let Err(e) = vm.collect() {
            // A guest that has ended writes nothing more.
            if vm.run_state() != RunState::Stopped {
                return Err(e.into());
            }
        }
        let window = watch.end_window(&**vm);
        // A guest that has stopped provides the reason shortly afterwards.
        let limit = match vm.run_state() {
            RunState::Stopped => END_REASON_LIMIT,
            _ => Duration::ZERO,
        };
        let end = vm.wait_end(Some(limit));
        let moved_to = end.as_ref().and_then(|_| self.moved_to());
        let info = self.info();
        let rate = window.frames.saturating_mul(PAGE_SIZE) as f64 / window.seconds.max(1e-9);
        let rings = info.tracking == TrackingMode::DirtyRing && info.backend == BackendKind::Kvm;
        Ok(WatchPage {
            watch: watch.number,
            end,
            moved_to,
            window_ms: window.seconds * 1e3,
            frames: window.frames,
            dirty_rate_bytes_per_s: rate as u64,
            memory: watch.bins.memory(),
            bin_bytes: watch.bins.bytes(),
            bin_frames: window.bin_frames,
            vcpu: watch.vcpus(window.vcpu_writes, &info.vcpu),
            ring_entries: rings.then_some(vm.machine_config().ring_entries),
            migration: self.migration_job().map(|job| job.snapshot()),
            checkpoints: self.checkpoint_job().map(|job| job.snapshot()),
            info,
        })
    }

    /// Returns where a guest that has ended here runs now, if it has migrated. Waits briefly for
    /// the migration's outcome.
    fn moved_to(&self) -> Option<String> {
        let job = self.migration_job()?;
        let end = Instant::now() + END_REASON_LIMIT;
        while !job.is_over() && Instant::now() < end {
            thread::sleep(Duration::from_millis(5));
        }
        let page = job.snapshot();
        let completed = page.report.is_some_and(|report| report.status == SendStatus::Completed);
        completed.then_some(page.to)
    }
}

/// Answers one request on the watch's thread, once its window is long enough. The thread holds only
/// a weak reference to the jobs, so that it does not keep them alive.
fn answer_request(watch: &mut DirtyWatch, jobs: &Weak<Jobs>, wait: Duration, reply: WindowReply) {
    if !watch.await_window(wait, || reply.is_closed()) {
        return;
    }
    let Some(jobs) = jobs.upgrade() else { return };
    let page = jobs.watch_page(watch);
    drop(jobs);
    watch.has_reported_end = matches!(&page, Ok(WatchPage { end: Some(_), .. }));
    // The client may have disconnected.
    let _ = reply.send(page);
}

#[cfg(test)]
mod tests {
    use super::*;
    use driftline_machine::vm::EndReason;

    /// Returns the next window of a watch, at least 50 ms long.
    fn window(jobs: &Arc<Jobs>, watch: u64) -> WatchPage {
        let answer = jobs.ask_watch(watch, Duration::from_millis(50)).unwrap();
        answer.blocking_recv().unwrap().unwrap()
    }

    #[track_caller]
    fn await_end(jobs: &Jobs) {
        let end = Instant::now() + Duration::from_secs(60);
        while !jobs.watches.are_over() {
            assert!(Instant::now() < end, "a watch has not ended");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// A watch takes no frame from another subscriber, and ends with the guest.
    #[test]
    fn each_watch_has_all_frames() {
        let (vm, jobs) = super::super::paused_guest();
        let mut other = vm.subscribe("test").unwrap();
        let [first, second] = [1, 4096].map(|bins| jobs.begin_watch(bins).unwrap());
        jobs.resume().unwrap();
        let (mut in_first, mut in_second) = (0, 0);
        // The payload writes to all of its 256 frames repeatedly.
        let end = Instant::now() + Duration::from_secs(60);
        while in_first.min(in_second) < 256 && Instant::now() < end {
            let page = window(&jobs, first);
            assert_eq!(page.bin_frames, [page.frames]);
            assert!(page.window_ms >= 50.0);
            in_first += page.frames;
            let page = window(&jobs, second);
            assert_eq!(page.bin_frames.iter().sum::<u64>(), page.frames);
            in_second += page.frames;
        }
        assert!(in_first >= 256 && in_second >= 256, "{in_first} and {in_second}");
        jobs.pause().unwrap();
        vm.collect().unwrap();
        assert!(other.drain().frames() >= 256, "a watch takes nothing from others");
        assert_eq!(vm.info().dirty.subscribers, 3);

        vm.stop("the test is over");
        let last = window(&jobs, first);
        assert_eq!(last.end, Some(EndReason::Stopped("the test is over".into())));
        assert_eq!(last.moved_to, None);
        // The second watch receives no more requests.
        await_end(&jobs);
        assert!(
            jobs.ask_watch(first, Duration::ZERO)
                .unwrap_err()
                .to_string()
                .contains("or it has ended")
        );
        assert!(jobs.begin_watch(1).unwrap_err().to_string().contains("has ended"));
    }

    #[test]
    fn watches_are_limited_and_end_when_unread() {
        let (vm, jobs) = super::super::paused_guest();
        let all: Vec<u64> = (0..MAX_WATCHES).map(|_| jobs.begin_watch(1).unwrap()).collect();
        assert!(jobs.begin_watch(1).unwrap_err().to_string().contains("4 others"));
        jobs.end_watch(all[0]).unwrap();
        assert!(jobs.end_watch(all[0]).unwrap_err().to_string().contains("there is no watch"));
        // A paused guest also has a window, with no frames in it.
        assert_eq!(window(&jobs, all[1]).frames, 0);
        // Requests whose clients have disconnected do not keep the watch alive.
        for _ in 0..MAX_QUEUED {
            drop(jobs.ask_watch(all[2], Duration::from_secs(3600)).unwrap());
        }
        await_end(&jobs);
        assert_eq!(vm.info().dirty.subscribers, 0);
        assert!(jobs.begin_watch(1).unwrap() > all[MAX_WATCHES - 1], "numbers are used once");
    }
}
