//! Which requests are possible before and after the start, and what ends the process.

use serde_json::json;

use super::*;

#[test]
fn operations_on_a_guest_need_a_guest() {
    let mut vm = TestMachine::new();
    for (method, path, body) in [
        ("PUT", "/actions", r#"{"action_type": "FlushMetrics"}"#),
        ("PUT", "/actions", r#"{"action_type": "SendCtrlAltDel"}"#),
        ("PATCH", "/balloon", r#"{"amount_mib": 1}"#),
        ("GET", "/balloon/statistics", ""),
        ("PATCH", "/balloon/statistics", r#"{"stats_polling_interval_s": 1}"#),
        ("PATCH", "/balloon/hinting/start", ""),
        ("GET", "/balloon/hinting/status", ""),
        ("PATCH", "/balloon/hinting/stop", ""),
        ("PATCH", "/drives/a", r#"{"drive_id": "a"}"#),
        ("PATCH", "/pmem/a", r#"{"id": "a"}"#),
        ("PATCH", "/network-interfaces/a", r#"{"iface_id": "a"}"#),
        ("GET", "/hotplug/memory", ""),
        ("PATCH", "/hotplug/memory", r#"{"requested_size_mib": 1}"#),
        ("PUT", "/snapshot/create", r#"{"snapshot_path": "s", "mem_file_path": "m"}"#),
        ("PATCH", "/vm", r#"{"state": "Paused"}"#),
        ("PATCH", "/vm", r#"{"state": "Resumed"}"#),
        ("DELETE", "/drives/a", ""),
    ] {
        assert_eq!(vm.refusal(method, path, body), BEFORE, "{method} {path}");
    }
    // None of them configures a guest that boots.
    let loading = vm.request("PUT", "/snapshot/load", LOAD);
    assert!(matches!(loading[..], [MicroVmAction::Perform(Task::Load(..))]));
}

#[test]
fn configuration_ends_with_the_start() {
    let mut vm = TestMachine::new();
    vm.start();
    for (path, body) in [
        ("/actions", START),
        ("/balloon", r#"{"amount_mib": 1, "deflate_on_oom": true}"#),
        ("/boot-source", r#"{"kernel_image_path": "k"}"#),
        ("/cpu-config", "{}"),
        ("/logger", "{}"),
        ("/machine-config", r#"{"vcpu_count": 1, "mem_size_mib": 2}"#),
        ("/metrics", r#"{"metrics_path": "m"}"#),
        ("/mmds/config", r#"{"network_interfaces": []}"#),
        ("/entropy", "{}"),
        ("/serial", "{}"),
        ("/hotplug/memory", r#"{"total_size_mib": 1024}"#),
        ("/snapshot/load", LOAD),
        ("/vsock", r#"{"guest_cid": 3, "uds_path": "v"}"#),
    ] {
        assert_eq!(vm.refusal("PUT", path, body), AFTER, "PUT {path}");
    }
    let data = drive("a", r#""is_root_device": false"#);
    assert_eq!(vm.refusal("PUT", "/drives/a", &data), "PCI is not enabled");
    assert_eq!(vm.refusal("DELETE", "/drives/a", ""), "PCI is not enabled");
    for (method, path, body) in [
        ("GET", "/", ""),
        ("GET", "/vm/config", ""),
        ("GET", "/mmds", ""),
        ("PATCH", "/vm", r#"{"state": "Paused"}"#),
        ("PUT", "/mmds", "{}"),
    ] {
        let actions = vm.request(method, path, body);
        assert!(matches!(actions[..], [MicroVmAction::ToGuest(..)]), "{method} {path}");
    }
}

#[test]
fn start_needs_a_kernel_and_may_be_retried() {
    let mut vm = TestMachine::new();
    let no_kernel = vm.refusal("PUT", "/actions", START);
    let text = "Start microvm error: Cannot start microvm without kernel configuration.";
    assert_eq!(no_kernel, text);
    vm.done("PUT", "/boot-source", r#"{"kernel_image_path": "k"}"#);
    let memory = StartFault::Memory(io::Error::from_raw_os_error(12));
    let failed = vm.call_with(("PUT", "/actions", START), Err(memory.into()));
    assert_eq!(
        fault_message(failed),
        "Start microvm error: Invalid Memory Configuration: Cannot create mmap region: Cannot \
         allocate memory (os error 12)"
    );
    vm.done("PUT", "/machine-config", r#"{"vcpu_count": 1, "mem_size_mib": 8}"#);
    vm.done("PUT", "/actions", START);
}

#[test]
fn command_line_has_a_limit() {
    let mut vm = TestMachine::new();
    let source = |length| json!({ "kernel_image_path": "k", "boot_args": "x".repeat(length) });
    vm.done("PUT", "/boot-source", &source(2047).to_string());
    assert_eq!(
        vm.refusal("PUT", "/boot-source", &source(2048).to_string()),
        "Boot source error: The kernel command line is invalid: Invalid cmdline capacity provided."
    );
}

#[test]
fn metrics_are_configured_once() {
    let mut vm = TestMachine::new();
    let metrics = ("PUT", "/metrics", r#"{"metrics_path": "m"}"#);
    let failed = vm.call_with(metrics, Err(MetricsFault::File(not_found()).into()));
    assert_eq!(
        fault_message(failed),
        "Metrics error: Cannot initialize the metrics system due to bad user input: No such file \
         or directory (os error 2)"
    );
    vm.done("PUT", "/metrics", r#"{"metrics_path": "m"}"#);
    assert_eq!(
        vm.refusal("PUT", "/metrics", r#"{"metrics_path": "m"}"#),
        "Metrics error: Cannot initialize the metrics system due to bad user input: \
         Reinitialization of metrics not allowed."
    );
}

#[test]
fn nothing_is_loaded_into_a_configured_machine() {
    let configuring = [
        ("PUT", "/machine-config", r#"{"vcpu_count": 0, "mem_size_mib": 1}"#),
        ("PATCH", "/machine-config", r#"{"smt": false}"#),
        ("PUT", "/boot-source", r#"{"kernel_image_path": "k"}"#),
        ("PUT", "/drives/a", r#"{"drive_id": "a", "is_root_device": false}"#),
        ("PUT", "/network-interfaces/a", r#"{"iface_id": "a", "host_dev_name": "t"}"#),
        ("PUT", "/pmem/a", r#"{"id": "a", "path_on_host": "p"}"#),
        ("PUT", "/balloon", r#"{"amount_mib": 1, "deflate_on_oom": true}"#),
        ("PUT", "/mmds/config", r#"{"network_interfaces": []}"#),
        ("PUT", "/vsock", r#"{"guest_cid": 3, "uds_path": "v"}"#),
        ("PUT", "/entropy", "{}"),
        ("PUT", "/hotplug/memory", r#"{"total_size_mib": 1024}"#),
    ];
    for (method, path, body) in configuring {
        let mut vm = TestMachine::new();
        vm.call(method, path, body);
        let text = vm.refusal("PUT", "/snapshot/load", LOAD);
        let expected = "Load snapshot error: Loading a microVM snapshot not allowed after \
                        configuring boot-specific resources.";
        assert_eq!(text, expected, "{method} {path}");
        // The process continues.
        vm.get("/");
    }
    let mut vm = TestMachine::new();
    for (path, body) in [
        ("/cpu-config", "{}"),
        ("/serial", "{}"),
        ("/logger", "{}"),
        ("/metrics", r#"{"metrics_path": "m"}"#),
        ("/mmds", "{}"),
    ] {
        vm.done("PUT", path, body);
    }
    vm.done("PUT", "/snapshot/load", LOAD);
    assert_eq!(vm.refusal("PUT", "/actions", START), AFTER);
}

#[test]
fn failed_load_ends_the_process() {
    let mut vm = TestMachine::new();
    vm.request("PUT", "/snapshot/load", LOAD);
    assert!(vm.request("GET", "/", "").is_empty(), "it waits");
    let actions = vm.finish(Err(LoadFault::State(not_found()).into()));
    let [
        MicroVmAction::Reply(1, Answer::Fault(fault)),
        MicroVmAction::Reply(2, Answer::Fault(ApiFault::Ending)),
        MicroVmAction::Exit(1),
    ] = &actions[..]
    else {
        panic!("{actions:?}");
    };
    let text = "Load snapshot error: Failed to restore from snapshot: Failed to get snapshot state \
                from file: Failed to open snapshot file: No such file or directory (os error 2)";
    assert_eq!(fault.to_string(), text);
}

#[test]
fn loaded_guest_shows_its_own_configuration() {
    let mut vm = TestMachine::new();
    let actions = vm.request("PUT", "/snapshot/load", LOAD);
    let [MicroVmAction::Perform(Task::Load(_, config))] = &actions[..] else {
        panic!("{actions:?}");
    };
    let mut config = config.clone();
    config.machine.mem_size_mib = 8;
    let actions = vm.vm.step(MicroVmEvent::Loaded(config.clone()));
    assert!(matches!(actions[..], [MicroVmAction::Reply(1, Answer::Done)]), "{actions:?}");
    assert_eq!((vm.vm.config(), vm.vm.stage), (&*config, MicroVmStage::Started));
    // A second one, with no task under way, changes nothing.
    config.machine.mem_size_mib = 16;
    assert!(vm.vm.step(MicroVmEvent::Loaded(config)).is_empty());
    assert_eq!(vm.vm.config().machine.mem_size_mib, 8);
    assert_eq!(vm.refusal("PUT", "/snapshot/load", LOAD), AFTER);
}

#[test]
fn load_that_is_not_tried_ends_nothing() {
    let mut vm = TestMachine::new();
    let not_built = ApiFault::NotBuilt("PUT /snapshot/load");
    vm.call_with(("PUT", "/snapshot/load", LOAD), Err(not_built));
    vm.get("/");
}

#[test]
fn requests_wait_for_the_task_under_way() {
    let mut vm = TestMachine::new();
    vm.request("PUT", "/boot-source", r#"{"kernel_image_path": "k"}"#);
    assert!(vm.request("PUT", "/actions", START).is_empty());
    assert!(vm.request("GET", "/", "").is_empty());
    let actions = vm.finish(Ok(()));
    let expected = "[Reply(1, Done), Perform(Start(";
    assert!(format!("{actions:?}").starts_with(expected), "{actions:?}");
    assert_eq!(actions.len(), 2);
    let actions = vm.finish(Ok(()));
    assert!(matches!(
        actions[..],
        [MicroVmAction::Reply(2, Answer::Done), MicroVmAction::ToGuest(3, Operation::GetInstance)]
    ));
}

#[test]
fn metrics_without_a_file_are_not_written() {
    const FLUSH: &str = r#"{"action_type": "FlushMetrics"}"#;
    let mut vm = TestMachine::new();
    vm.start();
    vm.done("PUT", "/actions", FLUSH);
    let mut vm = TestMachine::new();
    vm.done("PUT", "/metrics", r#"{"metrics_path": "m"}"#);
    vm.start();
    let flushing = vm.request("PUT", "/actions", FLUSH);
    assert!(matches!(flushing[..], [MicroVmAction::Perform(Task::FlushMetrics)]));
    // Another request waits for the line.
    assert!(vm.request("GET", "/", "").is_empty());
    let actions = vm.finish(Err(ApiFault::Guest("full".to_owned())));
    assert!(
        matches!(
            actions[..],
            [
                MicroVmAction::Reply(_, Answer::Fault(ApiFault::Guest(_))),
                MicroVmAction::ToGuest(_, Operation::GetInstance)
            ]
        ),
        "{actions:?}"
    );
}
