//! A guest for benches, in this process, and its reports.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use driftline_guest::Lifecycle;
use driftline_images::PayloadReport;
use driftline_machine::config::{
    BackendKind, Boot, CpuConfig, DEFAULT_RING_ENTRIES, HostConfig, MachineConfig, SerialSink,
};
use driftline_machine::machine::KvmMachine;
use driftline_machine::tracking::TrackingMode;

/// A guest of 1 GiB whose console is a file.
pub struct BenchGuest {
    pub machine: Arc<KvmMachine>,
    pub dir: tempfile::TempDir,
    serial: PathBuf,
}

impl BenchGuest {
    /// Runs `spec` on `vcpus` vCPUs until each has completed a pass over its share.
    pub fn start(spec: &str, vcpus: u8) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let serial = dir.path().join("serial");
        let host = HostConfig { serial: SerialSink::File(serial.clone()), ..HostConfig::default() };
        let config = MachineConfig {
            identity: Default::default(),
            mem_bytes: 1 << 30,
            vcpus,
            tracking: TrackingMode::DirtyRing,
            ring_entries: DEFAULT_RING_ENTRIES,
            backend: BackendKind::Kvm,
            boot: Boot::Payload(spec.to_owned()),
            cpu: CpuConfig::default(),
            devices: Vec::new(),
        };
        let image = driftline_backends::image(&config).expect("the payload");
        let host = HostConfig { image, ..host };
        let machine = KvmMachine::launch(config, &host).expect("a guest");
        machine.resume().expect("it runs");
        let guest = Self { machine, dir, serial };
        let start = Instant::now();
        while (0..vcpus.into()).any(|vcpu| !guest.reports().any(|r| r.vcpu == vcpu && r.passes > 0))
        {
            assert!(start.elapsed() < Duration::from_secs(60), "the guest makes no progress");
            std::thread::sleep(Duration::from_millis(20));
        }
        guest
    }

    /// Returns all reports so far.
    pub fn reports(&self) -> impl Iterator<Item = PayloadReport> {
        let text = std::fs::read_to_string(&self.serial).unwrap_or_default();
        PayloadReport::all_of(&text).collect::<Vec<_>>().into_iter()
    }
}

impl Drop for BenchGuest {
    fn drop(&mut self) {
        self.machine.stop("measured");
    }
}
