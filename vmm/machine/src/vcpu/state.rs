//! A vCPU's whole state besides memory: saved from one vCPU and restored into another, on this host
//! or a different one.
//!
//! Saving omits what the host lacks. Restoring refuses, by name, what the host cannot take, while
//! the guest still has its old host.

use std::io;

use driftline_guest::Clock;
use kvm_bindings::*;
use serde::{Deserialize, Serialize};

use super::error::{VcpuError, VcpuMisfit};
use super::lack::ProcessorLack;
use super::state_context::StateContext;
use super::{Vcpu, VcpuState, control, cpu_compat, msrs, reset, tsc};
use crate::kvm::{get_pdptrs, get_xsave, set_sregs_with_pdptrs, set_xsave};
use crate::wall_clock::{advance_ns, wall_ns};

/// The registers of a vCPU that a core file contains.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CoreRegisters {
    pub(crate) regs: kvm_regs,
    pub(crate) sregs: kvm_sregs,
    /// `MSR_KERNEL_GS_BASE`.
    pub(crate) kernel_gs_base: u64,
}

/// The adjustment of the time stamp counter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Adjust {
    /// Whether the guest's clocks advance over the time in which it did not run.
    pub clock: Clock,
    /// The host's wall clock in nanoseconds, read once for all vCPUs, so that the differences
    /// between their counters stay the same.
    pub now_ns: u64,
}

/// A vCPU's state, as it is stored in a section.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SavedVcpu {
    cpuid: Vec<kvm_cpuid_entry2>,
    tsc_khz: Option<u32>,
    /// The host's wall clock when the TSC was read, in nanoseconds.
    wall_ns: u64,
    mp_state: kvm_mp_state,
    regs: kvm_regs,
    sregs: kvm_sregs,
    pdptrs: Option<[u64; 4]>,
    xsave: Option<Vec<u8>>,
    xcrs: Option<kvm_xcrs>,
    debug: Option<kvm_debugregs>,
    lapic: kvm_lapic_state,
    msrs: Vec<kvm_msr_entry>,
    events: Option<kvm_vcpu_events>,
}

impl SavedVcpu {
    /// Returns the registers that a core file contains.
    pub(crate) fn registers(&self) -> CoreRegisters {
        let kernel_gs = self.msrs.iter().find(|msr| msr.index == msrs::MSR_KERNEL_GS_BASE);
        let kernel_gs_base = kernel_gs.map_or(0, |msr| msr.data);
        CoreRegisters { regs: self.regs, sregs: self.sregs, kernel_gs_base }
    }
}

#[cfg(test)]
impl SavedVcpu {
    /// Returns a state in which each byte differs from its neighbours.
    pub(crate) fn example() -> Self {
        use crate::testing::pattern;
        Self {
            cpuid: vec![pattern(1), pattern(2)],
            tsc_khz: Some(2_000_000),
            wall_ns: 0x1122_3344_5566_7788,
            mp_state: pattern(3),
            regs: pattern(4),
            sregs: pattern(5),
            pdptrs: Some([0x1001, 0x2001, 0x3001, 0x4001]),
            xsave: Some((0..40).collect()),
            xcrs: Some(pattern(6)),
            debug: Some(pattern(7)),
            lapic: pattern(8),
            msrs: vec![pattern(9), pattern(10)],
            events: Some(pattern(11)),
        }
    }
}

fn ioctl_result<T, E: Into<io::Error>>(
    what: &'static str,
    r: Result<T, E>,
) -> Result<T, VcpuError> {
    r.map_err(VcpuError::kvm(what))
}

