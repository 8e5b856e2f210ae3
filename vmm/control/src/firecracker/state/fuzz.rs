//! Fuzzes the API: calls of any method, path and body, in any order, and tasks that end at any time
//! and in any way. Bytes of the fuzzer select each step; most calls are valid, with few names, so
//! that they clash.
//!
//! These laws hold after every step:
//!
//! - Nothing panics. Every call has one answer at most, and one answer once all tasks have ended.
//! - A refusal has a `fault_message`.
//! - No two drives, interfaces or addresses are equal, and only the first drive is the root device.
//! - Nothing is configured once there is a guest.
#![allow(clippy::unwrap_used, reason = "a failure is the finding")]

use std::collections::BTreeSet;
use std::io;

use driftline_machine::config::CpuTemplate;
use serde_json::{Value, json};

use super::super::fault::BootFault;
use super::super::parse::parse;
use super::*;

/// Limit of the metadata in bytes.
const METADATA_LIMIT: usize = 100;
/// Maximum length of an arbitrary path or body, in bytes.
const MAX_TEXT: usize = 64;

const METHODS: [&str; 5] = ["GET", "PUT", "PATCH", "DELETE", "POST"];
const PATHS: [&str; 26] = [
    "/",
    "/actions",
    "/balloon",
    "/balloon/hinting/start",
    "/balloon/hinting/status",
    "/balloon/hinting/stop",
    "/balloon/statistics",
    "/boot-source",
    "/cpu-config",
    "/drives/a",
    "/entropy",
    "/hotplug/memory",
    "/logger",
    "/machine-config",
    "/metrics",
    "/mmds",
    "/mmds/config",
    "/network-interfaces/a",
    "/pmem/a",
    "/serial",
    "/snapshot/create",
    "/snapshot/load",
    "/vm/config",
    "/vsock",
    // At the end, because the bytes of existing seeds select paths by their position.
    "/version",
    "/vm",
];

/// Runs the steps that `bytes` select. At the end all tasks end.
pub fn api(bytes: &[u8]) {
    let mut steps = StepBytes(bytes);
    let mut run = ApiRun::new();
    while let Some(step) = steps.next() {
        match step & 0x0f {
            0 => run.end_task(true),
            1 => run.end_task(false),
            2 => {
                let method = steps.one_of(&METHODS);
                let path = match steps.u8() {
                    0 => format!("/{}", steps.text()),
                    n => PATHS[usize::from(n) % PATHS.len()].to_owned(),
                };
                let body = steps.text();
                run.call(method, &path, body.as_bytes());
            }
            3 => {
                let (method, path, body) = valid_call(&mut steps);
                let mut body = body.into_bytes();
                let at = usize::from(steps.u8());
                if let Some(byte) = body.get_mut(at) {
                    *byte = steps.u8();
                }
                run.call(method, &path, &body);
            }
            _ => {
                let (method, path, body) = valid_call(&mut steps);
                run.call(method, &path, body.as_bytes());
            }
        }
        // Otherwise later requests wait for the task.
        if step & 0x10 == 0 {
            run.end_task(step & 0x20 == 0);
        }
    }
    while run.vm.under_way.is_some() {
        run.end_task(true);
    }
    assert!(run.open.is_empty(), "without an answer: {:?}", run.open);
}

/// Bytes that select the steps; zeros after the last.
struct StepBytes<'b>(&'b [u8]);

impl StepBytes<'_> {
    fn next(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn u8(&mut self) -> u8 {
        self.next().unwrap_or(0)
    }

    fn flip(&mut self) -> bool {
        self.u8() & 1 == 1
    }

    fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[usize::from(self.u8()) % choices.len()]
    }

    fn text(&mut self) -> String {
        let len = usize::from(self.u8()).min(MAX_TEXT).min(self.0.len());
        let (text, rest) = self.0.split_at(len);
        self.0 = rest;
        String::from_utf8_lossy(text).into_owned()
    }
}

