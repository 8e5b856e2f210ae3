//! JSON types of the API socket, shared by the server and by the command line, which is its client.
//!
//! A number's unit is part of its name. Requests refuse unknown fields, so that a misspelt option
//! does not silently become a default.

mod answer;
mod checkpoint;
mod config;
mod guest;
mod limit;
mod migration;
mod rate_limits;
mod watch;

pub(crate) use answer::FaultMessage;
pub use answer::JobStarted;
pub use checkpoint::{CheckpointPage, CheckpointRequest, DisksPolicy, EpochLine, EpochOutcome};
pub use config::{
    BalloonSettings, BootSource, DriveSettings, EntropySettings, InterfaceSettings,
    MachineSettings, VmConfig, VsockSettings,
};
pub(crate) use guest::{ActionRequest, InstanceInfo};
pub use guest::{
    ArrivingInfo, ArrivingState, BalloonRequest, BalloonStatistics, BalloonView, GuestState, Info,
    InfoPage, VmRequest, VmTarget,
};
pub use limit::UnknownName;
pub(crate) use limit::{LimitError, at_least, at_most, one_to};
pub use migration::{
    GuestLocation, MAX_DOWNTIME_MS, MAX_TIMEOUT_S, MigrationFailure, MigrationPage,
    MigrationRequest, MigrationState, ResolveRequest, UpgradeRequest,
};
pub use rate_limits::{RateLimiterConfig, TokenBucketConfig};
pub use watch::{
    CheckpointSummary, MAX_BINS, MemoryRange, VcpuWindow, WatchPage, WatchRequest, WatchStarted,
};
