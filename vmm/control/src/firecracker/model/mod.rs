//! JSON types of Firecracker's API, version 1.16.1, with the optional fields of 1.17.
//!
//! Names of types and fields and the order of the fields are Firecracker's, because clients show
//! error texts: that for a body of another type names the struct, and that for an unknown field
//! lists the fields in this order. Bodies refuse unknown fields where Firecracker's do.

mod balloon;
mod boot;
mod config_file;
mod cpu;
mod drive;
mod entropy;
mod log;
mod machine;
mod mmds;
mod net;
mod refused;
mod snapshot;
mod vm;

pub use balloon::{
    BalloonDeviceConfig, BalloonUpdateConfig, BalloonUpdateStatsConfig, StartHintingCmd,
};
pub use boot::{BootSourceConfig, SerialConfig, VsockDeviceConfig};
pub use config_file::{ConfigFile, CpuTemplateSource};
pub use cpu::CustomCpuTemplate;
pub use drive::{BlockDeviceConfig, BlockDeviceUpdateConfig, CacheType, FileEngineType};
pub use entropy::EntropyDeviceConfig;
pub use log::{LoggerConfig, LoggerLevel, MetricsConfig};
pub use machine::{HugePageConfig, MachineConfigUpdate, MachineConfiguration, StaticCpuTemplate};
pub use mmds::{MmdsConfig, MmdsVersion};
pub use net::{NetworkInterfaceConfig, NetworkInterfaceUpdateConfig};
pub use refused::{
    MemoryHotplugConfig, MemoryHotplugSizeUpdate, PmemConfig, PmemDeviceUpdateConfig,
};
pub use snapshot::{
    CreateSnapshotParams, LoadSnapshotConfig, LoadSnapshotParams, MemBackendConfig, MemBackendType,
    NetworkOverride, SnapshotLoadHugePageConfig, SnapshotType, VsockOverride,
};
pub use vm::{ActionBody, ActionType, TargetState, VmStateChange, VmmConfig};
