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
mod watch;

pub use answer::{FaultMessage, JobStarted};
pub use checkpoint::{CheckpointPage, CheckpointRequest, DisksPolicy, EpochLine, EpochOutcome};
pub use config::{
    BalloonSettings, BootSource, DriveSettings, EntropySettings, InterfaceSettings,
    MachineSettings, VmConfig, VsockSettings,
};
pub use guest::{
    ActionRequest, ArrivingInfo, ArrivingState, BalloonRequest, BalloonView, GuestState, Info,
    InfoPage, InstanceInfo, VmRequest, VmTarget,
};
pub use limit::UnknownName;
pub(crate) use limit::{LimitError, at_least, at_most, one_to};
pub use migration::{
    GuestLocation, MAX_DOWNTIME_MS, MAX_TIMEOUT_S, MigrationFailure, MigrationPage,
    MigrationRequest, MigrationState, ResolveRequest,
};
pub use watch::{
    CheckpointSummary, MAX_BINS, MemoryRange, VcpuWindow, WatchPage, WatchRequest, WatchStarted,
};