impl Vcpu {
    /// Returns the whole state. The order matters where noted.
    pub(crate) fn save(&self) -> Result<Box<SavedVcpu>, VcpuError> {
        self.refuse_running("save")?;
        let (fd, ctx) = (&self.fd, &self.context);
        // Comes first: the query makes KVM process a pending INIT or SIPI, which changes
        // registers.
        let mp_state = ioctl_result("KVM_GET_MP_STATE", fd.get_mp_state())?;
        let extended = ctx.has(KVM_CAP_XSAVE2);
        let bytes = ctx.xsave_bytes();
        let xsave = || ioctl_result("KVM_GET_XSAVE2", get_xsave(fd, bytes, extended));
        let regs = ioctl_result("KVM_GET_REGS", fd.get_regs())?;
        let sregs = ioctl_result("KVM_GET_SREGS", fd.get_sregs())?;
        // They exist only under PAE paging, and the query takes ten microseconds of the pause.
        let pdptrs = match ctx.has(KVM_CAP_SREGS2) && control::has_pdptrs(&sregs) {
            true => ioctl_result("KVM_GET_SREGS2", get_pdptrs(fd))?,
            false => None,
        };
        Ok(Box::new(SavedVcpu {
            cpuid: self.cpuid.as_slice().to_vec(),
            tsc_khz: self.tsc_khz.filter(|_| ctx.has(KVM_CAP_GET_TSC_KHZ)),
            mp_state,
            regs,
            sregs,
            pdptrs,
            xsave: ctx.has(KVM_CAP_XSAVE).then(xsave).transpose()?,
            xcrs: optional(ctx, KVM_CAP_XCRS, || ioctl_result("KVM_GET_XCRS", fd.get_xcrs()))?,
            debug: optional(ctx, KVM_CAP_DEBUGREGS, || {
                ioctl_result("KVM_GET_DEBUGREGS", fd.get_debug_regs())
            })?,
            lapic: ioctl_result("KVM_GET_LAPIC", fd.get_lapic())?,
            wall_ns: wall_ns(),
            msrs: msrs::read(fd, ctx.msrs())?,
            // Comes last: it includes what the other queries left pending.
            events: optional(ctx, KVM_CAP_VCPU_EVENTS, || {
                ioctl_result("KVM_GET_VCPU_EVENTS", fd.get_vcpu_events())
            })?,
        }))
    }

    /// Restores a state into this vCPU, which has never run. The order matters: CPUID decides what
    /// the rest may contain; the APIC's mode comes with the special registers; the APIC timer's
    /// deadline needs the APIC; pending events come after everything that could raise or clear
    /// them.
    pub(crate) fn restore(&mut self, saved: &SavedVcpu, adjust: Adjust) -> Result<(), VcpuError> {
        self.refuse_running("restore")?;
        // The first time, registers with their reset values need not be set: each takes ten
        // microseconds of downtime.
        let reset = std::mem::take(&mut self.reset);
        self.restore_cpuid(&saved.cpuid)?;
        self.restore_tsc_khz(saved)?;
        let (fd, ctx) = (&self.fd, &self.context);
        let put = |part, r: Result<(), io::Error>| r.map_err(|e| self.unsupported(part, e));
        control::check_efer(&saved.sregs, &saved.cpuid)
            .map_err(|e| self.unsupported("special registers", e))?;
        put("general registers", fd.set_regs(&saved.regs).map_err(io::Error::from))?;
        let set = match saved.pdptrs.filter(|_| ctx.has(KVM_CAP_SREGS2)) {
            Some(p) => set_sregs_with_pdptrs(fd, &saved.sregs, p),
            None => fd.set_sregs(&saved.sregs).map_err(io::Error::from),
        };
        set.map_err(|cause| {
            let misfit = match control::foreign_cr4(&saved.sregs, &saved.cpuid) {
                Some(bit) => VcpuMisfit::SpecialRegisters { cause, bit },
                None => cause.into(),
            };
            self.unsupported("special registers", misfit)
        })?;
        if let Some(xcrs) = saved.xcrs.as_ref().filter(|xcrs| !(reset && reset::is_xcrs(xcrs))) {
            put("extended control registers", fd.set_xcrs(xcrs).map_err(io::Error::from))?;
        }
        if let Some(xsave) = &saved.xsave {
            let bytes = ctx.xsave_bytes();
            put("vector registers", set_xsave(fd, xsave, bytes))?;
        }
        if let Some(debug) = saved.debug.as_ref().filter(|regs| !(reset && reset::is_debug(regs))) {
            put("debug registers", fd.set_debug_regs(debug).map_err(io::Error::from))?;
        }
        put("local APIC", fd.set_lapic(&saved.lapic).map_err(io::Error::from))?;
        self.restore_msrs(saved, adjust)?;
        if let Some(events) = &saved.events {
            put("pending events", fd.set_vcpu_events(events).map_err(io::Error::from))?;
        }
        if !(reset && reset::is_mp_state(self.id, saved.mp_state)) {
            put("run state", fd.set_mp_state(saved.mp_state).map_err(io::Error::from))?;
        }
        if ctx.has(KVM_CAP_KVMCLOCK_CTRL) {
            // Reports the gap to the guest's watchdogs, whatever its final length, and any earlier
            // gap. Fails for a guest without kvmclock.
            let _ = fd.kvmclock_ctrl();
        }
        Ok(())
    }

