//! vCPU state whose size or shape depends on the host: XSAVE beyond 4096 bytes, PDPTEs.

use std::io;

use kvm_bindings::*;
use kvm_ioctls::VcpuFd;
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref};
use vmm_sys_util::{ioctl_ior_nr, ioctl_iow_nr};

ioctl_ior_nr!(KVM_GET_SREGS2, KVMIO, 0xcc, kvm_sregs2);
ioctl_iow_nr!(KVM_SET_SREGS2, KVMIO, 0xcd, kvm_sregs2);

/// Returns the number of 32-bit words that follow the classic 4096 bytes in an XSAVE area of
/// `bytes`.
fn extra_words(bytes: usize) -> usize {
    bytes.saturating_sub(size_of::<kvm_xsave>()).div_ceil(4)
}

fn new_xsave(bytes: usize) -> io::Result<Xsave> {
    Xsave::new(extra_words(bytes)).map_err(io::Error::other)
}

/// Returns the XSAVE area of `vcpu`. `bytes` is the host's size
/// ([`Capabilities::xsave_bytes`](super::Capabilities::xsave_bytes)); `extended` says whether the
/// kernel has `KVM_GET_XSAVE2`.
pub fn get_xsave(vcpu: &VcpuFd, bytes: usize, extended: bool) -> io::Result<Vec<u8>> {
    if !extended {
        let xsave = vcpu.get_xsave().map_err(io::Error::from)?;
        return Ok(xsave.region.iter().flat_map(|w| w.to_le_bytes()).collect());
    }
    let mut xsave = new_xsave(bytes)?;
    // SAFETY: the area has the size that the kernel named for this process, whose set of permitted
    // features does not change.
    unsafe { vcpu.get_xsave2(&mut xsave) }.map_err(io::Error::from)?;
    let region = &xsave.as_fam_struct_ref().xsave.region;
    let words = region.iter().chain(xsave.as_slice());
    Ok(words.flat_map(|w| w.to_le_bytes()).collect())
}

/// An XSAVE area has features that this host's area does not have.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("its {bytes} bytes do not fit the {fits} bytes of this host")]
struct XsaveMisfit {
    bytes: usize,
    fits: usize,
}

/// Loads an XSAVE area into `vcpu`, whose own area has `bytes`. A shorter area is padded with
/// zeros, which is how an area without the later features looks. A longer one is truncated.
///
/// # Errors
///
/// Fails if the truncated part of a longer area is not all zeros.
pub fn set_xsave(vcpu: &VcpuFd, area: &[u8], bytes: usize) -> io::Result<()> {
    let mut xsave = new_xsave(bytes)?;
    let fits = size_of::<kvm_xsave>() + xsave.as_slice().len() * 4;
    if area.iter().skip(fits).any(|&b| b != 0) {
        let misfit = XsaveMisfit { bytes: area.len(), fits };
        return Err(io::Error::new(io::ErrorKind::InvalidData, misfit));
    }
    let word = |i: usize| {
        let mut word = [0; 4];
        let from = area.get(i * 4..).unwrap_or_default();
        let have = from.len().min(4);
        word[..have].copy_from_slice(&from[..have]);
        u32::from_le_bytes(word)
    };
    let mut header = kvm_xsave::default();
    let classic = header.region.len();
    for (i, w) in header.region.iter_mut().enumerate() {
        *w = word(i);
    }
    for (i, w) in xsave.as_mut_slice().iter_mut().enumerate() {
        *w = word(classic + i);
    }
    // SAFETY: the flexible part's length is not touched; only the fixed part is overwritten.
    unsafe { xsave.as_mut_fam_struct() }.xsave.region = header.region;
    // SAFETY: the area has the size that the kernel named for this process, whose set of permitted
    // features does not change.
    unsafe { vcpu.set_xsave2(&xsave) }.map_err(io::Error::from)
}

/// Returns the PDPTEs that the processor has loaded if the guest uses PAE paging, and `None` in
/// other modes.
pub fn get_pdptrs(vcpu: &VcpuFd) -> io::Result<Option<[u64; 4]>> {
    let mut sregs = kvm_sregs2::default();
    // SAFETY: the kernel fills in one kvm_sregs2, which is plain data.
    let ret = unsafe { ioctl_with_mut_ref(vcpu, KVM_GET_SREGS2(), &mut sregs) };
    if ret != 0 {
        return Err(io::Error::last_os_error());
    }
    let valid = sregs.flags & u64::from(KVM_SREGS2_FLAGS_PDPTRS_VALID) != 0;
    Ok(valid.then_some(sregs.pdptrs))
}

/// Loads special registers together with their PDPTEs into `vcpu`.
pub fn set_sregs_with_pdptrs(vcpu: &VcpuFd, s: &kvm_sregs, pdptrs: [u64; 4]) -> io::Result<()> {
    let sregs = kvm_sregs2 {
        cs: s.cs,
        ds: s.ds,
        es: s.es,
        fs: s.fs,
        gs: s.gs,
        ss: s.ss,
        tr: s.tr,
        ldt: s.ldt,
        gdt: s.gdt,
        idt: s.idt,
        cr0: s.cr0,
        cr2: s.cr2,
        cr3: s.cr3,
        cr4: s.cr4,
        cr8: s.cr8,
        efer: s.efer,
        apic_base: s.apic_base,
        flags: u64::from(KVM_SREGS2_FLAGS_PDPTRS_VALID),
        pdptrs,
    };
    // SAFETY: the kernel reads one kvm_sregs2.
    let ret = unsafe { ioctl_with_ref(vcpu, KVM_SET_SREGS2(), &sregs) };
    if ret == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Returns whether the guest listens for interrupts at `pin` of this IOAPIC, that is, has not
/// masked the pin.
pub fn ioapic_listens(chip: &kvm_irqchip, pin: u8) -> bool {
    const MASKED: u64 = 1 << 16;
    // SAFETY: every member of the union is plain data for which all bits are valid.
    let ioapic = unsafe { chip.chip.ioapic };
    ioapic.redirtbl.get(usize::from(pin)).is_some_and(|entry| {
        // SAFETY: both members of the union are plain data for which all bits are valid.
        let bits = unsafe { entry.bits };
        bits & MASKED == 0
    })
}
