//! Tests of the state machine.

mod configuring;
mod stages;

use std::io;

use serde_json::Value;

use super::super::parse::parse;
use super::*;

/// A machine whose callers are numbers.
struct TestMachine {
    vm: MicroVm<u32>,
    next: u32,
}

impl TestMachine {
    fn new() -> Self {
        Self { vm: MicroVm::new("test".to_owned(), "Driftline", 100), next: 0 }
    }

    fn request(&mut self, method: &str, path: &str, body: &str) -> Vec<MicroVmAction<u32>> {
        self.next += 1;
        match parse(method, path, body.as_bytes()) {
            Ok(parsed) => self.vm.step(MicroVmEvent::Request(self.next, parsed.operation)),
            Err(fault) => vec![MicroVmAction::Reply(self.next, Answer::Fault(fault))],
        }
    }

    fn finish(&mut self, result: Result<(), ApiFault>) -> Vec<MicroVmAction<u32>> {
        self.vm.step(MicroVmEvent::Finished(result))
    }

    /// Sends a request whose task, if it has one, ends with `result`. Returns status and body.
    fn call_with(
        &mut self,
        (method, path, body): (&str, &str, &str),
        result: Result<(), ApiFault>,
    ) -> (u16, String) {
        let mut actions = self.request(method, path, body);
        if let [MicroVmAction::Perform(_)] = actions[..] {
            actions = self.finish(result);
        }
        match actions.into_iter().next() {
            Some(MicroVmAction::Reply(caller, answer)) => {
                assert_eq!(caller, self.next);
                (answer.status(), answer.into_body().unwrap_or_default())
            }
            other => panic!("{method} {path} {body}: {other:?}"),
        }
    }

    fn call(&mut self, method: &str, path: &str, body: &str) -> (u16, String) {
        self.call_with((method, path, body), Ok(()))
    }

    /// Sends a request that is done.
    fn done(&mut self, method: &str, path: &str, body: &str) {
        let answer = self.call(method, path, body);
        assert_eq!(answer, (204, String::new()), "{method} {path} {body}");
    }

    /// Returns the text for a request that is refused.
    fn refusal(&mut self, method: &str, path: &str, body: &str) -> String {
        fault_message(self.call(method, path, body))
    }

    fn get(&mut self, path: &str) -> Value {
        let (status, body) = self.call("GET", path, "");
        assert_eq!(status, 200, "GET {path}: {body}");
        serde_json::from_str(&body).unwrap()
    }

    fn start(&mut self) {
        self.done("PUT", "/boot-source", r#"{"kernel_image_path": "k"}"#);
        self.done("PUT", "/actions", START);
    }
}

const START: &str = r#"{"action_type": "InstanceStart"}"#;
const LOAD: &str = r#"{"snapshot_path": "s", "mem_backend":
                       {"backend_path": "m", "backend_type": "File"}}"#;
const BEFORE: &str = "The requested operation is not supported before starting the microVM.";
const AFTER: &str = "The requested operation is not supported after starting the microVM.";

fn fault_message((status, body): (u16, String)) -> String {
    assert_eq!(status, 400, "{body}");
    let body: Value = serde_json::from_str(&body).unwrap();
    body["fault_message"].as_str().unwrap().to_owned()
}

fn drive(id: &str, more: &str) -> String {
    format!(r#"{{"drive_id": "{id}", "path_on_host": "{id}.img", {more}}}"#)
}

fn not_found() -> io::Error {
    io::Error::from_raw_os_error(2)
}
