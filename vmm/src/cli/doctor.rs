//! Owns `driftline doctor`: prints the diagnosis.

use std::process::ExitCode;

use vmm::doctor::{Finding, diagnose, usable_kvm};

use super::args::DoctorArgs;
use super::failure::Failure;
use super::output::{print, print_json, table};

/// `driftline doctor`.
pub(super) fn doctor(args: &DoctorArgs) -> Result<ExitCode, Failure> {
    let diagnosis = diagnose();
    if args.json {
        print_json(&diagnosis)?;
    } else {
        let rows: Vec<(&str, String)> =
            diagnosis.findings.iter().map(|f| (f.name.as_str(), told(f))).collect();
        print(table(&rows))?;
    }
    match usable_kvm() {
        Ok(_) => Ok(ExitCode::SUCCESS),
        Err(why) => Err(Failure::host_lacks(why)),
    }
}

fn told(finding: &Finding) -> String {
    match finding.cost.as_str() {
        "" => finding.value.clone(),
        cost => format!("{}: {cost}", finding.value),
    }
}
