//! What a host may lack for a machine, and what the user can do.

use std::io;

use crate::config::CpuConfig;
use crate::cpu_model::MissingFeature;
use crate::vcpu::tsc::TscLack;
use crate::vcpu::{ProcessorLack, TemplateLack};

/// Something that this host lacks and that the guest's configuration needs.
#[derive(Debug, thiserror::Error)]
pub enum HostLack {
    /// KVM has no dirty rings.
    #[error(
        "KVM_CAP_DIRTY_LOG_RING: --tracking dirty-ring needs it; --tracking dirty-bitmap does \
         without"
    )]
    DirtyRing,
    /// KVM has smaller dirty rings.
    #[error(
        "dirty rings of {entries} entries: its KVM takes powers of two up to {most} per vCPU \
         (--ring-entries {most}): {cause}"
    )]
    RingEntries {
        /// Entries of each ring.
        entries: u32,
        /// The largest number that KVM takes.
        most: u32,
        /// KVM's error.
        #[source]
        cause: io::Error,
    },
    /// KVM's dirty bitmap cannot be cleared by hand.
    #[error(
        "KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2: --tracking dirty-bitmap-manual needs it; dirty-bitmap \
         does without"
    )]
    ManualDirtyLog,
    /// KVM offers manual clearing of its dirty bitmap, but refuses it.
    #[error(
        "manual clearing of KVM's dirty bitmap: KVM refuses KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2 \
         ({cause}); use --tracking dirty-bitmap"
    )]
    ManualDirtyLogRefused {
        /// KVM's error.
        #[source]
        cause: io::Error,
    },
    /// The kernel does not write-protect asynchronously.
    #[error(
        "userfaultfd's asynchronous write protection: --tracking userfault-wp needs Linux 6.7, and \
         root, vm.unprivileged_userfaultfd=1 or /dev/userfaultfd; dirty-ring and dirty-bitmap do \
         without ({cause})"
    )]
    UserfaultWp {
        /// The system's error.
        #[source]
        cause: io::Error,
    },
    /// KVM allows fewer vCPUs.
    #[error("room for {vcpus} vCPUs: its KVM allows {most} a guest")]
    Vcpus {
        /// vCPUs of the guest.
        vcpus: u8,
        /// The largest number that KVM allows.
        most: usize,
    },
    /// The processors cannot address the guest's memory.
    #[error(
        "guest addresses for {mem_bytes} bytes of memory: its processors have {bits} bits of \
         physical address"
    )]
    AddressBits {
        /// Size of guest memory, in bytes.
        mem_bytes: u64,
        /// Bits of a physical address.
        bits: u32,
    },
    /// The guest was shown something on another host.
    #[error("{0}: the guest has seen it on the host where it started, and may rely on it")]
    Exposed(#[source] ProcessorLack),
    /// The processor lacks a feature of the model.
    #[error("{cause}: --cpu {cpu} needs it")]
    Feature {
        /// The guest's processor.
        cpu: Box<CpuConfig>,
        /// The feature.
        #[source]
        cause: MissingFeature,
    },
    /// KVM lacks a part of the guest's CPU template.
    #[error(transparent)]
    Template(#[from] TemplateLack),
    /// The time stamp counter cannot have the rate that it had.
    #[error("{0}: the guest was promised that the rate never changes")]
    TscRate(#[source] TscLack),
}
