//! The MP table, from which a guest without ACPI learns its processors and interrupt wiring.
//!
//! Layout from the MultiProcessor Specification 1.4, chapter 4: a floating pointer, then a header
//! and entries for each processor, one ISA bus, one IOAPIC, the IOAPIC's 24 pins one to one as
//! interrupts of that bus (edge-triggered, like all interrupts in this table), and the two local
//! interrupts.

use super::map;
use super::platform::{IOAPIC, LOCAL_APIC, ioapic_id};

const ADDRESS: u64 = map::MP_TABLE.0;

/// Version of both kinds of APIC that KVM emulates: integrated.
const APIC_VERSION: u8 = 0x14;
const POINTER_BYTES: usize = 16;
const HEADER_BYTES: usize = 44;

const ENTRY_PROCESSOR: u8 = 0;
const ENTRY_BUS: u8 = 1;
const ENTRY_IOAPIC: u8 = 2;
const ENTRY_INTERRUPT: u8 = 3;
const ENTRY_LOCAL: u8 = 4;

/// Number of the IOAPIC's pins.
const PINS: u8 = 24;
const INT: u8 = 0;
const NMI: u8 = 1;
const EXT_INT: u8 = 3;
const ALL_APICS: u8 = 0xff;

/// Returns the bytes at [`map::MP_TABLE`] for `vcpus` processors.
pub(super) fn build(vcpus: u8) -> Vec<u8> {
    let ioapic_id = ioapic_id(vcpus);
    let mut entries = Vec::new();
    let mut count: u16 = 0;
    let mut entry = |bytes: &[u8]| {
        entries.extend_from_slice(bytes);
        count += 1;
    };
    for id in 0..vcpus {
        // Enabled, and one of them the boot processor. Guests learn signature and features from
        // CPUID, but expect an FPU and an APIC here.
        let flags = 1 | u8::from(id == 0) << 1;
        let mut processor = [0; 20];
        processor[..4].copy_from_slice(&[ENTRY_PROCESSOR, id, APIC_VERSION, flags]);
        processor[4..8].copy_from_slice(&0x600u32.to_le_bytes());
        processor[8..12].copy_from_slice(&0x201u32.to_le_bytes());
        entry(&processor);
    }
    entry(&[ENTRY_BUS, 0, b'I', b'S', b'A', b' ', b' ', b' ']);
    let mut ioapic = [ENTRY_IOAPIC, ioapic_id, APIC_VERSION, 1, 0, 0, 0, 0];
    ioapic[4..].copy_from_slice(&IOAPIC.to_le_bytes());
    entry(&ioapic);
    for irq in 0..PINS {
        // KVM's default wiring has the timer on pin 0, unlike PCs, which have it on pin 2.
        entry(&[ENTRY_INTERRUPT, INT, 0, 0, 0, irq, ioapic_id, irq]);
    }
    entry(&[ENTRY_LOCAL, EXT_INT, 0, 0, 0, 0, ALL_APICS, 0]);
    entry(&[ENTRY_LOCAL, NMI, 0, 0, 0, 0, ALL_APICS, 1]);

    let mut header = [0; HEADER_BYTES];
    header[..4].copy_from_slice(b"PCMP");
    let bytes = (HEADER_BYTES + entries.len()) as u16;
    header[4..6].copy_from_slice(&bytes.to_le_bytes());
    header[6] = 4;
    header[8..16].copy_from_slice(b"DRIFTLN ");
    header[16..28].copy_from_slice(b"MACHINE     ");
    header[34..36].copy_from_slice(&count.to_le_bytes());
    header[36..40].copy_from_slice(&LOCAL_APIC.to_le_bytes());
    header[7] = checksum(header.iter().chain(&entries));

    let mut pointer = [0; POINTER_BYTES];
    pointer[..4].copy_from_slice(b"_MP_");
    pointer[4..8].copy_from_slice(&(ADDRESS as u32 + POINTER_BYTES as u32).to_le_bytes());
    pointer[8] = 1;
    pointer[9] = 4;
    pointer[10] = checksum(pointer.iter());
    [&pointer[..], &header, &entries].concat()
}

/// Returns the byte that makes all bytes add up to 0.
fn checksum<'a>(bytes: impl Iterator<Item = &'a u8>) -> u8 {
    bytes.fold(0u8, |sum, b| sum.wrapping_add(*b)).wrapping_neg()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_checksums_hold_and_the_largest_table_fits() {
        for vcpus in [1, 2, crate::limits::MAX_VCPUS] {
            let table = build(vcpus);
            assert!(
                table.len() as u64 <= map::MP_TABLE.1 - map::MP_TABLE.0,
                "{} bytes",
                table.len()
            );
            assert_eq!(checksum(table[..POINTER_BYTES].iter()), 0);
            assert_eq!(checksum(table[POINTER_BYTES..].iter()), 0);
            let entries = u16::from_le_bytes([table[16 + 34], table[16 + 35]]);
            assert_eq!(entries, u16::from(vcpus) + 4 + u16::from(PINS));
        }
    }
}
