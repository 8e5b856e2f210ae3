//! `POST /migration/plan`: what a migration of this guest, and checkpoints of it, would come to.
//! Nothing is begun.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use driftline_checkpoint::{CadenceForecast, cadence_forecast};
use driftline_migrate::convergence::Goals;
use driftline_migrate::forecast::{Conditions, Curve, Forecast, forecast};
use serde::{Deserialize, Serialize};

use super::fault::{Fault, Input};
use super::handler::{Answer, Shared, blocking};
use crate::jobs::Watched;
use crate::model::MAX_DOWNTIME_MS;

/// What a link is taken to carry if nothing is said, bytes/s: 10 Gbit/s.
pub const ASSUMED_BANDWIDTH: u64 = 1_250_000_000;
/// Intervals of checkpoints that are looked at, ms.
const CADENCES_MS: [u64; 7] = [10, 25, 50, 100, 250, 500, 1000];

/// `POST /migration/plan`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanRequest {
    /// The pause that the guest may notice; 300.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub downtime_ms: Option<u64>,
    /// What the link carries, bytes/s; [`ASSUMED_BANDWIDTH`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth_bytes_per_s: Option<u64>,
}

/// Whether a migration would end by itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PlanVerdict {
    /// It would, with every vCPU at full speed.
    Converges,
    /// It would, with vCPUs held back.
    ConvergesThrottled,
    /// It would not.
    DoesNotConverge,
}

/// The answer.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// In a word.
    pub verdict: PlanVerdict,
    /// What the link was taken to carry, bytes/s.
    pub bandwidth_bytes_per_s: u64,
    /// Because nobody said.
    pub bandwidth_assumed: bool,
    /// The pause that the guest may notice, ms.
    pub downtime_target_ms: u64,
    /// As `send-migration` would go without other options.
    pub migration: Forecast,
    /// As it would go with `--no-throttle`, if that is another way.
    pub without_throttle: Option<Forecast>,
    /// Whether who writes is known, so that vCPUs can be held back.
    pub throttle_possible: bool,
    /// Whether postcopy is there for a guest that does not converge: not in this version.
    pub postcopy_offered: bool,
    /// What the guest was seen to do.
    pub guest: Watched,
    /// What checkpoints would cost, the most frequent first.
    pub checkpoints: Vec<CadenceForecast>,
    /// The most frequent of them that the guest would bear, if there is one.
    pub checkpoint_every_ms: Option<u64>,
}

impl Plan {
    /// What follows from what was `seen`.
    pub fn new(request: &PlanRequest, seen: Watched) -> Self {
        let curve = Curve::new(&seen.windows(), seen.memory_frames);
        let bytes_per_s = request.bandwidth_bytes_per_s.unwrap_or(ASSUMED_BANDWIDTH);
        // What `send-migration` aims at without other options.
        let mut goals = Goals::default();
        if let Some(ms) = request.downtime_ms {
            goals.downtime = Duration::from_millis(ms);
        }
        let (populated, zeros) = (seen.populated_frames, seen.zero_frames);
        let throttle = true;
        let conditions = Conditions { bytes_per_s, goals, throttle, populated, zeros };
        let migration = forecast(&conditions, &curve);
        let held = migration.most_bytes_per_s.is_some();
        let free = Conditions { throttle: false, ..conditions };
        let cadence = |ms: &u64| {
            let every = Duration::from_millis(*ms);
            cadence_forecast(every, curve.frames(every))
        };
        let checkpoints: Vec<CadenceForecast> = CADENCES_MS.iter().map(cadence).collect();
        let borne = CADENCES_MS.iter().zip(&checkpoints).find(|(_, c)| c.bearable);
        Self {
            verdict: match (migration.converges, held) {
                (true, false) => PlanVerdict::Converges,
                (true, true) => PlanVerdict::ConvergesThrottled,
                (false, _) => PlanVerdict::DoesNotConverge,
            },
            bandwidth_bytes_per_s: bytes_per_s,
            bandwidth_assumed: request.bandwidth_bytes_per_s.is_none(),
            downtime_target_ms: goals.downtime.as_millis().try_into().unwrap_or(u64::MAX),
            without_throttle: held.then(|| forecast(&free, &curve)),
            migration,
            throttle_possible: seen.curve.iter().any(|w| !w.vcpu_frames.is_empty()),
            postcopy_offered: false,
            checkpoint_every_ms: borne.map(|(ms, _)| *ms),
            checkpoints,
            guest: seen,
        }
    }
}

pub(super) async fn plan(State(app): Shared, Input(request): Input<PlanRequest>) -> Answer<Plan> {
    check(&request).map_err(Fault::new)?;
    let seen = blocking(app, |jobs| jobs.watch().map_err(Fault::new)).await?;
    Ok(Json(Plan::new(&request, seen)))
}

fn check(request: &PlanRequest) -> Result<(), String> {
    if let Some(ms) = request.downtime_ms.filter(|ms| *ms > MAX_DOWNTIME_MS) {
        return Err(format!("downtime_ms is {ms}; it is at most {MAX_DOWNTIME_MS}"));
    }
    if let Some(rate) =
        request.bandwidth_bytes_per_s.filter(|rate| *rate < driftline_migrate::MIN_BANDWIDTH)
    {
        let least = driftline_migrate::MIN_BANDWIDTH;
        return Err(format!("bandwidth_bytes_per_s is {rate}; it is at least {least}"));
    }
    Ok(())
}
