//! A machine's state as sections: `KVM_VM`, one `KVM_VCPU` per vCPU, `SERIAL`, `PLATFORM`, one
//! `VIRTIO` per virtio device, `KEYBOARD` if there is a keyboard. Each section begins with its own
//! version; the rest is postcard. Sections come from files and the network: this module or KVM
//! checks every value before its use.

use std::time::Duration;

use driftline_guest::{Clock, GuestError, Section, SectionHead, SectionTag};
use kvm_bindings::*;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::later_state;
use super::request_error::SupervisorError;
use crate::devices::{GENERATION_EVENT, Keyboard, PowerState, SerialPortState, VirtioState};
use crate::kvm::{KvmVm, ioapic_listens};
use crate::vcpu::{CoreRegisters, SavedVcpu, StateContext};
use crate::wall_clock::{advance_ns, wall_ns};
use crate::{boot, codec};

/// The interrupt controllers whose state KVM holds.
const CHIPS: [u32; 3] = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC];

/// A machine's state.
#[derive(Debug)]
pub(super) struct SavedMachine {
    pub(super) vm: SavedVm,
    pub(super) vcpus: Vec<SavedVcpu>,
    pub(super) com1: SerialPortState,
    pub(super) platform: SavedPlatform,
    pub(super) virtio: Vec<VirtioState>,
    pub(super) keyboard: Option<Keyboard>,
}

/// The state of the other emulated platform devices.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SavedPlatform {
    pub(super) power: PowerState,
}

/// The state that belongs to the VM and to no vCPU.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SavedVm {
    /// In the order of [`CHIPS`].
    irqchips: [kvm_irqchip; 3],
    pit: Option<kvm_pit_state2>,
    clock: Option<kvm_clock_data>,
    /// Time at which the clock was read, in nanoseconds of the host's wall clock.
    wall_ns: u64,
}

#[cfg(test)]
impl SavedVm {
    /// Returns a state in which each byte differs from its neighbours.
    pub(super) fn example() -> Self {
        use crate::testing::pattern;
        Self {
            irqchips: [pattern(1), pattern(2), pattern(3)],
            pit: Some(pattern(4)),
            clock: Some(pattern(5)),
            wall_ns: 0x1122_3344_5566_7788,
        }
    }
}

fn ioctl_result<T>(
    what: &'static str,
    r: Result<T, kvm_ioctls::Error>,
) -> Result<T, SupervisorError> {
    r.map_err(|cause| SupervisorError::Kvm { what, cause })
}

pub(super) fn save_vm(vm: &KvmVm, context: &StateContext) -> Result<SavedVm, SupervisorError> {
    let fd = vm.fd();
    let mut irqchips = CHIPS.map(|chip_id| kvm_irqchip { chip_id, ..Default::default() });
    for chip in &mut irqchips {
        ioctl_result("KVM_GET_IRQCHIP", fd.get_irqchip(chip))?;
    }
    let pit = context.has(KVM_CAP_PIT_STATE2);
    let clock = context.has(KVM_CAP_ADJUST_CLOCK);
    Ok(SavedVm {
        irqchips,
        pit: pit.then(|| ioctl_result("KVM_GET_PIT2", fd.get_pit2())).transpose()?,
        clock: clock.then(|| ioctl_result("KVM_GET_CLOCK", fd.get_clock())).transpose()?,
        wall_ns: wall_ns(),
    })
}

/// Restores the VM's part of a state, after the vCPUs' part.
pub(super) fn restore_vm(
    vm: &KvmVm,
    context: &StateContext,
    saved: &SavedVm,
    clock: Clock,
) -> Result<(), SupervisorError> {
    let fd = vm.fd();
    let put = |part, r: Result<(), kvm_ioctls::Error>| {
        r.map_err(|cause| SupervisorError::Part { part, cause })
    };
    for (chip, id) in saved.irqchips.iter().zip(CHIPS) {
        // The position decides which controller it is, not the section's own id.
        let chip = kvm_irqchip { chip_id: id, ..*chip };
        put("interrupt controllers", fd.set_irqchip(&chip))?;
    }
    if let Some(pit) = &saved.pit {
        put("interval timer", fd.set_pit2(pit))?;
    }
    if let Some(then) = &saved.clock
        && context.has(KVM_CAP_ADJUST_CLOCK)
    {
        put("clock", fd.set_clock(&clock_now(context, then, saved.wall_ns, clock)))?;
    }
    Ok(())
}

