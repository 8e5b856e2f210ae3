//! `driftline serve` with snapshots that it does not load.

use std::fs::{self, File};
use std::os::unix::net::UnixListener;

use driftline_machine::testing::kvm_or_skip;
use serde_json::{Value, json};

use crate::common::snapshots::{Instance, MIB, NOT_RESTORED, load_body, snapshot};

#[test]
fn damaged_state_is_refused_and_ends_the_process() {
    if !kvm_or_skip("damaged_state_is_refused_and_ends_the_process") {
        return;
    }
    let tmp = snapshot();
    let sound = fs::read(tmp.path("state")).unwrap();
    let refused = |state: &[u8]| {
        fs::write(tmp.path("bad"), state).unwrap();
        let body = load_body(&tmp, ("bad", "memory"), json!({ "resume_vm": true }));
        let text = Instance::failed_load(&tmp, "second", &body);
        let begin = format!(
            "{NOT_RESTORED}Failed to get snapshot state from file: Failed to load snapshot state \
             from file: "
        );
        assert!(text.starts_with(&begin), "{text}");
        assert!(text.contains(tmp.path("bad").to_str().unwrap()), "{text}");
    };
    // Unit tests flip each bit of a small state.
    let step = sound.len() / 16;
    for at in (0..16).map(|i| i * step + i).chain([sound.len() - 1]) {
        let mut bent = sound.clone();
        bent[at] ^= 1 << (at % 8);
        refused(&bent);
    }
    refused(&sound[..sound.len() - 1]);
    refused(&[]);
    refused(&[&sound[..], b"x"].concat());
}

#[test]
fn missing_or_foreign_files_end_the_process() {
    if !kvm_or_skip("missing_or_foreign_files_end_the_process") {
        return;
    }
    let tmp = snapshot();
    let refused = |files, more: Value, text: &str| {
        let body = load_body(&tmp, files, more);
        let refusal = Instance::failed_load(&tmp, "second", &body);
        assert!(refusal.starts_with(&format!("{NOT_RESTORED}{text}")), "{refusal}");
    };
    let not_found = "No such file or directory (os error 2)";
    let state = "Failed to get snapshot state from file: ";
    let opening = format!("{state}Failed to open snapshot file: {not_found}");
    refused(("none", "memory"), json!({}), &opening);
    let memory = "Failed to load guest memory: Error creating guest memory from file: ";
    let opening = format!("{memory}Failed to load guest memory: {not_found}");
    refused(("state", "none"), json!({}), &opening);
    for (name, bytes) in [("short", 32 * MIB - 1), ("long", 32 * MIB + 4096), ("empty", 0)] {
        fs::copy(tmp.path("memory"), tmp.path(name)).unwrap();
        File::options().write(true).open(tmp.path(name)).unwrap().set_len(bytes).unwrap();
        let text = format!(
            "{memory}Failed to restore guest memory: {} has {bytes} bytes",
            tmp.path(name).display()
        );
        refused(("state", name), json!({}), &text);
    }
    let nets = json!({ "network_overrides": [{ "iface_id": "eth0", "host_dev_name": "tap0" }] });
    refused(("state", "memory"), nets, &format!("{state}Unknown Network Device."));
    let vsock = json!({ "vsock_override": { "uds_path": "v.sock" } });
    refused(("state", "memory"), vsock, &format!("{state}Unknown Vsock Device."));
    let pool = format!("{memory}Cannot restore hugetlbfs backed snapshot");
    refused(("state", "memory"), json!({ "huge_pages": "2M" }), &pool);
    let connecting = "Failed to load guest memory: Error creating guest memory from uffd: Failed \
                      to connect to UDS Unix stream: ";
    drop(UnixListener::bind(tmp.path("left")).unwrap());
    for (socket, end) in [("none", not_found), ("left", "Connection refused (os error 111)")] {
        let handler = json!({ "mem_backend": { "backend_path": tmp.path(socket),
            "backend_type": "Uffd" } });
        refused(("state", "memory"), handler, &format!("{connecting}{end}"));
    }
}
