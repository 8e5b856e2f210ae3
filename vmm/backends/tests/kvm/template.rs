//! CPU templates: what a guest reads of CPUID and of its registers, here and after a move, and
//! hosts that lack a part.

use driftline_guest::{Clock, GuestError, GuestFactory, GuestIdentity, Lifecycle};
use driftline_machine::config::{ChangedBits, CpuTemplate, CpuidChange, MachineConfig, MsrChange};
use driftline_machine::machine::{HostLack, MachineError, MachineFactory, TemplateLack};
use driftline_machine::testing::{Elf, skip};
use driftline_machine::vm::Vm;
use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, Msrs, kvm_msr_entry};
use kvm_ioctls::Kvm;

use crate::harness::*;
use crate::state::move_to_new;

const ARCH_CAPABILITIES: u32 = 0x10a;
/// Leaf 7 EDX: the guest has [`ARCH_CAPABILITIES`].
const HAS_ARCH_CAPABILITIES: u32 = 1 << 29;
const EXTENDED: u32 = 0x8000_0001;
/// The revision of the processor's microcode.
const UCODE_REV: u32 = 0x8b;
/// Errors that the first bank of machine checks reports. KVM does not list it.
const MC0_CTL: u32 = 0x400;
/// Bits of ECX that the VMM sets: in leaf 1, and in leaf [`EXTENDED`].
const OWN_FEATURES: u32 = 1 << 5 | 1 << 24 | 1 << 27 | 1 << 31;
const OWN_EXTENDED: u32 = 0b110;

/// What the guest reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Seen {
    /// Leaf 1 ECX.
    features: u32,
    /// Leaf [`EXTENDED`] ECX.
    extended: u32,
    msr: u64,
}

impl Seen {
    const BYTES: usize = 16;

    fn parse(bytes: &[u8]) -> Self {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let msr = u64::from(word(12)) << 32 | u64::from(word(8));
        Self { features: word(0), extended: word(4), msr }
    }
}

/// Writes what it reads to the serial port, again and again.
fn reads_processor(msr: u32) -> Vec<u8> {
    // Writes EBX, lowest byte first: mov dx, 0x3f8; 4 times mov al, bl; out dx, al; shr ebx, 8.
    let send = [&[0x66, 0xba, 0xf8, 0x03][..], &[0x88, 0xd8, 0xee, 0xc1, 0xeb, 8].repeat(4)];
    let send = send.concat();
    let mut code = Vec::new();
    for leaf in [1, EXTENDED] {
        code.push(0xb8);
        code.extend(leaf.to_le_bytes());
        code.extend([0x31, 0xc9, 0x0f, 0xa2, 0x89, 0xcb]); // xor ecx, ecx; cpuid; mov ebx, ecx
        code.extend(&send);
    }
    code.push(0xb9);
    code.extend(msr.to_le_bytes());
    code.extend([0x0f, 0x32, 0x89, 0xc3, 0x89, 0xd6]); // rdmsr; mov ebx, eax; mov esi, edx
    code.extend(&send);
    code.extend([0x89, 0xf3]); // mov ebx, esi
    code.extend(&send);
    code.extend([0xb9, 0, 0, 2, 0, 0xe2, 0xfe]); // mov ecx, 0x20000; loop to itself
    code.push(0xe9);
    let back = -(code.len() as i32 + 4);
    code.extend(back.to_le_bytes()); // jmp to the start
    code
}

/// Returns the first value of a register in a vCPU of this host, if it has one.
fn first_value(index: u32) -> Option<u64> {
    let kvm = Kvm::new().unwrap();
    let vcpu = kvm.create_vm().unwrap().create_vcpu(0).unwrap();
    vcpu.set_cpuid2(&kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap()).unwrap();
    let entry = kvm_msr_entry { index, ..Default::default() };
    let mut msrs = Msrs::from_entries(&[entry]).unwrap();
    let read = vcpu.get_msrs(&mut msrs).unwrap();
    (read == 1).then(|| msrs.as_slice()[0].data)
}

fn lowest_bit(bits: u32) -> u32 {
    bits & bits.wrapping_neg()
}

fn leaf(function: u32, register: usize, mask: u32, value: u32) -> CpuidChange {
    let mut registers = [ChangedBits::default(); 4];
    registers[register] = ChangedBits { mask, value };
    // Leaf 7 has subleaves.
    let flags = u32::from(function == 7);
    CpuidChange { function, index: 0, flags, registers }
}

fn msr(index: u32, mask: u64, value: u64) -> MsrChange {
    MsrChange { index, bits: ChangedBits { mask, value } }
}

fn with(template: CpuTemplate, config: MachineConfig) -> MachineConfig {
    let mut config = config;
    config.cpu.template = template;
    config
}

fn await_records(console: &SerialLog, count: usize) -> Vec<Seen> {
    console.wait_for("records", |_| console.bytes().len() >= count * Seen::BYTES);
    console.bytes().chunks_exact(Seen::BYTES).map(Seen::parse).collect()
}

