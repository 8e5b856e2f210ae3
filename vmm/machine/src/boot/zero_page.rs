//! The 64-bit Linux boot protocol: zero page, page tables, descriptor table and command line in one
//! block of low memory.
//!
//! ```text
//! +0        zero page (boot_params)
//! +0x1000   PML4, PDPT, four page directories: the first 4 GiB, one to one, in pages of 2 MiB
//! +0x7000   GDT
//! +0x7100   command line
//! ```

use driftline_dirty_tracker::PAGE_SIZE;
use linux_loader::loader::bootparam::{CAN_USE_HEAP, boot_e820_entry, boot_params, setup_header};
use vm_memory::{ByteValued, Bytes, GuestAddress};

use super::defect::BootMisfit;
use super::error::BootError;
use super::map::{self, RangeKind};
use super::platform::{Entry, GuestRange};
use crate::memory::Memory;

const TABLES_AT: u64 = 0x1000;
const GDT_AT: u64 = 0x7000;
const CMDLINE_AT: u64 = 0x7100;

const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;
/// A boot loader without a number of its own.
const LOADER_UNDEFINED: u8 = 0xff;
const VID_MODE_NORMAL: u16 = 0xffff;

const DIRECTORIES: u64 = 4;
/// End of the identity-mapped addresses. A kernel's entry must lie below.
pub(super) const MAPPED_END: u64 = DIRECTORIES << 30;
const PRESENT_WRITABLE: u64 = 0b11;
const HUGE: u64 = 1 << 7;

/// Selectors that the protocol prescribes for code and data.
pub(super) const CODE_SELECTOR: u16 = 0x10;
pub(super) const DATA_SELECTOR: u16 = 0x18;
const GDT: [u64; 4] = [0, 0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff];
pub(super) const GDT_LIMIT: u16 = (GDT.len() * 8 - 1) as u16;

/// Returns a setup header for an ELF file, which has none: the values of a current kernel.
pub(super) fn header_of_an_elf() -> setup_header {
    setup_header {
        boot_flag: 0xaa55,
        header: u32::from_le_bytes(*b"HdrS"),
        version: 0x020f,
        initrd_addr_max: 0x7fff_ffff,
        kernel_alignment: 0x20_0000,
        cmdline_size: 2047,
        ..Default::default()
    }
}

/// The protocol's inputs besides the kernel.
pub(super) struct BootInputs<'a> {
    pub(super) header: &'a setup_header,
    pub(super) segments: &'a [GuestRange],
    pub(super) initrd: Option<GuestRange>,
    pub(super) cmdline: &'a str,
    pub(super) rsdp: u64,
}

/// Writes the block and returns the guest's entry.
pub(super) fn write(memory: &Memory, rip: u64, inputs: &BootInputs) -> Result<Entry, BootError> {
    let layout = memory.layout();
    let most = inputs.header.cmdline_size;
    if inputs.cmdline.len() > most as usize {
        let cause = BootMisfit::Cmdline { bytes: inputs.cmdline.len(), most };
        return Err(BootError::does_not_fit("the command line", layout, cause));
    }
    let bytes = CMDLINE_AT + inputs.cmdline.len() as u64 + 1;
    let Some(block) = map::low_gap(bytes, inputs.segments) else {
        let cause = BootMisfit::NoGap { bytes };
        return Err(BootError::does_not_fit("the boot information", layout, cause));
    };
    let params = params(memory, block, inputs);
    let gdt: Vec<u8> = GDT.iter().flat_map(|d| d.to_le_bytes()).collect();
    for (at, bytes) in [
        (0, params.as_slice()),
        (TABLES_AT, &page_tables(block + TABLES_AT)),
        (GDT_AT, &gdt),
        (CMDLINE_AT, inputs.cmdline.as_bytes()),
        (CMDLINE_AT + inputs.cmdline.len() as u64, &[0]),
    ] {
        let written = memory.ram().write_slice(bytes, GuestAddress(block + at));
        written.map_err(|e| BootError::does_not_fit("the boot information", layout, e))?;
    }
    let (page_tables, gdt) = (block + TABLES_AT, block + GDT_AT);
    Ok(Entry::Linux64 { rip, zero_page: block, page_tables, gdt })
}

