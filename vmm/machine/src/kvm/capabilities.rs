//! Capabilities of this host's KVM, and the consequence of each missing one.

use crate::tracking::TrackingMode;

use kvm_bindings::*;
use kvm_ioctls::Kvm;

/// Consequence of a missing capability.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Need {
    /// No machine can be built without it.
    Required,
    /// A fallback is used, or the function is not available. The text says which.
    Optional(&'static str),
}

/// One capability and the kernel's answer for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capability {
    /// Name in the kernel, without `KVM_CAP_`.
    pub name: &'static str,
    /// Number in the kernel.
    pub number: u32,
    /// Consequence if it is missing.
    pub need: Need,
    /// Answer of the kernel: 0 if it is missing, otherwise 1 or a value that is specific to the
    /// capability.
    pub value: i32,
}

/// All capabilities that are probed, in the order in which they are reported.
const PROBED: &[(&str, u32, Need)] = &[
    ("USER_MEMORY", KVM_CAP_USER_MEMORY, Need::Required),
    ("IRQCHIP", KVM_CAP_IRQCHIP, Need::Required),
    ("PIT2", KVM_CAP_PIT2, Need::Required),
    ("SET_TSS_ADDR", KVM_CAP_SET_TSS_ADDR, Need::Required),
    ("EXT_CPUID", KVM_CAP_EXT_CPUID, Need::Required),
    ("IMMEDIATE_EXIT", KVM_CAP_IMMEDIATE_EXIT, Need::Required),
    ("MP_STATE", KVM_CAP_MP_STATE, Need::Required),
    (
        "SET_IDENTITY_MAP_ADDR",
        KVM_CAP_SET_IDENTITY_MAP_ADDR,
        Need::Optional("the kernel's default place is used"),
    ),
    (
        "DIRTY_LOG_RING_ACQ_REL",
        KVM_CAP_DIRTY_LOG_RING_ACQ_REL,
        Need::Optional("DIRTY_LOG_RING does the same on x86"),
    ),
    (
        "DIRTY_LOG_RING",
        KVM_CAP_DIRTY_LOG_RING,
        Need::Optional("--tracking dirty-ring is refused; dirty-bitmap remains"),
    ),
    (
        "MANUAL_DIRTY_LOG_PROTECT2",
        KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
        Need::Optional("--tracking dirty-bitmap-manual is refused; dirty-bitmap remains"),
    ),
    ("XSAVE", KVM_CAP_XSAVE, Need::Optional("vector registers are not saved")),
    ("XSAVE2", KVM_CAP_XSAVE2, Need::Optional("at most 4096 bytes of XSAVE state are saved")),
    ("XCRS", KVM_CAP_XCRS, Need::Optional("XCR0 is not saved")),
    ("VCPU_EVENTS", KVM_CAP_VCPU_EVENTS, Need::Optional("pending exceptions are not saved")),
    ("DEBUGREGS", KVM_CAP_DEBUGREGS, Need::Optional("debug registers are not saved")),
    ("SREGS2", KVM_CAP_SREGS2, Need::Optional("a PAE guest's PDPTEs are read from its memory")),
    ("PIT_STATE2", KVM_CAP_PIT_STATE2, Need::Optional("the timer's state is not saved")),
    ("ADJUST_CLOCK", KVM_CAP_ADJUST_CLOCK, Need::Optional("kvmclock is not saved")),
    ("KVMCLOCK_CTRL", KVM_CAP_KVMCLOCK_CTRL, Need::Optional("pauses are not reported to guests")),
    ("GET_TSC_KHZ", KVM_CAP_GET_TSC_KHZ, Need::Optional("TSC frequencies are not compared")),
    (
        "TSC_CONTROL",
        KVM_CAP_TSC_CONTROL,
        Need::Optional("guests that were promised another, invariant TSC frequency are refused"),
    ),
    (
        "TSC_DEADLINE_TIMER",
        KVM_CAP_TSC_DEADLINE_TIMER,
        Need::Optional("guests use the periodic APIC timer"),
    ),
];

/// Answers of one host's kernel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Capabilities {
    all: Vec<Capability>,
}

impl Capabilities {
    /// Probes the kernel for all capabilities.
    pub fn probe(kvm: &Kvm) -> Self {
        Self::from_answers(|number| kvm.check_extension_raw(number.into()))
    }

