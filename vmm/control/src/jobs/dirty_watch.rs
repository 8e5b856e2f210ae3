//! Owns the watches of a running guest's writes. Each watch has a thread with its own subscription,
//! so that it takes no frame from another watch, a migration or a checkpoint.
//!
//! A thread ends when it is told to, when no client has sent a question for a while, or when the
//! guest has ended and the thread has reported that.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, TrySendError};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{PAGE_SIZE, Subscription};
use driftline_guest::{RunState, VcpuWrites};
use driftline_machine::config::Backend;
use driftline_machine::log;
use driftline_machine::tracking::TrackingMode;
use driftline_machine::vm::VcpuInfo;
use driftline_migrate::SendStatus;
use tokio::sync::oneshot;

use super::Jobs;
use super::bins::Bins;
use super::error::JobError;
use super::watches::{Ask, WatchHandle};
use crate::model::{VcpuWindow, WatchPage};

/// Maximum number of concurrent watches. Each adds one tree and one insert per dirty frame.
const MAX_WATCHES: usize = 4;
/// Time after which a watch ends if no client sends a question.
const LINGER: Duration = Duration::from_secs(5);
/// Time after which a watch ends once the guest has ended. A live client sends its next question at
/// once.
const LAST_ASK: Duration = Duration::from_secs(1);
/// Limit for waiting, once the guest has ended, for the reason of its end, and for the migration's
/// outcome, which says where the guest is.
const LAST_NEWS: Duration = Duration::from_secs(1);
/// Interval at which a thread checks whether the guest still exists.
const LOOK: Duration = Duration::from_millis(50);
/// Maximum number of questions that wait for the one before them.
const WAITING: usize = 4;

impl Jobs {
    /// Starts a watch of the guest's writes, counted in at most `bins` ranges of its memory.
    /// Returns the watch's number.
    ///
    /// # Errors
    /// The watch cannot be started.
    pub fn begin_watch(self: &Arc<Self>, bins: u32) -> Result<u64, JobError> {
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
        let (inbox, asked) = mpsc::sync_channel(WAITING);
        let work = DirtyWatch {
            number,
            jobs: Arc::downgrade(self),
            bins: Bins::new(self.vm.layout(), bins),
            writes,
            last: Instant::now(),
            vcpus: self.vm.vcpu_writes(),
            infos: self.vm.info().vcpu,
        };
        let purpose = "to watch the guest's writes";
        let thread = log::spawn("dirty-watch", move || work.run(&asked))
            .map_err(|cause| JobError::Thread { purpose, cause })?;
        let mut open = self.watches.open.lock();
        open.last_number = number;
        open.watches.push(WatchHandle { number, inbox: Some(inbox), thread });
        Ok(number)
    }

    /// Requests what was written since the last answer of watch `number`. The answer comes once
    /// that one is at least `wait` ago. No answer comes if the watch ends earlier.
    ///
    /// # Errors
    /// There is no such watch, or its queue of questions is full.
    pub fn ask_watch(
        &self,
        number: u64,
        wait: Duration,
    ) -> Result<oneshot::Receiver<Result<WatchPage, JobError>>, JobError> {
        let open = self.watches.open.lock();
        let watch = open.watches.iter().find(|watch| watch.number == number);
        let inbox = watch.and_then(|watch| watch.inbox.as_ref());
        let none = || JobError::NoWatch(number);
        let (reply, answer) = oneshot::channel();
        match inbox.ok_or_else(none)?.try_send(Ask { wait, reply }) {
            Ok(()) => Ok(answer),
            Err(TrySendError::Disconnected(_)) => Err(none()),
            Err(TrySendError::Full(_)) => {
                Err(JobError::TooManyQuestions { watch: number, questions: WAITING })
            }
        }
    }

    /// Ends watch `number`.
    ///
    /// # Errors
    /// There is no such watch.
    pub fn end_watch(&self, number: u64) -> Result<(), JobError> {
        let mut open = self.watches.open.lock();
        let watch = open.watches.iter_mut().find(|watch| watch.number == number);
        let told = watch.and_then(|watch| watch.inbox.take());
        told.map(drop).ok_or(JobError::NoWatch(number))
    }
}

