//! JSON of rate limits: Firecracker's, in both APIs.

use driftline_machine::config::{LimitChange, LimitsChange, RateLimit, RateLimits};
use serde::{Deserialize, Deserializer, Serialize};

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
    /// Returns the bucket as Firecracker shows it: a bucket without capacity or refill time does
    /// not exist, nor does an empty burst, nor a bucket whose refill time in ns exceeds 64 bits.
    pub(crate) fn in_effect(self) -> Option<Self> {
        let one_time_burst = self.one_time_burst.filter(|&burst| burst != 0);
        let refill_ns = self.refill_time.checked_mul(1_000_000)?;
        (self.size != 0 && refill_ns != 0).then_some(Self { one_time_burst, ..self })
    }

    /// Returns how a limit changes. `given` is the requested bucket, if there is one.
    fn change(given: Option<Self>) -> LimitChange {
        match given.map(Self::in_effect) {
            None => LimitChange::Keep,
            Some(None) => LimitChange::Remove,
            Some(Some(bucket)) => LimitChange::Set(bucket.into()),
        }
    }
}

impl From<TokenBucketConfig> for RateLimit {
    fn from(bucket: TokenBucketConfig) -> Self {
        let TokenBucketConfig { size, one_time_burst, refill_time } = bucket;
        Self { size, refill_ms: refill_time, one_time_burst: one_time_burst.unwrap_or(0) }
    }
}

impl From<RateLimit> for TokenBucketConfig {
    fn from(limit: RateLimit) -> Self {
        let RateLimit { size, refill_ms, one_time_burst } = limit;
        let one_time_burst = (one_time_burst > 0).then_some(one_time_burst);
        Self { size, one_time_burst, refill_time: refill_ms }
    }
}

/// Limits of a device, or of one direction of a network interface.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RateLimiterConfig {
    /// Limit of the bytes.
    pub bandwidth: Option<TokenBucketConfig>,
    /// Limit of the operations.
    pub ops: Option<TokenBucketConfig>,
}

impl RateLimiterConfig {
    /// Returns the limits as Firecracker shows them.
    pub(crate) fn in_effect(self) -> Option<Self> {
        let bandwidth = self.bandwidth.and_then(TokenBucketConfig::in_effect);
        let ops = self.ops.and_then(TokenBucketConfig::in_effect);
        (bandwidth.is_some() || ops.is_some()).then_some(Self { bandwidth, ops })
    }

    /// Returns the limits of a device as an answer shows them: `None` if there are none.
    pub(crate) fn shown(limits: &RateLimits) -> Option<Self> {
        let RateLimits { bandwidth, operations } = *limits;
        let (bandwidth, ops) = (bandwidth.map(Into::into), operations.map(Into::into));
        (!limits.is_none()).then_some(Self { bandwidth, ops })
    }

    /// Returns the change of a started device's limits: a bucket that is absent stays, and one that
    /// is off removes the limit.
    pub(crate) fn change(given: Option<Self>) -> LimitsChange {
        given.map_or_else(LimitsChange::default, |Self { bandwidth, ops }| LimitsChange {
            bandwidth: TokenBucketConfig::change(bandwidth),
            operations: TokenBucketConfig::change(ops),
        })
    }
}

/// A token bucket of a file in which each field must be known.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CheckedBucket {
    size: u64,
    one_time_burst: Option<u64>,
    refill_time: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CheckedLimiter {
    bandwidth: Option<CheckedBucket>,
    ops: Option<CheckedBucket>,
}

impl From<CheckedBucket> for TokenBucketConfig {
    fn from(CheckedBucket { size, one_time_burst, refill_time }: CheckedBucket) -> Self {
        Self { size, one_time_burst, refill_time }
    }
}

/// Reads limits and refuses a bucket's unknown fields, for files that only Driftline reads.
pub(super) fn checked<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<RateLimiterConfig>, D::Error> {
    let limiter = Option::<CheckedLimiter>::deserialize(from)?;
    Ok(limiter.map(|CheckedLimiter { bandwidth, ops }| RateLimiterConfig {
        bandwidth: bandwidth.map(Into::into),
        ops: ops.map(Into::into),
    }))
}

impl From<RateLimiterConfig> for RateLimits {
    fn from(RateLimiterConfig { bandwidth, ops }: RateLimiterConfig) -> Self {
        Self { bandwidth: bandwidth.map(RateLimit::from), operations: ops.map(RateLimit::from) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bucket(size: u64, refill_time: u64) -> TokenBucketConfig {
        TokenBucketConfig { size, one_time_burst: Some(0), refill_time }
    }

    #[test]
    fn bucket_without_size_or_refill_is_off() {
        let limits = |bucket| RateLimiterConfig { bandwidth: Some(bucket), ops: None };
        assert_eq!(limits(bucket(0, 100)).in_effect(), None);
        assert_eq!(limits(bucket(100, 0)).in_effect(), None);
        assert_eq!(limits(bucket(100, u64::MAX / 1_000_000 + 1)).in_effect(), None);
        let shown = limits(bucket(100, 50)).in_effect().and_then(|limits| limits.bandwidth);
        assert_eq!(shown, Some(TokenBucketConfig { one_time_burst: None, ..bucket(100, 50) }));
    }

    #[test]
    fn only_given_buckets_change_limits() {
        assert_eq!(RateLimiterConfig::change(None), LimitsChange::default());
        let given = RateLimiterConfig { bandwidth: Some(bucket(0, 100)), ops: None };
        let (bandwidth, operations) = (LimitChange::Remove, LimitChange::Keep);
        let expected = LimitsChange { bandwidth, operations };
        assert_eq!(RateLimiterConfig::change(Some(given)), expected);
        let given = RateLimiterConfig { bandwidth: None, ops: Some(bucket(7, 9)) };
        let limit = RateLimit { size: 7, refill_ms: 9, one_time_burst: 0 };
        let (bandwidth, operations) = (LimitChange::Keep, LimitChange::Set(limit));
        let expected = LimitsChange { bandwidth, operations };
        assert_eq!(RateLimiterConfig::change(Some(given)), expected);
    }

    #[test]
    fn limits_are_shown_as_they_were_given() {
        let ops = Some(TokenBucketConfig { one_time_burst: Some(3), ..bucket(1, 2) });
        let given = RateLimiterConfig { bandwidth: None, ops };
        assert_eq!(RateLimiterConfig::shown(&given.into()), Some(given));
        assert_eq!(RateLimiterConfig::shown(&RateLimits::default()), None);
    }
}
