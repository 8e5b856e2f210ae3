//! Reports what this host offers to a VMM, and what each missing feature costs.

use std::fs;

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES};
use kvm_ioctls::Kvm;
use serde::Serialize;

use crate::HostMemory;
use crate::kvm::{Capabilities, Need, Unusable, open_device};
use crate::memory::Userfault;
use crate::pm_qos;
use crate::vcpu::baseline;

/// The area that a finding concerns.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Group {
    /// Features without which there are no KVM machines.
    Required,
    /// Dirty tracking and migration.
    Migration,
    /// Checkpoints and tracking of writes.
    Checkpoints,
    /// Restrictions on a guest that breaks out.
    Sandbox,
    /// Speed.
    Host,
    /// A capability of KVM, with its value as a number.
    Capability,
}

/// One feature that a host may offer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Finding {
    /// The area that it concerns.
    pub group: Group,
    /// The feature's name.
    pub name: String,
    /// Whether the host has the feature.
    pub present: bool,
    /// The feature's version, size or setting.
    pub value: String,
    /// The consequence if the feature is missing, or a note about it; may be empty.
    pub cost: String,
}

impl Finding {
    fn of(mut self, group: Group) -> Self {
        self.group = group;
        self
    }
}

/// All findings of one host.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Diagnosis {
    /// Whether this host can build KVM machines.
    pub kvm: bool,
    /// One finding per feature.
    pub findings: Vec<Finding>,
}

/// Returns KVM's capabilities if this host can build KVM machines.
///
/// # Errors
///
/// The reason for which it cannot.
pub fn usable_kvm() -> Result<Capabilities, Unusable> {
    crate::kvm::open().map(|(_, capabilities)| capabilities)
}

/// Checks all features. Changes nothing.
pub fn diagnose() -> Diagnosis {
    let mut findings = Vec::new();
    match open_device() {
        Err(unusable) => findings.push(
            missing(
                "/dev/kvm",
                &format!("{unusable}: no KVM machines here; only --backend threads"),
            )
            .of(Group::Required),
        ),
        Ok(kvm) => kvm_findings(&kvm, &mut findings),
    }
    findings.extend([
        hypervisor(),
        memory(),
        huge_pages(),
        pagemap().of(Group::Checkpoints),
        userfaultfd().of(Group::Checkpoints),
        userfault_wp().of(Group::Checkpoints),
        clock_source().of(Group::Migration),
        sleep_states().of(Group::Migration),
        seccomp().of(Group::Sandbox),
        landlock().of(Group::Sandbox),
    ]);
    Diagnosis { kvm: usable_kvm().is_ok(), findings }
}

fn kvm_findings(kvm: &Kvm, findings: &mut Vec<Finding>) {
    let version = format!("API version {}", kvm.get_api_version());
    findings.push(present("/dev/kvm", version, "").of(Group::Required));
    let capabilities = Capabilities::probe(kvm);
    let ring = match capabilities.dirty_ring() {
        Some((_, entries)) => present("dirty ring", format!("up to {entries} entries a vCPU"), ""),
        None => missing("dirty ring", "--tracking dirty-ring is refused; dirty-bitmap remains"),
    };
    findings.push(ring.of(Group::Migration));
    match kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES) {
        Err(e) => findings.push(
            missing(BASELINE_FINDING, &format!("KVM_GET_SUPPORTED_CPUID failed: {e}"))
                .of(Group::Migration),
        ),
        Ok(supported) => {
            findings.push(baseline_processor(&supported).of(Group::Migration));
            let features = baseline::features(&supported).join(" ");
            let note = "--cpu MODEL,-NAME removes one";
            findings.push(present("processor features", features, note).of(Group::Capability));
        }
    }
    for c in capabilities.iter() {
        let name = format!("KVM_CAP_{}", c.name);
        findings.push(match (c.value, c.need) {
            (0, Need::Required) => missing(&name, "no KVM machines here").of(Group::Required),
            (0, Need::Optional(cost)) => missing(&name, cost),
            (value, _) => present(&name, value.to_string(), "").of(Group::Capability),
        });
    }
}

const BASELINE_FINDING: &str = "baseline processor";

fn baseline_processor(supported: &CpuId) -> Finding {
    let lacks = baseline::lacks(supported);
    if lacks.is_empty() {
        return present(BASELINE_FINDING, "offered".into(), "");
    }
    let (want, without) = (lacks.join(", "), lacks.join(",-"));
    let cost =
        format!("--cpu baseline is refused: {want} is missing; --cpu baseline,-{without} works");
    missing(BASELINE_FINDING, &cost)
}

fn hypervisor() -> Finding {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = cpuinfo.lines().find(|l| l.starts_with("flags")).unwrap_or_default();
    let nested = flags.split_ascii_whitespace().any(|f| f == "hypervisor");
    let hardware = ["vmx", "svm"].iter().any(|v| flags.split_ascii_whitespace().any(|f| f == *v));
    match (nested, hardware) {
        (false, true) => present("hardware virtualization", "yes".into(), ""),
        (true, true) => {
            let cost = "this host is a guest itself: exits and first writes to frames cost more";
            present("hardware virtualization", "nested".into(), cost)
        }
        (_, false) => missing(
            "hardware virtualization",
            "KVM, if present, works without VMX or SVM: guest kernel code may be emulated, and \
             slow",
        ),
    }
}

