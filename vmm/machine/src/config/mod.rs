//! A machine's configuration: the part that moves with the guest, and the part that belongs to one
//! host.

mod backend;
mod balloon;
mod boot_clock;
mod cpu;
mod cpu_template;
mod device_id;
mod devices;
mod disk;
mod error;
mod host;
mod identity;
mod lineage;
mod machine;
mod machine_codec;
mod metadata;
mod net;
mod opened;
mod rate_limits;
mod replace;
mod spec;

pub use backend::BackendKind;
pub use balloon::BalloonConfig;
pub use boot_clock::BootClock;
pub use cpu::{CpuConfig, CpuModel, CpuidWord, MsrWord};
pub use cpu_template::{ChangedBits, CpuTemplate, CpuidChange, MsrChange};
pub use device_id::MAX_ID_BYTES;
pub(crate) use devices::disks_mut;
pub use devices::{DeviceConfig, MAX_DEVICES, RngConfig, disks};
pub(crate) use disk::MAX_BLOCK_BYTES;
pub use disk::{DiskConfig, DiskSpec, MAX_SERIAL_BYTES};
pub use error::ConfigError;
pub use host::{HostConfig, Image, SerialSink};
pub use identity::DiskIdentity;
pub use lineage::{GuestName, Identity, Lineage, Restored, guest_span};
pub use machine::{Boot, DEFAULT_RING_ENTRIES, MachineConfig};
pub use metadata::{MetadataVersion, NetMetadata};
pub use net::{MIN_MTU, MacAddr, NetConfig, NetSpec, VsockConfig, VsockSpec};
pub use opened::{
    DiskCache, DiskEngine, HandedOverVsock, OpenedDisk, OpenedFile, OpenedFiles, OpenedSocket,
    OpenedTap,
};
pub use rate_limits::{LimitChange, LimitsChange, NetLimits, RateLimit, RateLimits};
pub use replace::ReplaceError;
pub use spec::SpecError;
