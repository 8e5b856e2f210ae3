//! Firecracker's API without HTTP: the JSON types, the parser of requests, and the state machine
//! that decides what each request does.
//!
//! `fault` <- `model` <- `operation` <- `parse`; `config` <- `saved`, `state` <- `guest`. Only
//! `guest`, `balloon` and `changes` ask a guest, once there is one. The others do no I/O: the owner
//! of a [`MicroVm`] performs its actions. `config_file` turns the file of `--config-file` into
//! operations. `metrics` counts requests, and makes lines of the counts.

mod answer;
mod balloon;
mod changes;
mod config;
mod config_file;
mod device_names;
mod fault;
mod guest;
mod instance;
mod metrics;
mod model;
mod name_limit;
mod operation;
mod parse;
mod saved;
mod state;

pub use answer::Answer;
pub use config::MicroVmConfig;
pub use config_file::{ConfigFileFault, config_file_operations, config_file_text};
pub use fault::{
    ApiFault, BootFault, DriveFault, LoadFault, MachineFault, MetricsFault, NetFault, StartFault,
};
pub(crate) use guest::started_instance;
pub use instance::{IMITATED_VERSION, InstanceName};
pub use metrics::{ApiCounts, FirecrackerMetrics, GuestCounts, UnwrittenLines};
pub(crate) use metrics::{CountedCall, latency_names};
pub use model::{
    BalloonDeviceConfig, BlockDeviceConfig, BootSourceConfig, CacheType, FileEngineType,
    HugePageConfig, LoadSnapshotParams, LoggerConfig, LoggerLevel, MachineConfiguration,
    MemBackendConfig, MemBackendType, MetricsConfig, NetworkInterfaceConfig, NetworkOverride,
    SerialConfig, SnapshotLoadHugePageConfig, VsockDeviceConfig, VsockOverride,
};
pub use operation::Operation;
pub(crate) use parse::{ParsedCall, parse};
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub use state::fuzz::api as fuzz_api;
pub use state::{MicroVm, MicroVmAction, MicroVmEvent, Task};