/// Returns method, path and body of a call whose body is one of the operation's.
fn valid_call(from: &mut StepBytes<'_>) -> (&'static str, String, String) {
    let id = from.one_of(&["a", "b", "c"]);
    let call = |method, path: &str, body: Value| (method, path.to_owned(), body.to_string());
    match from.u8() % 25 {
        0 | 1 => call("PUT", &format!("/drives/{id}"), drive(id, from)),
        2 | 3 => call("PUT", &format!("/network-interfaces/{id}"), interface(id, from)),
        4 => call("PUT", "/boot-source", json!({ "kernel_image_path": "k" })),
        5 => {
            let machine = json!({ "vcpu_count": from.u8() % 40, "mem_size_mib": from.u8() });
            call(from.one_of(&["PUT", "PATCH"]), "/machine-config", machine)
        }
        6 => {
            let balloon = json!({ "amount_mib": from.u8(), "deflate_on_oom": from.flip() });
            call("PUT", "/balloon", balloon)
        }
        7 => call("PUT", "/mmds/config", json!({ "network_interfaces": [id] })),
        8 => call(from.one_of(&["PUT", "PATCH"]), "/mmds", json!({ id: from.u8() })),
        9 => call("PUT", "/vsock", json!({ "guest_cid": from.u8(), "uds_path": "v" })),
        10 => call("PUT", "/cpu-config", template(from)),
        11 => call("PUT", "/entropy", json!({ "rate_limiter": limiter(from) })),
        12 => call("PUT", from.one_of(&["/logger", "/serial"]), json!({})),
        13 => call("PUT", "/metrics", json!({ "metrics_path": "m" })),
        14 | 15 => {
            let actions = ["InstanceStart", "FlushMetrics", "SendCtrlAltDel"];
            call("PUT", "/actions", json!({ "action_type": from.one_of(&actions) }))
        }
        16 => {
            let backend = json!({ "backend_path": "m", "backend_type": "File" });
            let body = json!({ "snapshot_path": "s", "mem_backend": backend });
            call("PUT", "/snapshot/load", body)
        }
        17 => {
            let state = from.one_of(&["Paused", "Resumed"]);
            call("PATCH", "/vm", json!({ "state": state }))
        }
        18 => {
            let body = json!({ "drive_id": id, "path_on_host": "f" });
            call("PATCH", &format!("/drives/{id}"), body)
        }
        20 => {
            let body = json!({ "iface_id": id, "rx_rate_limiter": limiter(from) });
            call("PATCH", &format!("/network-interfaces/{id}"), body)
        }
        21 => call("PATCH", "/balloon", json!({ "amount_mib": from.u8() })),
        22 => {
            let body = json!({ "stats_polling_interval_s": from.u8() % 3 });
            call("PATCH", "/balloon/statistics", body)
        }
        23 => {
            let kind = from.one_of(&["Full", "Diff"]);
            let body = json!({ "snapshot_type": kind, "snapshot_path": "s", "mem_file_path": "m" });
            call("PUT", "/snapshot/create", body)
        }
        24 => {
            let step = from.one_of(&["start", "stop"]);
            call("PATCH", &format!("/balloon/hinting/{step}"), json!({}))
        }
        _ => ("GET", from.one_of(&PATHS).to_owned(), String::new()),
    }
}

fn drive(id: &str, from: &mut StepBytes<'_>) -> Value {
    let mut drive = json!({ "drive_id": id, "is_root_device": from.flip() });
    if !from.u8().is_multiple_of(8) {
        drive["path_on_host"] = "f".into();
    }
    match from.u8() % 8 {
        0 => drive["socket"] = "s".into(),
        1 => drive["rate_limiter"] = limiter(from),
        2 => drive["partuuid"] = "0001".into(),
        3 => drive["cache_type"] = "Writeback".into(),
        _ => {}
    }
    drive
}

fn interface(id: &str, from: &mut StepBytes<'_>) -> Value {
    let mut net = json!({ "iface_id": id, "host_dev_name": "t" });
    match from.u8() % 8 {
        0 => net["rx_rate_limiter"] = limiter(from),
        1 => net["mtu"] = u16::from(from.u8()).into(),
        2 => {}
        _ => net["guest_mac"] = format!("06:00:00:00:00:0{}", from.u8() % 3).into(),
    }
    net
}

fn limiter(from: &mut StepBytes<'_>) -> Value {
    json!({ "ops": { "size": from.u8(), "refill_time": from.u8() } })
}

fn template(from: &mut StepBytes<'_>) -> Value {
    let bitmap = from.one_of(&["0b1", "0b0x", "0bxx_10", "1"]);
    let leaf = json!({ "leaf": format!("{:#x}", from.u8()), "subleaf": "0b0", "flags": 1,
        "modifiers": [{ "register": "ecx", "bitmap": bitmap }] });
    let msrs: Vec<Value> = (0..from.u8())
        .map(|_| json!({ "addr": format!("{:#x}", from.u8()), "bitmap": bitmap }))
        .collect();
    let capability = format!("{}{}", from.one_of(&["", "!"]), from.u8());
    json!({ "kvm_capabilities": [capability], "cpuid_modifiers": [leaf], "msr_modifiers": msrs })
}

/// A machine, and what has happened to it.
struct ApiRun {
    vm: MicroVm<u32>,
    calls: u32,
    /// Calls without an answer.
    open: BTreeSet<u32>,
    has_ended: bool,
    /// The configuration of the guest.
    started: Option<MicroVmConfig>,
}

impl ApiRun {
    fn new() -> Self {
        let vm = MicroVm::new("test".to_owned(), "Driftline", METADATA_LIMIT);
        Self { vm, calls: 0, open: BTreeSet::new(), has_ended: false, started: None }
    }

