//! Booting: the payload in memories of all shapes, other ELF files, and those that are none.

use checkpoint::Guest;
use vmm::config::{Boot, MachineConfig};
use vmm::testing::kvm_or_skip;
use vmm::vm::{EndReason, Vm};

use crate::elf::{CODE_AT, Elf};
use crate::harness::*;

#[test]
fn the_payload_boots_in_every_shape_of_memory() {
    if !kvm_or_skip("the_payload_boots_in_every_shape_of_memory") {
        return;
    }
    for (mem_mib, vcpus) in [(64, 1), (1024, 2), (5 * 1024, 2)] {
        let console = Console::new();
        let machine = launch(
            MachineConfig {
                mem_bytes: mem_mib * MIB,
                vcpus,
                ..payload("payload,ws=16M,rate=max,passes=3")
            },
            &console,
        );
        assert_eq!(console.text(), "", "a machine is launched paused");
        machine.resume().unwrap();
        assert_powers_off(&machine, &console);
        drop(machine);
        console.assert_no_errors();
        let done = console.reports().iter().filter(|r| r.done).count();
        assert_eq!(done, usize::from(vcpus), "{}", console.text());
    }
}
