//! What a machine is made of: the part of its configuration that moves with it, and the part that
//! belongs to one host.

mod balloon;
mod codec;
mod cpu;
mod device_id;
mod devices;
mod identity;
mod lineage;
mod net;
mod replace;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use driftline_dirty_tracker::TrackingMode;
use driftline_guest::{DriveHead, Origin, VmId};
use serde::{Deserialize, Serialize};

use crate::memory::MemoryOptions;
pub use balloon::BalloonConfig;
pub use cpu::{CpuConfig, CpuModel, CpuidWord, MsrWord};
pub(crate) use devices::disks_mut;
pub use devices::{
    DeviceConfig, DiskConfig, DiskSpec, MAX_BLOCK_BYTES, MAX_DEVICES, MAX_SERIAL_BYTES, disks,
};
pub use identity::DiskIdentity;
pub use lineage::{GuestName, Identity, Lineage, Restored, guest_span};
pub use net::{MAX_QUEUE_PAIRS, MacAddr, NetConfig, NetSpec, VsockConfig, VsockSpec};
pub use replace::ReplaceError;

/// What runs the vCPUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Backend {
    /// A KVM virtual machine.
    #[default]
    Kvm,
    /// The payload's workload on host threads over guest-shaped memory, for hosts without KVM.
    Threads,
}

impl Backend {
    const ALL: [Backend; 2] = [Self::Kvm, Self::Threads];

    /// The backend's name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Threads => "threads",
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Backend {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|b| b.name() == s);
        found.ok_or_else(|| format!("there is no backend \"{s}\"; there are kvm and threads"))
    }
}

/// What a machine boots; only its first start needs it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Boot {
    /// The embedded payload guest, by its spec (`payload,ws=64M,...`).
    Payload(String),
    /// A kernel from a file.
    Kernel {
        /// A static ELF file or a bzImage.
        kernel: PathBuf,
        /// An initial RAM disk.
        initrd: Option<PathBuf>,
        /// The kernel's command line.
        cmdline: String,
        /// Nothing is added to the command line: neither a console nor the virtio devices.
        bare: bool,
    },
}

/// The part of a configuration that moves with the guest. `Guest::config` is [`Self::encode`]'s
/// bytes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MachineConfig {
    /// Guest memory in bytes: whole frames, [`MIN_MEM_BYTES`](crate::limits::MIN_MEM_BYTES) to
    /// [`MAX_MEM_BYTES`](crate::limits::MAX_MEM_BYTES).
    pub mem_bytes: u64,
    /// vCPUs, 1..=[`MAX_VCPUS`](crate::limits::MAX_VCPUS).
    pub vcpus: u8,
    /// How writes are tracked.
    pub tracking: TrackingMode,
    /// Entries of each dirty ring: a power of two, at most what the host's kernel takes.
    pub ring_entries: u32,
    /// What runs the vCPUs.
    pub backend: Backend,
    /// What was booted.
    pub boot: Boot,
    /// The processor of its vCPUs.
    pub cpu: CpuConfig,
    /// Its virtio devices, in the order of their places.
    pub devices: Vec<DeviceConfig>,
    /// Who it is, beside its id.
    pub identity: Identity,
}

impl HostConfig {
    /// Whether the operator has named the file of `disk`.
    pub(crate) fn names(&self, disk: &DiskConfig) -> bool {
        self.disks.iter().any(|spec| spec.path == disk.path)
    }

    /// Whether the operator says that the file of `disk` may be any.
    pub(crate) fn takes_any_identity_for(&self, disk: &DiskConfig) -> bool {
        self.disks.iter().any(|spec| spec.path == disk.path && spec.any_identity)
    }

    /// This host as it is for a guest whose `drives` are about to be written over.
    pub(crate) fn writing_over(&self, drives: &[DriveHead]) -> Self {
        let written_over = drives.iter().map(|drive| drive.id.clone()).collect();
        Self { written_over, ..self.clone() }
    }

    /// This host as it is for a guest whose `drives` come along.
    pub(crate) fn with_copies_of(&self, drives: &[DriveHead]) -> Self {
        let copied = drives.iter().map(|drive| drive.id.clone()).collect();
        Self { copied, ..self.clone() }
    }
}

impl MachineConfig {
    /// The id and the machine of the guest that is restored from `from` on this host.
    pub(crate) fn restored(mut self, from: &Origin, host: &HostConfig) -> (VmId, Self) {
        let (vm_id, identity) = host.restored.of(from, self.identity);
        self.identity = identity;
        (vm_id, self)
    }

    /// The same machine with this host's files, taps and sockets; the error is a sentence. Its
    /// disks keep their identities where they are to be the same ones.
    pub fn on_host(mut self, host: &HostConfig) -> Result<Self, ReplaceError> {
        devices::replace(&mut self.devices, host)?;
        if host.disks_are_copies {
            // A wrong one is not written over: those that were named are the operator's word.
            devices::disks_mut(&mut self.devices)
                .filter(|disk| !host.written_over.contains(&disk.id))
                .for_each(|disk| disk.identity = None);
        }
        Ok(self)
    }
}

/// Entries of a dirty ring unless told otherwise: the most that KVM takes is 65,536.
pub const DEFAULT_RING_ENTRIES: u32 = 16_384;

/// Where the first serial port's output goes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum SerialSink {
    /// Standard output; standard input, where it is a terminal, a pipe or a file, is COM1's input.
    #[default]
    Stdio,
    /// Nowhere.
    Null,
    /// Appended to a file, which is created if need be.
    File(PathBuf),
}

impl FromStr for SerialSink {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s.split_once(':') {
            None if s == "stdio" => Ok(Self::Stdio),
            None if s == "null" => Ok(Self::Null),
            Some(("file", path)) if !path.is_empty() => Ok(Self::File(path.into())),
            _ => Err(format!("\"{s}\" is no serial sink: it is stdio, null or file:PATH")),
        }
    }
}

/// The part of a configuration that belongs to one host.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HostConfig {
    /// Where COM1 goes, and what it hears.
    pub serial: SerialSink,
    /// What holds guest memory.
    pub memory: MemoryOptions,
    /// For a guest that comes with disks: files to use for them here, in the places of those that
    /// it comes with. A named one goes to the disk of its name, the others to the rest in order.
    pub disks: Vec<DiskSpec>,
    /// They are expected to be others than the guest had, as after a restore, and so are those that
    /// none is given for unless they are to be written over. Else one that is known to be another
    /// disk than the guest's is refused.
    pub disks_are_copies: bool,
    /// As `disks`, for its network interfaces.
    pub nets: Vec<NetSpec>,
    /// Likewise for its vsock.
    pub vsock: Option<VsockSpec>,
    /// Of a guest that comes: the names of the disks that come along, into files that are made
    /// here.
    pub copied: Vec<String>,
    /// Of a guest that is restored: the names of the disks that are written over with what is in
    /// its epoch.
    pub written_over: Vec<String>,
    /// Of a guest that is restored: who it is then.
    pub restored: Restored,
    /// For the tests of the tests: of so many frames that the guest writes one is not reported.
    #[cfg(all(feature = "broken-source", debug_assertions))]
    pub loses_one_in: Option<std::num::NonZeroU64>,
}
