//! Token buckets that limit the bytes and the operations of a device. Pure: the caller gives the
//! time, in nanoseconds of a clock that does not go backwards.
//!
//! ```text
//!  request of n tokens -> one-time burst, until it is used up -> bucket: refills with time, up to
//!                                                                its size
//! ```
//!
//! A request waits until the bucket has its tokens. A request of more tokens than the bucket's size
//! would wait for ever. It is therefore admitted as soon as the bucket has no debt, and leaves a
//! debt that refilling pays before the next request. The requests that are admitted within any time
//! `t` therefore take at most the burst, the size, what is refilled in `t`, and one request of more
//! tokens than the size.

use serde::{Deserialize, Serialize};

use super::error::StateError;
use super::misfit::DeviceMisfit;
use crate::config::{LimitChange, LimitsChange, RateLimit, RateLimits};

/// One bucket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct TokenBucket {
    limit: RateLimit,
    /// Tokens that the bucket lacks, times the refill time in nanoseconds. It is 0 if the bucket is
    /// full, and more than [`capacity`](Self::capacity) if the bucket is in debt. In this unit a
    /// nanosecond refills exactly `size`, so nothing is rounded.
    lacking: u128,
    /// Tokens left of the one-time burst.
    burst_left: u64,
    /// Time of the last update of `lacking`, in nanoseconds.
    at_ns: u64,
}

impl TokenBucket {
    /// Returns a full bucket.
    pub(super) fn new(limit: RateLimit, now_ns: u64) -> Self {
        Self { limit, lacking: 0, burst_left: limit.one_time_burst, at_ns: now_ns }
    }

    /// Returns the value of `lacking` for an empty bucket.
    fn capacity(&self) -> u128 {
        u128::from(self.limit.size) * u128::from(self.limit.refill_ns())
    }

    /// Adds the tokens that were refilled by `now_ns`.
    fn refill(&mut self, now_ns: u64) {
        let elapsed = u128::from(now_ns.saturating_sub(self.at_ns));
        self.lacking = self.lacking.saturating_sub(elapsed * u128::from(self.limit.size));
        self.at_ns = self.at_ns.max(now_ns);
    }

    /// Returns how many of `tokens` come from the bucket, and not from the burst.
    fn bucket_part(&self, tokens: u64) -> u64 {
        tokens.saturating_sub(self.burst_left)
    }

    /// Returns the time until `tokens` can be taken, in nanoseconds.
    fn wait_ns(&self, tokens: u64) -> u64 {
        let needed = self.bucket_part(tokens);
        if needed == 0 {
            return 0;
        }
        let most = match needed <= self.limit.size {
            true => self.capacity() - u128::from(needed) * u128::from(self.limit.refill_ns()),
            false => self.capacity(),
        };
        let wait = self.lacking.saturating_sub(most).div_ceil(u128::from(self.limit.size.max(1)));
        u64::try_from(wait).unwrap_or(u64::MAX)
    }

    /// Takes `tokens`.
    fn take(&mut self, tokens: u64) {
        let needed = self.bucket_part(tokens);
        self.burst_left -= tokens - needed;
        // Only a debt that takes centuries to pay can be cut short.
        let more = u128::from(needed) * u128::from(self.limit.refill_ns());
        self.lacking = self.lacking.saturating_add(more);
    }
}

/// A bucket in a saved state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct SavedBucket {
    limit: RateLimit,
    /// See [`TokenBucket`].
    lacking: u128,
    burst_left: u64,
}

impl SavedBucket {
    /// Returns the bucket. Its values are hostile.
    fn restored(&self, now_ns: u64) -> Result<TokenBucket, StateError> {
        let Self { limit, lacking, burst_left } = *self;
        let bucket = TokenBucket { limit, lacking, burst_left, at_ns: now_ns };
        // A request has at most u32::MAX bytes, so no device leaves a larger debt.
        let largest = u128::from(u32::MAX) * u128::from(limit.refill_ns());
        let most = bucket.capacity().saturating_add(largest);
        if lacking > most {
            return Err(DeviceMisfit::Bucket { size: limit.size, lacking, most }.into());
        }
        if burst_left > limit.one_time_burst {
            let (left, whole) = (burst_left, limit.one_time_burst);
            return Err(DeviceMisfit::Burst { left, whole }.into());
        }
        Ok(bucket)
    }
}

