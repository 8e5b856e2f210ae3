//! Counts requests, and measures those that pause, resume, save or load the guest.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::firecracker::answer::Answer;
use crate::firecracker::model::SnapshotType;
use crate::firecracker::operation::Operation;

/// A metric: its group and its name.
type MetricName = (&'static str, &'static str);

/// The requests of a process.
#[derive(Default, Debug)]
pub struct ApiCounts {
    counts: Mutex<BTreeMap<MetricName, u64>>,
    /// The last values of what is not counted.
    values: Mutex<BTreeMap<MetricName, u64>>,
}

/// The names of an operation whose latency is measured.
#[derive(Clone, Copy)]
pub(crate) struct LatencyNames {
    /// The metric of the time from the request to its answer.
    api: &'static str,
    /// The metric of the time that the guest takes.
    vmm: &'static str,
    /// The operation in the log.
    action: &'static str,
}

impl ApiCounts {
    /// Counts a request, whether it can be parsed, and whether it uses something deprecated.
    pub(crate) fn count(&self, call: &CountedCall<'_>, is_parsed: bool, is_deprecated: bool) {
        let mut counts = self.counts.lock();
        let mut add = |name| *counts.entry(name).or_insert(0) += 1;
        if let Some(CallMetrics { group, count, fails }) = call.metrics() {
            add((group, count));
            if let Some(fails) = fails.filter(|_| !is_parsed) {
                add((group, fails));
            }
        }
        if is_deprecated {
            add(("deprecated_api", "deprecated_http_api_calls"));
        }
    }

    /// Records the time that the process took to start, in microseconds, if the starter measured
    /// it: wall-clock time and processor time.
    pub fn set_start_up(&self, wall_us: Option<u64>, cpu_us: Option<u64>) {
        let mut values = self.values.lock();
        for (name, us) in
            [("process_startup_time_us", wall_us), ("process_startup_time_cpu_us", cpu_us)]
        {
            values.extend(us.map(|us| (("api_server", name), us)));
        }
    }

    /// Lets the guest answer, and records the time that it takes.
    pub fn time_guest(&self, operation: &Operation, ask: impl FnOnce() -> Answer) -> Answer {
        let begun = Instant::now();
        let answer = ask();
        if let Some(names) = latency_names(operation)
            && !matches!(answer, Answer::Fault(_))
        {
            self.set_vmm_latency(names, begun.elapsed());
        }
        answer
    }

    /// Loads a guest, and records the time that it takes.
    ///
    /// # Errors
    ///
    /// Those of `load`.
    pub fn time_load<T, E>(&self, load: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let begun = Instant::now();
        load().inspect(|_| self.set_vmm_latency(LOAD, begun.elapsed()))
    }

    /// Records the time from a request to its answer.
    pub(crate) fn set_api_latency(&self, names: LatencyNames, took: Duration, answer: &Answer) {
        if !matches!(answer, Answer::Fault(_)) {
            let us = self.set_latency(names.api, took);
            tracing::info!("'{}' API request took {us} us.", names.action);
        }
    }

    fn set_vmm_latency(&self, names: LatencyNames, took: Duration) {
        let us = self.set_latency(names.vmm, took);
        tracing::info!("'{}' VMM action took {us} us.", names.action);
    }

    fn set_latency(&self, name: &'static str, took: Duration) -> u64 {
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.values.lock().insert(("latencies_us", name), us);
        us
    }

    pub(super) fn counts(&self) -> BTreeMap<MetricName, u64> {
        self.counts.lock().clone()
    }

    pub(super) fn values(&self) -> BTreeMap<MetricName, u64> {
        self.values.lock().clone()
    }
}

const fn latency(api: &'static str, vmm: &'static str, action: &'static str) -> LatencyNames {
    LatencyNames { api, vmm, action }
}

/// The names of a load.
const LOAD: LatencyNames = latency("load_snapshot", "vmm_load_snapshot", "load snapshot");

/// Returns the names of an operation whose latency is measured.
pub(crate) fn latency_names(operation: &Operation) -> Option<LatencyNames> {
    Some(match operation {
        Operation::CreateSnapshot(params) => match params.snapshot_type {
            SnapshotType::Full => {
                latency("full_create_snapshot", "vmm_full_create_snapshot", "create full snapshot")
            }
            SnapshotType::Diff => {
                latency("diff_create_snapshot", "vmm_diff_create_snapshot", "create diff snapshot")
            }
        },
        Operation::LoadSnapshot(_) => LOAD,
        Operation::Pause => latency("pause_vm", "vmm_pause_vm", "pause vm"),
        Operation::Resume => latency("resume_vm", "vmm_resume_vm", "resume vm"),
        _ => return None,
    })
}

/// The parts of a request that decide how it is counted.
pub(crate) struct CountedCall<'a> {
    pub(crate) method: &'a str,
    pub(crate) path: &'a str,
    pub(crate) has_body: bool,
}

/// The names of the metrics that a request is counted in.
struct CallMetrics {
    group: &'static str,
    /// The number of requests.
    count: &'static str,
    /// The number of those which cannot be parsed.
    fails: Option<&'static str>,
}

impl CountedCall<'_> {
    /// Returns the metrics that the request is counted in, if there are any.
    fn metrics(&self) -> Option<CallMetrics> {
        let mut parts = self.path.trim_start_matches('/').split_terminator('/');
        let first = parts.next().unwrap_or_default();
        let is_hotplug = first == "hotplug" && parts.next() == Some("memory");
        let (count, fails) = match (self.method, first) {
            ("GET", _) if self.has_body => return None,
            ("GET", "") => ("instance_info_count", None),
            ("GET", "version") => ("vmm_version_count", None),
            ("GET", "machine-config") => ("machine_cfg_count", None),
            ("GET", "mmds") => ("mmds_count", None),
            ("GET", _) if is_hotplug => ("hotplug_memory_count", None),
            ("PUT" | "PATCH", _) if !self.has_body => return None,
            ("PUT", "actions") => ("actions_count", Some("actions_fails")),
            ("PUT", "boot-source") => ("boot_source_count", Some("boot_source_fails")),
            ("PUT", "cpu-config") => ("cpu_cfg_count", Some("cpu_cfg_fails")),
            ("PUT", "logger") => ("logger_count", Some("logger_fails")),
            ("PUT", "metrics") => ("metrics_count", Some("metrics_fails")),
            ("PUT", "serial") => ("serial_count", Some("serial_fails")),
            ("PUT", "vsock") => ("vsock_count", Some("vsock_fails")),
            ("PUT" | "PATCH", "drives") => ("drive_count", Some("drive_fails")),
            ("PUT" | "PATCH", "machine-config") => ("machine_cfg_count", Some("machine_cfg_fails")),
            ("PUT" | "PATCH", "mmds") => ("mmds_count", Some("mmds_fails")),
            ("PUT" | "PATCH", "network-interfaces") => ("network_count", Some("network_fails")),
            ("PUT" | "PATCH", "pmem") => ("pmem_count", Some("pmem_fails")),
            ("PUT" | "PATCH", _) if is_hotplug => {
                ("hotplug_memory_count", Some("hotplug_memory_fails"))
            }
            _ => return None,
        };
        let group = match self.method {
            "GET" => "get_api_requests",
            "PUT" => "put_api_requests",
            _ => "patch_api_requests",
        };
        Some(CallMetrics { group, count, fails })
    }
}