/// Checks what a guest with a changed register sees, here and in another machine.
fn check_guest(change: MsrChange) -> Result<(), MachineError> {
    let dir = tempfile::tempdir().unwrap();
    let elf = Elf::new(&reads_processor(change.index)).bytes();
    let [features, extended] =
        [offered(1)[2] & !OWN_FEATURES, offered(EXTENDED)[2] & !OWN_EXTENDED];
    let hidden = [lowest_bit(features), lowest_bit(extended)];
    // A bit that the host does not have appears.
    let shown = lowest_bit(!extended & !OWN_EXTENDED);
    let mut template = CpuTemplate::default();
    template.change_leaf(leaf(1, 2, hidden[0], 0));
    template.change_leaf(leaf(EXTENDED, 2, hidden[1] | shown, hidden[1] | shown));
    template.change_leaf(leaf(EXTENDED, 2, hidden[1], 0));
    template.change_leaf(leaf(7, 3, HAS_ARCH_CAPABILITIES, HAS_ARCH_CAPABILITIES));
    template.change_msr(change);
    template.require(kvm_bindings::KVM_CAP_IRQCHIP);
    let console = SerialLog::new();
    let machine = boot(with(template.clone(), kernel(&elf, &dir)), &console.host())?;
    machine.resume().unwrap();
    let first = await_records(&console, 2)[0];
    // A KVM that emulates the guest's kernel shows other bits of this leaf as the processor has
    // them.
    assert_eq!(first.features & hidden[0], 0, "{first:x?}");
    assert_eq!(first.extended & !OWN_EXTENDED, extended & !hidden[1] | shown, "{first:x?}");
    let before = first_value(change.index).unwrap();
    assert_eq!(first.msr, change.bits.apply(before), "{first:x?}, {before:#x}");
    assert_ne!(first.msr, before);

    let recorded = machine.machine_config().cpu.clone();
    assert_eq!(recorded.template, template);
    let moved = move_to_new(&machine, &console, Clock::Advance);
    let before = console.bytes().len() / Seen::BYTES;
    moved.resume().unwrap();
    let seen = await_records(&console, before + 3);
    assert!(seen.iter().all(|seen| *seen == first), "{seen:x?}");
    assert_eq!(moved.machine_config().cpu, recorded);
    Ok(())
}

#[test]
fn guest_sees_its_template_after_a_move() {
    const NAME: &str = "guest_sees_its_template_after_a_move";
    if !kvm_or_skip(NAME) {
        return;
    }
    check_guest(msr(UCODE_REV, 0xff << 32, 0xa5 << 32)).unwrap();
    // It has all bits or none.
    let all = if first_value(MC0_CTL) == Some(0) { u64::MAX } else { 0 };
    check_guest(msr(MC0_CTL, u64::MAX, all)).unwrap();
    // Clears one bit, if any is set, and sets another.
    let capabilities = first_value(ARCH_CAPABILITIES).unwrap_or(0);
    let (cleared, set) = (capabilities & capabilities.wrapping_neg(), 1 << 45);
    match check_guest(msr(ARCH_CAPABILITIES, cleared | set, set)) {
        Ok(()) => {}
        Err(MachineError::HostLacks(HostLack::Template(
            lack @ TemplateLack::Value { index: ARCH_CAPABILITIES, .. },
        ))) => skip(NAME, &format!("IA32_ARCH_CAPABILITIES: this host lacks {lack}")),
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn lacking_host_is_refused_by_name() {
    if !kvm_or_skip("lacking_host_is_refused_by_name") {
        return;
    }
    let lack = |template: CpuTemplate| match refused(with(template, payload("payload,ws=1M"))) {
        MachineError::HostLacks(HostLack::Template(lack)) => lack,
        other => panic!("{other}"),
    };
    let leaves = |leaf| CpuTemplate { leaves: vec![leaf], ..CpuTemplate::default() };
    let msrs = |msr| CpuTemplate { msrs: vec![msr], ..CpuTemplate::default() };
    let capabilities = |c| CpuTemplate { capabilities: vec![c], ..CpuTemplate::default() };
    let unknown = TemplateLack::Leaf { function: 0x1234, index: 0 };
    assert_eq!(lack(leaves(leaf(0x1234, 0, 1, 1))), unknown);
    let subleaf = CpuidChange { index: 77, ..leaf(1, 0, 1, 1) };
    assert_eq!(lack(leaves(subleaf)), TemplateLack::Leaf { function: 1, index: 77 });
    assert_eq!(lack(capabilities(0xffff)), TemplateLack::Capability(0xffff));
    assert_eq!(lack(msrs(msr(0x9999, 1, 1))), TemplateLack::Msr(0x9999));
    // Bits 1 to 7 of the base of the local APIC are reserved.
    let reserved = msr(0x1b, 0xfe, 0xfe);
    assert!(matches!(lack(msrs(reserved)), TemplateLack::Value { index: 0x1b, .. }));
}

#[test]
fn lacking_destination_refuses_an_arriving_guest() {
    if !kvm_or_skip("lacking_destination_refuses_an_arriving_guest") {
        return;
    }
    let machine = boot(payload("payload,ws=1M"), &silent()).unwrap();
    let factory = MachineFactory::new(silent());
    let refusal = |change: &dyn Fn(&mut CpuTemplate)| {
        let mut config = MachineConfig::decode(&machine.config()).unwrap();
        change(&mut config.cpu.template);
        let error = factory.create(machine.vm_id(), &config.encode()).unwrap_err();
        assert!(matches!(error, GuestError::Unsupported { .. }), "exit code 3: {error}");
        error.to_string()
    };
    let lacks = refusal(&|template| template.change_msr(msr(0x9999, 0, 0)));
    assert!(lacks.ends_with("lacks MSR 0x9999, which the guest's CPU template changes"), "{lacks}");
    let lacks = refusal(&|template| template.change_leaf(leaf(0x1234, 0, 0, 0)));
    assert!(lacks.contains("lacks CPUID leaf 0x1234, subleaf 0x0, which"), "{lacks}");
    let lacks = refusal(&|template| template.require(0xffff));
    assert!(lacks.contains("lacks KVM capability 65535, which"), "{lacks}");
}
