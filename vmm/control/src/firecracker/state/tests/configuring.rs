//! What the requests before the start set, show and refuse.

use serde_json::json;

use super::*;
use crate::firecracker::fault::{BootFault, DriveFault, NetFault};

#[test]
fn pages_before_start_are_those_of_firecracker() {
    let mut vm = TestMachine::new();
    let instance = json!({ "id": "test", "state": "Not started", "vmm_version": IMITATED_VERSION,
        "app_name": "Driftline" });
    assert_eq!(vm.get("/"), instance);
    assert_eq!(vm.get("/version"), json!({ "firecracker_version": IMITATED_VERSION }));
    let machine = json!({ "vcpu_count": 1, "mem_size_mib": 128, "smt": false,
        "track_dirty_pages": false, "huge_pages": "None" });
    assert_eq!(vm.get("/machine-config"), machine);
    assert_eq!(vm.get("/mmds"), json!({}));
    let boot = json!({ "kernel_image_path": "", "initrd_path": null, "boot_args": null });
    let config = json!({ "balloon": null, "drives": [], "boot-source": boot, "cpu-config": null,
        "logger": null, "machine-config": machine, "metrics": null, "mmds-config": null,
        "network-interfaces": [], "vsock": null, "entropy": null, "pmem": [],
        "memory-hotplug": null });
    assert_eq!(vm.get("/vm/config"), config);
    let none = vm.refusal("GET", "/balloon", "");
    assert_eq!(none, "Balloon config error: No balloon device found.");
}