    /// Raises a non-maskable interrupt.
    pub(crate) fn nmi(&self) -> Result<(), VcpuError> {
        ioctl_result("KVM_NMI", self.fd.nmi())
    }

    fn refuse_running(&self, request: &'static str) -> Result<(), VcpuError> {
        match self.state {
            VcpuState::Running => Err(VcpuError::Running { request }),
            _ => Ok(()),
        }
    }

    fn restore_cpuid(&mut self, saved: &[kvm_cpuid_entry2]) -> Result<(), VcpuError> {
        let supported = self.context.supported();
        if !cpu_compat::same_vendor(saved, supported) {
            let lacks = ProcessorLack::Vendor;
            return Err(self.unsupported("processor", VcpuMisfit::Processor(lacks)));
        }
        if let Some(lacks) = cpu_compat::lacking(saved, supported) {
            return Err(self.unsupported("processor", VcpuMisfit::Processor(lacks)));
        }
        // If both hosts are alike, the machine was created with this table. Setting it again takes
        // a tenth of a millisecond of downtime.
        if saved == self.cpuid.as_slice() {
            return Ok(());
        }
        let cpuid = CpuId::from_entries(saved);
        let cpuid = cpuid.map_err(|e| self.unsupported("CPUID table", e))?;
        let set = self.fd.set_cpuid2(&cpuid);
        set.map_err(|e| self.unsupported("CPUID table", io::Error::from(e)))?;
        self.cpuid = cpuid;
        Ok(())
    }

    /// Gives the guest its own frequency if the host's differs. Without hardware for that, the
    /// guest continues only if it was not promised a constant rate: it then keeps time by kvmclock,
    /// which knows the real rate.
    fn restore_tsc_khz(&mut self, saved: &SavedVcpu) -> Result<(), VcpuError> {
        let (Some(want), Some(have)) = (saved.tsc_khz, self.tsc_khz) else { return Ok(()) };
        if tsc::is_near(want, have) {
            return Ok(());
        }
        let scale = self.context.has(KVM_CAP_TSC_CONTROL);
        if tsc::is_promised(&saved.cpuid)
            && let Some(lacks) = tsc::missing(want, have, scale)
        {
            return Err(self.unsupported("processor", VcpuMisfit::TscRate(lacks)));
        }
        if let Err(e) = self.fd.set_tsc_khz(want) {
            let id = self.id;
            tracing::warn!(
                "vCPU {id}: its time stamp counter ran at {want} kHz and now runs at {have} kHz: \
                 {e}"
            );
        }
        // The value changes even after an error: KVM remembers what was requested.
        self.tsc_khz = self.fd.get_tsc_khz().ok();
        Ok(())
    }

    fn restore_msrs(&self, saved: &SavedVcpu, adjust: Adjust) -> Result<(), VcpuError> {
        const PART: &str = "model-specific registers";
        let (mut put, mut deadline) = (Vec::new(), None);
        for msr in saved.msrs.iter().filter_map(|m| msrs::to_restore(*m, &saved.cpuid)) {
            match msr.index {
                msrs::MSR_TSC_DEADLINE => deadline = Some(msr),
                msrs::MSR_TSC => put.push(self.adjusted(msr, saved, adjust)),
                _ => put.push(msr),
            }
        }
        // The deadline depends on a correct TSC.
        put.extend(deadline);
        let refused = msrs::write(&self.fd, &put).map_err(|e| self.unsupported(PART, e))?;
        msrs::check_refused(&refused).map_err(|e| self.unsupported(PART, e))
    }

    /// Returns the TSC value to restore, never less than what the guest has seen.
    fn adjusted(&self, mut tsc: kvm_msr_entry, saved: &SavedVcpu, adjust: Adjust) -> kvm_msr_entry {
        if let Some(khz) = saved.tsc_khz {
            let away = advance_ns(adjust.clock, saved.wall_ns, adjust.now_ns);
            let cycles = u128::from(away) * u128::from(khz) / 1_000_000;
            tsc.data = tsc.data.saturating_add(u64::try_from(cycles).unwrap_or(0));
        }
        tsc
    }

    fn unsupported(&self, part: &'static str, cause: impl Into<VcpuMisfit>) -> VcpuError {
        VcpuError::Unsupported { vcpu: self.id, part, cause: cause.into() }
    }
}

fn optional<T>(
    ctx: &StateContext,
    capability: u32,
    get: impl FnOnce() -> Result<T, VcpuError>,
) -> Result<Option<T>, VcpuError> {
    ctx.has(capability).then(get).transpose()
}
