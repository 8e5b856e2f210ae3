//! `POST /v1/migration/plan`: forecasts a migration of this guest, and checkpoints of it. Starts
//! neither.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use driftline_checkpoint::{CadenceForecast, cadence_forecast};
use driftline_migrate::forecast::{Forecast, ForecastConditions, WriteCurve, forecast};
use driftline_migrate::{Goals, MIN_BANDWIDTH};
use serde::{Deserialize, Serialize};

use super::fault::JsonBody;
use super::handler::{AppState, JsonAnswer, blocking};
use crate::jobs::WriteProfile;
use crate::model::{MAX_DOWNTIME_MS, at_least, at_most};

/// Assumed bandwidth of the link if the request gives none, in bytes/s: 10 Gbit/s.
pub(crate) const ASSUMED_BANDWIDTH: u64 = 1_250_000_000;
/// Intervals for which checkpoints are forecast, in ms.
const CADENCES_MS: [u64; 7] = [10, 25, 50, 100, 250, 500, 1000];

/// Body of `POST /v1/migration/plan`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanRequest {
    /// Downtime target, in ms; by default 300.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub downtime_ms: Option<u64>,
    /// Bandwidth of the link, in bytes/s; by default 10 Gbit/s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth_bytes_per_s: Option<u64>,
}

/// Whether a migration would converge.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PlanVerdict {
    /// It would converge with every vCPU at full speed.
    Converges,
    /// It would converge with throttled vCPUs.
    ConvergesThrottled,
    /// It would not converge.
    DoesNotConverge,
}

/// The answer to `POST /v1/migration/plan`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// The verdict in one word.
    pub verdict: PlanVerdict,
    /// Bandwidth of the link that the forecast used, in bytes/s.
    pub bandwidth_bytes_per_s: u64,
    /// Whether the bandwidth is an assumption because the request gave none.
    pub bandwidth_assumed: bool,
    /// Downtime target, in ms.
    pub downtime_target_ms: u64,
    /// Forecast for `send-migration` without other options.
    pub migration: Forecast,
    /// Forecast with `--no-throttle`, if that differs.
    pub without_throttle: Option<Forecast>,
    /// Whether vCPUs can be throttled: only if the writes of each vCPU are known.
    pub throttle_possible: bool,
    /// Whether post-copy is available for a guest that does not converge; never in this version.
    pub postcopy_offered: bool,
    /// The guest's observed behaviour.
    pub guest: WriteProfile,
    /// The cost of checkpoints, most frequent first.
    pub checkpoints: Vec<CadenceForecast>,
    /// The shortest of those intervals that the guest would bear, in ms, if there is one.
    pub checkpoint_every_ms: Option<u64>,
}

impl Plan {
    /// Computes the plan from the observed behaviour.
    pub fn new(request: &PlanRequest, profile: WriteProfile) -> Self {
        let curve = WriteCurve::new(&profile.windows(), profile.memory_frames);
        let bytes_per_s = request.bandwidth_bytes_per_s.unwrap_or(ASSUMED_BANDWIDTH);
        // The goals of `send-migration` without other options.
        let mut goals = Goals::default();
        if let Some(ms) = request.downtime_ms {
            goals.downtime = Duration::from_millis(ms);
        }
        let (populated, zeros) = (profile.populated_frames, profile.zero_frames);
        let throttle = true;
        let conditions = ForecastConditions { bytes_per_s, goals, throttle, populated, zeros };
        let migration = forecast(&conditions, &curve);
        let throttled = migration.most_bytes_per_s.is_some();
        let unthrottled = ForecastConditions { throttle: false, ..conditions };
        let cadence = |ms: &u64| {
            let every = Duration::from_millis(*ms);
            cadence_forecast(every, curve.frames(every))
        };
        let checkpoints: Vec<CadenceForecast> = CADENCES_MS.iter().map(cadence).collect();
        let bearable = CADENCES_MS.iter().zip(&checkpoints).find(|(_, c)| c.bearable);
        Self {
            verdict: match (migration.converges, throttled) {
                (true, false) => PlanVerdict::Converges,
                (true, true) => PlanVerdict::ConvergesThrottled,
                (false, _) => PlanVerdict::DoesNotConverge,
            },
            bandwidth_bytes_per_s: bytes_per_s,
            bandwidth_assumed: request.bandwidth_bytes_per_s.is_none(),
            downtime_target_ms: goals.downtime.as_millis().try_into().unwrap_or(u64::MAX),
            without_throttle: throttled.then(|| forecast(&unthrottled, &curve)),
            migration,
            throttle_possible: profile.curve.iter().any(|w| !w.vcpu_frames.is_empty()),
            postcopy_offered: false,
            checkpoint_every_ms: bearable.map(|(ms, _)| *ms),
            checkpoints,
            guest: profile,
        }
    }
}

pub(super) async fn plan(
    State(app): AppState,
    JsonBody(request): JsonBody<PlanRequest>,
) -> JsonAnswer<Plan> {
    let PlanRequest { downtime_ms, bandwidth_bytes_per_s: bandwidth } = request;
    downtime_ms.map_or(Ok(()), |ms| at_most("downtime_ms", ms, MAX_DOWNTIME_MS))?;
    bandwidth.map_or(Ok(()), |b| at_least("bandwidth_bytes_per_s", b, MIN_BANDWIDTH))?;
    let profile = blocking(app, |jobs| Ok(jobs.sample_writes()?)).await?;
    Ok(Json(Plan::new(&request, profile)))
}
