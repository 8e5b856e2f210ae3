//! Addresses, devices and the entry, which the loader shares with the tables that describe the
//! machine.

use crate::devices::DevicePlacement;

/// Addresses of KVM's interrupt controllers.
pub(super) const LOCAL_APIC: u32 = 0xfee0_0000;
pub(super) const IOAPIC: u32 = 0xfec0_0000;

/// Returns the first APIC id that no vCPU has.
pub(super) const fn ioapic_id(vcpus: u8) -> u8 {
    vcpus
}

/// A range of guest physical addresses that is in use: start and end.
pub(super) type GuestRange = (u64, u64);

/// The parts of a machine that the tables in its memory describe.
#[derive(Clone, Copy, Debug)]
pub(super) struct DescribedMachine<'d> {
    pub(super) vcpus: u8,
    pub(super) devices: &'d [DevicePlacement],
    /// Whether there is a keyboard controller.
    pub(super) has_keyboard: bool,
}

/// The entry of a loaded kernel, and the place of its boot information. All values are guest
/// physical addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Entry {
    /// 32-bit protected mode without paging.
    Pvh {
        /// Its first instruction.
        rip: u64,
        /// The start info, for RBX.
        start_info: u64,
    },
    /// Long mode.
    Linux64 {
        /// Its first instruction.
        rip: u64,
        /// The zero page, for RSI.
        zero_page: u64,
        /// The identity tables, for CR3.
        page_tables: u64,
        /// The descriptor table.
        gdt: u64,
    },
}
