//! What this host's processor lacks for a guest that has seen another host's.

use crate::cpu_model::{FeatureBit, FeatureNumber};

/// The registers that describe features, by their numbers.
pub(super) const ARCH_CAPABILITIES: u32 = 0x10a;
pub(super) const PERF_CAPABILITIES: u32 = 0x345;

/// The first thing that a guest has seen on another host and that this host does not have.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ProcessorLack {
    /// The processor is of another vendor.
    #[error("a processor of its vendor")]
    Vendor,
    /// The processor does not have a feature.
    #[error("{0}")]
    Feature(FeatureBit),
    /// A number is too small, or another than it must be.
    #[error("{0}")]
    Number(FeatureNumber),
    /// The processor does not count an event.
    #[error("the event of {0}")]
    Event(FeatureBit),
    /// A feature register lacks something.
    #[error(transparent)]
    Msr(#[from] MsrLack),
}

/// What a feature register of this host lacks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MsrLack {
    /// A feature, or the absence of a vulnerability.
    #[error("bit {bit} of {} (MSR {index:#x})", register_name(*index))]
    Bit {
        /// The register's number.
        index: u32,
        /// The bit.
        bit: u32,
    },
    /// Branch records have another format.
    #[error(
        "branch records of format {wants} ({}, MSR {PERF_CAPABILITIES:#x}, here {has})",
        register_name(PERF_CAPABILITIES)
    )]
    BranchRecords {
        /// The format that the guest needs.
        wants: u64,
        /// The format that this host has.
        has: u64,
    },
}

/// Returns the name of a feature register.
fn register_name(index: u32) -> &'static str {
    match index {
        ARCH_CAPABILITIES => "IA32_ARCH_CAPABILITIES",
        _ => "IA32_PERF_CAPABILITIES",
    }
}

/// A register whose value this host does not take.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("this host does not take MSR {index:#x} = {data:#x}")]
pub struct RefusedMsr {
    pub(super) index: u32,
    pub(super) data: u64,
}
