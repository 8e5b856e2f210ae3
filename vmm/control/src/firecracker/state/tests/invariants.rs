//! Laws that hold after any events.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::firecracker::fault::BootFault;

/// A request with few names, so that they clash.
fn requests() -> impl Strategy<Value = (&'static str, String, String)> {
    let id = prop::sample::select(vec!["a", "b", "c"]);
    let body =
        |path: &'static str| move |body: &'static str| ("PUT", path.to_owned(), body.to_owned());
    prop_oneof![
        4 => (id.clone(), any::<bool>(), any::<bool>()).prop_map(|(id, root, file)| {
            let file = if file { r#""path_on_host": "f","# } else { "" };
            let body = format!(r#"{{"drive_id": "{id}", {file} "is_root_device": {root}}}"#);
            ("PUT", format!("/drives/{id}"), body)
        }),
        4 => (id, prop::sample::select(vec!["01", "02", "03"])).prop_map(|(id, mac)| {
            let mac = format!("06:00:00:00:00:{mac}");
            let body =
                format!(r#"{{"iface_id": "{id}", "host_dev_name": "t", "guest_mac": "{mac}"}}"#);
            ("PUT", format!("/network-interfaces/{id}"), body)
        }),
        2 => prop::sample::select(vec![r#"{"network_interfaces": ["a"]}"#,
            r#"{"network_interfaces": ["b", "c"]}"#]).prop_map(body("/mmds/config")),
        2 => Just(r#"{"kernel_image_path": "k"}"#).prop_map(body("/boot-source")),
        1 => Just(START).prop_map(body("/actions")),
        1 => Just(LOAD).prop_map(body("/snapshot/load")),
        2 => (0u8..34, 0u16..200).prop_map(|(vcpus, mib)| {
            let body = format!(r#"{{"vcpu_count": {vcpus}, "mem_size_mib": {mib}}}"#);
            ("PATCH", "/machine-config".to_owned(), body)
        }),
        2 => (0u16..200).prop_map(|mib| {
            let body = format!(r#"{{"amount_mib": {mib}, "deflate_on_oom": true}}"#);
            ("PUT", "/balloon".to_owned(), body)
        }),
        1 => Just(r#"{"guest_cid": 3, "uds_path": "v"}"#).prop_map(body("/vsock")),
        1 => Just(("GET", "/vm/config".to_owned(), String::new())),
        1 => Just(("PATCH", "/vm".to_owned(), r#"{"state": "Paused"}"#.to_owned())),
    ]
}

fn check_config(config: &MicroVmConfig) -> Result<(), TestCaseError> {
    let drives: BTreeSet<_> = config.drives.iter().map(|drive| &drive.drive_id).collect();
    prop_assert_eq!(drives.len(), config.drives.len(), "two drives of one name");
    prop_assert!(config.drives.iter().skip(1).all(|drive| !drive.is_root_device));
    let names: BTreeSet<_> = config.interfaces.iter().map(|net| &net.iface_id).collect();
    prop_assert_eq!(names.len(), config.interfaces.len(), "two interfaces of one name");
    let macs: BTreeSet<_> = config.interfaces.iter().map(|net| net.guest_mac.unwrap().0).collect();
    prop_assert_eq!(macs.len(), config.interfaces.len(), "two interfaces of one address");
    let served = config.mmds.iter().flat_map(|mmds| &mmds.network_interfaces);
    prop_assert!(served.into_iter().all(|id| names.contains(id)), "metadata for no interface");
    let balloon_mib = config.balloon.as_ref().map_or(0, |balloon| balloon.amount_mib);
    prop_assert!(balloon_mib as usize <= config.machine.mem_size_mib);
    Ok(())
}

/// An event of a test.
type TestEvent = Box<dyn Fn(&mut TestMachine) -> Vec<MicroVmAction<u32>>>;

/// A request, whether a task ends after it, and whether that task succeeds.
type TestStep = ((&'static str, String, String), bool, bool);

/// Turns steps into events. At the end all tasks end.
fn events(steps: Vec<TestStep>) -> Vec<TestEvent> {
    let count = steps.len();
    let mut events: Vec<TestEvent> = Vec::new();
    for ((method, path, body), ends, succeeds) in steps {
        events.push(Box::new(move |vm| vm.request(method, &path, &body)));
        if ends {
            events.push(Box::new(move |vm| match succeeds {
                true => vm.finish(Ok(())),
                false => vm.finish(Err(BootFault::Kernel(not_found()).into())),
            }));
        }
    }
    events.extend(
        (0..count).map(|_| Box::new(|vm: &mut TestMachine| vm.finish(Ok(()))) as TestEvent),
    );
    events
}

/// What has happened so far.
#[derive(Default)]
struct History {
    /// Callers without an answer.
    open: BTreeSet<u32>,
    is_under_way: bool,
    has_ended: bool,
    /// The configuration at the start.
    started: Option<MicroVmConfig>,
}

impl History {
    fn check(&mut self, vm: &TestMachine, action: MicroVmAction<u32>) -> Result<(), TestCaseError> {
        match action {
            MicroVmAction::Reply(caller, _) | MicroVmAction::ToGuest(caller, _) => {
                prop_assert!(self.open.remove(&caller), "a second answer");
            }
            MicroVmAction::Perform(task) => {
                prop_assert!(!self.is_under_way, "two simultaneous tasks");
                self.is_under_way = true;
                prop_assert!(vm.vm.stage == MicroVmStage::Configuring);
                if let Task::Start(config) = task {
                    prop_assert!(config.boot_source.is_some(), "a start without a kernel");
                }
            }
            MicroVmAction::Exit(code) => {
                prop_assert_eq!(code, 1);
                prop_assert!(!self.has_ended, "a second end");
                self.has_ended = true;
            }
        }
        Ok(())
    }

    /// Checks that nothing is configured after the start.
    fn check_started(&mut self, vm: &TestMachine) -> Result<(), TestCaseError> {
        match &self.started {
            Some(config) => prop_assert_eq!(config, &vm.vm.config, "changed after the start"),
            None if vm.vm.stage == MicroVmStage::Configuring => {}
            None => self.started = Some(vm.vm.config.clone()),
        }
        Ok(())
    }
}

proptest! {
    /// Requests arrive at any time, and tasks end in any way and at any time.
    #[test]
    fn any_sequence_keeps_the_invariants(
        steps in prop::collection::vec((requests(), any::<bool>(), any::<bool>()), 1..40),
    ) {
        let mut vm = TestMachine::new();
        let mut history = History::default();
        for event in events(steps) {
            let before = vm.next;
            let actions = event(&mut vm);
            if vm.next > before {
                history.open.insert(vm.next);
            } else {
                history.is_under_way = false;
            }
            let waits_for_a_task = vm.vm.under_way.is_some() || vm.vm.waiting.is_empty();
            prop_assert!(waits_for_a_task, "a request waits although no task is under way");
            for action in actions {
                history.check(&vm, action)?;
            }
            check_config(&vm.vm.config)?;
            history.check_started(&vm)?;
        }
        prop_assert!(history.open.is_empty(), "without an answer: {:?}", history.open);
    }
}
