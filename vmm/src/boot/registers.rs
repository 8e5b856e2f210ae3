//! The registers with which PVH enters a kernel: 32-bit protected mode, flat segments, no paging.

use kvm_bindings::{kvm_regs, kvm_segment};
use kvm_ioctls::VcpuFd;

use super::Entry;

const CR0_PE: u64 = 1 << 0;
const CR0_ET: u64 = 1 << 4;
/// Bit 1 of EFLAGS is always set.
const EFLAGS_FIXED: u64 = 1 << 1;

const CODE: u8 = 0xb;
const DATA: u8 = 0x3;
const BUSY_TSS: u8 = 0xb;

/// Puts the boot vCPU where the PVH protocol says: RBX has the start info, all else is 0.
pub fn set_registers(vcpu: &VcpuFd, entry: Entry) -> Result<(), kvm_ioctls::Error> {
    let mut sregs = vcpu.get_sregs()?;
    let flat = |selector: u16, type_: u8| kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_,
        present: 1,
        db: 1,
        s: 1,
        g: 1,
        ..Default::default()
    };
    sregs.cs = flat(0x8, CODE);
    for data in [&mut sregs.ds, &mut sregs.es, &mut sregs.fs, &mut sregs.gs, &mut sregs.ss] {
        *data = flat(0x10, DATA);
    }
    sregs.tr = kvm_segment {
        limit: 0x67,
        selector: 0x18,
        type_: BUSY_TSS,
        present: 1,
        ..Default::default()
    };
    sregs.cr0 = CR0_PE | CR0_ET;
    sregs.cr4 = 0;
    sregs.efer = 0;
    vcpu.set_sregs(&sregs)?;
    vcpu.set_regs(&kvm_regs {
        rip: entry.rip,
        rbx: entry.start_info,
        rflags: EFLAGS_FIXED,
        ..Default::default()
    })
}
