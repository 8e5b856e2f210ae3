//! The part of a configuration that moves with the guest.

use std::path::PathBuf;

use driftline_guest::{Origin, VmId};
use serde::{Deserialize, Serialize};

use super::backend::BackendKind;
use super::cpu::CpuConfig;
use super::devices::{DeviceConfig, disks_mut};
use super::host::HostConfig;
use super::lineage::Identity;
use super::replace::{self, ReplaceError};
use crate::tracking::TrackingMode;

/// Default number of entries of a dirty ring. KVM's maximum is 65,536.
pub const DEFAULT_RING_ENTRIES: u32 = 16_384;

/// The image that a machine boots. Only its first start needs it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Boot {
    /// A guest that the program embeds, described by its spec. Its image is in
    /// [`HostConfig::image`].
    Payload(String),
    /// A kernel from a file.
    Kernel {
        /// A static ELF file or a bzImage.
        kernel: PathBuf,
        /// An initial RAM disk.
        initrd: Option<PathBuf>,
        /// The kernel's command line.
        cmdline: String,
        /// Whether the command line stays as given, without a console and virtio devices added.
        bare: bool,
    },
}

/// The part of a configuration that moves with the guest. `GuestIdentity::config` returns the bytes
/// of [`Self::encode`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MachineConfig {
    /// Guest memory in bytes: whole frames, from [`MIN_MEM_BYTES`](crate::limits::MIN_MEM_BYTES) to
    /// [`MAX_MEM_BYTES`](crate::limits::MAX_MEM_BYTES).
    pub mem_bytes: u64,
    /// Number of vCPUs, 1..=[`MAX_VCPUS`](crate::limits::MAX_VCPUS).
    pub vcpus: u8,
    /// The method that tracks the guest's writes.
    pub tracking: TrackingMode,
    /// Entries of each dirty ring: a power of two, at most the limit of the host's kernel.
    pub ring_entries: u32,
    /// The backend that runs the vCPUs.
    pub backend: BackendKind,
    /// The image that was booted.
    pub boot: Boot,
    /// The processor that the vCPUs show to the guest.
    pub cpu: CpuConfig,
    /// The virtio devices. Their order decides their register addresses and interrupts.
    pub devices: Vec<DeviceConfig>,
    /// The guest's identity, apart from its id.
    pub identity: Identity,
}

impl MachineConfig {
    /// Returns the id and the configuration of the guest that is restored from `from` on this host.
    pub fn restored(mut self, from: &Origin, host: &HostConfig) -> (VmId, Self) {
        let (vm_id, identity) = host.restored.of(from, self.identity);
        self.identity = identity;
        (vm_id, self)
    }

    /// Returns the same machine with this host's files, taps and sockets. A disk keeps its identity
    /// if it must be the same disk here.
    ///
    /// # Errors
    ///
    /// The devices that are given for this host do not fit the guest.
    pub fn on_host(mut self, host: &HostConfig) -> Result<Self, ReplaceError> {
        replace::replace(&mut self.devices, host)?;
        if host.disks_are_copies {
            // A disk to be overwritten keeps its identity, so that a wrong disk is not overwritten.
            // `replace` has cleared the identity of each disk that the operator named.
            disks_mut(&mut self.devices)
                .filter(|disk| !host.written_over.contains(&disk.id))
                .for_each(|disk| disk.identity = None);
        }
        Ok(self)
    }
}
