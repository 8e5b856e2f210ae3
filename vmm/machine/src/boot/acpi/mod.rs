//! The ACPI tables: RSDP, XSDT, FADT with its FACS, MADT and DSDT, one after the other.
//!
//! In ACPI's terms the machine is a PC, not a *hardware-reduced* machine: it has the two 8259s and
//! the 8254 that KVM emulates, and kernels fall back on them. So it also has a PM1 register block
//! ([`devices::PowerManagement`](crate::devices)).

mod dsdt;

use acpi_tables::Aml;
use acpi_tables::facs::FACS;
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;

use super::platform::{DescribedMachine, IOAPIC, LOCAL_APIC, ioapic_id};
use crate::devices::{KEYBOARD_COMMAND, KEYBOARD_RESET, PM1A_CONTROL, PM1A_EVENT, SCI};

const OEM: [u8; 6] = *b"DRFTLN";
const OEM_TABLE: [u8; 8] = *b"MACHINE ";
const OEM_REVISION: u32 = 1;

const XSDT_REVISION: u8 = 1;
const DSDT_REVISION: u8 = 2;
const MADT_REVISION: u8 = 4;

/// IA-PC boot architecture flags: there is no VGA and no real-time clock. Without a keyboard, the
/// flag of its controller stays clear: port 0x64 then knows one command, which resets.
const KEYBOARD: u16 = 1 << 1;
const NO_VGA: u16 = 1 << 2;
const NO_RTC: u16 = 1 << 5;

/// MADT flag: the two 8259s exist, and are to be masked.
const PCAT_COMPAT: u32 = 1;
/// MPS INTI flags of the SCI: active high, level triggered.
const ACTIVE_HIGH_LEVEL: u16 = 0b1101;
const ALL_PROCESSORS: u8 = 0xff;

/// Returns the bytes of all tables, to be written at address `at`, where the RSDP lies. They
/// describe `machine` and a generation ID at `generation_id`.
pub(super) fn build(at: u64, machine: DescribedMachine<'_>, generation_id: u64) -> Vec<u8> {
    let DescribedMachine { vcpus, devices, has_keyboard } = machine;
    let mut area = Area { at, bytes: Vec::new() };
    area.bytes.resize(Rsdp::len(), 0);
    let facs = area.put(&FACS::new());
    let dsdt = area.put(&table(*b"DSDT", DSDT_REVISION, &dsdt::body(devices, generation_id)));
    let fadt = area.put(&fadt(facs as u32, dsdt as u32, has_keyboard));
    let madt = area.put(&table(*b"APIC", MADT_REVISION, &madt_body(vcpus)));
    let entries = [fadt, madt].map(u64::to_le_bytes).concat();
    let xsdt = area.put(&table(*b"XSDT", XSDT_REVISION, &entries));
    let mut rsdp = Vec::new();
    Rsdp::new(OEM, xsdt).to_aml_bytes(&mut rsdp);
    area.bytes[..rsdp.len()].copy_from_slice(&rsdp);
    area.bytes
}

/// Tables one after the other.
struct Area {
    at: u64,
    bytes: Vec<u8>,
}

impl Area {
    /// Appends a table and returns its address. The FACS requires an alignment of 64 bytes.
    fn put(&mut self, table: &dyn Aml) -> u64 {
        self.bytes.resize(self.bytes.len().next_multiple_of(64), 0);
        let address = self.at + self.bytes.len() as u64;
        table.to_aml_bytes(&mut self.bytes);
        address
    }
}

fn table(signature: [u8; 4], revision: u8, body: &[u8]) -> Sdt {
    const HEADER_BYTES: u32 = 36;
    let mut sdt = Sdt::new(signature, HEADER_BYTES, revision, OEM, OEM_TABLE, OEM_REVISION);
    sdt.append_slice(body);
    sdt
}

fn fadt(facs: u32, dsdt: u32, has_keyboard: bool) -> impl Aml {
    let mut fadt = FADTBuilder::new(OEM, OEM_TABLE, OEM_REVISION)
        .firmware_ctrl_32(facs)
        // Caches are coherent, HLT works, buttons are not fixed hardware (there are none).
        .flag(Flags::Wbinvd)
        .flag(Flags::ProcC1)
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::ResetRegSup);
    fadt.dsdt = dsdt.into();
    fadt.x_dsdt = u64::from(dsdt).into();
    fadt.sci_int = u16::from(SCI).into();
    fadt.pm1a_evt_blk = u32::from(PM1A_EVENT).into();
    fadt.pm1_evt_len = 4;
    fadt.x_pm1a_evt_blk = port(PM1A_EVENT, 32, AccessSize::WordAccess);
    fadt.pm1a_cnt_blk = u32::from(PM1A_CONTROL).into();
    fadt.pm1_cnt_len = 2;
    fadt.x_pm1a_cnt_blk = port(PM1A_CONTROL, 16, AccessSize::WordAccess);
    // Latencies too long for use: processors have no deeper sleep states.
    fadt.p_lvl2_lat = 0xffff.into();
    fadt.p_lvl3_lat = 0xffff.into();
    let keyboard = if has_keyboard { KEYBOARD } else { 0 };
    fadt.iapc_boot_arch = (NO_VGA | NO_RTC | keyboard).into();
    fadt.reset_reg = port(KEYBOARD_COMMAND, 8, AccessSize::ByteAccess);
    fadt.reset_value = KEYBOARD_RESET;
    fadt.hypervisor_vendor_identity = u64::from_le_bytes(*b"DRIFTLN\0").into();
    fadt.finalize()
}

