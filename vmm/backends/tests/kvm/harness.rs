//! Machines for tests, and the output of their guests.

use std::num::NonZero;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{Gfn, PAGE_SIZE};
use driftline_guest::{GuestContents, VmId};
use driftline_images::{PayloadMessage, PayloadReport};
use driftline_machine::config::{BackendKind, Boot, HostConfig, MachineConfig, SerialSink};
use driftline_machine::machine::{BuildOptions, KvmMachine, MachineError};
use driftline_machine::testing::payload_config;
use driftline_machine::vm::{EndReason, Vm};
use kvm_bindings::KVM_MAX_CPUID_ENTRIES;
use kvm_ioctls::Kvm;
use parking_lot::{Condvar, Mutex};
use tempfile::TempDir;
use vm_memory::{Bytes, GuestAddress};

pub const MIB: u64 = 1 << 20;

/// A limit that nothing here reaches, even on the slowest host.
pub const LONG: Duration = Duration::from_secs(300);

/// Number of tests that are running.
static TURNS: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

/// A test's permission to run. These tests wait little, so running many more of them than there are
/// processors makes all of them slower: on 2 processors they take 29 s three at a time, and 36 s
/// eight at a time.
struct Turn;

impl Turn {
    fn take() -> Self {
        let most = std::thread::available_parallelism().map_or(1, NonZero::get) + 1;
        let (running, ended) = &TURNS;
        let mut running = running.lock();
        ended.wait_while(&mut running, |running| *running >= most);
        *running += 1;
        Self
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *TURNS.0.lock() -= 1;
        TURNS.1.notify_one();
    }
}

thread_local! {
    /// Ends with the thread, and so with its test.
    static TURN: Turn = Turn::take();
}

/// Behaves like [`driftline_machine::testing::kvm_or_skip`], once the calling thread's test may
/// run.
pub fn kvm_or_skip(test: &str) -> bool {
    TURN.with(|_| driftline_machine::testing::kvm_or_skip(test))
}

/// Returns the configuration of a guest that runs the payload `spec` and reports ten times a
/// second.
pub fn payload(spec: &str) -> MachineConfig {
    MachineConfig {
        mem_bytes: 64 * MIB,
        boot: Boot::Payload(format!("{spec},report=100")),
        ..payload_config(BackendKind::Kvm)
    }
}

/// Returns the configuration of a hand-made kernel.
pub fn kernel(elf: &[u8], dir: &TempDir) -> MachineConfig {
    let kernel = dir.path().join("kernel.elf");
    std::fs::write(&kernel, elf).unwrap();
    let boot = Boot::Kernel { kernel, initrd: None, cmdline: String::new(), bare: true };
    MachineConfig { boot, ..payload("") }
}

/// A copy of all memory of a machine.
pub struct RamCopy(Vec<u8>);

impl RamCopy {
    pub fn of(machine: &KvmMachine) -> Self {
        let mut bytes = vec![0; machine.machine_config().mem_bytes as usize];
        machine.ram().read_slice(&mut bytes, GuestAddress(0)).unwrap();
        Self(bytes)
    }

    /// Copies the frames that differ, and returns them in order.
    pub fn update(&mut self, machine: &KvmMachine) -> Vec<Gfn> {
        let mut now = [0; PAGE_SIZE as usize];
        let mut changed = Vec::new();
        for (frame, gfn) in self.0.chunks_mut(now.len()).zip((0..).map(Gfn)) {
            machine.ram().read_slice(&mut now, GuestAddress(gfn.gpa())).unwrap();
            if frame != now {
                frame.copy_from_slice(&now);
                changed.push(gfn);
            }
        }
        changed
    }
}

/// The destination of a guest's serial output.
pub struct SerialLog {
    path: PathBuf,
    _dir: TempDir,
}

