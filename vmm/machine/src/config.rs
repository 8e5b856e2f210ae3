//! A machine's configuration: the part that moves with the guest, and the part that belongs to one
//! host.

mod balloon;
mod codec;
mod cpu;
mod device_id;
mod devices;
mod identity;
mod lineage;
mod net;
mod replace;
mod spec;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use driftline_guest::{DriveHead, Origin, VmId};
use serde::{Deserialize, Serialize};

use crate::memory::MemoryOptions;
use crate::tracking::TrackingMode;
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
pub use spec::SpecError;

/// The backend that runs the vCPUs.
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

/// The image that a machine boots. Only its first start needs it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Boot {
    /// The embedded payload guest, described by its spec (`payload,ws=64M,...`).
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
    pub backend: Backend,
    /// The image that was booted.
    pub boot: Boot,
    /// The processor that the vCPUs show to the guest.
    pub cpu: CpuConfig,
    /// The virtio devices. Their order decides their register addresses and interrupts.
    pub devices: Vec<DeviceConfig>,
    /// The guest's identity, apart from its id.
    pub identity: Identity,
}

impl HostConfig {
    /// Returns whether the operator has named the file of `disk`.
    pub(crate) fn names(&self, disk: &DiskConfig) -> bool {
        self.disks.iter().any(|spec| spec.path == disk.path)
    }

    /// Returns whether the operator accepts any identity for the file of `disk`.
    pub(crate) fn takes_any_identity_for(&self, disk: &DiskConfig) -> bool {
        self.disks.iter().any(|spec| spec.path == disk.path && spec.any_identity)
    }

    /// Returns this host's part for a guest whose `drives` are to be overwritten.
    pub(crate) fn writing_over(&self, drives: &[DriveHead]) -> Self {
        let written_over = drives.iter().map(|drive| drive.id.clone()).collect();
        Self { written_over, ..self.clone() }
    }

    /// Returns this host's part for a guest whose `drives` are copied to this host.
    pub(crate) fn with_copies_of(&self, drives: &[DriveHead]) -> Self {
        let copied = drives.iter().map(|drive| drive.id.clone()).collect();
        Self { copied, ..self.clone() }
    }
}

impl MachineConfig {
    /// Returns the id and the configuration of the guest that is restored from `from` on this host.
    pub(crate) fn restored(mut self, from: &Origin, host: &HostConfig) -> (VmId, Self) {
        let (vm_id, identity) = host.restored.of(from, self.identity);
        self.identity = identity;
        (vm_id, self)
    }

    /// Returns the same machine with this host's files, taps and sockets. A disk keeps its identity
    /// if it must be the same disk here.
    ///
    /// # Errors
    ///
    /// What is given for this host does not fit the guest. The error is a sentence.
    pub fn on_host(mut self, host: &HostConfig) -> Result<Self, ReplaceError> {
        devices::replace(&mut self.devices, host)?;
        if host.disks_are_copies {
            // A disk to be overwritten keeps its identity, so that a wrong disk is not overwritten.
            // `replace` has cleared the identity of each disk that the operator named.
            devices::disks_mut(&mut self.devices)
                .filter(|disk| !host.written_over.contains(&disk.id))
                .for_each(|disk| disk.identity = None);
        }
        Ok(self)
    }
}

/// Default number of entries of a dirty ring. KVM's maximum is 65,536.
pub const DEFAULT_RING_ENTRIES: u32 = 16_384;

/// The destination of the first serial port's output.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum SerialSink {
    /// Standard output. Standard input, if it is a terminal, a pipe or a file, is COM1's input.
    #[default]
    Stdio,
    /// The output is discarded.
    Null,
    /// The output is appended to a file, which is created if it does not exist.
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
    /// The destination of COM1's output, and the source of its input.
    pub serial: SerialSink,
    /// The host memory that backs guest memory.
    pub memory: MemoryOptions,
    /// Files on this host that replace the disks of an arriving guest. A spec with a name replaces
    /// the disk of that name; the others replace the remaining disks in order.
    pub disks: Vec<DiskSpec>,
    /// Whether the disks are expected to differ from the guest's, as after a restore. This includes
    /// disks without a spec, unless they are to be overwritten. If false, a disk that is known to
    /// differ from the guest's is refused.
    pub disks_are_copies: bool,
    /// Taps that replace the network interfaces of an arriving guest, by the rules of `disks`.
    pub nets: Vec<NetSpec>,
    /// The socket that replaces the vsock of an arriving guest.
    pub vsock: Option<VsockSpec>,
    /// For an arriving guest: the names of the disks that are copied with it, into files that are
    /// created here.
    pub copied: Vec<String>,
    /// For a restored guest: the names of the disks that are overwritten with the content of its
    /// checkpoint.
    pub written_over: Vec<String>,
    /// For a restored guest: its new identity.
    pub restored: Restored,
    /// For tests of the tests: one in this many frames that the guest writes is not reported.
    #[cfg(all(feature = "broken-source", debug_assertions))]
    pub loses_one_in: Option<std::num::NonZeroU64>,
}
