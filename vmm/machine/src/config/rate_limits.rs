//! Limits of the bandwidth and of the operations of a device.

use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};

use super::error::ConfigError;
use super::spec::{GivenOptions, SpecError};
use crate::size::{SIZE_FORMS, parse_size};

/// Nanoseconds in a millisecond.
const NS_PER_MS: u64 = 1_000_000;
/// Longest refill time, in ms: its nanoseconds fit into 64 bits.
const MAX_REFILL_MS: u64 = u64::MAX / NS_PER_MS;

/// A limit as a token bucket. One token is one byte or one operation. The bucket starts full, and
/// refills at `size` tokens per `refill_ms`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RateLimit {
    /// Capacity of the bucket in tokens, at least 1.
    pub size: u64,
    /// Time in which an empty bucket becomes full, in ms, from 1 to about 5.8e11 (584 years).
    pub refill_ms: u64,
    /// Tokens that are taken before those of the bucket, and are never refilled.
    pub one_time_burst: u64,
}

impl RateLimit {
    /// Returns a limit of `rate` tokens per second. The bucket holds those of an eighth of a
    /// second, or of a whole second if 8 does not divide the rate.
    pub fn per_second(rate: u64) -> Self {
        let (size, refill_ms) = match rate.is_multiple_of(8) {
            true => (rate / 8, 125),
            false => (rate, 1000),
        };
        Self { size, refill_ms, one_time_burst: 0 }
    }

    /// Returns the refill time in nanoseconds.
    pub(crate) fn refill_ns(&self) -> u64 {
        self.refill_ms.saturating_mul(NS_PER_MS)
    }

    /// Checks a limit of `what`, whose tokens are `unit`.
    fn check(&self, what: &str, unit: &'static str) -> Result<(), ConfigError> {
        let size = |part, value, unit, wanted| Err(ConfigError::Size { part, value, unit, wanted });
        if self.size == 0 {
            return size(format!("the bucket of {what}"), 0, unit, "at least 1".to_owned());
        }
        if !(1..=MAX_REFILL_MS).contains(&self.refill_ms) {
            let (part, wanted) =
                (format!("the refill time of {what}"), format!("1 to {MAX_REFILL_MS}"));
            return size(part, self.refill_ms, "ms", wanted);
        }
        Ok(())
    }
}

/// Limits of a device, or of one direction of a network interface. `None` means no limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct RateLimits {
    /// Limit of the bytes that requests move.
    pub bandwidth: Option<RateLimit>,
    /// Limit of the number of requests.
    pub operations: Option<RateLimit>,
}

impl RateLimits {
    /// Returns whether there is no limit.
    pub fn is_none(&self) -> bool {
        self.bandwidth.is_none() && self.operations.is_none()
    }

    /// Checks the limits of `device`.
    pub(crate) fn check(&self, device: &str) -> Result<(), ConfigError> {
        let check = |limit: &Option<RateLimit>, kind, unit| {
            let what = format!("the {kind} limit of {device}");
            limit.as_ref().map_or(Ok(()), |limit| limit.check(&what, unit))
        };
        check(&self.bandwidth, "bandwidth", "bytes")?;
        check(&self.operations, "operations", "operations")
    }
}

/// Reads the option `key`, a number of bytes per second.
pub(super) fn read_bandwidth(
    options: &GivenOptions<'_>,
    key: &str,
) -> Result<Option<RateLimit>, SpecError> {
    let read = |text: &str| {
        let rate = parse_size(text).filter(|rate| *rate > 0);
        let form = format!("{SIZE_FORMS}; at least 1 byte per second");
        rate.map(RateLimit::per_second)
            .ok_or_else(|| ConfigError::malformed("bandwidth", text, form).into())
    };
    options.get(key).map(read).transpose()
}

/// Reads the option `key`, a number of operations per second.
pub(super) fn read_operations(
    options: &GivenOptions<'_>,
    key: &str,
) -> Result<Option<RateLimit>, SpecError> {
    let rate = options.number::<NonZeroU64>(key, "at least 1")?;
    Ok(rate.map(|rate| RateLimit::per_second(rate.get())))
}

/// A change of one limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LimitChange {
    /// The limit and its tokens stay.
    #[default]
    Keep,
    /// The limit is removed.
    Remove,
    /// This limit holds, with a full bucket.
    Set(RateLimit),
}

impl LimitChange {
    fn limit(self) -> Option<RateLimit> {
        match self {
            Self::Set(limit) => Some(limit),
            Self::Keep | Self::Remove => None,
        }
    }
}

/// A change of the limits of a running device, or of one direction of a network interface.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LimitsChange {
    /// The limit of the bytes.
    pub bandwidth: LimitChange,
    /// The limit of the number of requests.
    pub operations: LimitChange,
}

impl LimitsChange {
    /// Checks the limits that are set for the device with this name.
    pub(crate) fn check(&self, device: &str) -> Result<(), ConfigError> {
        let (bandwidth, operations) = (self.bandwidth.limit(), self.operations.limit());
        RateLimits { bandwidth, operations }.check(&format!("device \"{device}\""))
    }
}

/// Limits of a network interface, one for each direction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct NetLimits {
    /// Limits of the frames that the guest receives. They wait in the tap.
    pub receive: RateLimits,
    /// Limits of the frames that the guest sends.
    pub transmit: RateLimits,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_exact() {
        for rate in [1, 7, 8, 1000, 1001, 10 << 20, u64::MAX] {
            let RateLimit { size, refill_ms, .. } = RateLimit::per_second(rate);
            let refilled = u128::from(size) * 1000;
            assert_eq!(refilled, u128::from(rate) * u128::from(refill_ms), "{rate} a second");
        }
    }

    #[test]
    fn impossible_limits_are_refused_by_value() {
        let limit = RateLimit { size: 1, refill_ms: MAX_REFILL_MS, one_time_burst: u64::MAX };
        let limits = RateLimits { bandwidth: Some(limit), operations: Some(limit) };
        assert_eq!(limits.check("disk \"a\""), Ok(()));
        assert_eq!(limit.refill_ns(), MAX_REFILL_MS * NS_PER_MS);
        let refused = |limits: RateLimits| limits.check("disk \"a\"").unwrap_err().to_string();
        let empty = Some(RateLimit { size: 0, ..limit });
        assert_eq!(
            refused(RateLimits { bandwidth: empty, ..limits }),
            "the bucket of the bandwidth limit of disk \"a\" has 0 bytes, not at least 1"
        );
        for refill_ms in [0, MAX_REFILL_MS + 1, u64::MAX] {
            let operations = Some(RateLimit { refill_ms, ..limit });
            assert_eq!(
                refused(RateLimits { operations, ..limits }),
                format!(
                    "the refill time of the operations limit of disk \"a\" has {refill_ms} ms, not \
                     1 to {MAX_REFILL_MS}"
                )
            );
        }
    }
}
