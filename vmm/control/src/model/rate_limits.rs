//! JSON of rate limits, in Firecracker's format.

use driftline_machine::config::{RateLimit, RateLimits};
use serde::{Deserialize, Serialize};

/// Limits of a device, or of one direction of a network interface.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RateLimiterSettings {
    /// Limit of the bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<BucketSettings>,
    /// Limit of the number of requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ops: Option<BucketSettings>,
}

/// A limit as a token bucket.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BucketSettings {
    /// Capacity, in bytes or requests.
    pub size: u64,
    /// Time in which an empty bucket becomes full, in ms.
    pub refill_time: u64,
    /// Tokens that are taken first, and never refilled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub one_time_burst: Option<u64>,
}

impl RateLimiterSettings {
    /// Returns the limits as an answer shows them: `None` if there are none.
    pub(super) fn shown(limits: &RateLimits) -> Option<Self> {
        let bucket = |limit: RateLimit| {
            let RateLimit { size, refill_ms, one_time_burst } = limit;
            let one_time_burst = (one_time_burst > 0).then_some(one_time_burst);
            BucketSettings { size, refill_time: refill_ms, one_time_burst }
        };
        let RateLimits { bandwidth, operations } = limits;
        (!limits.is_none())
            .then(|| Self { bandwidth: bandwidth.map(bucket), ops: operations.map(bucket) })
    }
}

impl From<RateLimiterSettings> for RateLimits {
    fn from(settings: RateLimiterSettings) -> Self {
        let limit = |bucket: BucketSettings| {
            let BucketSettings { size, refill_time, one_time_burst } = bucket;
            let one_time_burst = one_time_burst.unwrap_or(0);
            RateLimit { size, refill_ms: refill_time, one_time_burst }
        };
        let RateLimiterSettings { bandwidth, ops } = settings;
        Self { bandwidth: bandwidth.map(limit), operations: ops.map(limit) }
    }
}