fn port(port: u16, bits: u8, access_size: AccessSize) -> GAS {
    GAS {
        address_space_id: AddressSpace::SystemIo,
        register_bit_width: bits,
        register_bit_offset: 0,
        access_size,
        address: u64::from(port).into(),
    }
}

/// Builds the MADT's body: local APICs, the IOAPIC, the SCI's wiring, and NMI on LINT1 everywhere.
/// All other ISA interrupts, the timer included, go to the pin of the same number, as KVM wires
/// them.
fn madt_body(vcpus: u8) -> Vec<u8> {
    let mut body = Vec::new();
    body.extend(LOCAL_APIC.to_le_bytes());
    body.extend(PCAT_COMPAT.to_le_bytes());
    for id in 0..vcpus {
        body.extend([0, 8, id, id]);
        body.extend(1u32.to_le_bytes());
    }
    body.extend([1, 12, ioapic_id(vcpus), 0]);
    body.extend(IOAPIC.to_le_bytes());
    body.extend(0u32.to_le_bytes());
    body.extend([2, 10, 0, SCI]);
    body.extend(u32::from(SCI).to_le_bytes());
    body.extend(ACTIVE_HIGH_LEVEL.to_le_bytes());
    body.extend([4, 6, ALL_PROCESSORS, 0, 0, 1]);
    body
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::map;
    use crate::devices::DevicePlacement;
    use crate::limits::MAX_VCPUS;

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |sum, b| sum.wrapping_add(*b))
    }

    fn u32_at(bytes: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    fn u64_at(bytes: &[u8], at: usize) -> u64 {
        u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
    }

    /// Follows the pointers as a guest does, checks every checksum, and returns the tables by
    /// signature.
    fn walk(all: &[u8], at: u64) -> Vec<(String, Vec<u8>)> {
        let table = |address: u64| {
            let from = (address - at) as usize;
            let bytes = &all[from..from + u32_at(all, from + 4) as usize];
            (String::from_utf8(bytes[..4].to_vec()).unwrap(), bytes.to_vec())
        };
        assert_eq!(&all[..8], b"RSD PTR ");
        assert_eq!((sum(&all[..20]), sum(&all[..36])), (0, 0));
        let xsdt = table(u64_at(all, 24));
        let mut found = vec![xsdt.clone()];
        for entry in xsdt.1[36..].chunks(8) {
            found.push(table(u64_at(entry, 0)));
        }
        let fadt = found[1].1.clone();
        assert_eq!(u64::from(u32_at(&fadt, 40)), u64_at(&fadt, 140), "both DSDT pointers");
        found.push(table(u64_at(&fadt, 140)));
        for (name, bytes) in &found {
            assert_eq!(sum(bytes), 0, "{name}");
        }
        found.push(table(u32_at(&fadt, 36).into()));
        found
    }

    #[test]
    fn every_table_is_found_with_valid_checksum() {
        let (at, end) = map::ACPI_TABLES;
        let devices: Vec<DevicePlacement> = (0..16)
            .map(|i| DevicePlacement { base: 0xd000_0000 + i * 0x1000, irq: 5 + i as u32 })
            .collect();
        for (vcpus, devices) in [(1, &devices[..0]), (MAX_VCPUS, &devices[..])] {
            let machine = DescribedMachine { vcpus, devices, has_keyboard: true };
            let all = build(at, machine, map::GENERATION_ID.0);
            assert!(at + all.len() as u64 <= end, "{} bytes", all.len());
            let tables = walk(&all, at);
            let names: Vec<&str> = tables.iter().map(|t| t.0.as_str()).collect();
            assert_eq!(names, ["XSDT", "FACP", "APIC", "DSDT", "FACS"]);
            let madt = &tables[2].1;
            let (mut from, mut kinds) = (44, [0; 5]);
            while from < madt.len() {
                kinds[usize::from(madt[from])] += 1;
                from += usize::from(madt[from + 1]);
            }
            assert_eq!((from, kinds), (madt.len(), [usize::from(vcpus), 1, 1, 0, 1]));
            assert_eq!(tables[1].1.len(), 276);
        }
    }

    #[test]
    fn fadt_names_the_ports_of_the_bus() {
        let fadt = |has_keyboard| {
            let machine = DescribedMachine { vcpus: 1, devices: &[], has_keyboard };
            let all = build(map::ACPI_TABLES.0, machine, map::GENERATION_ID.0);
            walk(&all, map::ACPI_TABLES.0)[1].1.clone()
        };
        // The flags of the boot architecture.
        assert_eq!([fadt(false)[109], fadt(true)[109]], [0b10_0100, 0b10_0110]);
        let fadt = &fadt(false)[..];
        assert_eq!((u32_at(fadt, 56), u32_at(fadt, 64)), (0x600, 0x604));
        // A system I/O port of eight bits, accessed by bytes, and the value to write there.
        assert_eq!(fadt[116..120], [1, 8, 0, 1]);
        assert_eq!((u64_at(fadt, 120), fadt[128]), (0x64, 0xfe));
        assert_ne!(u32_at(fadt, 112) & 1 << 10, 0, "the reset register is supported");
    }
}
