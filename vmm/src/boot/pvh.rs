//! What PVH tells a guest: start info, modules, memory map and command line in one block of low
//! memory, beside the MP table.
//!
//! ```text
//! 0 .. 0x9fc00           RAM; the block lies in it, from 0x6000 on, where the kernel leaves room
//! 0x9fc00 .. 0xa0000     reserved: MP table
//! 0xa0000 .. 1 MiB       reserved: where PCs have video memory and ROMs
//! 1 MiB .. 3 GiB         RAM, as far as it goes; the RAM disk at its end
//! 0xfec00000 .. 4 GiB    reserved: IOAPIC, local APICs, KVM's own pages
//! 4 GiB ..               RAM, the rest
//! ```

use std::fs::File;

use linux_loader::configurator::pvh::PvhBootConfigurator;
use linux_loader::configurator::{BootConfigurator, BootParams};
use linux_loader::start_info::{
    XEN_HVM_MEMMAP_TYPE_RAM, XEN_HVM_MEMMAP_TYPE_RESERVED, XEN_HVM_START_MAGIC_VALUE,
    hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use vm_memory::{Bytes, GuestAddress};

use super::elf::Loaded;
use super::{BootError, Entry, Taken, mptable};
use crate::memory::{HOLE_END, Memory};

/// First address of low memory that the block may use: real-mode tables lie below.
const BLOCK_FLOOR: u64 = 0x6000;
const PAGE: u64 = 4096;
const MODULES_AT: u64 = 64;
const MEMMAP_AT: u64 = MODULES_AT + 32;
const CMDLINE_AT: u64 = 512;
const ONE_MIB: u64 = 1 << 20;
const CHIPSET_START: u64 = 0xfec0_0000;

/// Writes everything besides the kernel itself, and says where the guest begins.
pub(crate) fn write(
    memory: &Memory,
    kernel: &Loaded,
    initrd: Option<Taken>,
    cmdline: &str,
    vcpus: u8,
) -> Result<Entry, BootError> {
    let layout = memory.layout();
    if cmdline.bytes().any(|b| b == 0) {
        return Err(BootError::Config("the kernel's command line contains a NUL byte".to_owned()));
    }
    let table = (mptable::ADDRESS, mptable::ADDRESS + mptable::ROOM);
    if kernel.segments.iter().any(|s| overlap(*s, table)) {
        let why = format!("it needs {:#x}..{:#x}, where the MP table goes", table.0, table.1);
        return Err(BootError::does_not_fit("the kernel", layout, why));
    }
    let bytes = CMDLINE_AT + cmdline.len() as u64 + 1;
    let Some(block) = low_gap(bytes, &kernel.segments) else {
        let why = format!(
            "the kernel leaves no {bytes} bytes free between {BLOCK_FLOOR:#x} and {:#x}",
            mptable::ADDRESS
        );
        return Err(BootError::does_not_fit("the command line", layout, why));
    };
    let memmap = memory_map(memory);
    let start_info = hvm_start_info {
        magic: XEN_HVM_START_MAGIC_VALUE,
        version: 1,
        nr_modules: u32::from(initrd.is_some()),
        modlist_paddr: if initrd.is_some() { block + MODULES_AT } else { 0 },
        cmdline_paddr: block + CMDLINE_AT,
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
    let cannot = |e: &dyn std::fmt::Display| {
        BootError::does_not_fit("the boot information", layout, e.to_string())
    };
    PvhBootConfigurator::write_bootparams(&params, memory.ram()).map_err(|e| cannot(&e))?;
    let line = GuestAddress(block + CMDLINE_AT);
    memory.ram().write_slice(cmdline.as_bytes(), line).map_err(|e| cannot(&e))?;
    memory
        .ram()
        .write_slice(&mptable::build(vcpus), GuestAddress(mptable::ADDRESS))
        .map_err(|e| cannot(&e))?;
    Ok(Entry { rip: kernel.entry, start_info: block })
}

/// Reads a RAM disk to the end of low memory, above the kernel.
pub(crate) fn load_initrd(
    what: &str,
    mut file: File,
    memory: &Memory,
    kernel: &Loaded,
) -> Result<Taken, BootError> {
    let unreadable = |cause| BootError::Unreadable { what: what.to_owned(), cause };
    let bytes = file.metadata().map_err(unreadable)?.len();
    let low_end = memory.layout().slots().next().map_or(0, |s| s.run().end().gpa());
    let low_kernel_end = kernel.segments.iter().map(|s| s.1).filter(|e| *e <= low_end).max();
    let floor = low_kernel_end.unwrap_or(0).max(ONE_MIB);
    let start = low_end.checked_sub(bytes).map(|s| s & !(PAGE - 1)).filter(|s| *s >= floor);
    let Some(start) = start else {
        let why = format!("its {bytes} bytes must lie between {floor:#x} and {low_end:#x}");
        return Err(BootError::does_not_fit(what, memory.layout(), why));
    };
    memory
        .ram()
        .read_exact_volatile_from(GuestAddress(start), &mut file, bytes as usize)
        .map_err(|e| unreadable(std::io::Error::other(e)))?;
    Ok((start, start + bytes))
}

fn overlap(a: Taken, b: Taken) -> bool {
    a.0 < b.1 && b.0 < a.1
}

/// The lowest page-aligned range of `bytes` in low memory that no segment touches.
fn low_gap(bytes: u64, segments: &[Taken]) -> Option<u64> {
    let mut start = BLOCK_FLOOR;
    loop {
        let end = start.checked_add(bytes)?;
        if end > mptable::ADDRESS {
            return None;
        }
        match segments.iter().find(|s| overlap(**s, (start, end))) {
            Some(s) => start = s.1.checked_next_multiple_of(PAGE)?,
            None => return Some(start),
        }
    }
}

fn memory_map(memory: &Memory) -> Vec<hvm_memmap_table_entry> {
    let entry = |start: u64, end: u64, type_| hvm_memmap_table_entry {
        addr: start,
        size: end - start,
        type_,
        reserved: 0,
    };
    let mut map = vec![
        entry(0, mptable::ADDRESS, XEN_HVM_MEMMAP_TYPE_RAM),
        entry(mptable::ADDRESS, ONE_MIB, XEN_HVM_MEMMAP_TYPE_RESERVED),
    ];
    for slot in memory.layout().slots() {
        let (start, end) = (slot.base.gpa(), slot.run().end().gpa());
        if start == 0 {
            map.push(entry(ONE_MIB, end, XEN_HVM_MEMMAP_TYPE_RAM));
            map.push(entry(CHIPSET_START, HOLE_END, XEN_HVM_MEMMAP_TYPE_RESERVED));
        } else {
            map.push(entry(start, end, XEN_HVM_MEMMAP_TYPE_RAM));
        }
    }
    map
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::MemoryOptions;

    #[test]
    fn the_block_steps_over_what_the_kernel_takes() {
        assert_eq!(low_gap(600, &[]), Some(0x6000));
        assert_eq!(low_gap(600, &[(0x6100, 0x7001), (0x1000, 0x6001)]), Some(0x8000));
        assert_eq!(low_gap(600, &[(0x5000, 0xa0000)]), None);
        assert_eq!(low_gap(0x99c00, &[]), Some(0x6000), "exactly up to the MP table");
        assert_eq!(low_gap(0x99c01, &[]), None);
    }

    #[test]
    fn the_memory_map_is_the_layout() {
        let memory = Memory::new(5 << 30, &MemoryOptions::default()).unwrap();
        let map = memory_map(&memory);
        let ram: u64 =
            map.iter().filter(|e| e.type_ == XEN_HVM_MEMMAP_TYPE_RAM).map(|e| e.size).sum();
        assert_eq!(ram, (5 << 30) - (ONE_MIB - mptable::ADDRESS));
        assert!(map.windows(2).all(|w| w[0].addr + w[0].size <= w[1].addr), "ascending");
    }
}
