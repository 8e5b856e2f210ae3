//! The reset values of those parts of a vCPU's state that many guests never touch: the
//! architecture's (Intel's manual, volume 3, table "IA-32 and Intel 64 Processor States Following
//! Power-up, Reset, or INIT"), and KVM's for a new vCPU.
//!
//! A restore does not set the parts that have their reset values. That saves up to three ioctls a
//! vCPU, each of some ten microseconds on a host that is itself a guest. The downtime of the row "4
//! GiB, mostly idle" of `cargo bench -p tests --bench migrate_vs_qemu` (0.55 ms) includes them: the
//! payload touches none of these registers.

use kvm_bindings::{
    KVM_MP_STATE_RUNNABLE, KVM_MP_STATE_UNINITIALIZED, kvm_debugregs, kvm_mp_state, kvm_xcrs,
};

const DR6: u64 = 0xffff_0ff0;
const DR7: u64 = 0x400;
/// XCR0: the x87 unit alone.
const XCR0: u64 = 1;

/// Returns whether these debug registers have their reset values.
pub(super) fn is_debug(regs: &kvm_debugregs) -> bool {
    (regs.db, regs.dr6, regs.dr7, regs.flags) == ([0; 4], DR6, DR7, 0)
}

/// Returns whether these extended control registers have their reset values.
pub(super) fn is_xcrs(regs: &kvm_xcrs) -> bool {
    let [xcr0, ..] = regs.xcrs;
    (regs.nr_xcrs, regs.flags, xcr0.xcr, xcr0.value) == (1, 0, 0, XCR0)
}

/// Returns whether vCPU `id` has this state when it is created: the first one runs, the others wait
/// to be started.
pub(super) fn is_mp_state(id: u8, state: kvm_mp_state) -> bool {
    let made = if id == 0 { KVM_MP_STATE_RUNNABLE } else { KVM_MP_STATE_UNINITIALIZED };
    state.mp_state == made
}

#[cfg(test)]
mod tests {
    use kvm_ioctls::Kvm;

    use super::*;

    #[test]
    fn new_vcpu_has_the_reset_values() {
        if !crate::testing::kvm_or_skip("new_vcpu_has_the_reset_values") {
            return;
        }
        let vm = Kvm::new().unwrap().create_vm().unwrap();
        vm.create_irq_chip().unwrap();
        for id in 0..2 {
            let vcpu = vm.create_vcpu(id.into()).unwrap();
            assert!(is_mp_state(id, vcpu.get_mp_state().unwrap()));
            let (debug, xcrs) = (vcpu.get_debug_regs().unwrap(), vcpu.get_xcrs().unwrap());
            assert!(is_debug(&debug), "{debug:x?}");
            assert!(is_xcrs(&xcrs), "{xcrs:x?}");
            let changed = kvm_debugregs { dr7: DR7 | 1, ..debug };
            vcpu.set_debug_regs(&changed).unwrap();
            assert!(!is_debug(&vcpu.get_debug_regs().unwrap()));
        }
    }
}