fn memory() -> Finding {
    match HostMemory::read() {
        Some(HostMemory { available, total, .. }) => {
            let value = format!("{} MiB available of {} MiB", available >> 20, total >> 20);
            present("memory", value, "")
        }
        None => missing("memory", "/proc/meminfo does not report it"),
    }
}

fn huge_pages() -> Finding {
    let enabled = read("/sys/kernel/mm/transparent_hugepage/enabled");
    let chosen = enabled.split(['[', ']']).nth(1).unwrap_or("never").to_owned();
    match chosen.as_str() {
        "never" => missing("transparent huge pages", "first touches of guest memory cost more"),
        _ => present("transparent huge pages", chosen, ""),
    }
}

fn pagemap() -> Finding {
    match fs::File::open("/proc/self/pagemap") {
        Ok(_) => present("pagemap", "readable".into(), ""),
        Err(e) => missing(
            "pagemap",
            &format!(
                "{e}: checkpoints and migrations cannot tell which memory is in use, and fail"
            ),
        ),
    }
}

fn userfaultfd() -> Finding {
    match Userfault::open() {
        Ok(_) => present("userfaultfd", "write protection, also of pages never written".into(), ""),
        Err(e) => missing(
            "userfaultfd",
            &format!(
                "{e}: a checkpoint's pause grows with what changed, some 0.1 ms for each MiB; it \
                 needs Linux 6.4, and root, vm.unprivileged_userfaultfd=1 or /dev/userfaultfd"
            ),
        ),
    }
}

fn userfault_wp() -> Finding {
    const NAME: &str = "userfaultfd, asynchronous";
    match Userfault::open_async() {
        Ok(_) => present(NAME, "write protection that records writes".into(), ""),
        Err(e) => missing(
            NAME,
            &format!(
                "{e}: --tracking userfault-wp is refused; it needs Linux 6.7, and root, \
                 vm.unprivileged_userfaultfd=1 or /dev/userfaultfd"
            ),
        ),
    }
}

fn clock_source() -> Finding {
    let source = read("/sys/devices/system/clocksource/clocksource0/current_clocksource");
    match source.as_str() {
        "tsc" | "kvm-clock" => present("clock source", source, ""),
        "" => missing("clock source", "the kernel names none"),
        _ => {
            let cost = "guests' kvmclock needs a host clock on the TSC to be cheap and exact";
            present("clock source", source, cost)
        }
    }
}

fn sleep_states() -> Finding {
    match pm_qos::open() {
        Ok(_) => present("processors kept awake", pm_qos::DEVICE.into(), ""),
        Err(e) => missing(
            "processors kept awake",
            &format!(
                "{}: {e}: processors may sleep during a hand-over, which then takes some tenths \
                 of a millisecond longer; run as root, or permit writing to that file",
                pm_qos::DEVICE
            ),
        ),
    }
}

fn seccomp() -> Finding {
    let actions = read("/proc/sys/kernel/seccomp/actions_avail");
    match actions.split_ascii_whitespace().any(|a| a == "trap") {
        true => present("seccomp filters", "yes".into(), ""),
        false => missing(
            "seccomp filters",
            "guests run with --no-seccomp only: system calls are not filtered",
        ),
    }
}

/// Accesses that landlock restricts only from an ABI version on, with the kernel that added it.
const LANDLOCK: [(i32, &str); 3] =
    [(3, "truncating files (Linux 6.2)"), (4, "TCP ports (6.7)"), (5, "ioctls of devices (6.10)")];

fn landlock() -> Finding {
    let Some(version) = crate::sandbox::landlock_offered() else {
        return missing(
            "landlock",
            "a guest that breaks out reaches the user's files; Linux 5.13 has it where lsm= names \
             it",
        );
    };
    let lacks = LANDLOCK.iter().filter(|(has, _)| version < *has).map(|(_, what)| *what);
    let lacks: Vec<_> = lacks.collect();
    let cost = match lacks.is_empty() {
        true => String::new(),
        false => format!("not restricted are {}", lacks.join(", ")),
    };
    present("landlock", format!("ABI {version}"), &cost)
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

fn present(name: &str, value: String, cost: &str) -> Finding {
    Finding {
        group: Group::Host,
        name: name.to_owned(),
        present: true,
        value,
        cost: cost.to_owned(),
    }
}

fn missing(name: &str, cost: &str) -> Finding {
    let value = "missing".to_owned();
    Finding {
        group: Group::Host,
        name: name.to_owned(),
        present: false,
        value,
        cost: cost.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_missing_feature_has_a_cost() {
        let diagnosis = diagnose();
        assert!(diagnosis.findings.iter().all(|f| f.present || !f.cost.is_empty()));
        assert!(diagnosis.findings.iter().any(|f| f.name == "memory" && f.present));
        assert_eq!(diagnosis.kvm, usable_kvm().is_ok());
    }
}