#[test]
fn configuration_is_shown_with_its_defaults() {
    let mut vm = TestMachine::new();
    vm.done("PUT", "/boot-source", r#"{"kernel_image_path": "k", "boot_args": "a"}"#);
    vm.done("PUT", "/drives/a", &drive("a", r#""is_root_device": true"#));
    vm.done("PUT", "/vsock", r#"{"vsock_id": "v", "guest_cid": 3, "uds_path": "v"}"#);
    vm.done("PUT", "/balloon", r#"{"amount_mib": 1, "deflate_on_oom": true}"#);
    vm.done("PUT", "/entropy", r#"{"rate_limiter": {"ops": {"size": 0, "refill_time": 1}}}"#);
    vm.done("PUT", "/serial", r#"{"serial_out_path": "s"}"#);
    let shown = vm.get("/vm/config");
    let boot = json!({ "kernel_image_path": "k", "initrd_path": null, "boot_args": "a" });
    assert_eq!(shown["boot-source"], boot);
    let drive = json!({ "drive_id": "a", "partuuid": null, "is_root_device": true,
        "cache_type": "Unsafe", "is_read_only": false, "path_on_host": "a.img",
        "rate_limiter": null, "io_engine": "Sync", "socket": null });
    assert_eq!(shown["drives"], json!([drive]));
    assert_eq!(shown["vsock"], json!({ "guest_cid": 3, "uds_path": "v" }));
    assert_eq!(shown["entropy"], json!({ "rate_limiter": null }));
    let balloon = json!({ "amount_mib": 1, "deflate_on_oom": true, "stats_polling_interval_s": 0,
        "free_page_hinting": false, "free_page_reporting": false });
    assert_eq!(vm.get("/balloon"), balloon);
    assert_eq!(shown["balloon"], balloon);
}

#[test]
fn machine_is_checked_and_put_resets_fields() {
    let mut vm = TestMachine::new();
    let memory = "Machine config error: The memory size (MiB) is either 0, or not a multiple of \
                  the configured page size.";
    let vcpus = "Machine config error: The number of vCPUs must be greater than 0, less than 32 \
                 and must be 1 or an even number if SMT is enabled.";
    for (body, text) in [
        (r#"{"vcpu_count": 1, "mem_size_mib": 0}"#, memory),
        (r#"{"vcpu_count": 1, "mem_size_mib": 3, "huge_pages": "2M"}"#, memory),
        (r#"{"vcpu_count": 0, "mem_size_mib": 1}"#, vcpus),
        (r#"{"vcpu_count": 33, "mem_size_mib": 1}"#, vcpus),
        (r#"{"vcpu_count": 3, "mem_size_mib": 1, "smt": true}"#, vcpus),
    ] {
        assert_eq!(vm.refusal("PUT", "/machine-config", body), text);
    }
    vm.done("PATCH", "/machine-config", r#"{"track_dirty_pages": true, "vcpu_count": 32}"#);
    vm.done("PUT", "/machine-config", r#"{"vcpu_count": 2, "mem_size_mib": 64}"#);
    let shown = json!({ "vcpu_count": 2, "mem_size_mib": 64, "smt": false,
        "track_dirty_pages": false, "huge_pages": "None" });
    assert_eq!(vm.get("/machine-config"), shown);
    vm.done("PATCH", "/machine-config", r#"{"smt": true}"#);
    assert_eq!(vm.get("/machine-config")["smt"], true);
    assert_eq!(vm.refusal("PATCH", "/machine-config", r#"{"vcpu_count": 5}"#), vcpus);
    vm.done("PATCH", "/machine-config", r#"{"vcpu_count": 1}"#);
}

#[test]
fn balloon_is_not_larger_than_memory() {
    let mut vm = TestMachine::new();
    let balloon = |mib| format!(r#"{{"amount_mib": {mib}, "deflate_on_oom": false}}"#);
    let text = vm.refusal("PUT", "/balloon", &balloon(129));
    assert_eq!(text, "Balloon config error: Amount of pages requested is too large.");
    vm.done("PUT", "/balloon", &balloon(128));
    let text = vm.refusal("PATCH", "/machine-config", r#"{"mem_size_mib": 64}"#);
    assert_eq!(
        text,
        "Machine config error: The memory size (MiB) is smaller than the previously set balloon \
         device target size."
    );
}

#[test]
fn drives_keep_places_and_root_is_first() {
    let mut vm = TestMachine::new();
    let (root, data) = (r#""is_root_device": true"#, r#""is_root_device": false"#);
    for id in ["a", "b"] {
        vm.done("PUT", &format!("/drives/{id}"), &drive(id, data));
    }
    vm.done("PUT", "/drives/r", &drive("r", root));
    let second = "Drive config error: A root block device already exists!";
    assert_eq!(vm.refusal("PUT", "/drives/b", &drive("b", root)), second);
    vm.done("PUT", "/drives/r", &drive("r", data));
    vm.done("PUT", "/drives/b", &drive("b", root));
    let drives = vm.get("/vm/config")["drives"].clone();
    let ids = drives.as_array().unwrap().iter().map(|drive| drive["drive_id"].as_str().unwrap());
    assert_eq!(ids.collect::<Vec<_>>(), ["b", "a", "r"]);
}

#[test]
fn drive_has_a_file_and_no_socket() {
    let mut vm = TestMachine::new();
    let invalid = "Drive config error: Unable to create the virtio block device: Invalid block \
                   config.";
    let both = drive("a", r#""is_root_device": false, "socket": "s""#);
    let with = |more: &str| format!(r#"{{"drive_id": "a", "is_root_device": false{more}}}"#);
    for body in [
        both,
        with(""),
        with(r#", "socket": "s", "is_read_only": false"#),
        with(r#", "socket": "s", "rate_limiter": {}"#),
        with(r#", "socket": "s", "io_engine": "Sync""#),
    ] {
        assert_eq!(vm.refusal("PUT", "/drives/a", &body), invalid, "{body}");
    }
    let socket = with(r#", "socket": "s""#);
    assert!(vm.refusal("PUT", "/drives/a", &socket).contains("Driftline has no vhost-user drives"));
}

#[test]
fn number_of_drives_is_bounded() {
    let mut vm = TestMachine::new();
    let body = |id: usize| drive(&id.to_string(), r#""is_root_device": false"#);
    for id in 0..16 {
        vm.done("PUT", &format!("/drives/{id}"), &body(id));
    }
    let more = "Drive config error: Unable to create the virtio block device: a guest has at most \
                16 devices.";
    assert_eq!(vm.refusal("PUT", "/drives/16", &body(16)), more);
    vm.done("PUT", "/drives/3", &body(3));
}

#[test]
fn failed_opening_changes_nothing() {
    let mut vm = TestMachine::new();
    let before = vm.get("/vm/config");
    let drive_file = DriveFault::File { cause: not_found(), path: "a.img".to_owned() };
    let tap = NetFault::Tap { cause: not_found(), tap: "t".to_owned() };
    let drive_body = drive("a", r#""is_root_device": true"#);
    let net = r#"{"iface_id": "a", "host_dev_name": "t"}"#;
    let mut refused = |method, path, body, fault: ApiFault| {
        fault_message(vm.call_with((method, path, body), Err(fault)))
    };
    assert_eq!(
        refused(
            "PUT",
            "/boot-source",
            r#"{"kernel_image_path": "k"}"#,
            BootFault::Kernel(not_found()).into()
        ),
        "Boot source error: The kernel file cannot be opened: No such file or directory (os error \
         2)"
    );
    assert_eq!(
        refused("PUT", "/drives/a", &drive_body, drive_file.into()),
        "Drive config error: Unable to create the virtio block device: Virtio backend error: Error \
         manipulating the backing file: No such file or directory (os error 2) a.img"
    );
    assert_eq!(
        refused("PUT", "/network-interfaces/a", net, tap.into()),
        "Network config error: Could not create the network device: Open tap device failed: Error \
         while creating ifreq structure: No such file or directory (os error 2). Invalid TUN/TAP \
         Backend provided by t. Check our documentation on setting up the network devices."
    );
    assert_eq!(
        refused(
            "PUT",
            "/boot-source",
            r#"{"kernel_image_path": "k", "initrd_path": "i"}"#,
            BootFault::Initrd(not_found()).into()
        ),
        "Boot source error: The initrd file cannot be opened due to invalid path or invalid \
         permissions. No such file or directory (os error 2)"
    );
    assert_eq!(
        refused("PUT", "/logger", "{}", ApiFault::Logger(not_found())),
        "Logger error: Failed to open target file: No such file or directory (os error 2)"
    );
    assert_eq!(vm.get("/vm/config"), before);
}

#[test]
fn refused_socket_leaves_no_vsock() {
    let mut vm = TestMachine::new();
    let vsock = r#"{"guest_cid": 3, "uds_path": "v"}"#;
    vm.done("PUT", "/vsock", vsock);
    let in_use = ApiFault::Vsock(io::Error::from_raw_os_error(98));
    assert_eq!(
        fault_message(vm.call_with(("PUT", "/vsock", vsock), Err(in_use))),
        "Vsock config error: Cannot create backend for vsock device: Error binding to the \
         host-side Unix socket: Address already in use (os error 98)"
    );
    assert_eq!(vm.get("/vm/config")["vsock"], Value::Null);
}

#[test]
fn interfaces_have_addresses_of_their_own() {
    let mut vm = TestMachine::new();
    let net = |id: &str, mac: &str| {
        let mac = format!("06:00:00:00:00:{mac}");
        format!(r#"{{"iface_id": "{id}", "host_dev_name": "t", "guest_mac": "{mac}"}}"#)
    };
    for (id, mac) in [("a", "01"), ("b", "02"), ("c", "03")] {
        vm.done("PUT", &format!("/network-interfaces/{id}"), &net(id, mac));
    }
    assert_eq!(
        vm.refusal("PUT", "/network-interfaces/b", &net("b", "03")),
        "Network config error: The MAC address is already in use: 06:00:00:00:00:03"
    );
    // The same name replaces the interface, which becomes the last one.
    vm.done("PUT", "/network-interfaces/a", &net("a", "01"));
    let shown = vm.get("/vm/config")["network-interfaces"].clone();
    let ids = shown.as_array().unwrap().iter().map(|net| net["iface_id"].as_str().unwrap());
    assert_eq!(ids.collect::<Vec<_>>(), ["c", "b", "a"]);
    let many = "Network config error: Could not create the network device: a guest has at most 16 \
                devices.";
    for n in 10..23 {
        vm.done(
            "PUT",
            &format!("/network-interfaces/{n}"),
            &net(&n.to_string(), &format!("{n:02}")),
        );
    }
    assert_eq!(vm.refusal("PUT", "/network-interfaces/z", &net("z", "ff")), many);
    let small = r#"{"iface_id": "d", "host_dev_name": "t", "mtu": 67}"#;
    assert_eq!(
        vm.refusal("PUT", "/network-interfaces/d", small),
        "Network config error: Could not create the network device: MTU 67 is out of range [68, \
         65535]"
    );
}

const NO_ROOT: &str = r#""is_root_device": false"#;

#[test]
fn device_that_no_machine_has_is_refused() {
    let mut vm = TestMachine::new();
    let net = |mac| json!({ "iface_id": "a", "host_dev_name": "t", "guest_mac": mac }).to_string();
    for mac in ["00:00:00:00:00:00", "01:00:00:00:00:01"] {
        let text = vm.refusal("PUT", "/network-interfaces/a", &net(mac));
        let why = "is not a valid address of one interface: it is zero or multicast";
        assert!(text.contains(&format!("\"{mac}\" {why}")), "{text}");
    }
    for cid in [0, 2, u32::MAX] {
        let vsock = json!({ "guest_cid": cid, "uds_path": "v" }).to_string();
        let text = vm.refusal("PUT", "/vsock", &vsock);
        let why = format!("Vsock config error: \"{cid}\" is not a valid context ID of a guest");
        assert!(text.starts_with(&why), "{text}");
    }
    let long = json!({ "guest_cid": 3, "uds_path": "v".repeat(97) }).to_string();
    let text = vm.refusal("PUT", "/vsock", &long);
    assert!(text.contains("the path of the vsock's unix socket"), "{text}");
    assert_eq!(vm.get("/vm/config")["vsock"], Value::Null);
}

#[test]
fn names_of_devices_fit_into_a_machine() {
    let mut vm = TestMachine::new();
    let name = |len| "n".repeat(len);
    let net = |id: &str| json!({ "iface_id": id, "host_dev_name": "t" }).to_string();
    let put = |vm: &mut TestMachine, id: &str| {
        vm.done("PUT", &format!("/drives/{id}"), &drive(id, NO_ROOT));
        vm.done("PUT", &format!("/network-interfaces/{id}"), &net(id));
    };
    put(&mut vm, &name(60));
    let config = &vm.vm.config;
    let names = [config.drive_name(&name(60)), config.interface_name(&name(60))];
    assert_eq!(names, [name(60), format!("net-{}", name(60))]);
    for id in [name(61), "\u{e9}".to_owned()] {
        let text = "API Resource IDs have at most 60 ASCII letters, digits and underscores.";
        assert_eq!(vm.refusal("PUT", &format!("/drives/{id}"), &drive(&id, NO_ROOT)), text);
        assert_eq!(vm.refusal("PUT", &format!("/network-interfaces/{id}"), &net(&id)), text);
    }
}

#[test]
fn devices_of_all_kinds_are_bounded_together() {
    let mut vm = TestMachine::new();
    for id in 0..13 {
        vm.done("PUT", &format!("/drives/{id}"), &drive(&id.to_string(), NO_ROOT));
    }
    let vsock = r#"{"guest_cid": 3, "uds_path": "v"}"#;
    let balloon = r#"{"amount_mib": 1, "deflate_on_oom": true}"#;
    let net = r#"{"iface_id": "a", "host_dev_name": "t"}"#;
    let single = [
        ("Vsock", "/vsock", vsock),
        ("Balloon", "/balloon", balloon),
        ("Entropy", "/entropy", "{}"),
    ];
    for (_, path, body) in single {
        vm.done("PUT", path, body);
    }
    let more = "a guest has at most 16 devices.";
    assert!(vm.refusal("PUT", "/network-interfaces/a", net).ends_with(more));
    assert!(vm.refusal("PUT", "/drives/13", &drive("13", NO_ROOT)).ends_with(more));
    for (_, path, body) in single {
        vm.done("PUT", path, body);
    }
    for (kind, path, body) in single {
        let mut vm = TestMachine::new();
        for id in 0..16 {
            vm.done("PUT", &format!("/drives/{id}"), &drive(&id.to_string(), NO_ROOT));
        }
        assert_eq!(vm.refusal("PUT", path, body), format!("{kind} config error: {more}"));
    }
}

#[test]
fn metadata_service_needs_an_existing_interface() {
    let mut vm = TestMachine::new();
    let put = |vm: &mut TestMachine, body| vm.refusal("PUT", "/mmds/config", body);
    assert_eq!(
        put(&mut vm, r#"{"network_interfaces": []}"#),
        "MMMDS config error: The list of network interface IDs that allow forwarding MMDS requests \
         is empty."
    );
    assert_eq!(
        put(&mut vm, r#"{"network_interfaces": ["a"], "ipv4_address": "169.254.0.1"}"#),
        "MMMDS config error: The MMDS IPv4 address is not link local."
    );
    assert_eq!(
        put(&mut vm, r#"{"network_interfaces": ["a"]}"#),
        "MMMDS config error: The list of network interface IDs provided contains at least one ID \
         that does not correspond to any existing network interface."
    );
    let net = r#"{"iface_id": "a", "host_dev_name": "t"}"#;
    vm.done("PUT", "/network-interfaces/a", net);
    vm.done("PUT", "/mmds/config", r#"{"network_interfaces": ["a"], "version": "V2"}"#);
    let shown = json!({ "version": "V2", "network_interfaces": ["a"],
        "ipv4_address": "169.254.169.254", "imds_compat": false });
    assert_eq!(vm.get("/vm/config")["mmds-config"], shown);
    // Its successor is a new interface.
    vm.done("PUT", "/network-interfaces/a", net);
    assert_eq!(vm.get("/vm/config")["mmds-config"], Value::Null);
}

#[test]
fn metadata_has_a_limit() {
    let mut vm = TestMachine::new();
    let text = vm.refusal("PATCH", "/mmds", "{}");
    assert_eq!(text, "MMDS error: The MMDS data store is not initialized.");
    vm.done("PUT", "/mmds", r#"{"a": 1}"#);
    let (status, body) = vm.call("PUT", "/mmds", &json!("x".repeat(100)).to_string());
    assert_eq!(status, 413);
    assert!(body.contains("MMDS limit exceeded error: The MMDS patch request doesn't fit."));
    vm.done("PATCH", "/mmds", r#"{"b": 2, "a": null}"#);
    assert_eq!(vm.get("/mmds"), json!({ "b": 2 }));
}

#[test]
fn what_driftline_lacks_is_refused_by_name() {
    let mut vm = TestMachine::new();
    for (method, path, body, name) in [
        ("PUT", "/pmem/a", r#"{"id": "a", "path_on_host": "p"}"#, "pmem"),
        ("PUT", "/hotplug/memory", r#"{"total_size_mib": 1024}"#, "memory hotplug"),
        ("PATCH", "/machine-config", r#"{"cpu_template": "T2"}"#, "static CPU templates"),
    ] {
        let text = vm.refusal(method, path, body);
        assert!(text.starts_with("The requested operation is not supported: "), "{text}");
        assert!(text.contains(name), "{text}");
    }
}

#[test]
fn template_none_removes_the_custom_template() {
    let mut vm = TestMachine::new();
    vm.done("PUT", "/cpu-config", r#"{"kvm_capabilities": ["1"]}"#);
    vm.done("PUT", "/machine-config", r#"{"vcpu_count": 1, "mem_size_mib": 8}"#);
    assert!(vm.vm.config.cpu_template.is_some());
    vm.done("PATCH", "/machine-config", r#"{"cpu_template": "None"}"#);
    assert_eq!(vm.vm.config.cpu_template, None);
}