    fn call(&mut self, method: &str, path: &str, body: &[u8]) {
        self.calls += 1;
        match parse(method, path, body) {
            Ok(parsed) => {
                if let Operation::PutCpuTemplate(template) = &parsed.operation {
                    let _ = CpuTemplate::from(template);
                }
                self.open.insert(self.calls);
                self.step(MicroVmEvent::Request(self.calls, parsed.operation));
            }
            Err(fault) => check_answer(Answer::Fault(fault)),
        }
    }

    fn end_task(&mut self, succeeds: bool) {
        let event = match &self.vm.under_way {
            None => return,
            Some((_, Task::Load(_, config))) if succeeds => MicroVmEvent::Loaded(config.clone()),
            Some(_) if succeeds => MicroVmEvent::Finished(Ok(())),
            Some(_) => {
                let missing = io::Error::from_raw_os_error(2);
                MicroVmEvent::Finished(Err(BootFault::Kernel(missing).into()))
            }
        };
        self.step(event);
    }

    fn step(&mut self, event: MicroVmEvent<u32>) {
        let was_under_way = self.vm.under_way.is_some();
        let ends = !matches!(event, MicroVmEvent::Request(..));
        let actions = self.vm.step(event);
        let mut tasks = usize::from(was_under_way && !ends);
        for action in actions {
            match action {
                MicroVmAction::Reply(caller, answer) => {
                    assert!(self.open.remove(&caller), "a second answer");
                    check_answer(answer);
                }
                MicroVmAction::ToGuest(caller, _) => {
                    assert!(self.open.remove(&caller), "a second answer");
                    assert!(self.vm.stage == MicroVmStage::Started, "there is no guest");
                }
                MicroVmAction::Perform(task) => {
                    tasks += 1;
                    self.check_task(&task);
                }
                MicroVmAction::Exit(code) => {
                    assert_eq!(code, LOAD_FAILED);
                    assert!(!self.has_ended, "a second end");
                    self.has_ended = true;
                }
            }
        }
        assert!(tasks <= 1, "two simultaneous tasks");
        let waits_for_a_task = self.vm.under_way.is_some() || self.vm.waiting.is_empty();
        assert!(waits_for_a_task, "a request waits although no task is under way");
        check_config(&self.vm.config);
        self.check_started();
    }

    fn check_task(&self, task: &Task) {
        let is_flush = *task == Task::FlushMetrics;
        assert_eq!(is_flush, self.vm.stage == MicroVmStage::Started, "{task:?}");
        if let Task::Start(config) = task {
            assert!(config.boot_source.is_some(), "a start without a kernel");
        }
    }

    /// Checks that nothing is configured after the start.
    fn check_started(&mut self) {
        match &self.started {
            Some(config) => assert_eq!(config, &self.vm.config, "changed after the start"),
            None if self.vm.stage == MicroVmStage::Configuring => {}
            None => self.started = Some(self.vm.config.clone()),
        }
    }
}

fn check_answer(answer: Answer) {
    let (is_fault, status) = (matches!(answer, Answer::Fault(_)), answer.status());
    assert_eq!(is_fault, status >= 400, "status {status}");
    let Some(body) = answer.into_body() else {
        return assert_eq!(status, 204);
    };
    let page: Value = serde_json::from_str(&body).unwrap();
    if is_fault {
        let text = page["fault_message"].as_str().unwrap();
        assert!(!text.is_empty() && page.as_object().unwrap().len() == 1, "{page}");
    }
}

fn check_config(config: &MicroVmConfig) {
    let drives: BTreeSet<_> = config.drives.iter().map(|drive| &drive.drive_id).collect();
    assert_eq!(drives.len(), config.drives.len(), "two drives of one name");
    assert!(config.drives.iter().skip(1).all(|drive| !drive.is_root_device), "two root devices");
    let names: BTreeSet<_> = config.interfaces.iter().map(|net| &net.iface_id).collect();
    assert_eq!(names.len(), config.interfaces.len(), "two interfaces of one name");
    let macs: Vec<_> =
        config.interfaces.iter().filter_map(|net| net.guest_mac.map(|mac| mac.0)).collect();
    let different: BTreeSet<_> = macs.iter().collect();
    assert_eq!(different.len(), macs.len(), "two interfaces of one address");
    let served = config.mmds.iter().flat_map(|mmds| &mmds.network_interfaces);
    assert!(served.into_iter().all(|id| names.contains(id)), "metadata for no interface");
    let balloon_mib = config.balloon.as_ref().map_or(0, |balloon| balloon.amount_mib);
    assert!(balloon_mib as usize <= config.machine.mem_size_mib, "balloon larger than memory");
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        /// Requests arrive at any time, and tasks end in any way and at any time.
        #[test]
        fn any_sequence_keeps_the_invariants(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            super::api(&bytes);
        }
    }
}
