//! The guest's throttle during pre-copy: measures each vCPU's writes in a pass, and applies the
//! throttle that [`judge_and_throttle`] returns.
//!
//! Dropping [`GuestThrottle`], on any path, ends the throttle.

use std::time::{Duration, Instant};

use driftline_dirty_tracker::PAGE_SIZE;
use driftline_guest::{GuestIdentity, VcpuWrites, WriteThrottle};

use crate::error::{Cause, ThrottleEffect, ThrottledVcpu};
use crate::policy::convergence::{Goals, Judgement, PassMeasurement, judge};
use crate::policy::throttle::{PassWrites, Throttle, judge_and_throttle};
use crate::report::{VcpuThrottle, ms, per_second};

/// The throttle of one guest's vCPUs.
#[must_use = "dropping this ends the throttle"]
pub(super) struct GuestThrottle<'g, G: GuestIdentity + WriteThrottle + ?Sized> {
    guest: &'g G,
    /// Whether the operator forbids a throttle.
    forbidden: bool,
    now: Throttle,
    /// The throttle of the last judgement, not applied yet.
    next: Throttle,
    /// Time at which the first throttle began.
    since: Option<Instant>,
    /// Counters before the migration.
    first: Vec<VcpuWrites>,
    /// Counters at the end of the last pass.
    last: Vec<VcpuWrites>,
    /// Frames that each vCPU dirtied during the last pass.
    dirtied: Vec<u64>,
    /// Time between the last two drains.
    window: Duration,
    /// Report of each vCPU, as of the last pass.
    figures: Vec<VcpuThrottle>,
}

impl<'g, G: GuestIdentity + WriteThrottle + ?Sized> GuestThrottle<'g, G> {
    /// Starts without a throttle. Unless `allowed`, none is ever applied.
    pub(super) fn new(guest: &'g G, allowed: bool) -> Self {
        let first = guest.vcpu_writes();
        Self {
            guest,
            forbidden: !allowed,
            now: Throttle::Off,
            next: Throttle::Off,
            since: None,
            last: first.clone(),
            dirtied: vec![0; first.len()],
            window: Duration::ZERO,
            figures: Vec::new(),
            first,
        }
    }

    /// Measures a pass, whose dirty frames were drained `window` after those of the previous one.
    pub(super) fn measure(&mut self, window: Duration) {
        let now = self.guest.vcpu_writes();
        let writes = now.iter().zip(&self.last);
        self.dirtied.clear();
        self.dirtied.extend(writes.map(|(n, l)| n.dirtied_frames.saturating_sub(l.dirtied_frames)));
        let vcpus = now.iter().zip(&self.first).zip(&self.dirtied).zip(0u32..);
        let figures = vcpus.map(|(((now, first), dirtied), vcpu)| {
            let throttled = now.throttled.saturating_sub(first.throttled);
            VcpuThrottle {
                vcpu,
                dirty_rate_bytes_per_s: per_second(dirtied.saturating_mul(PAGE_SIZE), window),
                throttled_ms: ms(throttled),
                throttled_percent: self.percent(throttled),
                most_bytes_per_s: None,
            }
        });
        self.figures = figures.collect();
        (self.last, self.window) = (now, window);
    }

    /// Returns `throttled` as a percentage of the time since the first throttle began.
    fn percent(&self, throttled: Duration) -> f64 {
        let since = self.since.map_or(Duration::ZERO, |since| since.elapsed());
        let part = throttled.as_secs_f64() / since.as_secs_f64();
        if part.is_finite() { (part * 100.0).min(100.0) } else { 0.0 }
    }

    /// Judges a pass after which `pending` frames are left. [`Self::adjust`] applies the throttle
    /// that follows from it.
    pub(super) fn judge(
        &mut self,
        goals: &Goals,
        passes: &[PassMeasurement],
        pending: u64,
        elapsed: Duration,
    ) -> Judgement {
        if self.forbidden {
            return judge(goals, passes, pending, elapsed);
        }
        let left = (pending, elapsed);
        let writes = PassWrites { dirtied: &self.dirtied, time: self.window };
        let (judgement, next) = judge_and_throttle(self.now, goals, passes, left, writes);
        self.next = next;
        judgement
    }

    /// Applies the throttle of the last judgement, because pre-copy continues.
    pub(super) fn adjust(&mut self) {
        let next = self.next;
        if next.rate() != self.now.rate() {
            let most = next.rate().map_or(0, |rate| rate.saturating_mul(PAGE_SIZE));
            tracing::info!(vm = %self.guest.vm_id(), ?next, most, "vCPUs are throttled");
            self.since.get_or_insert_with(Instant::now);
            self.guest.throttle(next.rate());
        }
        self.now = next;
    }

    /// Returns the figures of each vCPU as of the last pass; empty if the tracking mode does not
    /// tell vCPUs apart.
    pub(super) fn figures(&self) -> Vec<VcpuThrottle> {
        let most = self.now.rate().map(|rate| rate.saturating_mul(PAGE_SIZE));
        let with_most = |f: &VcpuThrottle| VcpuThrottle { most_bytes_per_s: most, ..*f };
        self.figures.iter().map(with_most).collect()
    }

    /// Adds the throttle's effect to a cause that is a lack of convergence.
    pub(super) fn explain(&self, cause: Cause) -> Cause {
        match cause {
            Cause::NotConverging { limit, .. } => {
                Cause::NotConverging { limit, throttle: Some(self.effect()) }
            }
            other => other,
        }
    }

    fn effect(&self) -> ThrottleEffect {
        if self.forbidden {
            return ThrottleEffect::Forbidden;
        }
        if self.first.is_empty() {
            return ThrottleEffect::NotMeasured;
        }
        let Some(rate) = self.now.rate() else { return ThrottleEffect::Off };
        // Read now, because an unfinished pass has no figures.
        let now = self.guest.vcpu_writes();
        let throttled =
            now.iter().zip(&self.first).map(|(n, f)| n.throttled.saturating_sub(f.throttled));
        let vcpus = (0u32..)
            .zip(throttled)
            .filter(|(_, throttled)| !throttled.is_zero())
            .map(|(vcpu, throttled)| ThrottledVcpu { vcpu, percent: self.percent(throttled) })
            .collect();
        ThrottleEffect::On { most_bytes_per_s: rate.saturating_mul(PAGE_SIZE), vcpus }
    }
}

impl<G: GuestIdentity + WriteThrottle + ?Sized> Drop for GuestThrottle<'_, G> {
    fn drop(&mut self) {
        if self.now != Throttle::Off {
            self.guest.throttle(None);
        }
    }
}
