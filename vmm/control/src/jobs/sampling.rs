//! Samples a running guest's writes for a plan: a subscription of its own, drained after windows of
//! several lengths.
//!
//! A single subscription is drained after one window at a time, so that a frame which a vCPU writes
//! repeatedly in a window counts once, as it does in a pass of a migration. Short windows are
//! repeated, spread over the whole sample, for a guest whose behaviour varies.

use std::thread;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{FrameRun, Gfn, PAGE_SIZE, Subscription};
use driftline_format::is_zero;
use driftline_guest::Guest;
use driftline_migrate::forecast::WriteWindow;
use serde::{Deserialize, Serialize};
use vm_memory::{Bytes, GuestAddress};

use super::Jobs;
use super::error::JobError;
use crate::model::GuestState;

/// Length of the first window, which is discarded: when tracking begins, the first write to each
/// frame is expensive, and the guest runs more slowly for a moment.
const WARM_UP_MS: u64 = 100;
/// Lengths of the windows in a round, in ms, and the number of rounds.
const ROUND_MS: [u64; 7] = [10, 10, 10, 10, 50, 50, 250];
const ROUNDS: usize = 3;
/// Lengths of the windows after the rounds, in ms.
const LONG_MS: [u64; 2] = [750, 1500];
/// Interval at which the thread checks whether the guest still runs.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Number of frames that are read to estimate the share of zero frames.
const ZERO_SAMPLES: u64 = 1024;
/// A guest is not steady if the frames of two windows of one length differ by more than this
/// factor, and by more than `UNSTEADY_MIN_FRAMES`.
const UNSTEADY_FACTOR: f64 = 1.5;
const UNSTEADY_MIN_FRAMES: u64 = 64;

/// Summary of the windows of one length.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct WindowSummary {
    /// Average length of the windows, in ms.
    pub window_ms: f64,
    /// Number of windows.
    pub windows: u32,
    /// Average number of distinct frames that the guest dirtied in a window.
    pub frames: f64,
    /// Number of frames in the window with the fewest.
    pub least_frames: u64,
    /// Number of frames in the window with the most.
    pub most_frames: u64,
    /// Dirty rate in bytes/s, counting whole frames.
    pub dirty_rate_bytes_per_s: u64,
    /// Average number of frames that each vCPU dirtied in a window; empty where that is not known.
    pub vcpu_frames: Vec<f64>,
}

/// How a guest has written its memory while it was observed.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct WriteProfile {
    /// Duration of the observation, in ms.
    pub watched_ms: f64,
    /// Number of frames in guest memory.
    pub memory_frames: u64,
    /// Number of frames that a copy of all memory contains.
    pub populated_frames: u64,
    /// Number of those frames that contain only zeros, estimated from a sample.
    pub zero_frames: u64,
    /// The windows by length, shortest first.
    pub curve: Vec<WindowSummary>,
    /// Whether windows of one length have about the same number of frames.
    pub steady: bool,
    /// Whether checkpoints were being taken, in which case the rates include their pauses.
    pub checkpointing: bool,
}

impl WriteProfile {
    /// Returns the windows as input of a forecast.
    pub(crate) fn windows(&self) -> Vec<WriteWindow> {
        let one = |summary: &WindowSummary| WriteWindow {
            // A length that cannot be represented becomes zero; the forecast skips such windows.
            length: Duration::try_from_secs_f64(summary.window_ms / 1e3).unwrap_or_default(),
            frames: summary.frames,
            by_vcpu: summary.vcpu_frames.clone(),
        };
        self.curve.iter().map(one).collect()
    }
}

/// One window.
struct WindowSample {
    nominal_ms: u64,
    length: Duration,
    frames: u64,
    by_vcpu: Vec<u64>,
}

/// The plan's subscription, and the state at its last drain.
struct Sampler<'g> {
    guest: &'g dyn Guest,
    writes: Subscription,
    drained_at: Instant,
    /// Number of frames that each vCPU had dirtied by then.
    vcpu_frames: Vec<u64>,
}

