//! The metadata of a guest over Firecracker's API, before and after the guest starts or is loaded.

use driftline_machine::testing::{TestTap, kvm_or_skip, skip};
use serde_json::{Value, json};

use crate::common::TestDir;
use crate::common::serving::ServeProcess;
use crate::serve_guest::{AfterPrint, configure};

const START: &str = r#"{"action_type": "InstanceStart"}"#;

#[test]
fn metadata_changes_while_the_guest_runs() {
    let test = "metadata_changes_while_the_guest_runs";
    if !kvm_or_skip(test) {
        return;
    }
    let tap = match TestTap::new("m") {
        Ok(tap) => tap,
        Err(e) => return skip(test, &e.to_string()),
    };
    let tmp = TestDir::new();
    let mut vmm = ServeProcess::start(&tmp, &[]);
    configure(&vmm, &tmp, AfterPrint::Wait);
    let net = json!({ "iface_id": "eth0", "host_dev_name": &tap.0 });
    vmm.done("PUT", "/network-interfaces/eth0", &net.to_string());
    vmm.done("PUT", "/mmds/config", r#"{"network_interfaces": ["eth0"], "version": "V2"}"#);
    vmm.done("PUT", "/mmds", r#"{"a": 1}"#);
    vmm.done("PUT", "/actions", START);
    assert_eq!(vmm.get("/mmds"), json!({ "a": 1 }));
    vmm.done("PATCH", "/mmds", r#"{"a": null, "b": [2]}"#);
    assert_eq!(vmm.get("/mmds"), json!({ "b": [2] }));
    let (status, _, body) = vmm.answer("PATCH", "/mmds", &long(50_000));
    assert_eq!(status, 204, "{body}");
    let (status, _, body) =
        vmm.answer("PATCH", "/mmds", &json!({ "d": "x".repeat(2000) }).to_string());
    let text = "MMDS limit exceeded error: The MMDS patch request doesn't fit.";
    assert!(status == 413 && body.contains(text), "{status}: {body}");
    vmm.done("PUT", "/mmds", r#"{"c": 3}"#);
    assert_eq!(vmm.get("/mmds"), json!({ "c": 3 }));
    let refusal = vmm.refusal("PUT", "/mmds/config", r#"{"network_interfaces": ["eth0"]}"#);
    assert!(refusal.ends_with("not supported after starting the microVM."), "{refusal}");
    let served = vmm.get("/vm/config")["mmds-config"].clone();
    assert_eq!(
        (&served["version"], &served["ipv4_address"]),
        (&json!("V2"), &json!("169.254.169.254"))
    );

    vmm.done("PATCH", "/vm", r#"{"state": "Paused"}"#);
    let (state, memory) = (tmp.text("state"), tmp.text("memory"));
    let create = json!({ "snapshot_path": &state, "mem_file_path": &memory });
    vmm.done("PUT", "/snapshot/create", &create.to_string());
    vmm.signal(rustix::process::Signal::TERM);
    vmm.wait();
    let backend = json!({ "backend_path": &memory, "backend_type": "File" });
    let load = json!({ "snapshot_path": &state, "mem_backend": backend }).to_string();
    for (before, after) in [(None, json!({})), (Some(r#"{"d": 4}"#), json!({ "d": 4 }))] {
        let other = TestDir::new();
        let loaded = ServeProcess::start(&other, &[]);
        if let Some(before) = before {
            loaded.done("PUT", "/mmds", before);
        }
        loaded.done("PUT", "/snapshot/load", &load);
        assert_eq!(loaded.get("/vm/config")["mmds-config"], served);
        assert_eq!(loaded.get("/mmds"), after, "a snapshot has no metadata");
        loaded.done("PUT", "/mmds", r#"{"e": 5}"#);
        assert_eq!(loaded.get("/mmds"), json!({ "e": 5 }));
    }
}

/// Returns a patch of this many bytes.
fn long(bytes: usize) -> String {
    let empty = json!({ "b": "" }).to_string();
    json!({ "b": "x".repeat(bytes - empty.len()) }).to_string()
}

#[test]
fn metadata_without_an_interface_is_not_served() {
    if !kvm_or_skip("metadata_without_an_interface_is_not_served") {
        return;
    }
    let tmp = TestDir::new();
    let vmm = ServeProcess::start(&tmp, &[]);
    configure(&vmm, &tmp, AfterPrint::Wait);
    vmm.done("PUT", "/mmds", r#"{"a": 1}"#);
    vmm.done("PUT", "/actions", START);
    assert_eq!(vmm.get("/vm/config")["mmds-config"], Value::Null);
    let text = "MMDS error: The MMDS data store is not initialized.";
    for (method, body) in [("GET", ""), ("PUT", "{}"), ("PATCH", "{}")] {
        assert_eq!(vmm.refusal(method, "/mmds", body), text);
    }
}
