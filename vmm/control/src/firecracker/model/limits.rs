//! Rate limiters, and the entropy device, which has nothing else.

use serde::{Deserialize, Serialize};

/// A token bucket. Firecracker ignores unknown fields here.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TokenBucketConfig {
    /// Capacity, in bytes or operations.
    pub size: u64,
    /// Tokens that are spent first and never refilled.
    pub one_time_burst: Option<u64>,
    /// Time in which an empty bucket fills, in ms.
    pub refill_time: u64,
}

impl TokenBucketConfig {
    /// Returns the bucket as `GET /vm/config` shows it: a bucket without capacity or refill time
    /// does not exist, nor does an empty burst, nor a bucket whose refill time in ns exceeds 64
    /// bits.
    pub(crate) fn in_effect(self) -> Option<Self> {
        let one_time_burst = self.one_time_burst.filter(|&burst| burst != 0);
        let refill_ns = self.refill_time.checked_mul(1_000_000)?;
        (self.size != 0 && refill_ns != 0).then_some(Self { one_time_burst, ..self })
    }
}

/// Limits of a device's bandwidth and operations.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RateLimiterConfig {
    /// Limit of the bytes.
    pub bandwidth: Option<TokenBucketConfig>,
    /// Limit of the operations.
    pub ops: Option<TokenBucketConfig>,
}

impl RateLimiterConfig {
    /// Returns the limits as `GET /vm/config` shows them.
    pub(crate) fn in_effect(self) -> Option<Self> {
        let bandwidth = self.bandwidth.and_then(TokenBucketConfig::in_effect);
        let ops = self.ops.and_then(TokenBucketConfig::in_effect);
        (bandwidth.is_some() || ops.is_some()).then_some(Self { bandwidth, ops })
    }
}

/// Body of `PUT /entropy`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EntropyDeviceConfig {
    /// Limits of the device.
    pub rate_limiter: Option<RateLimiterConfig>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bucket_without_size_or_refill_is_off() {
        let bucket =
            |size, refill_time| TokenBucketConfig { size, one_time_burst: Some(0), refill_time };
        let limits = |bucket| RateLimiterConfig { bandwidth: Some(bucket), ops: None };
        assert_eq!(limits(bucket(0, 100)).in_effect(), None);
        assert_eq!(limits(bucket(100, 0)).in_effect(), None);
        assert_eq!(limits(bucket(100, u64::MAX / 1_000_000 + 1)).in_effect(), None);
        let shown = limits(bucket(100, 50)).in_effect().and_then(|limits| limits.bandwidth);
        assert_eq!(shown, Some(TokenBucketConfig { one_time_burst: None, ..bucket(100, 50) }));
    }
}
