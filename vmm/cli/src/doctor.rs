//! Owns `driftline doctor`: prints the diagnosis, with the verdict first.

use std::io::{self, IsTerminal};
use std::process::ExitCode;

use driftline_machine::doctor::{Diagnosis, Finding, Group, diagnose};

use super::args::DoctorArgs;
use super::colour;
use super::failure::Failure;
use super::output::{print, print_json};

/// The groups in display order.
const GROUPS: [(Group, &str); 6] = [
    (Group::Required, "Required"),
    (Group::Migration, "Migration"),
    (Group::Checkpoints, "Checkpoints"),
    (Group::Sandbox, "Sandbox"),
    (Group::Host, "Host"),
    (Group::Capability, "KVM capabilities"),
];

/// Columns of the report. Longer findings continue on the next line.
const COLUMNS: usize = 100;

/// `driftline doctor`; `verbose` also shows the capabilities.
pub(super) fn doctor(args: &DoctorArgs, verbose: bool) -> Result<ExitCode, Failure> {
    let diagnosis = diagnose();
    if args.check && !diagnosis.kvm {
        return Err(Failure::host_lacks(verdict(&diagnosis)).with(&diagnosis));
    }
    if args.json {
        print_json(&diagnosis)?;
    } else {
        let colours = io::stdout().is_terminal() && !colour::is_refused();
        print(report(&diagnosis, verbose, colours))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn verdict(diagnosis: &Diagnosis) -> String {
    let missing = |required| {
        let missing = diagnosis.findings.iter().filter(move |f| !f.present);
        let those = missing.filter(move |f| (f.group == Group::Required) == required);
        those.map(|f| f.name.as_str()).collect::<Vec<_>>().join(", ")
    };
    match (diagnosis.kvm, missing(false).as_str()) {
        (false, _) => format!(
            "this host cannot run KVM guests: it lacks {}; --backend threads needs no KVM",
            missing(true)
        ),
        (true, "") => "this host can run KVM guests; nothing is missing".to_owned(),
        (true, names) => format!("this host can run KVM guests; missing, at a cost: {names}"),
    }
}

fn report(diagnosis: &Diagnosis, verbose: bool, colours: bool) -> String {
    let mut lines = vec![verdict(diagnosis)];
    for (group, heading) in GROUPS {
        let findings: Vec<&Finding> =
            diagnosis.findings.iter().filter(|f| f.group == group).collect();
        if findings.is_empty() || (group == Group::Capability && !verbose) {
            continue;
        }
        lines.push(format!("\n{heading}"));
        let width = findings.iter().map(|f| f.name.len()).max().unwrap_or(0);
        for finding in findings {
            let mark = match (finding.present, colours) {
                (true, false) => "ok     ",
                (true, true) => "\x1b[32mok\x1b[0m     ",
                (false, false) => "missing",
                (false, true) => "\x1b[31mmissing\x1b[0m",
            };
            // Two blanks come before the mark, before the name, and before the description.
            let indent = width + 2 + "missing".len() + 2 + 2;
            let described = wrap(&describe(finding), indent);
            lines.push(format!("  {mark}  {:width$}  {described}", finding.name));
        }
    }
    lines.join("\n")
}

fn describe(finding: &Finding) -> String {
    match (finding.present, finding.cost.as_str()) {
        (true, "") => finding.value.clone(),
        (true, cost) => format!("{}: {cost}", finding.value),
        (false, cost) => cost.to_owned(),
    }
}

/// Breaks `text`, which starts at column `indent`, into lines that start there and have at
/// most [`COLUMNS`] columns.
fn wrap(text: &str, indent: usize) -> String {
    let mut wrapped = String::new();
    let mut column = indent;
    for word in text.split(' ') {
        let length = word.chars().count();
        if column > indent && column + 1 + length > COLUMNS {
            wrapped.push_str(&format!("\n{:indent$}", ""));
            column = indent;
        } else if column > indent {
            wrapped.push(' ');
            column += 1;
        }
        wrapped.push_str(word);
        column += length;
    }
    wrapped
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(group: Group, name: &str, present: bool) -> Finding {
        let text = |text: &str| text.to_owned();
        Finding { group, name: text(name), present, value: text("1"), cost: text("slow") }
    }

    #[test]
    fn verdict_is_first_and_capabilities_need_verbose() {
        let mut diagnosis = Diagnosis {
            kvm: true,
            findings: vec![
                finding(Group::Required, "/dev/kvm", true),
                finding(Group::Capability, "KVM_CAP_IRQCHIP", true),
                finding(Group::Sandbox, "landlock", false),
            ],
        };
        let text = report(&diagnosis, false, false);
        assert!(text.starts_with("this host can run KVM guests; missing, at a cost: landlock\n"));
        assert!(text.contains("\nSandbox\n  missing  landlock  slow"), "{text}");
        assert!(!text.contains("KVM_CAP") && !text.contains('\u{1b}'), "{text}");
        assert!(report(&diagnosis, true, false).contains("KVM_CAP_IRQCHIP"));
        (diagnosis.kvm, diagnosis.findings[0].present) = (false, false);
        assert!(verdict(&diagnosis).contains("cannot run KVM guests: it lacks /dev/kvm;"));
    }

    #[test]
    fn long_finding_continues_on_the_next_line() {
        let value = ["avx512f"; 100].join(" ");
        let long = Finding { value, ..finding(Group::Capability, "processor features", true) };
        let text = report(&Diagnosis { kvm: true, findings: vec![long] }, true, false);
        assert!(text.lines().all(|line| line.len() <= COLUMNS), "{text}");
        assert_eq!(text.matches("avx512f").count(), 100);
        let indent = text.lines().find_map(|line| line.find("avx512f")).unwrap();
        assert!(text.lines().skip(4).all(|line| line.find(|c| c != ' ') == Some(indent)), "{text}");
    }
}
