//! The guest's processor: the baseline, removed features, and refusals by a host that lacks a
//! feature.

use driftline_guest::{Clock, GuestError, GuestFactory, GuestIdentity, Lifecycle};
use driftline_machine::config::{Boot, CpuConfig, CpuidWord, MachineConfig, MsrWord};
use driftline_machine::machine::MachineFactory;
use driftline_machine::testing::{Elf, skip};
use driftline_machine::vm::Vm;

use crate::harness::*;
use crate::state::move_to_new;

/// Returns the baseline minus the features that this host's KVM lacks, by name. Hosts that emulate
/// the guest's kernel lack many. Reports for `test` that the full baseline was not tested.
fn baseline_or_less(test: &str) -> String {
    let mut cpu = "baseline".to_owned();
    loop {
        let config = MachineConfig { cpu: cpu.parse().unwrap(), ..payload("payload,ws=1M") };
        let Err(error) = boot(config, &silent()) else { break };
        assert!(error.host_lacks(), "{error}");
        let error = error.to_string();
        let name = error.strip_prefix("this host lacks ").and_then(|rest| rest.split(' ').next());
        assert!(error.ends_with(&format!("): --cpu {cpu} needs it")), "{error}");
        cpu = format!("{cpu},-{}", name.unwrap());
    }
    if cpu != "baseline" {
        skip(
            test,
            &format!("the whole baseline; this host's KVM offers --cpu {cpu}, which is used"),
        );
    }
    cpu
}

/// Prints CPUID's CX16 (leaf 1 ECX bit 13), "1" or "0". Then prints "-" or "+" for leaf 7 EBX, leaf
/// 0xa EAX and leaf 0x8000_0007 EDX: "-" if the register is zero. Then resets. Runs in ring 0,
/// where KVM answers CPUID on every host.
fn asks_cpuid() -> Vec<u8> {
    let mut code = vec![0xb8, 1, 0, 0, 0, 0x0f, 0xa2]; // mov eax, 1; cpuid
    // shr ecx, 13; and cl, 1; add cl, '0'; mov al, cl
    code.extend([0xc1, 0xe9, 13, 0x80, 0xe1, 1, 0x80, 0xc1, b'0', 0x88, 0xc8]);
    code.extend([0x66, 0xba, 0xf8, 0x03, 0xee]); // out 0x3f8, al
    let test = [[0x85, 0xdb], [0x85, 0xc0], [0x85, 0xd2]]; // test ebx, ebx; eax, eax; edx, edx
    for (leaf, test) in [7u32, 0xa, 0x8000_0007].into_iter().zip(test) {
        code.push(0xb8);
        code.extend(leaf.to_le_bytes());
        code.extend([0x31, 0xc9, 0x0f, 0xa2]); // mov eax, leaf; xor ecx, ecx; cpuid
        code.extend(test);
        code.extend([0xb0, b'-', 0x74, 0x02, 0xb0, b'+']); // mov al, '-'; jz +2; mov al, '+'
        code.extend([0x66, 0xba, 0xf8, 0x03, 0xee]); // out 0x3f8, al
    }
    code.extend([0xb0, 0xfe, 0xe6, 0x64, 0xeb, 0xfe]); // reset
    code
}

#[test]
fn guest_sees_the_configured_processor() {
    const NAME: &str = "guest_sees_the_configured_processor";
    if !kvm_or_skip(NAME) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let elf = Elf::new(&asks_cpuid()).bytes();
    let sign = |register: u32| if register == 0 { '-' } else { '+' };
    let (features, counters) = (sign(offered(7)[1]), sign(offered(0xa)[0]));
    let host = format!("0{features}{counters}{}", sign(offered(0x8000_0007)[3]));
    let baseline = baseline_or_less(NAME);
    for (cpu, sees) in [
        (baseline.clone(), "1---".to_owned()),
        (format!("{baseline},-cx16"), "0---".to_owned()),
        ("host,-cx16".to_owned(), host),
    ] {
        let console = SerialLog::new();
        let config = MachineConfig { cpu: cpu.parse().unwrap(), ..kernel(&elf, &dir) };
        let machine = launch(config, &console);
        machine.resume().unwrap();
        machine.wait_end(Some(LONG)).unwrap();
        drop(machine);
        assert_eq!(console.text(), sees, "{cpu}");
    }
}