impl Jobs {
    /// Observes the guest for about four seconds. Its writes are tracked as in a migration.
    ///
    /// # Errors
    ///
    /// The guest cannot be observed, or the observation ended early.
    pub(crate) fn sample_writes(&self) -> Result<WriteProfile, JobError> {
        let Some(_alone) = self.sampling.try_lock() else {
            return Err(JobError::PlanUnderWay);
        };
        self.still_running()?;
        let guest: &dyn Guest = &**self.vm();
        let begun = Instant::now();
        let mut sampler = Sampler {
            guest,
            writes: guest.subscribe("plan")?,
            drained_at: begun,
            vcpu_frames: vcpu_frames(guest),
        };
        self.window(&mut sampler, WARM_UP_MS)?;
        let rounds = std::iter::repeat_n(ROUND_MS, ROUNDS).flatten();
        let mut samples = Vec::new();
        for ms in rounds.chain(LONG_MS) {
            samples.push(self.window(&mut sampler, ms)?);
        }
        let watched_ms = begun.elapsed().as_secs_f64() * 1e3;
        drop(sampler);
        // A migration uses the same list. A guest that ends meanwhile has no plan.
        let populated = guest.populated()?;
        let zero_frames = zeros(guest, &populated);
        self.still_running()?;
        let curve = by_length(&samples);
        Ok(WriteProfile {
            watched_ms,
            memory_frames: guest.layout().frames(),
            populated_frames: populated.iter().map(|run| run.count).sum(),
            zero_frames,
            steady: curve.iter().all(is_steady),
            curve,
            checkpointing: self.info().checkpointing,
        })
    }

    /// Waits for the end of a window of `nominal_ms` that began at the last drain.
    fn window(&self, sampler: &mut Sampler<'_>, nominal_ms: u64) -> Result<WindowSample, JobError> {
        let nominal = Duration::from_millis(nominal_ms);
        loop {
            let left = nominal.saturating_sub(sampler.drained_at.elapsed());
            if left.is_zero() {
                break;
            }
            thread::sleep(left.min(POLL_INTERVAL));
            self.still_running()?;
        }
        sampler.guest.collect()?;
        let epoch = sampler.writes.drain();
        let (now, vcpu_frames) = (Instant::now(), vcpu_frames(sampler.guest));
        let (length, frames) = (now - sampler.drained_at, epoch.frames());
        epoch.commit();
        let before = std::mem::replace(&mut sampler.vcpu_frames, vcpu_frames);
        let pairs = sampler.vcpu_frames.iter().zip(&before);
        let by_vcpu = pairs.map(|(now, before)| now.saturating_sub(*before)).collect();
        sampler.drained_at = now;
        Ok(WindowSample { nominal_ms, length, frames, by_vcpu })
    }

    fn still_running(&self) -> Result<(), JobError> {
        let why = match self.info().state {
            GuestState::Running => return Ok(()),
            GuestState::Paused => "is paused and writes nothing; resume it first",
            GuestState::Migrating => {
                "is being migrated already; `driftline info` shows the progress"
            }
            GuestState::InDoubt => {
                "has been handed over and may run elsewhere; see `driftline resolve`"
            }
            GuestState::Stopped => "has ended",
        };
        Err(JobError::NoPlan(why))
    }
}

fn vcpu_frames(guest: &dyn Guest) -> Vec<u64> {
    guest.vcpu_writes().iter().map(|writes| writes.dirtied_frames).collect()
}

/// Estimates how many of these frames are zero frames, by reading an evenly spread sample.
fn zeros(guest: &dyn Guest, populated: &[FrameRun]) -> u64 {
    let all: u64 = populated.iter().map(|run| run.count).sum();
    let step = (all / ZERO_SAMPLES).max(1);
    let (mut passed, mut next) = (0, 0);
    let (mut read, mut found) = (0u64, 0u64);
    let mut page = [0; PAGE_SIZE as usize];
    for run in populated {
        while next < passed + run.count {
            let at = GuestAddress(Gfn(run.start.0 + next - passed).gpa());
            let readable = guest.ram().read_slice(&mut page, at).is_ok();
            read += 1;
            found += u64::from(readable && is_zero(&page));
            next += step;
        }
        passed += run.count;
    }
    all.checked_mul(found).and_then(|n| n.checked_div(read)).unwrap_or(0)
}