/// Gives a restored guest a new generation ID and, if the guest listens, interrupts it. Runs
/// after [`restore_vm`], which would overwrite the interrupt. Waits up to `limit` for the ID's
/// page to arrive.
pub(super) fn renew_generation(
    vm: &KvmVm,
    saved: &SavedVm,
    limit: Duration,
) -> Result<(), SupervisorError> {
    // The supervisor runs this and ends the guest: it must not wait for a page that never arrives.
    let arrived = vm.memory().require(boot::generation_frame(), limit);
    arrived.map_err(SupervisorError::GenerationPage)?;
    boot::renew_generation_id(vm.memory()).map_err(SupervisorError::GenerationId)?;
    // A guest without a driver for it may use the pin, or an uninitialized 8259, otherwise.
    let listens = saved.irqchips.get(2).is_some_and(|c| ioapic_listens(c, GENERATION_EVENT));
    if listens {
        ioctl_result("KVM_IRQ_LINE", vm.pulse_irq(u32::from(GENERATION_EVENT)))?;
    }
    Ok(())
}

/// Returns the clock to set for a guest whose clock read `then` at `saved_ns`.
fn clock_now(
    context: &StateContext,
    then: &kvm_clock_data,
    saved_ns: u64,
    clock: Clock,
) -> kvm_clock_data {
    let now = kvm_clock_data { clock: then.clock, ..Default::default() };
    let away = advance_ns(clock, saved_ns, wall_ns());
    tracing::debug!(?clock, away_ns = away, "guest clock");
    // Given the wall clock at the time of reading, the kernel adds the time that has passed until
    // the very moment at which it sets the clock.
    let by_kernel = then.flags & context.value(KVM_CAP_ADJUST_CLOCK) & KVM_CLOCK_REALTIME;
    if away > 0 && by_kernel != 0 {
        return kvm_clock_data { flags: KVM_CLOCK_REALTIME, realtime: then.realtime, ..now };
    }
    kvm_clock_data { clock: then.clock.saturating_add(away), ..now }
}

/// Encodes `saved` as sections.
pub(super) fn encode(saved: &SavedMachine) -> Result<Vec<Section>, SupervisorError> {
    let mut sections = vec![section(SectionTag::KVM_VM, 0, &saved.vm)?];
    for (vcpu, i) in saved.vcpus.iter().zip(0u16..) {
        sections.push(section(SectionTag::KVM_VCPU, i, vcpu)?);
    }
    sections.push(section(SectionTag::SERIAL, 0, &saved.com1)?);
    sections.push(section(SectionTag::PLATFORM, 0, &saved.platform)?);
    for (device, i) in saved.virtio.iter().zip(0u16..) {
        sections.push(Section::new(SectionTag::VIRTIO, i, device.encode()?));
    }
    if let Some(keyboard) = &saved.keyboard {
        sections.push(section(SectionTag::KEYBOARD, 0, keyboard)?);
    }
    later_state::change(&mut sections);
    Ok(sections)
}

pub(super) fn section<T: Serialize>(
    tag: SectionTag,
    instance: u16,
    value: &T,
) -> Result<Section, SupervisorError> {
    Ok(Section::new(tag, instance, codec::encode_versioned(value)?))
}

/// Reads the sections of a machine with `vcpus` vCPUs and `devices` virtio devices. Each section
/// must be there once; an unknown section that must be understood is refused.
pub(super) fn decode(
    sections: &[Section],
    vcpus: u8,
    devices: usize,
) -> Result<SavedMachine, GuestError> {
    let sections = &*later_state::changed_back(sections);
    for s in sections {
        check_part(s.tag, s.instance, s.must_understand, vcpus, devices)
            .map_err(|defect| GuestError::unsupported(name(s.tag, s.instance), defect))?;
    }
    let each = (0..u16::from(vcpus)).map(|i| read(sections, SectionTag::KVM_VCPU, i));
    let virtio = (0..devices as u16).map(|i| {
        let section = find(sections, SectionTag::VIRTIO, i)?;
        VirtioState::decode(name(SectionTag::VIRTIO, i), &section.bytes)
    });
    Ok(SavedMachine {
        vm: read(sections, SectionTag::KVM_VM, 0)?,
        vcpus: each.collect::<Result<_, GuestError>>()?,
        com1: read(sections, SectionTag::SERIAL, 0)?,
        platform: read(sections, SectionTag::PLATFORM, 0)?,
        virtio: virtio.collect::<Result<_, GuestError>>()?,
        keyboard: read_keyboard(sections)?,
    })
}

/// What is wrong with a section, besides its bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
enum SectionDefect {
    #[error("it is missing")]
    Missing,
    #[error("it occurs twice")]
    Twice,
    #[error("a KVM machine with {vcpus} vCPUs and {devices} virtio devices has no such part")]
    NoPart { vcpus: u8, devices: usize },
}

