//! The guest's processor: the baseline, features taken away, and what a host refuses for lack of one.

use std::sync::Arc;

use checkpoint::{Guest, GuestError, GuestFactory};
use vmm::config::{Boot, CpuidWord, HostConfig, MachineConfig, SerialSink};
use vmm::machine::{Machine, MachineFactory};
use vmm::testing::kvm_or_skip;
use vmm::vm::Vm;

use crate::elf::Elf;
use crate::harness::*;

fn silent() -> HostConfig {
    HostConfig { serial: SerialSink::Null, ..Default::default() }
}

fn supported(function: u32) -> [u32; 4] {
    let kvm = kvm_ioctls::Kvm::new().unwrap();
    let cpuid = kvm.get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES).unwrap();
    let found = cpuid.as_slice().iter().find(|e| e.function == function && e.index == 0);
    found.map_or([0; 4], |e| [e.eax, e.ebx, e.ecx, e.edx])
}

fn has_leaf_7() -> bool {
    supported(7)[1] != 0
}

/// A machine with a baseline processor; `None` where this host's KVM does not offer one, which must
/// then be said by the name of what it lacks.
fn launch_or_lack(config: MachineConfig, console: &Console) -> Option<Arc<Machine>> {
    const SSE3: u32 = 1 << 0;
    let whole = supported(1)[2] & SSE3 != 0;
    match Machine::launch(config.clone(), &console.host()) {
        Ok(machine) => Some(machine),
        Err(e) if !whole => {
            assert!(e.host_lacks());
            let says = format!(
                "this host lacks pni (CPUID leaf 0x1 ECX bit 0): --cpu {} needs it",
                config.cpu
            );
            assert_eq!(e.to_string(), says);
            None
        }
        Err(e) => unreachable!("{e}"),
    }
}

/// Prints what CPUID says of CX16 (leaf 1 ECX bit 13) and of leaf 7 EBX: "1" or "0", and "-" if it
/// is all zeros, else "+". Then resets. In ring 0, where KVM answers on every host.
fn asks_cpuid() -> Vec<u8> {
    let mut code = vec![0xb8, 1, 0, 0, 0, 0x0f, 0xa2]; // mov eax, 1; cpuid
    code.extend([0xc1, 0xe9, 13, 0x80, 0xe1, 1, 0x80, 0xc1, b'0', 0x88, 0xc8]); // shr, and, add; mov al, cl
    code.extend([0x66, 0xba, 0xf8, 0x03, 0xee]); // out 0x3f8, al
    code.extend([0xb8, 7, 0, 0, 0, 0x31, 0xc9, 0x0f, 0xa2]); // mov eax, 7; xor ecx, ecx; cpuid
    code.extend([0xb0, b'-', 0x85, 0xdb, 0x74, 0x02, 0xb0, b'+']); // mov al, '-'; test ebx, ebx; jz +2; mov al, '+'
    code.extend([0x66, 0xba, 0xf8, 0x03, 0xee]); // out 0x3f8, al
    code.extend([0xb0, 0xfe, 0xe6, 0x64, 0xeb, 0xfe]); // reset
    code
}

#[test]
fn the_guest_sees_the_processor_that_was_asked_for() {
    if !kvm_or_skip("the_guest_sees_the_processor_that_was_asked_for") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let elf = Elf::new(&asks_cpuid()).bytes();
    let host = if has_leaf_7() { "0+" } else { "0-" };
    for (cpu, sees) in [("baseline", "1-"), ("baseline,-cx16", "0-"), ("host,-cx16", host)] {
        let console = Console::new();
        let config = MachineConfig { cpu: cpu.parse().unwrap(), ..kernel(&elf, &dir) };
        let Some(machine) = launch_or_lack(config, &console) else { continue };
        machine.resume().unwrap();
        machine.wait_end(Some(LONG)).unwrap();
        drop(machine);
        assert_eq!(console.text(), sees, "{cpu}");
    }
}

#[test]
fn a_guest_that_has_seen_more_than_this_host_has_is_refused_by_name() {
    if !kvm_or_skip("a_guest_that_has_seen_more_than_this_host_has_is_refused_by_name") {
        return;
    }
    let machine = Machine::launch(payload("payload,ws=1M"), &silent()).unwrap();
    let shown = &machine.machine_config().cpu.shown;
    assert!(shown.iter().any(|w| w.function == 1 && w.registers[3] & 1 != 0), "an FPU, at least");
    let mut config = MachineConfig::decode(&machine.config()).unwrap();
    let factory = MachineFactory { host: silent() };
    factory.create(machine.vm_id(), &config.encode()).unwrap();

    // No processor has this bit, nor a name for it.
    let word = |registers| CpuidWord { function: 0x8000_0008, index: 0, registers };
    config.cpu.shown.retain(|w| w.function != 0x8000_0008);
    config.cpu.shown.push(word([0, 1 << 31, 0, 0]));
    let error = factory.create(machine.vm_id(), &config.encode()).unwrap_err();
    assert!(matches!(error, GuestError::Unsupported { .. }), "exit code 3: {error}");
    assert!(
        error
            .to_string()
            .contains("this host lacks CPUID leaf 0x80000008 EBX bit 31: the guest has seen it"),
        "{error}"
    );
    config.cpu.shown[0].registers[1] ^= 1;
    let error = factory.create(machine.vm_id(), &config.encode()).unwrap_err().to_string();
    assert!(error.contains("this host lacks a processor of its vendor"), "{error}");
}

#[test]
fn a_payload_runs_on_the_baseline_and_keeps_its_name_for_it() {
    if !kvm_or_skip("a_payload_runs_on_the_baseline_and_keeps_its_name_for_it") {
        return;
    }
    let console = Console::new();
    let config = MachineConfig {
        cpu: "baseline".parse().unwrap(),
        vcpus: 2,
        ..payload("payload,ws=1M,rate=max,passes=2")
    };
    assert!(matches!(config.boot, Boot::Payload(_)));
    let Some(machine) = launch_or_lack(config, &console) else { return };
    machine.resume().unwrap();
    assert_powers_off(&machine, &console);
    assert_eq!(machine.machine_config().cpu.to_string(), "baseline");
    drop(machine);
    console.assert_no_errors();
}
