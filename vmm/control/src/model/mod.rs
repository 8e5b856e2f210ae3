//! The JSON that crosses the API socket, for the server and for the command line that is its
//! client.
//!
//! Numbers have their unit in their name. Requests refuse fields that they do not know, so that a
//! misspelt option is not silently a default.

mod answer;
mod checkpoint;
mod guest;
mod migration;
mod watch;

pub use answer::{FaultMessage, JobBegun};
pub use checkpoint::{CheckpointPage, CheckpointRequest, DisksPolicy, EpochLine, EpochOutcome};
pub use guest::{
    ActionRequest, ArrivingInfo, ArrivingState, BalloonRequest, BalloonView, GuestState, Info,
    InfoPage, InstanceInfo, MachineConfigView, VmRequest, VmTarget,
};
pub use migration::{
    GuestWhere, MAX_DOWNTIME_MS, MAX_TIMEOUT_S, MigrationFailure, MigrationPage, MigrationRequest,
    MigrationState, ResolveRequest,
};
pub use watch::{
    CheckpointGlance, MAX_BINS, MemoryRange, VcpuWindow, WatchBegun, WatchPage, WatchRequest,
};