fn by_length(samples: &[WindowSample]) -> Vec<WindowSummary> {
    let mut lengths: Vec<u64> = samples.iter().map(|s| s.nominal_ms).collect();
    lengths.sort_unstable();
    lengths.dedup();
    let of = |ms: &u64| samples.iter().filter(|s| s.nominal_ms == *ms).collect::<Vec<_>>();
    lengths.iter().map(|ms| summary(&of(ms))).collect()
}

fn summary(samples: &[&WindowSample]) -> WindowSummary {
    let count = samples.len().max(1) as f64;
    let seconds = samples.iter().map(|s| s.length.as_secs_f64()).sum::<f64>();
    let frames = samples.iter().map(|s| s.frames).sum::<u64>();
    let vcpus = samples.iter().map(|s| s.by_vcpu.len()).min().unwrap_or(0);
    let of_vcpu = |vcpu: usize| samples.iter().map(|s| s.by_vcpu[vcpu]).sum::<u64>() as f64 / count;
    let rate = frames.saturating_mul(PAGE_SIZE) as f64 / seconds;
    WindowSummary {
        window_ms: seconds / count * 1e3,
        windows: samples.len() as u32,
        frames: frames as f64 / count,
        least_frames: samples.iter().map(|s| s.frames).min().unwrap_or(0),
        most_frames: samples.iter().map(|s| s.frames).max().unwrap_or(0),
        dirty_rate_bytes_per_s: if seconds > 0.0 { rate as u64 } else { 0 },
        vcpu_frames: (0..vcpus).map(of_vcpu).collect(),
    }
}

fn is_steady(summary: &WindowSummary) -> bool {
    // The shortest windows are too short to judge: a guest's own timer may or may not fire in one.
    summary.window_ms < 200.0
        || summary.most_frames as f64
            <= summary.least_frames as f64 * UNSTEADY_FACTOR + UNSTEADY_MIN_FRAMES as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(nominal_ms: u64, ms: u64, frames: u64, by_vcpu: &[u64]) -> WindowSample {
        let length = Duration::from_millis(ms);
        WindowSample { nominal_ms, length, frames, by_vcpu: by_vcpu.to_vec() }
    }

    #[test]
    fn windows_of_one_length_are_averaged() {
        let all = [
            sample(250, 300, 40, &[30, 10]),
            sample(10, 10, 4, &[4, 0]),
            sample(250, 500, 60, &[50, 0]),
        ];
        let curve = by_length(&all);
        assert_eq!(curve.len(), 2);
        assert_eq!((curve[0].windows, curve[0].window_ms, curve[0].frames), (1, 10.0, 4.0));
        let long = &curve[1];
        assert_eq!((long.windows, long.window_ms, long.frames), (2, 400.0, 50.0));
        assert_eq!((long.least_frames, long.most_frames), (40, 60));
        assert_eq!(long.vcpu_frames, [40.0, 5.0]);
        assert_eq!(long.dirty_rate_bytes_per_s, 100 * 4096 * 10 / 8);
        assert!(is_steady(long));
        assert!(!is_steady(
            &by_length(&[sample(250, 250, 1000, &[]), sample(250, 250, 5000, &[])])[0]
        ));
        assert!(by_length(&[]).is_empty());
    }

    #[test]
    fn plan_needs_a_running_guest_to_itself() {
        let (vm, jobs) = crate::jobs::paused_guest();
        assert!(jobs.sample_writes().unwrap_err().to_string().contains("is paused"));
        jobs.resume().unwrap();
        let other = jobs.sampling.lock();
        assert!(jobs.sample_writes().unwrap_err().to_string().contains("being watched already"));
        drop(other);
        vm.stop("the test is over");
        assert!(jobs.sample_writes().unwrap_err().to_string().contains("has ended"));
    }
}