impl SerialLog {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self { path: dir.path().join("serial"), _dir: dir }
    }

    pub fn host(&self) -> HostConfig {
        HostConfig { serial: SerialSink::File(self.path.clone()), ..Default::default() }
    }

    pub fn text(&self) -> String {
        std::fs::read_to_string(&self.path).unwrap_or_default()
    }

    pub fn bytes(&self) -> Vec<u8> {
        std::fs::read(&self.path).unwrap_or_default()
    }

    pub fn reports(&self) -> Vec<PayloadReport> {
        PayloadReport::all_of(&self.text()).collect()
    }

    /// Waits until `enough` returns true for the output. Fails after [`LONG`].
    #[track_caller]
    pub fn wait_for(&self, what: &str, enough: impl Fn(&str) -> bool) {
        let end = Instant::now() + LONG;
        let mut seen = None;
        loop {
            // Guests are slower while tests read the same output again and again.
            let len = std::fs::metadata(&self.path).map(|file| file.len()).ok();
            if seen != Some(len) && enough(&self.text()) {
                return;
            }
            seen = Some(len);
            assert!(Instant::now() < end, "no {what} within {LONG:?}; so far:\n{}", self.text());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until each of `vcpus` vCPUs has reported at least `count` times.
    #[track_caller]
    pub fn wait_for_reports(&self, vcpus: u8, count: usize) {
        self.wait_for("reports", |text| {
            let reports: Vec<PayloadReport> = PayloadReport::all_of(text).collect();
            let of = |id: u8| reports.iter().filter(|r| r.vcpu == u32::from(id)).count();
            (0..vcpus).all(|id| of(id) >= count)
        });
    }

    /// Fails if the payload reported an error, or printed nothing at all.
    #[track_caller]
    pub fn assert_no_errors(&self) {
        let text = self.text();
        assert!(!self.reports().is_empty(), "the payload never reported:\n{text}");
        for line in text.lines() {
            let bad = match PayloadMessage::parse(line) {
                Some(PayloadMessage::Report(report)) => report.errors > 0,
                Some(PayloadMessage::Ready { .. } | PayloadMessage::Io(_)) => false,
                Some(_) => true,
                None => false,
            };
            assert!(!bad, "{line}\nin:\n{text}");
        }
    }
}

/// Boots the guest of `config`, which may be the payload.
pub fn boot(config: MachineConfig, host: &HostConfig) -> Result<Arc<KvmMachine>, MachineError> {
    boot_as(config, host, BuildOptions::default())
}

pub fn boot_as(
    config: MachineConfig,
    host: &HostConfig,
    options: BuildOptions,
) -> Result<Arc<KvmMachine>, MachineError> {
    let image = driftline_backends::image(&config).unwrap_or_default();
    KvmMachine::build(VmId::random(), config, &HostConfig { image, ..host.clone() }, options)
}

/// Returns a host without serial output.
pub fn silent() -> HostConfig {
    HostConfig { serial: SerialSink::Null, ..Default::default() }
}

/// Returns EAX, EBX, ECX and EDX of a leaf that this host's KVM offers.
pub fn offered(function: u32) -> [u32; 4] {
    let cpuid = Kvm::new().unwrap().get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
    let found = cpuid.as_slice().iter().find(|e| e.function == function && e.index == 0);
    found.map_or([0; 4], |e| [e.eax, e.ebx, e.ecx, e.edx])
}

/// A random number generator with a fixed seed (splitmix64).
pub struct SeededRandom(pub u64);

impl SeededRandom {
    /// Returns a number below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}

pub fn launch(config: MachineConfig, console: &SerialLog) -> Arc<KvmMachine> {
    boot(config, &console.host()).unwrap()
}

pub fn refused(config: MachineConfig) -> MachineError {
    boot(config, &silent()).unwrap_err()
}

#[track_caller]
pub fn assert_powers_off(machine: &KvmMachine, console: &SerialLog) {
    let end = machine.wait_end(Some(LONG));
    assert_eq!(end, Some(EndReason::PowerOff), "{}", console.text());
}

/// Returns the smallest ring that the kernel accepts.
pub fn smallest_ring(config: &MachineConfig) -> u32 {
    let takes = |entries: &u32| {
        boot(MachineConfig { ring_entries: *entries, ..config.clone() }, &silent()).is_ok()
    };
    (6..17).map(|log| 1 << log).find(takes).unwrap()
}
