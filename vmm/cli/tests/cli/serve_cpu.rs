//! `driftline serve` with CPU templates.

use driftline_machine::testing::{Elf, kvm_or_skip};
use serde_json::json;

use crate::common::serving::ServeProcess;
use crate::common::{TestDir, driftline, wait_for};
use crate::serve_guest::{AfterPrint, configure};

const START: &str = r#"{"action_type": "InstanceStart"}"#;

/// Returns a kernel that prints three bytes again and again: the lowest byte of ECX of CPUID leaf
/// 0x8000_0001, the number of threads of a core (leaf 0xb EBX), and the fifth byte of the revision
/// of the microcode (MSR 0x8b).
fn reads_processor() -> Vec<u8> {
    let out = [0x66, 0xba, 0xf8, 0x03, 0xee]; // mov dx, 0x3f8; out dx, al
    let mut code = vec![0xb8, 1, 0, 0, 0x80, 0x31, 0xc9, 0x0f, 0xa2]; // mov eax, 0x80000001; cpuid
    code.extend([0x88, 0xc8]); // mov al, cl
    code.extend(out);
    code.extend([0xb8, 0xb, 0, 0, 0, 0x31, 0xc9, 0x0f, 0xa2]); // mov eax, 0xb; cpuid
    code.extend([0x88, 0xd8]); // mov al, bl
    code.extend(out);
    code.extend([0xb9, 0x8b, 0, 0, 0, 0x0f, 0x32, 0x88, 0xd0]); // mov ecx, 0x8b; rdmsr; mov al, dl
    code.extend(out);
    code.extend([0xb9, 0, 0, 0x10, 0, 0xe2, 0xfe, 0xe9]); // mov ecx, 0x100000; loop; jmp
    let back = -(code.len() as i32 + 4);
    code.extend(back.to_le_bytes());
    Elf::new(&code).bytes()
}

/// Starts a process whose guest prints to `serial`.
fn serve(tmp: &TestDir, name: &str) -> ServeProcess {
    let socket = tmp.text(&format!("{name}.sock"));
    let vmm = ServeProcess::spawn(driftline(&["serve", "--api-sock", &socket]), socket);
    vmm.done("PUT", "/serial", &json!({ "serial_out_path": tmp.path(name) }).to_string());
    vmm
}

/// Waits for three records of the guest, and returns them.
fn await_records(tmp: &TestDir, name: &str) -> Vec<u8> {
    let print = || std::fs::read(tmp.path(name)).ok().filter(|bytes| bytes.len() >= 9);
    wait_for("what the guest reads", print)[..9].to_vec()
}

#[test]
fn guest_sees_its_processor_after_a_load() {
    if !kvm_or_skip("guest_sees_its_processor_after_a_load") {
        return;
    }
    let tmp = TestDir::new();
    std::fs::write(tmp.path("kernel"), reads_processor()).unwrap();
    let first = serve(&tmp, "first");
    let source = json!({ "kernel_image_path": tmp.text("kernel") });
    first.done("PUT", "/boot-source", &source.to_string());
    let machine = r#"{"vcpu_count": 2, "mem_size_mib": 32, "smt": true}"#;
    first.done("PUT", "/machine-config", machine);
    let template = json!({
        "kvm_capabilities": ["0", "!56"],
        "cpuid_modifiers": [
            { "leaf": "0x80000001", "subleaf": "0x0", "flags": 0,
              "modifiers": [{ "register": "ecx", "bitmap": "0b0101_1001" }] },
            { "leaf": "0x80000001", "subleaf": "0b0", "flags": 0,
              "modifiers": [{ "register": "ecx", "bitmap": "0b1010_0xxx" }] },
        ],
        "msr_modifiers": [{ "addr": "0x8b", "bitmap": format!("0b10100101{}", "x".repeat(32)) }],
    });
    first.done("PUT", "/cpu-config", &template.to_string());
    first.done("PUT", "/actions", START);
    let expected = [0xa1, 2, 0xa5].repeat(3);
    assert_eq!(await_records(&tmp, "first"), expected);
    assert_eq!(first.get("/vm/config")["cpu-config"], json!(null));
    first.done("PATCH", "/vm", r#"{"state": "Paused"}"#);
    let files = json!({ "snapshot_path": tmp.path("state"), "mem_file_path": tmp.path("memory") });
    first.done("PUT", "/snapshot/create", &files.to_string());
    drop(first);
    let second = serve(&tmp, "second");
    let files = json!({ "snapshot_path": tmp.path("state"), "resume_vm": true,
        "mem_backend": { "backend_path": tmp.path("memory"), "backend_type": "File" } });
    second.done("PUT", "/snapshot/load", &files.to_string());
    let seen = await_records(&tmp, "second");
    // The snapshot may be of the middle of a record.
    let is_rest = |from: usize| seen[..9 - from] == expected[from..];
    assert!((0..3).any(is_rest), "{seen:x?}");
    assert_eq!(second.get("/machine-config")["smt"], true);
}

#[test]
fn template_that_kvm_lacks_is_refused() {
    if !kvm_or_skip("template_that_kvm_lacks_is_refused") {
        return;
    }
    let tmp = TestDir::new();
    let vmm = ServeProcess::start(&tmp, &[]);
    configure(&vmm, &tmp, AfterPrint::Wait);
    let config = "System configuration error: Failed to create guest config: ";
    for (template, text) in [
        (
            json!({ "kvm_capabilities": ["65535"] }),
            "Kvm error: Missing KVM capabilities: 0xffff".to_owned(),
        ),
        (
            json!({ "cpuid_modifiers": [
                { "leaf": "0x12345", "subleaf": "0xa", "flags": 0, "modifiers": [] }] }),
            format!(
                "{config}Template changes a CPUID entry not supported by KVM: Leaf: 12345, \
                 Subleaf: a"
            ),
        ),
        (
            json!({ "msr_modifiers": [{ "addr": "0x9999", "bitmap": "0b1" }] }),
            format!("{config}KVM vcpu ioctl failed: Failed to get KVM vcpu msr: 0x9999"),
        ),
    ] {
        vmm.done("PUT", "/cpu-config", &template.to_string());
        let refusal = vmm.refusal("PUT", "/actions", START);
        assert_eq!(refusal, format!("Start microvm error: {text}"));
        assert_eq!(vmm.get("/")["state"], "Not started");
    }
    vmm.done("PUT", "/cpu-config", "{}");
    vmm.done("PUT", "/actions", START);
}