#[test]
fn guest_needing_a_missing_feature_is_refused() {
    if !kvm_or_skip("guest_needing_a_missing_feature_is_refused") {
        return;
    }
    let machine = boot(payload("payload,ws=1M"), &silent()).unwrap();
    let exposed = &machine.machine_config().cpu.exposed;
    assert!(exposed.iter().any(|w| w.function == 1 && w.registers[3] & 1 != 0), "an FPU, at least");
    let mut config = MachineConfig::decode(&machine.config()).unwrap();
    let factory = MachineFactory::new(silent());
    factory.create(machine.vm_id(), &config.encode()).unwrap();

    // No processor has this bit, and it has no name.
    let word = |registers| CpuidWord { function: 0x8000_0008, index: 0, registers };
    config.cpu.exposed.retain(|w| w.function != 0x8000_0008);
    config.cpu.exposed.push(word([0, 1 << 31, 0, 0]));
    let error = factory.create(machine.vm_id(), &config.encode()).unwrap_err();
    assert!(matches!(error, GuestError::Unsupported { .. }), "exit code 3: {error}");
    assert!(
        error
            .to_string()
            .contains("this host lacks CPUID leaf 0x80000008 EBX bit 31: the guest has seen it"),
        "{error}"
    );
    config.cpu.exposed[0].registers[1] ^= 1;
    let error = factory.create(machine.vm_id(), &config.encode()).unwrap_err().to_string();
    assert!(error.contains("this host lacks a processor of its vendor"), "{error}");
}

#[test]
fn guest_promised_another_tsc_rate_is_refused() {
    if !kvm_or_skip("guest_promised_another_tsc_rate_is_refused") {
        return;
    }
    let machine = boot(payload("payload,ws=1M"), &silent()).unwrap();
    let factory = MachineFactory::new(silent());
    let create = |change: &dyn Fn(&mut CpuConfig)| {
        let mut config = MachineConfig::decode(&machine.config()).unwrap();
        change(&mut config.cpu);
        let created = factory.create(machine.vm_id(), &config.encode());
        created.map(drop).map_err(|e| e.to_string())
    };
    assert_eq!(create(&|_| ()), Ok(()), "this very host");
    let error = create(&|cpu| cpu.exposed_msrs.push(MsrWord { index: 0x10a, value: 1 << 60 }));
    let error = error.unwrap_err();
    assert!(error.contains("lacks bit 60 of IA32_ARCH_CAPABILITIES (MSR 0x10a)"), "{error}");

    let promised = offered(0x8000_0007)[3] & 1 << 8 != 0;
    let khz = machine.machine_config().cpu.tsc_khz;
    assert_eq!(khz.is_some(), promised, "a rate is noted where CPUID promises one");
    let here = khz.unwrap_or_else(host_khz);
    let near = here + here / 10_000;
    assert_eq!(create(&|cpu| cpu.tsc_khz = Some(near)), Ok(()), "100 parts in a million");
    let far = here + here / 1000;
    let answer = create(&|cpu| cpu.tsc_khz = Some(far));
    let kvm = kvm_ioctls::Kvm::new().unwrap();
    if kvm.check_extension(kvm_ioctls::Cap::TscControl) {
        assert_eq!(answer, Ok(()), "this host can scale it");
    } else {
        let error = answer.unwrap_err();
        let says = format!("this host lacks a time stamp counter of {far} kHz (it has {here} kHz");
        assert!(error.contains(&says), "{error}");
    }
}

fn host_khz() -> u32 {
    let vm = kvm_ioctls::Kvm::new().unwrap().create_vm().unwrap();
    vm.create_vcpu(0).unwrap().get_tsc_khz().unwrap()
}

#[test]
fn baseline_guest_continues_in_another_machine() {
    const NAME: &str = "baseline_guest_continues_in_another_machine";
    if !kvm_or_skip(NAME) {
        return;
    }
    let console = SerialLog::new();
    let cpu = baseline_or_less(NAME);
    let config =
        MachineConfig { cpu: cpu.parse().unwrap(), vcpus: 2, ..payload("payload,ws=1M,rate=max") };
    assert!(matches!(config.boot, Boot::Payload(_)));
    let machine = launch(config, &console);
    let promised = machine.machine_config().cpu.clone();
    assert_eq!((promised.to_string(), promised.tsc_khz), (cpu, None));
    assert_eq!(promised.exposed_msrs, []);
    let expected = [0, 1, 6, 0x4000_0001, 0x8000_0001, 0x8000_0008];
    for word in &promised.exposed {
        assert!(word.index == 0 && expected.contains(&word.function), "{word:x?}");
    }
    machine.resume().unwrap();
    console.wait_for("start", |text| text.contains("payload ready"));
    let machine = move_to_new(&machine, &console, Clock::Advance);
    machine.resume().unwrap();
    let already = console.reports().iter().filter(|r| r.vcpu == 0).count();
    console.wait_for_reports(2, already + 2);
    machine.stop("it has shown enough");
    console.assert_no_errors();
}
