//! Details in `kvm_run` of exits that kvm-ioctls does not decode.

use std::fmt::Write;

use kvm_bindings::KVM_INTERNAL_ERROR_EMULATION;
use kvm_ioctls::VcpuFd;

/// `KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES`.
const FLAG_INSTRUCTION_BYTES: u64 = 1;

/// Describes the `KVM_EXIT_INTERNAL_ERROR` that `vcpu` has just returned, in one sentence: the
/// suberror, and the instruction's bytes if the kernel provides them.
pub fn internal_error(vcpu: &mut VcpuFd) -> String {
    let run = vcpu.get_kvm_run();
    // SAFETY: every member of the union is plain data for which all bits are valid, and the exit
    // reason shows that the kernel filled in this member.
    let error = unsafe { run.__bindgen_anon_1.internal };
    let data = &error.data[..(error.ndata as usize).min(error.data.len())];
    describe(error.suberror, data)
}

fn describe(suberror: u32, data: &[u64]) -> String {
    if suberror != KVM_INTERNAL_ERROR_EMULATION {
        return format!("KVM internal error, suberror {suberror}, data {data:x?}");
    }
    // The data of an emulation failure is: flags, the instruction's length, up to 15 bytes of it.
    let bytes: Vec<u8> = data.iter().skip(1).flat_map(|w| w.to_le_bytes()).collect();
    let mut text = "KVM cannot emulate an instruction (internal error, suberror 1)".to_owned();
    if let (Some(flags), Some((&len, rest))) = (data.first(), bytes.split_first())
        && flags & FLAG_INSTRUCTION_BYTES != 0
    {
        text.push_str("; its bytes begin with");
        for byte in rest.iter().take(usize::from(len).min(15)) {
            let _ = write!(text, " {byte:02x}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instruction_bytes_are_spelled_out() {
        // lock cmpxchg16b [rdi]
        let data = [1, u64::from_le_bytes([5, 0xf0, 0x48, 0x0f, 0xc7, 0x0f, 0, 0]), 0];
        assert_eq!(
            describe(KVM_INTERNAL_ERROR_EMULATION, &data),
            "KVM cannot emulate an instruction (internal error, suberror 1); its bytes begin with \
             f0 48 0f c7 0f"
        );
        assert!(describe(KVM_INTERNAL_ERROR_EMULATION, &[]).ends_with("suberror 1)"));
        assert_eq!(describe(3, &[1]), "KVM internal error, suberror 3, data [1]");
    }
}
