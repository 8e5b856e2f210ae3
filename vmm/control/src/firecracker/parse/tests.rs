//! Tests of the parser.

use proptest::prelude::*;
use serde_json::json;

use super::*;

/// Parses a request that is accepted.
fn accepted(method: &str, path: &str, body: &str) -> ParsedCall {
    let parsed = parse(method, path, body.as_bytes());
    parsed.unwrap_or_else(|fault| panic!("{method} {path} {body}: {fault}"))
}

/// Returns the text for a request that is refused.
fn refusal(method: &str, path: &str, body: &str) -> String {
    match parse(method, path, body.as_bytes()) {
        Ok(parsed) => panic!("{method} {path} {body} was accepted: {parsed:?}"),
        Err(fault) => {
            assert_eq!(fault.status(), 400);
            fault.to_string()
        }
    }
}

/// The 38 requests that Firecracker documents, with each action and each state, and a DELETE. Each
/// has a body that it accepts and that uses nothing deprecated, and the start of the operation's
/// debug output.
const OPERATIONS: &[(&str, &str, &str, &str)] = &[
    ("GET", "/", "", "GetInstance"),
    ("GET", "/version", "", "GetVersion"),
    ("PUT", "/actions", r#"{"action_type": "InstanceStart"}"#, "Start"),
    ("PUT", "/actions", r#"{"action_type": "FlushMetrics"}"#, "FlushMetrics"),
    ("PUT", "/actions", r#"{"action_type": "SendCtrlAltDel"}"#, "SendCtrlAltDel"),
    ("GET", "/balloon", "", "GetBalloon"),
    ("PUT", "/balloon", r#"{"amount_mib": 1, "deflate_on_oom": true}"#, "PutBalloon"),
    ("PATCH", "/balloon", r#"{"amount_mib": 1}"#, "PatchBalloon("),
    ("GET", "/balloon/statistics", "", "GetBalloonStatistics"),
    ("PATCH", "/balloon/statistics", r#"{"stats_polling_interval_s": 1}"#, "PatchBalloonStat"),
    ("PATCH", "/balloon/hinting/start", "", "StartHinting"),
    ("GET", "/balloon/hinting/status", "", "GetHinting"),
    ("PATCH", "/balloon/hinting/stop", "", "StopHinting"),
    ("PUT", "/boot-source", r#"{"kernel_image_path": "k"}"#, "PutBootSource"),
    ("PUT", "/cpu-config", "{}", "PutCpuTemplate"),
    ("PUT", "/drives/a_1", r#"{"drive_id": "a_1", "is_root_device": true}"#, "PutDrive"),
    ("PATCH", "/drives/a", r#"{"drive_id": "a"}"#, "PatchDrive"),
    ("PUT", "/pmem/a", r#"{"id": "a", "path_on_host": "p"}"#, "PutPmem"),
    ("PATCH", "/pmem/a", r#"{"id": "a"}"#, "PatchPmem"),
    ("PUT", "/logger", "{}", "PutLogger"),
    ("GET", "/machine-config", "", "GetMachine"),
    ("PUT", "/machine-config", r#"{"vcpu_count": 1, "mem_size_mib": 2}"#, "UpdateMachine"),
    ("PATCH", "/machine-config", r#"{"smt": true}"#, "UpdateMachine"),
    ("PUT", "/metrics", r#"{"metrics_path": "m", "unknown": 1}"#, "PutMetrics"),
    ("GET", "/mmds", "", "GetMetadata"),
    ("PUT", "/mmds", "[1]", "PutMetadata"),
    ("PATCH", "/mmds", "null", "PatchMetadata"),
    ("PUT", "/mmds/config", r#"{"network_interfaces": [], "version": "V2"}"#, "PutMmds"),
    ("PUT", "/entropy", "{}", "PutEntropy"),
    ("PUT", "/serial", "{}", "PutSerial"),
    ("PUT", "/hotplug/memory", r#"{"total_size_mib": 1024}"#, "PutMemoryHotplug"),
    ("PATCH", "/hotplug/memory", r#"{"requested_size_mib": 1}"#, "PatchMemoryHotplug"),
    ("GET", "/hotplug/memory", "", "GetMemoryHotplug"),
    ("PUT", "/network-interfaces/a", r#"{"iface_id": "a", "host_dev_name": "t"}"#, "PutInterface"),
    ("PATCH", "/network-interfaces/a", r#"{"iface_id": "a"}"#, "PatchInterface"),
    ("PUT", "/snapshot/create", r#"{"snapshot_path": "s", "mem_file_path": "m"}"#, "CreateSnap"),
    (
        "PUT",
        "/snapshot/load",
        r#"{"snapshot_path": "s", "mem_backend": {"backend_path": "m", "backend_type": "Uffd"}}"#,
        "LoadSnapshot",
    ),
    ("PATCH", "/vm", r#"{"state": "Paused"}"#, "Pause"),
    ("PATCH", "/vm", r#"{"state": "Resumed"}"#, "Resume"),
    ("GET", "/vm/config", "", "GetConfig"),
    ("PUT", "/vsock", r#"{"guest_cid": 3, "uds_path": "v"}"#, "PutVsock"),
    ("DELETE", "/drives/a", "", "Unplug"),
];

#[test]
fn each_operation_is_parsed() {
    for &(method, path, body, name) in OPERATIONS {
        let parsed = accepted(method, path, body);
        let debug = format!("{:?}", parsed.operation);
        assert!(debug.starts_with(name), "{method} {path}: {debug}");
        assert_eq!(parsed.deprecation, None, "{method} {path}");
        let with_slash = accepted(method, &format!("{path}/"), body);
        assert_eq!(with_slash, parsed, "{method} {path}/");
    }
}

#[test]
fn deprecated_fields_are_reported() {
    for (method, path, body, start) in [
        ("PUT", "/vsock", r#"{"vsock_id": "v", "guest_cid": 3, "uds_path": "v"}"#, "PUT /vsock"),
        ("PUT", "/mmds/config", r#"{"network_interfaces": []}"#, "PUT /mmds/config: V1"),
        (
            "PUT",
            "/machine-config",
            r#"{"vcpu_count": 1, "mem_size_mib": 1, "cpu_template": "None"}"#,
            "PUT /machine-config",
        ),
        ("PATCH", "/machine-config", r#"{"cpu_template": "T2"}"#, "PATCH /machine-config"),
        (
            "PUT",
            "/snapshot/load",
            r#"{"snapshot_path": "s", "mem_file_path": "m"}"#,
            "PUT /snapshot/load",
        ),
    ] {
        let parsed = accepted(method, path, body);
        assert!(parsed.deprecation.unwrap().starts_with(start), "{method} {path}");
    }
}

#[test]
fn load_with_deprecated_fields_becomes_the_new() {
    let old = r#"{"snapshot_path": "s", "mem_file_path": "m", "enable_diff_snapshots": true}"#;
    let new = r#"{"snapshot_path": "s", "track_dirty_pages": true,
                  "mem_backend": {"backend_path": "m", "backend_type": "File"}}"#;
    let load = |body| accepted("PUT", "/snapshot/load", body).operation;
    assert_eq!(load(old), load(new));
}

#[test]
fn refusals_have_the_texts_of_firecracker() {
    let id_mismatch = "The id from the path does not match the id from the body!";
    for (method, path, body, text) in [
        ("GET", "/foo", "", "Invalid request method and/or path: GET foo."),
        ("GET", "/vm", "", "Invalid request method and/or path: GET vm."),
        ("GET", "/version?a=1", "", "Invalid request method and/or path: GET version?a=1."),
        ("PUT", "/version", "{}", "Invalid request method and/or path: PUT version."),
        ("PATCH", "/boot-source", "{}", "Invalid request method and/or path: PATCH boot-source."),
        ("DELETE", "/vm", "", "Invalid request method and/or path: DELETE vm."),
        ("POST", "/vm", "{}", "Invalid request method and/or path: POST vm."),
        ("PUT", "/snapshot/a", "{}", "Invalid request method and/or path: PUT /snapshot/a."),
        ("GET", "/foo", "{}", "GET request cannot have a body."),
        ("PUT", "/foo", "", "Empty PUT request."),
        ("PATCH", "/foo", "", "Empty PATCH request."),
        ("PATCH", "/balloon", "", "Empty PATCH request."),
        ("PATCH", "/balloon/statistics", "", "Empty PATCH request."),
        ("PATCH", "/machine-config", "{}", "Empty PATCH request."),
        ("DELETE", "/drives/a", "{}", "Empty Delete request."),
        ("PUT", "/drives", "{}", "The ID cannot be empty."),
        ("PUT", "/drives//a", "{}", "The ID cannot be empty."),
        ("DELETE", "/pmem", "", "The ID cannot be empty."),
        (
            "PUT",
            "/network-interfaces/a-b",
            "{}",
            "API Resource IDs can only contain alphanumeric characters and underscores.",
        ),
        ("PUT", "/drives/a", r#"{"drive_id": "b", "is_root_device": false}"#, id_mismatch),
        ("PATCH", "/pmem/a", r#"{"id": "b"}"#, id_mismatch),
        (
            "PATCH",
            "/network-interfaces/a",
            r#"{"iface_id": "b"}"#,
            "The id from the path [a] does not match the id from the body [b]!",
        ),
        ("PUT", "/snapshot", "{}", "Missing snapshot operation type."),
        ("GET", "/balloon/x", "", "Unrecognized GET request path `x`."),
        ("PUT", "/mmds/x", "{}", "Unrecognized PUT request path `x`."),
        ("GET", "/balloon/hinting", "", "Unrecognized GET request path `/hinting/`."),
        ("PATCH", "/balloon/hinting/x", "", "Unrecognized PATCH request path `/hinting/x`."),
    ] {
        assert_eq!(refusal(method, path, body), text, "{method} {path} {body}");
    }
}

/// A body's fault, without the beginning that all such faults have.
fn body_fault(method: &str, path: &str, body: &str) -> String {
    let text = refusal(method, path, body);
    let start = "An error occurred when deserializing the json body of a request: ";
    text.strip_prefix(start).unwrap_or_else(|| panic!("{text}")).to_owned()
}

#[test]
fn unknown_fields_are_refused_with_the_known() {
    let limits = r#"{"rate_limiter": {"x": 1}}"#;
    for (method, path, body, known) in [
        ("PUT", "/actions", r#"{"x": 1}"#, "expected `action_type`"),
        ("PATCH", "/vm", r#"{"x": 1}"#, "expected `state`"),
        ("PUT", "/entropy", limits, "expected `bandwidth` or `ops`"),
        (
            "PUT",
            "/balloon",
            r#"{"x": 1}"#,
            "expected one of `amount_mib`, `deflate_on_oom`, `stats_polling_interval_s`, \
             `free_page_hinting`, `free_page_reporting`",
        ),
        (
            "PUT",
            "/boot-source",
            r#"{"x": 1}"#,
            "expected one of `kernel_image_path`, `initrd_path`, `boot_args`",
        ),
        (
            "PUT",
            "/drives/a",
            r#"{"x": 1}"#,
            "expected one of `drive_id`, `partuuid`, `is_root_device`, `cache_type`, \
             `is_read_only`, `path_on_host`, `rate_limiter`, `io_engine`, `socket`",
        ),
        (
            "PUT",
            "/machine-config",
            r#"{"x": 1}"#,
            "expected one of `vcpu_count`, `mem_size_mib`, `smt`, `cpu_template`, \
             `track_dirty_pages`, `huge_pages`",
        ),
        (
            "PUT",
            "/network-interfaces/a",
            r#"{"x": 1}"#,
            "expected one of `iface_id`, `host_dev_name`, `guest_mac`, `mtu`, `rx_rate_limiter`, \
             `tx_rate_limiter`",
        ),
        (
            "PUT",
            "/logger",
            r#"{"x": 1}"#,
            "expected one of `log_path`, `level`, `show_level`, `show_log_origin`, `module`",
        ),
        (
            "PUT",
            "/snapshot/load",
            r#"{"x": 1}"#,
            "expected one of `snapshot_path`, `mem_file_path`, `mem_backend`, \
             `enable_diff_snapshots`, `track_dirty_pages`, `resume_vm`, `network_overrides`, \
             `vsock_override`, `clock_realtime`, `huge_pages`",
        ),
        ("PUT", "/serial", r#"{"x": 1}"#, "expected `serial_out_path` or `rate_limiter`"),
        ("PUT", "/vsock", r#"{"x": 1}"#, "expected one of `vsock_id`, `guest_cid`, `uds_path`"),
    ] {
        let text = body_fault(method, path, body);
        let expected = format!("unknown field `x`, {known} at line 1 column ");
        assert!(text.starts_with(&expected), "{method} {path}: {text}");
    }
}

#[test]
fn malformed_bodies_are_refused_as_serde_does() {
    let net = |rest: &str| format!(r#"{{"iface_id": "a", "host_dev_name": "t", {rest}}}"#);
    for (path, body, start) in [
        ("/boot-source", "{", "EOF while parsing an object at line 1 column 1."),
        ("/boot-source", "{}", "missing field `kernel_image_path` at line 1 column 2."),
        ("/machine-config", "[", "EOF while parsing a list at line 1 column 1."),
        ("/machine-config", "1", "invalid type: integer `1`, expected struct MachineConfig at"),
        (
            "/machine-config",
            r#"{"vcpu_count": 1, "mem_size_mib": "a"}"#,
            "invalid type: string \"a\", expected usize at",
        ),
        (
            "/machine-config",
            r#"{"vcpu_count": 256, "mem_size_mib": 1}"#,
            "invalid value: integer `256`, expected u8 at",
        ),
        (
            "/machine-config",
            r#"{"vcpu_count": 1, "mem_size_mib": 1, "cpu_template": "X"}"#,
            "unknown variant `X`, expected one of `C3`, `T2`, `T2S`, `None`, `T2CL`, `T2A` at",
        ),
        (
            "/machine-config",
            r#"{"vcpu_count": 1, "vcpu_count": 1}"#,
            "duplicate field `vcpu_count` at",
        ),
        (
            "/drives/a",
            r#"{"drive_id": "a", "is_root_device": false, "cache_type": "WriteBack"}"#,
            "unknown variant `WriteBack`, expected `Unsafe` or `Writeback` at",
        ),
        (
            "/actions",
            r#"{"action_type": "Stop"}"#,
            "unknown variant `Stop`, expected one of `FlushMetrics`, `InstanceStart`, \
             `SendCtrlAltDel` at",
        ),
        (
            "/network-interfaces/a",
            &net(r#""guest_mac": "06:00:00:00:00""#),
            "The provided MAC address is invalid. at",
        ),
        (
            "/snapshot/load",
            r#"{"snapshot_path": "s"}"#,
            "missing field: either `mem_backend` or `mem_file_path` is required.",
        ),
        (
            "/snapshot/load",
            r#"{"snapshot_path": "s", "mem_file_path": "m",
                "mem_backend": {"backend_path": "m", "backend_type": "File"}}"#,
            "too many fields: either `mem_backend` or `mem_file_path` exclusively is required.",
        ),
        ("/logger", r#"{"level": "loud"}"#, "Invalid LevelFilter at"),
    ] {
        let text = body_fault("PUT", path, body);
        assert!(text.starts_with(start), "PUT {path} {body}: {text}");
    }
}

#[test]
fn optional_fields_of_1_17_are_accepted() {
    accepted(
        "PUT",
        "/machine-config",
        r#"{"vcpu_count": 1, "mem_size_mib": 2, "huge_pages": "Transparent"}"#,
    );
    accepted("PUT", "/metrics", r#"{"metrics_path": "m", "emit_id": true, "properties": {}}"#);
    let load = json!({ "snapshot_path": "s", "huge_pages": "2M", "clock_realtime": true,
        "mem_backend": { "backend_path": "m", "backend_type": "File" },
        "network_overrides": [{ "iface_id": "a", "host_dev_name": "t", "unknown": 1 }] });
    accepted("PUT", "/snapshot/load", &load.to_string());
}

#[test]
fn addresses_keep_their_text() {
    let mac = r#"{"iface_id": "a", "host_dev_name": "t", "guest_mac": "06:00:AC:10:00:02"}"#;
    let Operation::PutInterface(net) = accepted("PUT", "/network-interfaces/a", mac).operation
    else {
        panic!("not an interface");
    };
    assert_eq!(net.guest_mac.unwrap().to_string(), "06:00:ac:10:00:02");
    assert_eq!(serde_json::to_value(&net).unwrap()["guest_mac"], "06:00:ac:10:00:02");
}

proptest! {
    /// Any request is parsed or refused with a text.
    #[test]
    fn hostile_requests_do_not_panic(
        operation in prop::sample::select(OPERATIONS),
        cut in 0usize..80,
        byte in any::<u8>(),
        path in "[/a-z?-]{0,12}",
    ) {
        let (method, known, body, _) = operation;
        let mut body = body.as_bytes().to_vec();
        if let Some(at) = body.get_mut(cut) {
            *at = byte;
        }
        for path in [known, &path] {
            for body in [&body[..], &body[..cut.min(body.len())]] {
                if let Err(fault) = parse(method, path, body) {
                    prop_assert!(!fault.to_string().is_empty());
                }
            }
        }
    }
}