/// State of a watch's thread. It holds only a weak reference to the guest and its jobs, so that it
/// does not keep them alive.
struct DirtyWatch {
    number: u64,
    jobs: Weak<Jobs>,
    bins: Bins,
    writes: Subscription,
    /// Start of the window.
    last: Instant,
    /// The vCPUs' counters at the start of the window.
    vcpus: Vec<VcpuWrites>,
    infos: Vec<VcpuInfo>,
}

impl DirtyWatch {
    fn run(mut self, asked: &Receiver<Ask>) {
        let mut heard = Instant::now();
        let mut ended: Option<Instant> = None;
        loop {
            match asked.recv_timeout(LOOK) {
                Ok(ask) => {
                    if !self.answer(ask) {
                        return;
                    }
                    heard = Instant::now();
                }
                Err(RecvTimeoutError::Timeout) => {
                    let Some(over) = self.is_over() else { return };
                    // Applies even if the last question was long ago: the client may be about to
                    // send one.
                    let last_ask = over.then(|| ended.get_or_insert_with(Instant::now).elapsed());
                    if last_ask.is_some_and(|long| long > LAST_ASK) || heard.elapsed() > LINGER {
                        return;
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Returns whether the guest has ended, or `None` if its jobs no longer exist.
    fn is_over(&self) -> Option<bool> {
        Some(self.jobs.upgrade()?.vm.run_state() == RunState::Stopped)
    }

    /// Answers once the window is long enough. Returns whether further answers are possible.
    fn answer(&mut self, ask: Ask) -> bool {
        loop {
            let Some(over) = self.is_over() else { return false };
            let left = ask.wait.saturating_sub(self.last.elapsed());
            if over || left.is_zero() {
                break;
            }
            if ask.reply.is_closed() {
                // The client has disconnected. The window continues, for a client that may still
                // come.
                return true;
            }
            thread::sleep(left.min(LOOK));
        }
        let Some(jobs) = self.jobs.upgrade() else { return false };
        let page = self.page(&jobs);
        drop(jobs);
        let more = !matches!(&page, Ok(WatchPage { end: Some(_), .. }));
        // The client may have disconnected.
        let _ = ask.reply.send(page);
        more
    }

    /// Ends the current window and returns its page.
    fn page(&mut self, jobs: &Jobs) -> Result<WatchPage, JobError> {
        let vm = &jobs.vm;
        if let Err(e) = vm.collect() {
            // A guest that has ended writes nothing more.
            if vm.run_state() != RunState::Stopped {
                return Err(e.into());
            }
        }
        let epoch = self.writes.drain();
        let window = std::mem::replace(&mut self.last, Instant::now());
        let window = self.last.saturating_duration_since(window).as_secs_f64();
        let (frames, bin_frames) = (epoch.frames(), self.bins.count(epoch.runs()));
        epoch.commit();
        // These counters belong to the same window.
        let writes = vm.vcpu_writes();

        // A guest that has stopped provides the reason shortly afterwards.
        let patience = if vm.run_state() == RunState::Stopped { LAST_NEWS } else { Duration::ZERO };
        let end = vm.wait_end(Some(patience));
        let moved_to = end.as_ref().and_then(|_| jobs.moved_to());
        let info = jobs.info();
        let rate = frames.saturating_mul(PAGE_SIZE) as f64 / window.max(1e-9);
        let rings = info.tracking == TrackingMode::DirtyRing && info.backend == Backend::Kvm;
        Ok(WatchPage {
            watch: self.number,
            end,
            moved_to,
            window_ms: window * 1e3,
            frames,
            dirty_rate_bytes_per_s: rate as u64,
            memory: self.bins.memory(),
            bin_bytes: self.bins.bytes(),
            bin_frames,
            vcpu: self.vcpus(writes, &info.vcpu),
            ring_entries: rings.then_some(vm.machine_config().ring_entries),
            migration: jobs.migration_job().map(|job| job.snapshot()),
            checkpoints: jobs.checkpoint_job().map(|job| job.snapshot()),
            info,
        })
    }

    /// Returns each vCPU's figures, less their values at the start of the window.
    fn vcpus(&mut self, writes: Vec<VcpuWrites>, infos: &[VcpuInfo]) -> Vec<VcpuWindow> {
        let before = std::mem::replace(&mut self.infos, infos.to_vec());
        let wrote = std::mem::replace(&mut self.vcpus, writes);
        let one = |(vcpu, (now, then)): (usize, (&VcpuInfo, &VcpuInfo))| VcpuWindow {
            dirtied_frames: self
                .vcpus
                .get(vcpu)
                .zip(wrote.get(vcpu))
                .map(|(now, then)| now.dirtied_frames.saturating_sub(then.dirtied_frames)),
            exits: now.exits.saturating_sub(then.exits),
            ring_full_exits: now.ring_full_exits.saturating_sub(then.ring_full_exits),
            ring_peak_entries: now.ring_peak_entries,
            held_ms: now.held_ms.saturating_sub(then.held_ms),
        };
        infos.iter().zip(&before).enumerate().map(one).collect()
    }
}

impl Jobs {
    /// Returns where a guest that has ended here runs now, if it has migrated. Waits briefly for
    /// the migration's outcome.
    fn moved_to(&self) -> Option<String> {
        let job = self.migration_job()?;
        let end = Instant::now() + LAST_NEWS;
        while !job.is_over() && Instant::now() < end {
            thread::sleep(Duration::from_millis(5));
        }
        let page = job.snapshot();
        let completed = page.report.is_some_and(|report| report.status == SendStatus::Completed);
        completed.then_some(page.to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use driftline_machine::vm::EndReason;

    /// Returns the next window of a watch, at least 50 ms long.
    fn window(jobs: &Jobs, watch: u64) -> WatchPage {
        let answer = jobs.ask_watch(watch, Duration::from_millis(50)).unwrap();
        answer.blocking_recv().unwrap().unwrap()
    }

    #[track_caller]
    fn await_end(jobs: &Jobs) {
        let end = Instant::now() + Duration::from_secs(60);
        while !jobs.watches.are_over() {
            assert!(Instant::now() < end, "a watch goes on");
            thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn each_watch_has_all_frames() {
        let (vm, jobs) = super::super::paused_guest();
        let mut other = vm.subscribe("test").unwrap();
        let [first, second] = [1, 4096].map(|bins| jobs.begin_watch(bins).unwrap());
        jobs.resume().unwrap();
        let (mut seen, mut frames) = (0, 0);
        // The payload writes to all of its 256 frames repeatedly.
        let end = Instant::now() + Duration::from_secs(60);
        while seen.min(frames) < 256 && Instant::now() < end {
            let page = window(&jobs, first);
            assert_eq!(page.bin_frames, [page.frames]);
            assert!(page.window_ms >= 50.0);
            seen += page.frames;
            let page = window(&jobs, second);
            assert_eq!(page.bin_frames.iter().sum::<u64>(), page.frames);
            frames += page.frames;
        }
        assert!(seen >= 256 && frames >= 256, "{seen} and {frames}");
        jobs.pause().unwrap();
        vm.collect().unwrap();
        assert!(other.drain().frames() >= 256, "what others took is there all the same");
        assert_eq!(vm.info().dirty.subscribers, 3);

        vm.stop("enough");
        let last = window(&jobs, first);
        assert_eq!(last.end, Some(EndReason::Stopped("enough".into())));
        assert_eq!(last.moved_to, None);
        // The second watch receives no more questions.
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
        // Questions whose clients have gone do not keep the watch alive.
        for _ in 0..WAITING {
            drop(jobs.ask_watch(all[2], Duration::from_secs(3600)).unwrap());
        }
        await_end(&jobs);
        assert_eq!(vm.info().dirty.subscribers, 0);
        assert!(jobs.begin_watch(1).unwrap() > all[MAX_WATCHES - 1], "numbers are used once");
    }
}