    pub(crate) fn from_answers(answer: impl Fn(u32) -> i32) -> Self {
        let probe = |&(name, number, need): &(&'static str, u32, Need)| {
            let value = answer(number).max(0);
            Capability { name, number, need, value }
        };
        Self { all: PROBED.iter().map(probe).collect() }
    }

    /// Returns every probed capability.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Capability> {
        self.all.iter()
    }

    /// Returns the required capabilities that are missing.
    pub fn missing(&self) -> impl Iterator<Item = &Capability> {
        self.all.iter().filter(|c| c.need == Need::Required && c.value == 0)
    }

    /// Returns the kernel's answer for `number`, or 0 if it was not probed.
    pub fn value(&self, number: u32) -> i32 {
        self.all.iter().find(|c| c.number == number).map_or(0, |c| c.value)
    }

    /// Returns whether the kernel has `number`.
    pub fn has(&self, number: u32) -> bool {
        self.value(number) != 0
    }

    /// Returns the capability that enables dirty rings and the maximum number of entries of a ring,
    /// or `None` if the kernel has no rings.
    pub fn dirty_ring(&self) -> Option<(u32, u32)> {
        [KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_CAP_DIRTY_LOG_RING].into_iter().find_map(|number| {
            let entries = self.value(number) as u32 / size_of::<kvm_dirty_gfn>() as u32;
            (entries > 0).then_some((number, entries))
        })
    }

    /// Returns the flags that make reading bitmaps and write-protecting frames separate calls, or
    /// `None` if the kernel cannot separate them.
    pub fn manual_dirty_log(&self) -> Option<u32> {
        let supported = KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | KVM_DIRTY_LOG_INITIALLY_SET;
        let flags = self.value(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2) as u32 & supported;
        (flags & KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE != 0).then_some(flags)
    }

    /// Returns the best tracking mode of this host: dirty rings if the kernel allows rings of
    /// `entries` entries, otherwise the dirty bitmap.
    pub fn best_tracking(&self, entries: u32) -> TrackingMode {
        match self.dirty_ring() {
            Some((_, most)) if most >= entries => TrackingMode::DirtyRing,
            _ => TrackingMode::DirtyBitmap,
        }
    }

    /// Returns the size of a vCPU's XSAVE state in bytes.
    pub(crate) fn xsave_bytes(&self) -> usize {
        (self.value(KVM_CAP_XSAVE2) as usize).max(size_of::<kvm_xsave>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_capability_is_named() {
        let caps = Capabilities::from_answers(|n| i32::from(n != KVM_CAP_PIT2));
        assert_eq!(caps.missing().map(|c| c.name).collect::<Vec<_>>(), ["PIT2"]);
        assert!(caps.has(KVM_CAP_IRQCHIP));
        assert_eq!(caps.dirty_ring(), None, "a ring of less than one entry is none");
    }

    #[test]
    fn bitmap_is_best_without_large_enough_rings() {
        let with = |bytes: i32| {
            Capabilities::from_answers(|n| if n == KVM_CAP_DIRTY_LOG_RING { bytes } else { 1 })
        };
        assert_eq!(with(1 << 20).best_tracking(65_536), TrackingMode::DirtyRing);
        assert_eq!(with(1 << 20).best_tracking(131_072), TrackingMode::DirtyBitmap);
        assert_eq!(with(0).best_tracking(1), TrackingMode::DirtyBitmap);
    }

    #[test]
    fn unknown_flags_of_manual_protection_are_not_enabled() {
        let with = |flags: i32| Capabilities::from_answers(|_| flags).manual_dirty_log();
        assert_eq!([0, 1, 2, 3, 7].map(with), [None, Some(1), None, Some(3), Some(3)]);
    }

    #[test]
    fn ring_sizes_are_counted_in_entries() {
        let acq_rel = KVM_CAP_DIRTY_LOG_RING_ACQ_REL;
        let caps = Capabilities::from_answers(|n| if n == acq_rel { 1 << 20 } else { 0 });
        assert_eq!(caps.dirty_ring(), Some((acq_rel, 65_536)));
        let caps = Capabilities::from_answers(|n| if n == acq_rel { -1 } else { 65_536 });
        assert_eq!(caps.dirty_ring(), Some((KVM_CAP_DIRTY_LOG_RING, 4_096)));
    }
}
