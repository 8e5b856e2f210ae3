//! The PVH boot protocol: start info, modules, memory map and command line in one block of low
//! memory.

use linux_loader::configurator::pvh::PvhBootConfigurator;
use linux_loader::configurator::{BootConfigurator, BootParams};
use linux_loader::start_info::{
    XEN_HVM_MEMMAP_TYPE_RAM, XEN_HVM_MEMMAP_TYPE_RESERVED, XEN_HVM_START_MAGIC_VALUE,
    hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use vm_memory::{Bytes, GuestAddress};

use super::defect::BootMisfit;
use super::error::BootError;
use super::map::{self, RangeKind};
use super::platform::{Entry, GuestRange};
use crate::memory::Memory;

const MODULES_AT: u64 = 64;
const MEMMAP_AT: u64 = MODULES_AT + 32;
const CMDLINE_AT: u64 = 512;

/// Writes the block and returns the guest's entry.
pub(super) fn write(
    memory: &Memory,
    rip: u64,
    segments: &[GuestRange],
    initrd: Option<GuestRange>,
    cmdline: &str,
    rsdp: u64,
) -> Result<Entry, BootError> {
    let layout = memory.layout();
    let bytes = CMDLINE_AT + cmdline.len() as u64 + 1;
    let Some(block) = map::low_gap(bytes, segments) else {
        let cause = BootMisfit::NoGap { bytes };
        return Err(BootError::does_not_fit("the command line", layout, cause));
    };
    let memmap = memmap(memory);
    let start_info = hvm_start_info {
        magic: XEN_HVM_START_MAGIC_VALUE,
        version: 1,
        nr_modules: u32::from(initrd.is_some()),
        modlist_paddr: if initrd.is_some() { block + MODULES_AT } else { 0 },
        cmdline_paddr: block + CMDLINE_AT,
        rsdp_paddr: rsdp,
        memmap_paddr: block + MEMMAP_AT,
        memmap_entries: memmap.len() as u32,
        ..Default::default()
    };
    let mut params = BootParams::new(&start_info, GuestAddress(block));
    params.set_sections(&memmap, GuestAddress(block + MEMMAP_AT));
    if let Some((start, end)) = initrd {
        let module = hvm_modlist_entry { paddr: start, size: end - start, ..Default::default() };
        params.set_modules(&[module], GuestAddress(block + MODULES_AT));
    }
    let misfit = |cause: BootMisfit| BootError::does_not_fit("the boot information", layout, cause);
    PvhBootConfigurator::write_bootparams(&params, memory.ram()).map_err(|e| misfit(e.into()))?;
    let line = GuestAddress(block + CMDLINE_AT);
    memory.ram().write_slice(cmdline.as_bytes(), line).map_err(|e| misfit(e.into()))?;
    Ok(Entry::Pvh { rip, start_info: block })
}

fn memmap(memory: &Memory) -> Vec<hvm_memmap_table_entry> {
    let entry = |range: &map::MapRange| hvm_memmap_table_entry {
        addr: range.start,
        size: range.bytes(),
        type_: match range.kind {
            RangeKind::Ram => XEN_HVM_MEMMAP_TYPE_RAM,
            RangeKind::Reserved => XEN_HVM_MEMMAP_TYPE_RESERVED,
        },
        reserved: 0,
    };
    map::memory_map(memory).iter().map(entry).collect()
}
