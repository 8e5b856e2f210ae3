//! The tables that firmware would leave in memory: MP table, ACPI tables, generation ID.

use driftline_dirty_tracker::Gfn;
use vm_memory::{Bytes, GuestAddress};

use super::defect::BootMisfit;
use super::error::BootError;
use super::loaded::Loaded;
use super::platform::DescribedMachine;
use super::{acpi, map, mptable};
use crate::memory::Memory;

/// Writes all tables, beside the kernel, and returns the address of the RSDP.
pub(super) fn write(
    memory: &Memory,
    kernel: &Loaded,
    machine: DescribedMachine<'_>,
) -> Result<u64, BootError> {
    let rsdp = map::ACPI_TABLES.0;
    let acpi = acpi::build(rsdp, machine, map::GENERATION_ID.0);
    let parts = [
        ("the MP table", map::MP_TABLE, mptable::build(machine.vcpus)),
        ("ACPI tables", map::ACPI_TABLES, acpi),
        ("the generation ID", map::GENERATION_ID, fresh_generation_id().to_vec()),
    ];
    for (what, place, bytes) in parts {
        let misfit = |cause| BootError::does_not_fit(what, memory.layout(), cause);
        if let Some(&kernel) = kernel.segments.iter().find(|s| map::overlap(**s, place)) {
            return Err(misfit(BootMisfit::Occupied { kernel, table: what, place }));
        }
        if bytes.len() as u64 > place.1 - place.0 {
            return Err(misfit(BootMisfit::Table { bytes: bytes.len(), place }));
        }
        let written = memory.ram().write_slice(&bytes, GuestAddress(place.0));
        written.map_err(|e| misfit(e.into()))?;
    }
    Ok(rsdp)
}

/// Returns the frame that contains the generation ID.
pub(crate) fn generation_frame() -> Gfn {
    Gfn::containing(map::GENERATION_ID.0)
}

/// Gives the guest a new generation ID. The guest continues from a state from which others may
/// continue too, and must not draw the same random numbers. The frame is marked dirty as by every
/// other write.
pub(crate) fn renew_generation_id(memory: &Memory) -> Result<(), vm_memory::GuestMemoryError> {
    let at = GuestAddress(map::GENERATION_ID.0);
    memory.ram().write_slice(&fresh_generation_id(), at)
}

fn fresh_generation_id() -> [u8; 16] {
    uuid::Uuid::new_v4().into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::MemoryOptions;
    use driftline_dirty_tracker::FrameRun;

    #[test]
    fn new_generation_id_differs_and_is_tracked() {
        let memory = Memory::new(16 << 20, &MemoryOptions::default()).unwrap();
        let read = || {
            let mut id = [0; 16];
            memory.ram().read_slice(&mut id, GuestAddress(map::GENERATION_ID.0)).unwrap();
            id
        };
        renew_generation_id(&memory).unwrap();
        let (first, mut subscription) = (read(), memory.tracker().subscribe("test").unwrap());
        renew_generation_id(&memory).unwrap();
        assert_ne!(read(), first);
        let frames: Vec<FrameRun> = subscription.drain().runs().collect();
        assert_eq!(frames, [FrameRun { start: Gfn(0xff), count: 1 }]);
    }
}
