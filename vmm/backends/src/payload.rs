//! The payload guest: its image, and where its working set lies in guest memory.

use driftline_dirty_tracker::Layout;
use driftline_images::workload::WorkingSetPlacement;
use driftline_images::{PAYLOAD_ELF, PayloadSpec, PayloadSpecError};
use driftline_machine::config::{Boot, Image, MachineConfig};
use driftline_machine::memory::{self, MemoryError};

/// The reason why the payload cannot be a guest.
#[derive(Debug, thiserror::Error)]
pub enum PayloadError {
    /// Its spec is invalid.
    #[error(transparent)]
    Spec(#[from] PayloadSpecError),
    /// There cannot be guest memory of this size.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The payload does not fit the guest.
    #[error("the guest \"{guest}\" does not fit: {why}")]
    Misfit {
        /// The payload's spec.
        guest: String,
        /// The part that does not fit.
        why: Misfit,
    },
}

/// The part of the payload that does not fit a guest.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Misfit {
    /// Guest memory is too small.
    #[error(
        "its working set takes {wanted} pages, and guest memory has {available} at or above \
         {base:#x}"
    )]
    Memory {
        /// Pages of the working set.
        wanted: u64,
        /// Pages that guest memory has for it.
        available: u64,
        /// Lowest address of the working set.
        base: u64,
    },
    /// Some vCPUs would have nothing to do.
    #[error("its working set has {pages} pages, too few for {vcpus} vCPUs")]
    Vcpus {
        /// Pages of the working set.
        pages: u64,
        /// vCPUs of the guest.
        vcpus: u8,
    },
}

/// Returns where the working set lies in memory of this layout.
pub(crate) fn place(
    spec: &PayloadSpec,
    vcpus: u8,
    layout: &Layout,
) -> Result<WorkingSetPlacement, Misfit> {
    let slots = layout.slots().map(|s| (s.base.gpa(), s.run().bytes()));
    let placement = WorkingSetPlacement::new(spec, slots).map_err(|e| Misfit::Memory {
        wanted: e.wanted,
        available: e.available,
        base: WorkingSetPlacement::base(spec),
    })?;
    match spec.ws_pages() {
        pages if pages < u64::from(vcpus) => Err(Misfit::Vcpus { pages, vcpus }),
        _ => Ok(placement),
    }
}

/// Returns the image that the guest of `config` boots, if that is the payload: the part of
/// [`HostConfig`](driftline_machine::config::HostConfig) that a machine needs for it.
///
/// # Errors
///
/// The payload's spec is invalid, or the payload does not fit the guest.
pub fn image(config: &MachineConfig) -> Result<Option<Image>, PayloadError> {
    let Boot::Payload(guest) = &config.boot else { return Ok(None) };
    let spec: PayloadSpec = guest.parse()?;
    let misfit = |why| PayloadError::Misfit { guest: guest.clone(), why };
    place(&spec, config.vcpus, &memory::layout(config.mem_bytes)?).map_err(misfit)?;
    Ok(Some(Image { elf: PAYLOAD_ELF, cmdline: spec.cmdline(config.vcpus.into()) }))
}