/// Refuses a section of a part that a machine does not have, unless it can be skipped. Returns
/// whether the machine reads it.
fn check_part(
    tag: SectionTag,
    instance: u16,
    must_understand: bool,
    vcpus: u8,
    devices: usize,
) -> Result<bool, SectionDefect> {
    let has = match tag {
        SectionTag::KVM_VM | SectionTag::SERIAL | SectionTag::PLATFORM | SectionTag::KEYBOARD => {
            instance == 0
        }
        SectionTag::KVM_VCPU => instance < u16::from(vcpus),
        SectionTag::VIRTIO => usize::from(instance) < devices,
        // The configuration was used to build this machine.
        SectionTag::CONFIG => return Ok(false),
        _ if !must_understand => return Ok(false),
        _ => false,
    };
    match has {
        true => Ok(true),
        false => Err(SectionDefect::NoPart { vcpus, devices }),
    }
}

/// Returns the heads of the sections that [`encode`] returns.
pub(super) fn heads(vcpus: u8, devices: usize, has_keyboard: bool) -> Vec<SectionHead> {
    let head = |tag: SectionTag, instance| SectionHead {
        tag,
        name: tag.to_string(),
        instance,
        must_understand: true,
        version: codec::VERSION,
    };
    let mut heads = vec![head(SectionTag::KVM_VM, 0)];
    heads.extend((0..u16::from(vcpus)).map(|i| head(SectionTag::KVM_VCPU, i)));
    heads.extend([head(SectionTag::SERIAL, 0), head(SectionTag::PLATFORM, 0)]);
    heads.extend((0..devices as u16).map(|i| head(SectionTag::VIRTIO, i)));
    heads.extend(has_keyboard.then(|| head(SectionTag::KEYBOARD, 0)));
    later_state::change_heads(&mut heads);
    heads
}

/// Refuses sections that [`decode`] would refuse for their heads.
pub(super) fn check_heads(
    heads: &[SectionHead],
    vcpus: u8,
    devices: usize,
) -> Result<(), GuestError> {
    let heads = &*later_state::changed_back_heads(heads);
    heads.iter().try_for_each(|head| {
        match check_part(head.tag, head.instance, head.must_understand, vcpus, devices) {
            Ok(true) => codec::check_version(name(head.tag, head.instance), head.version),
            Ok(false) => Ok(()),
            Err(defect) => Err(GuestError::unsupported(name_of_head(head), defect)),
        }
    })
}

/// Returns the name of a section in errors. An unknown tag has that of the section's writer.
fn name_of_head(head: &SectionHead) -> String {
    match head.tag.name() {
        Some(_) => name(head.tag, head.instance),
        None => format!("{}, {:?} (instance {})", head.tag, head.name, head.instance),
    }
}

/// Reads the keyboard's section, which not every machine has.
fn read_keyboard(sections: &[Section]) -> Result<Option<Keyboard>, GuestError> {
    if !sections.iter().any(|section| section.tag == SectionTag::KEYBOARD) {
        return Ok(None);
    }
    let keyboard: Keyboard = read(sections, SectionTag::KEYBOARD, 0)?;
    keyboard.check().map_err(|e| GuestError::malformed(SectionTag::KEYBOARD, e))?;
    Ok(Some(keyboard))
}

pub(super) fn read<T: DeserializeOwned>(
    sections: &[Section],
    tag: SectionTag,
    instance: u16,
) -> Result<T, GuestError> {
    codec::decode_versioned(name(tag, instance), &find(sections, tag, instance)?.bytes)
}

/// Returns the name of a section in errors.
fn name(tag: SectionTag, instance: u16) -> String {
    format!("{tag} (instance {instance})")
}

/// Returns the section, which must be there once.
fn find(sections: &[Section], tag: SectionTag, instance: u16) -> Result<&Section, GuestError> {
    let malformed = |defect: SectionDefect| GuestError::malformed(name(tag, instance), defect);
    let mut found = sections.iter().filter(|s| s.tag == tag && s.instance == instance);
    let section = found.next().ok_or_else(|| malformed(SectionDefect::Missing))?;
    if found.next().is_some() {
        return Err(malformed(SectionDefect::Twice));
    }
    Ok(section)
}

/// Returns the registers of each of `vcpus` vCPUs, for an ELF core.
pub(crate) fn registers(sections: &[Section], vcpus: u8) -> Result<Vec<CoreRegisters>, GuestError> {
    let each = (0..u16::from(vcpus)).map(|i| {
        let saved: SavedVcpu = read(sections, SectionTag::KVM_VCPU, i)?;
        Ok(saved.registers())
    });
    each.collect()
}