/// A limiter in a saved state: its limits, which may have changed since the guest's start, and the
/// tokens. The time between save and restore refills nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(super) struct SavedLimiter {
    bandwidth: Option<SavedBucket>,
    operations: Option<SavedBucket>,
}

#[cfg(test)]
impl SavedLimiter {
    /// Returns a state whose fields all differ.
    pub(super) fn example() -> Self {
        let limit = RateLimit { size: 300, refill_ms: 100, one_time_burst: 7 };
        let bandwidth = Some(SavedBucket { limit, lacking: 1 << 40, burst_left: 5 });
        Self { bandwidth, operations: None }
    }
}

/// The buckets of a device, or of one direction of a network interface.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct DeviceRateLimiter {
    bandwidth: Option<TokenBucket>,
    operations: Option<TokenBucket>,
}

impl DeviceRateLimiter {
    /// Returns a limiter with full buckets.
    pub(super) fn new(limits: RateLimits, now_ns: u64) -> Self {
        let bucket = |limit: Option<RateLimit>| limit.map(|limit| TokenBucket::new(limit, now_ns));
        Self { bandwidth: bucket(limits.bandwidth), operations: bucket(limits.operations) }
    }

    /// Returns whether there is no limit.
    pub(super) fn is_off(&self) -> bool {
        self.bandwidth.is_none() && self.operations.is_none()
    }

    /// Returns the limits.
    pub(super) fn limits(&self) -> RateLimits {
        let limit = |bucket: Option<TokenBucket>| bucket.map(|bucket| bucket.limit);
        RateLimits { bandwidth: limit(self.bandwidth), operations: limit(self.operations) }
    }

    /// Changes the limits.
    pub(super) fn change(&mut self, changes: &LimitsChange, now_ns: u64) {
        let change = |bucket: &mut Option<TokenBucket>, change| match change {
            LimitChange::Keep => {}
            LimitChange::Remove => *bucket = None,
            LimitChange::Set(limit) => *bucket = Some(TokenBucket::new(limit, now_ns)),
        };
        change(&mut self.bandwidth, changes.bandwidth);
        change(&mut self.operations, changes.operations);
    }

    /// Returns the state at `now_ns`.
    pub(super) fn save(&self, now_ns: u64) -> SavedLimiter {
        let save = |bucket: Option<TokenBucket>| {
            bucket.map(|mut bucket| {
                bucket.refill(now_ns);
                let TokenBucket { limit, lacking, burst_left, .. } = bucket;
                SavedBucket { limit, lacking, burst_left }
            })
        };
        SavedLimiter { bandwidth: save(self.bandwidth), operations: save(self.operations) }
    }

    /// Returns the saved limiter; none of its tokens are refilled between the save and `now_ns`.
    /// `device` is its name in errors. The state is hostile.
    pub(super) fn restored(
        saved: &SavedLimiter,
        now_ns: u64,
        device: &str,
    ) -> Result<Self, StateError> {
        let restore = |bucket: &Option<SavedBucket>| {
            bucket.as_ref().map(|bucket| bucket.restored(now_ns)).transpose()
        };
        let restored =
            Self { bandwidth: restore(&saved.bandwidth)?, operations: restore(&saved.operations)? };
        restored.limits().check(device)?;
        Ok(restored)
    }

