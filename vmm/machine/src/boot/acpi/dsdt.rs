//! The DSDT: devices that a guest cannot discover on a bus.

use acpi_tables::aml::{
    Device, EISAName, IO, Interrupt, Memory32Fixed, Method, Name, Notify, ONE, Package, Path,
    ResourceTemplate, Scope, ZERO,
};
use acpi_tables::{Aml, aml::AmlStr};

use crate::devices::{
    COM1_IRQ, COM1_PORTS, DevicePlacement, GENERATION_EVENT, PVPANIC, REGISTERS_LEN,
};

/// The notification value for a changed generation ID.
const CHANGED: u8 = 0x80;

/// Returns the definition block.
pub(super) fn body(devices: &[DevicePlacement], generation_id: u64) -> Vec<u8> {
    let mut aml = Vec::new();
    // S5, soft off, is sleep type 0; there is no other sleep state.
    let off = Package::new(vec![&ZERO, &ZERO, &ZERO, &ZERO]);
    Name::new(Path::new("\\_S5_"), &off).to_aml_bytes(&mut aml);
    com1(&mut aml);
    for (device, i) in devices.iter().zip(0u32..) {
        virtio(&mut aml, device, i);
    }
    panic_device(&mut aml);
    generation(&mut aml, generation_id);
    aml
}

/// Adds a device to the system bus.
fn device(aml: &mut Vec<u8>, name: &str, children: Vec<&dyn Aml>) {
    let device = Device::new(Path::new(name), children);
    Scope::new(Path::new("\\_SB_"), vec![&device]).to_aml_bytes(aml);
}

fn name(name: &str, value: &dyn Aml) -> Name {
    Name::new(Path::new(name), value)
}

/// Returns an edge-triggered, active high interrupt that is not shared.
fn edge(gsi: u32) -> Interrupt {
    Interrupt::new(true, true, false, false, gsi)
}

fn com1(aml: &mut Vec<u8>) {
    let (start, end) = (*COM1_PORTS.start(), *COM1_PORTS.end());
    let ports = IO::new(start, start, 1, (end - start + 1) as u8);
    let interrupt = edge(COM1_IRQ);
    let resources = ResourceTemplate::new(vec![&ports, &interrupt]);
    let id = name("_HID", &EISAName::new("PNP0501"));
    device(aml, "COM1", vec![&id, &name("_UID", &ONE), &name("_CRS", &resources)]);
}

fn virtio(aml: &mut Vec<u8>, placement: &DevicePlacement, number: u32) {
    // Devices lie below 4 GiB, in the memory hole.
    let registers = Memory32Fixed::new(true, placement.base as u32, REGISTERS_LEN as u32);
    let interrupt = edge(placement.irq);
    let resources = ResourceTemplate::new(vec![&registers, &interrupt]);
    let id: AmlStr = "LNRO0005";
    let children: [&dyn Aml; 4] = [
        &name("_HID", &id),
        &name("_UID", &number),
        // DMA is coherent.
        &name("_CCA", &ONE),
        &name("_CRS", &resources),
    ];
    device(aml, &format!("VR{number:02X}"), children.to_vec());
}

fn panic_device(aml: &mut Vec<u8>) {
    let port = IO::new(PVPANIC, PVPANIC, 1, 1);
    let id: AmlStr = "QEMU0001";
    let resources = ResourceTemplate::new(vec![&port]);
    device(aml, "PEVT", vec![&name("_HID", &id), &name("_CRS", &resources)]);
}

/// Adds the generation ID, and the event device whose interrupt reports a change of it.
fn generation(aml: &mut Vec<u8>, at: u64) {
    let id: AmlStr = "DRFT0001";
    // The first is the specification's, the second Hyper-V's; drivers look for either.
    let (specified, usual): (AmlStr, AmlStr) = ("VM_Gen_Counter", "VMGENCTR");
    let compatible = Package::new(vec![&specified, &usual]);
    let (low, high) = (at as u32, (at >> 32) as u32);
    let address = Package::new(vec![&low, &high]);
    let children: [&dyn Aml; 4] = [
        &name("_HID", &id),
        &name("_CID", &compatible),
        &name("_DDN", &specified),
        &name("ADDR", &address),
    ];
    device(aml, "VGEN", children.to_vec());

    let id: AmlStr = "ACPI0013";
    let interrupt = edge(GENERATION_EVENT.into());
    let resources = ResourceTemplate::new(vec![&interrupt]);
    let target = Path::new("\\_SB_.VGEN");
    let changed = Notify::new(&target, &CHANGED);
    // Its argument is the interrupt's number; there is only one interrupt.
    let event = Method::new(Path::new("_EVT"), 1, true, vec![&changed]);
    let children: [&dyn Aml; 4] =
        [&name("_HID", &id), &name("_UID", &ZERO), &name("_CRS", &resources), &event];
    device(aml, "GED0", children.to_vec());
}
