//! Throttles vCPUs that make frames dirty faster than allowed. A migration sets the rate
//! ([`WriteThrottle`](driftline_guest::WriteThrottle)); this module enforces it.
//!
//! ```text
//! pacing         the collector's part: charges each vCPU its new frames, decides which vCPU stalls
//! vcpu_throttle  a vCPU's part: stays out of the guest, and reports when its time slice is over
//! meter          how often and how long a vCPU was stalled; any thread may read it
//! ```

mod meter;
mod pacing;
mod vcpu_throttle;

pub(crate) use meter::StallMeter;
pub(crate) use pacing::{Pacing, StallTarget};
pub(crate) use vcpu_throttle::ThrottleState;
