//! The entropy device, which has nothing but limits.

use serde::{Deserialize, Serialize};

use crate::model::RateLimiterConfig;

/// Body of `PUT /entropy`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EntropyDeviceConfig {
    /// Limits of the device.
    pub rate_limiter: Option<RateLimiterConfig>,
}
