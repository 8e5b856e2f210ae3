//! The part of a configuration that belongs to one host.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use driftline_guest::DriveHead;

use super::boot_clock::BootClock;
use super::disk::{DiskConfig, DiskSpec};
use super::error::ConfigError;
use super::lineage::Restored;
use super::net::{NetSpec, VsockSpec};
use super::opened::OpenedFiles;
use super::rate_limits::RateLimit;
use crate::memory::MemoryOptions;
use crate::metadata::MetadataStore;

/// The destination of the first serial port's output.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum SerialSink {
    /// Standard output. Standard input, if it is a terminal, a pipe or a file, is COM1's input.
    #[default]
    Stdio,
    /// The output is discarded.
    Null,
    /// The output is appended to a file, which is created if it does not exist. It may be a FIFO or
    /// a character device, whose reader is not waited for.
    File(PathBuf),
}

impl FromStr for SerialSink {
    type Err = ConfigError;

    fn from_str(s: &str) -> Result<Self, ConfigError> {
        match s.split_once(':') {
            None if s == "stdio" => Ok(Self::Stdio),
            None if s == "null" => Ok(Self::Null),
            Some(("file", path)) if !path.is_empty() => Ok(Self::File(path.into())),
            _ => Err(ConfigError::malformed("serial sink", s, "it is stdio, null or file:PATH")),
        }
    }
}

/// A guest that the program embeds, in place of a kernel from a file.
#[derive(Clone, PartialEq, Eq)]
pub struct Image {
    /// Its static ELF file.
    pub elf: &'static [u8],
    /// Its command line.
    pub cmdline: String,
}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Image").field("cmdline", &self.cmdline).finish_non_exhaustive()
    }
}

/// The part of a configuration that belongs to one host.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HostConfig {
    /// The destination of COM1's output, and the source of its input.
    pub serial: SerialSink,
    /// The limit of COM1's output, in bytes. Bytes beyond it are dropped.
    pub serial_limit: Option<RateLimit>,
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
    /// The image that a new guest boots, if its configuration names one that the program embeds
    /// ([`Boot::Payload`](super::Boot::Payload)).
    pub image: Option<Image>,
    /// For a new guest: whether it has a keyboard controller, by which it is told to shut down.
    pub keyboard: bool,
    /// For a new guest: when its start was requested, if it has the register by which it reports
    /// that it has booted.
    pub boot_timer: Option<BootClock>,
    /// The metadata that the guest reads, if an interface serves it.
    pub metadata: MetadataStore,
    /// The guest's files that are open already.
    pub opened: OpenedFiles,
    /// For tests of the tests: one in this many frames that the guest writes is not reported.
    #[cfg(all(feature = "broken-source", debug_assertions))]
    pub loses_one_in: Option<std::num::NonZeroU64>,
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