fn params(memory: &Memory, block: u64, inputs: &BootInputs) -> boot_params {
    let mut params = boot_params { hdr: *inputs.header, ..Default::default() };
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.vid_mode = VID_MODE_NORMAL;
    params.hdr.loadflags &= !CAN_USE_HEAP;
    // The VMM sets these, whatever the file has there.
    params.hdr.setup_data = 0;
    params.hdr.hardware_subarch = 0;
    params.hdr.cmd_line_ptr = (block + CMDLINE_AT) as u32;
    let (start, end) = inputs.initrd.unwrap_or_default();
    params.hdr.ramdisk_image = start as u32;
    params.hdr.ramdisk_size = (end - start) as u32;
    params.acpi_rsdp_addr = inputs.rsdp;
    // At most five ranges: the layout has at most two slots.
    let ranges = map::memory_map(memory);
    let mut table = params.e820_table;
    let mut entries = 0;
    for (entry, range) in table.iter_mut().zip(&ranges) {
        let r#type = if range.kind == RangeKind::Ram { E820_RAM } else { E820_RESERVED };
        *entry = boot_e820_entry { addr: range.start, size: range.bytes(), r#type };
        entries += 1;
    }
    params.e820_table = table;
    params.e820_entries = entries;
    params
}

/// Returns the PML4, PDPT and page directories for tables at address `at`.
fn page_tables(at: u64) -> Vec<u8> {
    let mut entries = vec![0u64; ((2 + DIRECTORIES) * PAGE_SIZE / 8) as usize];
    entries[0] = (at + PAGE_SIZE) | PRESENT_WRITABLE;
    for i in 0..DIRECTORIES {
        entries[512 + i as usize] = (at + (2 + i) * PAGE_SIZE) | PRESENT_WRITABLE;
    }
    for (i, entry) in entries[1024..].iter_mut().enumerate() {
        *entry = (i as u64) << 21 | HUGE | PRESENT_WRITABLE;
    }
    entries.iter().flat_map(|e| e.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::MemoryOptions;

    fn inputs(header: &setup_header) -> BootInputs<'_> {
        BootInputs {
            header,
            segments: &[],
            initrd: Some((0x200_0000, 0x200_1234)),
            cmdline: "hello",
            rsdp: 0xe_0000,
        }
    }

    #[test]
    fn zero_page_has_all_boot_parameters() {
        let memory = Memory::new(5 << 30, &MemoryOptions::default()).unwrap();
        let mut header = header_of_an_elf();
        // Fields that a file must not be able to set.
        header.setup_data = 0x1234;
        let Entry::Linux64 { rip, zero_page, page_tables, .. } =
            write(&memory, 0x100_0200, &inputs(&header)).unwrap()
        else {
            panic!("not entered at 64 bits");
        };
        assert_eq!((rip, page_tables), (0x100_0200, zero_page + 0x1000));
        let mut params = boot_params::default();
        memory.ram().read_slice(params.as_mut_slice(), GuestAddress(zero_page)).unwrap();
        let hdr = params.hdr;
        assert_eq!({ hdr.ramdisk_image }, 0x200_0000);
        assert_eq!({ hdr.ramdisk_size }, 0x1234);
        assert_eq!({ hdr.setup_data }, 0);
        assert_eq!({ params.acpi_rsdp_addr }, 0xe_0000);
        let mut line = [0xff; 6];
        memory.ram().read_slice(&mut line, GuestAddress(u64::from(hdr.cmd_line_ptr))).unwrap();
        assert_eq!(&line, b"hello\0");
        let table = params.e820_table;
        let listed: Vec<(u64, u64, u32)> = table[..usize::from(params.e820_entries)]
            .iter()
            .map(|e| (e.addr, e.size, e.r#type))
            .collect();
        assert_eq!(listed.len(), 5);
        assert_eq!(listed[2], (1 << 20, (3 << 30) - (1 << 20), E820_RAM));
        assert_eq!(listed[4], (4 << 30, 2 << 30, E820_RAM));
    }

    #[test]
    fn four_gibibytes_are_mapped_one_to_one() {
        let memory = Memory::new(16 << 20, &MemoryOptions::default()).unwrap();
        memory.ram().write_slice(&page_tables(0x7000), GuestAddress(0x7000)).unwrap();
        let read = |at| memory.ram().read_obj::<u64>(GuestAddress(at)).unwrap();
        for address in [0u64, 0x1234_5678, 0xfee0_0020, 0xffff_ffff] {
            let pdpt = read(0x7000 + (address >> 39) * 8) & !0xfff;
            let directory = read(pdpt + (address >> 30) * 8) & !0xfff;
            let entry = read(directory + (address >> 21 & 511) * 8);
            assert_eq!(entry & 0xfff, 0x83);
            assert_eq!((entry & !0xfff) | (address & 0x1f_ffff), address);
        }
    }

    #[test]
    fn too_long_command_line_is_refused() {
        let memory = Memory::new(16 << 20, &MemoryOptions::default()).unwrap();
        let header = setup_header { cmdline_size: 4, ..header_of_an_elf() };
        let error = write(&memory, 0, &inputs(&header)).err().unwrap().to_string();
        assert!(error.ends_with("it has 5 bytes, and the kernel takes 4"), "{error}");
    }
}
