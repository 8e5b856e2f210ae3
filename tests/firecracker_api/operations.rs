//! The page that lists Firecracker's operations, held to the record.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use super::record::{
    self, AnswerDifference, CallStep, DifferenceKind, RecordedAnswer, SequenceStep,
};

/// The operations of the record's version.
const OPERATIONS: [&str; 38] = [
    "GET /",
    "GET /balloon",
    "GET /balloon/hinting/status",
    "GET /balloon/statistics",
    "GET /hotplug/memory",
    "GET /machine-config",
    "GET /mmds",
    "GET /version",
    "GET /vm/config",
    "PATCH /balloon",
    "PATCH /balloon/hinting/start",
    "PATCH /balloon/hinting/stop",
    "PATCH /balloon/statistics",
    "PATCH /drives/{id}",
    "PATCH /hotplug/memory",
    "PATCH /machine-config",
    "PATCH /mmds",
    "PATCH /network-interfaces/{id}",
    "PATCH /pmem/{id}",
    "PATCH /vm",
    "PUT /actions",
    "PUT /balloon",
    "PUT /boot-source",
    "PUT /cpu-config",
    "PUT /drives/{id}",
    "PUT /entropy",
    "PUT /hotplug/memory",
    "PUT /logger",
    "PUT /machine-config",
    "PUT /metrics",
    "PUT /mmds",
    "PUT /mmds/config",
    "PUT /network-interfaces/{id}",
    "PUT /pmem/{id}",
    "PUT /serial",
    "PUT /snapshot/create",
    "PUT /snapshot/load",
    "PUT /vsock",
];

/// Fewest answers of the record.
const MIN_ANSWERS: usize = 600;

/// What the record says about an operation.
#[derive(Default, Debug)]
struct OperationRecord {
    /// Whether Driftline does something that Firecracker does.
    succeeds_here: bool,
    kinds: BTreeSet<DifferenceKind>,
    reasons: BTreeSet<String>,
}

impl OperationRecord {
    fn add(&mut self, call: &CallStep) {
        let here = call.differs.as_ref().map_or(&call.answer, |differs| &differs.answer);
        self.succeeds_here |= is_success(&call.answer) && is_success(here);
    }

    fn add_difference(&mut self, differs: &AnswerDifference) {
        self.kinds.insert(differs.kind);
        self.reasons.insert(differs.why.clone());
    }

    /// Returns the word of the page.
    fn verdict(&self) -> &'static str {
        match self.kinds.iter().collect::<Vec<_>>()[..] {
            [] => "same",
            _ if self.succeeds_here => "differs",
            [DifferenceKind::NotYet] => "not yet",
            [DifferenceKind::Refused] => "refused",
            _ => "differs",
        }
    }
}

/// All of the record that the page shows.
#[derive(Default, Debug)]
struct RecordSummary {
    operations: BTreeMap<String, OperationRecord>,
    /// Reasons of differences that are not those of an operation.
    other_reasons: BTreeSet<String>,
    answers: usize,
}

impl RecordSummary {
    fn read() -> Self {
        let mut summary = Self::default();
        for name in record::names() {
            for sequence in record::read(&name).sequences {
                for step in sequence.steps {
                    summary.add(record::step(step, &format!("{name}.json, {}", sequence.name)));
                }
            }
        }
        summary
    }

    fn add(&mut self, step: SequenceStep) {
        match step {
            SequenceStep::Call(call) => self.add_call(&call),
            SequenceStep::Together(step) => {
                step.together.iter().for_each(|call| self.add_call(call));
            }
            SequenceStep::Raw(step) => {
                self.answers += step.answers.len();
                self.other_reasons.extend(step.differs.map(|differs| differs.why));
            }
            SequenceStep::Run(step) => {
                self.answers += 1;
                self.other_reasons.extend(step.differs.map(|differs| differs.why));
            }
            SequenceStep::End(step) => {
                self.answers += 1;
                self.other_reasons.extend(step.differs.map(|differs| differs.why));
            }
            SequenceStep::Start(_) => {}
        }
    }

    fn add_call(&mut self, call: &CallStep) {
        self.answers += 1;
        let operation = operation(&call.call);
        if let Some(operation) = &operation {
            self.operations.entry(operation.clone()).or_default().add(call);
        }
        let Some(differs) = &call.differs else { return };
        match differs.of.clone().or(operation) {
            Some(of) => self.operations.entry(of).or_default().add_difference(differs),
            None => _ = self.other_reasons.insert(differs.why.clone()),
        }
    }
}

/// Returns the operation of a call; `None` if it is that of none.
fn operation(call: &str) -> Option<String> {
    let (method, path) = call.split_once(' ').expect("method and path");
    let path = match path.split('/').collect::<Vec<_>>()[..] {
        ["", device @ ("drives" | "network-interfaces" | "pmem"), _] => format!("/{device}/{{id}}"),
        _ => path.to_owned(),
    };
    let operation = format!("{method} {path}");
    OPERATIONS.contains(&operation.as_str()).then_some(operation)
}

fn is_success(answer: &RecordedAnswer) -> bool {
    match answer {
        RecordedAnswer::Status(status) => *status == 204,
        RecordedAnswer::Fault(_) => false,
        RecordedAnswer::Detailed(answer) => answer.status == Some(204) || answer.keys.is_some(),
    }
}

fn page() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/src/reference/firecracker.md");
    fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

#[test]
fn every_operation_is_recorded() {
    let summary = RecordSummary::read();
    let recorded: Vec<_> = summary.operations.keys().map(String::as_str).collect();
    assert_eq!(recorded, OPERATIONS);
    assert!(summary.answers >= MIN_ANSWERS, "{} answers", summary.answers);
}

#[test]
fn page_of_operations_equals_the_record() {
    let summary = RecordSummary::read();
    let page = page();
    let rows: Vec<(&str, &str, &str)> = page
        .lines()
        .filter_map(|line| {
            let cells: Vec<_> = line.trim_matches('|').split('|').map(str::trim).collect();
            let [operation, verdict, how] = cells[..] else { return None };
            let operation = operation.strip_prefix('`')?.strip_suffix('`')?;
            Some((operation, verdict, how))
        })
        .collect();
    let listed: Vec<_> = rows.iter().map(|(operation, ..)| *operation).collect();
    let mut expected = OPERATIONS.to_vec();
    // The page has the order of the paths.
    expected.sort_by_key(|operation| {
        let (method, path) = operation.split_once(' ').expect("method and path");
        (path, method)
    });
    assert_eq!(listed, expected);
    for (operation, verdict, how) in rows {
        let record = &summary.operations[operation];
        assert_eq!(verdict, record.verdict(), "{operation}: {record:?}");
        let reasons: Vec<_> = record.reasons.iter().map(String::as_str).collect();
        assert_eq!(how, reasons.join(" "), "{operation}");
    }
    // A sentence may be broken into lines.
    let words = page.split_whitespace().collect::<Vec<_>>().join(" ");
    for reason in &summary.other_reasons {
        assert!(words.contains(reason), "the page lacks: {reason}");
    }
}
