//! What this host's processor lacks for a guest that has seen another host's.

use crate::cpu_model::{FeatureBit, FeatureNumber};

/// The first thing that a guest has seen on another host and that this host does not have.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
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
#[non_exhaustive]
pub enum MsrLack {
    /// A feature, or the absence of a vulnerability.
    #[error("bit {bit} of {name} (MSR {index:#x})")]
    Bit {
        /// The register's number.
        index: u32,
        /// The register's name.
        name: &'static str,
        /// The bit.
        bit: u32,
    },
    /// Branch records have another format.
    #[error("branch records of format {wants} ({name}, MSR {index:#x}, here {has})")]
    BranchRecords {
        /// The register's number.
        index: u32,
        /// The register's name.
        name: &'static str,
        /// The format that the guest needs.
        wants: u64,
        /// The format that this host has.
        has: u64,
    },
}

/// A register whose value this host does not take.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("this host does not take MSR {index:#x} = {data:#x}")]
pub struct RefusedMsr {
    pub(super) index: u32,
    pub(super) data: u64,
}
