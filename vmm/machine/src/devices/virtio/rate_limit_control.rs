//! The handle by which the rate limits of a device are read and changed.

use std::sync::Arc;
use std::time::Instant;

use super::worker::DeviceWorker;
use crate::actor::{CallError, Handle};
use crate::config::{ConfigError, LimitsChange, RateLimits};
use crate::devices::stats::Counter;

/// Handle of a device that can have rate limits. A limit that is changed is part of the device's
/// state from then on, and replaces that of the configuration after a restore or a migration.
#[derive(Clone, Debug)]
pub struct RateLimitControl {
    device: String,
    /// Number of limiters that the device has.
    limiters: usize,
    worker: Handle<DeviceWorker>,
    /// The number of times that each limiter has made a queue wait.
    throttles: Arc<[Counter]>,
}

/// The reason why the rate limits of a device cannot be read or changed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RateLimitError {
    /// A limit is impossible. No limit is changed.
    #[error(transparent)]
    Limit(#[from] ConfigError),
    /// The device has fewer limiters. No limit is changed.
    #[error("{given} rate limits are given for device \"{device}\", which has {most}")]
    TooMany {
        /// Name of the device.
        device: String,
        /// Number of limiters that are given.
        given: usize,
        /// Number of limiters that the device has.
        most: usize,
    },
    /// The device's thread has not answered in time, or has ended.
    #[error(transparent)]
    Call(#[from] CallError),
}

impl RateLimitControl {
    pub(super) fn new(
        device: &str,
        limiters: usize,
        worker: Handle<DeviceWorker>,
        throttles: Arc<[Counter]>,
    ) -> Self {
        Self { device: device.to_owned(), limiters, worker, throttles }
    }

    /// Returns the device's name.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// Returns how many times each limit has made a queue wait, in the order of
    /// [`limits`](Self::limits). Does not wait for the device.
    pub(crate) fn throttles(&self) -> Vec<u64> {
        self.throttles.iter().map(Counter::get).collect()
    }

    /// Returns the limits in effect: one item, or receive and transmit of a network interface.
    ///
    /// # Errors
    ///
    /// The device has not answered by `deadline`, or has ended.
    pub fn limits(&self, deadline: Instant) -> Result<Vec<RateLimits>, RateLimitError> {
        Ok(self.worker.call("report its rate limits", deadline, |worker| worker.rate_limits())?)
    }

    /// Changes the limits, in the order of [`limits`](Self::limits); limiters past the last item
    /// keep theirs. A limit that is set starts with a full bucket. Requests that wait are tried
    /// again immediately, or when a paused guest resumes.
    ///
    /// # Errors
    ///
    /// A limit is impossible, there are too many items, or the device has not answered by
    /// `deadline`. After a deadline the change may still come into effect, if the device had begun
    /// it.
    pub fn change(
        &self,
        changes: &[LimitsChange],
        deadline: Instant,
    ) -> Result<(), RateLimitError> {
        if changes.len() > self.limiters {
            let (device, given, most) = (self.device.clone(), changes.len(), self.limiters);
            return Err(RateLimitError::TooMany { device, given, most });
        }
        changes.iter().try_for_each(|change| change.check(&self.device))?;
        let changes = changes.to_vec();
        let change = move |worker: &mut DeviceWorker| worker.change_limits(&changes);
        Ok(self.worker.call("change its rate limits", deadline, change)?)
    }
}
