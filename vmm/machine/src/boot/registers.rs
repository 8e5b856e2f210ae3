//! The registers with which a kernel is entered: flat 32-bit protected mode without paging for PVH,
//! long mode over identity tables for the 64-bit Linux protocol.

use kvm_bindings::{kvm_dtable, kvm_regs, kvm_segment, kvm_sregs};
use kvm_ioctls::VcpuFd;

use super::platform::Entry;
use super::zero_page;
use crate::kvm::{CR0_PG, CR4_PAE, EFER_LMA};

const CR0_PE: u64 = 1 << 0;
const CR0_ET: u64 = 1 << 4;
const EFER_LME: u64 = 1 << 8;
/// Bit 1 of EFLAGS is always set.
const EFLAGS_FIXED: u64 = 1 << 1;

const CODE: u8 = 0xb;
const DATA: u8 = 0x3;
const BUSY_TSS: u8 = 0xb;

/// Sets the boot vCPU's registers as the protocol requires: one general register points to the boot
/// information, and the others are 0.
pub fn set_registers(vcpu: &VcpuFd, entry: Entry) -> Result<(), kvm_ioctls::Error> {
    let mut sregs = vcpu.get_sregs()?;
    let mut regs = kvm_regs { rflags: EFLAGS_FIXED, ..Default::default() };
    match entry {
        Entry::Pvh { rip, start_info } => {
            protected_mode(&mut sregs);
            (regs.rip, regs.rbx) = (rip, start_info);
        }
        Entry::Linux64 { rip, zero_page, page_tables, gdt } => {
            long_mode(&mut sregs, page_tables, gdt);
            (regs.rip, regs.rsi) = (rip, zero_page);
        }
    }
    vcpu.set_sregs(&sregs)?;
    vcpu.set_regs(&regs)
}

fn flat(selector: u16, type_: u8) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_,
        present: 1,
        db: 1,
        s: 1,
        g: 1,
        ..Default::default()
    }
}

/// Returns a task register that the processor accepts.
fn task(selector: u16) -> kvm_segment {
    kvm_segment { limit: 0x67, selector, type_: BUSY_TSS, present: 1, ..Default::default() }
}

fn set_data(sregs: &mut kvm_sregs, selector: u16) {
    let data = flat(selector, DATA);
    for segment in [&mut sregs.ds, &mut sregs.es, &mut sregs.fs, &mut sregs.gs, &mut sregs.ss] {
        *segment = data;
    }
}

fn protected_mode(sregs: &mut kvm_sregs) {
    sregs.cs = flat(0x8, CODE);
    set_data(sregs, 0x10);
    sregs.tr = task(0x18);
    sregs.cr0 = CR0_PE | CR0_ET;
    sregs.cr4 = 0;
    sregs.efer = 0;
}

fn long_mode(sregs: &mut kvm_sregs, page_tables: u64, gdt: u64) {
    // A 64-bit code segment has L set and D clear.
    sregs.cs = kvm_segment { l: 1, db: 0, ..flat(zero_page::CODE_SELECTOR, CODE) };
    set_data(sregs, zero_page::DATA_SELECTOR);
    sregs.tr = task(0);
    sregs.gdt = kvm_dtable { base: gdt, limit: zero_page::GDT_LIMIT, ..Default::default() };
    sregs.idt = kvm_dtable::default();
    sregs.cr3 = page_tables;
    sregs.cr4 = CR4_PAE;
    sregs.efer = EFER_LME | EFER_LMA;
    sregs.cr0 = CR0_PE | CR0_ET | CR0_PG;
}