    /// Takes the tokens of one operation that moves `bytes`.
    ///
    /// # Errors
    ///
    /// Takes nothing if there are too few, and returns the time after which there are enough, in
    /// nanoseconds.
    pub(super) fn take(&mut self, bytes: u64, now_ns: u64) -> Result<(), u64> {
        let needs = [(&mut self.operations, 1), (&mut self.bandwidth, bytes)];
        let mut buckets = needs.map(|(bucket, tokens)| (bucket.as_mut(), tokens));
        let mut wait_ns = 0;
        for (bucket, tokens) in &mut buckets {
            if let Some(bucket) = bucket {
                bucket.refill(now_ns);
                wait_ns = wait_ns.max(bucket.wait_ns(*tokens));
            }
        }
        if wait_ns > 0 {
            return Err(wait_ns);
        }
        for (bucket, tokens) in buckets {
            if let Some(bucket) = bucket {
                bucket.take(tokens);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    /// A bucket that adds tokens nanosecond by nanosecond, in fractions of a token.
    struct ModelBucket {
        size: i128,
        refill_ns: i128,
        burst: i128,
        /// Tokens times the refill time; negative is a debt.
        level: i128,
        now_ns: u64,
    }

    impl ModelBucket {
        fn new(limit: RateLimit) -> Self {
            let (size, refill_ns) = (i128::from(limit.size), i128::from(limit.refill_ns()));
            let burst = i128::from(limit.one_time_burst);
            Self { size, refill_ns, burst, level: size * refill_ns, now_ns: 0 }
        }

        fn take(&mut self, tokens: u64, now_ns: u64) -> bool {
            self.level += i128::from(now_ns - self.now_ns) * self.size;
            self.level = self.level.min(self.size * self.refill_ns);
            self.now_ns = now_ns;
            let needed = (i128::from(tokens) - self.burst).max(0);
            let cost = needed * self.refill_ns;
            let admits = match needed {
                0 => true,
                _ if needed > self.size => self.level >= 0,
                _ => self.level >= cost,
            };
            if admits {
                self.burst -= i128::from(tokens) - needed;
                self.level -= cost;
            }
            admits
        }
    }

    fn limit() -> impl Strategy<Value = RateLimit> {
        (1u64..2000, 1u64..50, prop_oneof![Just(0), 1u64..5000]).prop_map(
            |(size, refill_ms, one_time_burst)| RateLimit { size, refill_ms, one_time_burst },
        )
    }

    fn bandwidth(limit: RateLimit) -> DeviceRateLimiter {
        DeviceRateLimiter::new(RateLimits { bandwidth: Some(limit), operations: None }, 0)
    }

    proptest! {
        #[test]
        fn bucket_agrees_with_its_model(
            limit in limit(),
            steps in prop::collection::vec((0u64..20_000_000, 0u64..3000), 1..200),
        ) {
            let (mut limiter, mut model) = (bandwidth(limit), ModelBucket::new(limit));
            let mut now_ns = 0;
            for (later_ns, tokens) in steps {
                now_ns += later_ns;
                let taken = limiter.take(tokens, now_ns);
                prop_assert_eq!(taken.is_ok(), model.take(tokens, now_ns));
                if let Err(wait_ns) = taken {
                    let early = limiter.clone_at(tokens, now_ns + wait_ns - 1);
                    prop_assert_eq!(early, Err(1), "a nanosecond too early");
                    prop_assert_eq!(limiter.clone_at(tokens, now_ns + wait_ns), Ok(()));
                }
            }
        }

        /// A driver that always asks gets the rate, and no window of time has more.
        #[test]
        fn admitted_bytes_follow_the_rate(
            limit in limit(),
            sizes in prop::collection::vec(1u64..3000, 50..200),
        ) {
            let (mut limiter, mut now_ns, mut admitted) = (bandwidth(limit), 0, VecDeque::new());
            for bytes in &sizes {
                if let Err(wait_ns) = limiter.take(*bytes, now_ns) {
                    now_ns += wait_ns;
                    prop_assert_eq!(limiter.take(*bytes, now_ns), Ok(()));
                }
                admitted.push_back((now_ns, *bytes));
            }
            let (size, largest) = (limit.size, *sizes.iter().max().unwrap_or(&0));
            let above_size = u128::from(if largest > size { largest } else { 0 });
            while let Some((from_ns, _)) = admitted.front().copied() {
                let mut sum = 0;
                for (at_ns, bytes) in &admitted {
                    sum += u128::from(*bytes);
                    let refilled = u128::from(at_ns - from_ns) * u128::from(limit.size)
                        / u128::from(limit.refill_ns());
                    let most =
                        u128::from(limit.one_time_burst) + u128::from(size) + refilled + above_size;
                    prop_assert!(sum <= most, "{sum} bytes, and {most} are allowed");
                }
                admitted.pop_front();
            }
            let sum: u128 = sizes.iter().map(|bytes| u128::from(*bytes)).sum();
            let refilled =
                u128::from(now_ns) * u128::from(limit.size) / u128::from(limit.refill_ns());
            let most_at_once = u128::from(size.max(largest));
            prop_assert!(sum + most_at_once >= refilled, "it waits longer than it has to");
        }

        #[test]
        fn no_limit_overflows(
            (size, refill_ms, one_time_burst) in any::<(u64, u64, u64)>(),
            steps in prop::collection::vec(any::<(u64, u64)>(), 1..50),
        ) {
            let limit = Some(RateLimit { size, refill_ms, one_time_burst });
            let limits = RateLimits { bandwidth: limit, operations: limit };
            let mut limiter = DeviceRateLimiter::new(limits, 0);
            for (now_ns, bytes) in steps {
                let _ = limiter.take(bytes, now_ns);
            }
        }
    }

    impl DeviceRateLimiter {
        /// Returns what [`take`](Self::take) would return.
        fn clone_at(self, bytes: u64, now_ns: u64) -> Result<(), u64> {
            { self }.take(bytes, now_ns)
        }
    }

    #[test]
    fn extreme_limits_do_not_overflow() {
        for (size, refill_ms) in [(0, 0), (1, 0), (0, 1), (1, u64::MAX), (u64::MAX, u64::MAX)] {
            let limit = RateLimit { size, refill_ms, one_time_burst: 0 };
            let mut limiter = bandwidth(limit);
            for now_ns in [0, 1, u64::MAX, 0] {
                let _ = limiter.take(u64::MAX, now_ns);
                let _ = limiter.take(1, now_ns);
            }
        }
    }

    #[test]
    fn saved_tokens_are_restored() {
        let limit = |size| Some(RateLimit { size, refill_ms: 10, one_time_burst: 50 });
        let limits = RateLimits { bandwidth: limit(100), operations: limit(7) };
        let mut limiter = DeviceRateLimiter::new(limits, 0);
        assert_eq!(limiter.take(320, 0), Ok(()));
        let saved = limiter.save(1_000_000);
        // The clock of the next host shows another time.
        let mut restored = DeviceRateLimiter::restored(&saved, 77, "a disk").unwrap();
        assert_eq!(restored.limits(), limits);
        assert_eq!(restored.save(77), saved);
        assert_eq!(restored.take(100, 77), limiter.take(100, 1_000_000));
        assert_eq!(restored.take(100, 77), Err(26_000_000), "a debt of 160, and 100");
    }

    #[test]
    fn impossible_states_are_refused() {
        let refused = |change: &dyn Fn(&mut SavedBucket)| {
            let mut saved = SavedLimiter::example();
            saved.bandwidth.as_mut().map(change).unwrap();
            DeviceRateLimiter::restored(&saved, 0, "a disk").unwrap_err()
        };
        let lacks = refused(&|bucket| bucket.lacking = u128::MAX).to_string();
        assert!(lacks.contains("a bucket of 300 tokens lacks"), "{lacks}");
        let left = refused(&|bucket| bucket.burst_left = 8).to_string();
        assert!(left.contains("8 tokens are left of a burst of 7"), "{left}");
        let empty = refused(&|bucket| bucket.limit.size = 0);
        assert!(matches!(empty, StateError::Limit(_)), "{empty}");
        let empty = empty.to_string();
        assert!(empty.contains("the bandwidth limit of a disk has 0 bytes"), "{empty}");
    }

    #[test]
    fn large_request_leaves_a_debt() {
        let limit = RateLimit { size: 100, refill_ms: 10, one_time_burst: 0 };
        let mut limiter = bandwidth(limit);
        assert_eq!(limiter.take(350, 0), Ok(()));
        // 250 tokens of debt, and one token.
        assert_eq!(limiter.take(1, 0), Err(25_100_000));
        assert_eq!(limiter.take(101, 24_999_999), Err(1));
        assert_eq!(limiter.take(101, 25_000_000), Ok(()));
    }

    #[test]
    fn burst_is_taken_first_and_once() {
        let limit = RateLimit { size: 100, refill_ms: 10, one_time_burst: 50 };
        let mut limiter = bandwidth(limit);
        assert_eq!(limiter.take(150, 0), Ok(()), "50 of the burst, 100 of the bucket");
        assert_eq!(limiter.take(100, 0), Err(10_000_000));
        assert_eq!(limiter.take(101, 1_000_000_000), Ok(()), "a debt of 1");
        assert_eq!(limiter.take(100, 1_000_000_000), Err(10_100_000), "no further burst");
    }

    #[test]
    fn refused_operation_takes_no_token() {
        let limit = |size| Some(RateLimit { size, refill_ms: 10, one_time_burst: 0 });
        let limits = RateLimits { bandwidth: limit(100), operations: limit(2) };
        let mut limiter = DeviceRateLimiter::new(limits, 0);
        assert_eq!(limiter.take(100, 0), Ok(()));
        for _ in 0..10 {
            assert_eq!(limiter.take(100, 0), Err(10_000_000));
        }
        assert_eq!(limiter.take(0, 0), Ok(()), "one operation is left");
        assert_eq!(limiter.take(0, 0), Err(5_000_000));
    }
}
