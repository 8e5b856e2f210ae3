//! The documented statuses of Firecracker's operations are those of the recorded answers.
//!
//! `tests/firecracker_api.rs` plays the record, and holds each reply to the document.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use serde_json::Value;
use tests::ApiDocument;

/// Answers that only a guest with a driver of the balloon causes. The guests of the record have
/// none; that of `tests/linux/firecracker.rs` has.
pub const WITH_DRIVER: [(&str, u16); 2] =
    [("PATCH /balloon/hinting/start", 204), ("PATCH /balloon/hinting/stop", 204)];

/// Returns the status of a recorded answer.
fn status(answer: &Value) -> u16 {
    let default = if answer.get("keys").is_some() { 200 } else { 400 };
    let status = answer.as_u64().or_else(|| answer["status"].as_u64()).unwrap_or(default);
    u16::try_from(status).expect("a status")
}

/// Adds the statuses of Driftline's answers to the calls in `step`, by operation.
fn add(step: &Value, found: &mut BTreeMap<String, BTreeSet<u16>>) {
    step["together"].as_array().into_iter().flatten().for_each(|call| add(call, found));
    let Some((method, path)) = step["call"].as_str().and_then(|call| call.split_once(' ')) else {
        return;
    };
    let operation = ApiDocument::read().find(&["firecracker"], method, path);
    if let Some(operation) = operation.filter(|_| !path.contains('?')) {
        let differs = step["differs"].get("answer");
        let status = status(differs.unwrap_or(&step["answer"]));
        found.entry(operation.name()).or_default().insert(status);
    }
}

fn recorded() -> BTreeMap<String, BTreeSet<u16>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("firecracker");
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).expect("the record") {
        let text = fs::read_to_string(entry.expect("an entry").path()).expect("a file");
        let file: Value = serde_json::from_str(&text).expect("JSON");
        let sequences = file["sequences"].as_array().expect("sequences");
        let steps = sequences.iter().flat_map(|sequence| sequence["steps"].as_array());
        steps.flatten().for_each(|step| add(step, &mut found));
    }
    found
}

#[test]
fn statuses_equal_those_of_the_record() {
    let recorded = recorded();
    let document = ApiDocument::read();
    for operation in document.operations().filter(|operation| operation.has_tag("firecracker")) {
        let name = operation.name();
        let mut expected = recorded.get(&name).cloned().unwrap_or_default();
        let with_driver = WITH_DRIVER.iter().filter(|(of, _)| *of == name);
        for (_, status) in with_driver {
            assert!(expected.insert(*status), "{name}, {status} is in the record");
        }
        // `refusals` causes a refusal by each operation.
        expected.insert(400);
        let documented: BTreeSet<_> = operation.statuses().into_iter().collect();
        assert_eq!(documented, expected, "{name}");
    }
}
