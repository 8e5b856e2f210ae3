//! Helpers shared by the tests of this crate and of the crates above it: a guard that reports a
//! skipped test where the host lacks KVM, configurations of small guests, and small kernels.

mod elf;
mod memory_share;
mod process_usage;
mod tap;

use std::ffi::OsStr;
use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter,
};

use crate::config::{
    BackendKind, Boot, CpuConfig, DEFAULT_RING_ENTRIES, DiskConfig, Identity, MachineConfig,
    RateLimits,
};
use crate::kvm;
use crate::tracking::TrackingMode;
pub use elf::{CODE_AT, ECHO, Elf, note};
pub use memory_share::{most_in_upgrade, most_together, share_kib};
pub use process_usage::{ProcessUsage, only_child};
pub use tap::TestTap;

/// Environment variable that names a file. Each skipped test adds a line to it, to be counted.
pub const SKIP_LOG: &str = "DRIFTLINE_SKIP_LOG";

/// Returns whether this host can build machines. If not, reports on standard error, and in the file
/// that [`SKIP_LOG`] names, that `test` of this binary is skipped and why:
/// `<binary>::<test>: <why>`.
///
/// ```no_run
/// if !driftline_machine::testing::kvm_or_skip("a_test_of_something") {
///     return;
/// }
/// ```
pub fn kvm_or_skip(test: &str) -> bool {
    match kvm::open() {
        Ok(_) => true,
        Err(why) => {
            skip(test, &why.to_string());
            false
        }
    }
}

/// Returns the configuration of a guest with one vCPU, 32 MiB and no devices that runs the payload
/// over 1 MiB.
pub fn payload_config(backend: BackendKind) -> MachineConfig {
    MachineConfig {
        identity: Identity::default(),
        mem_bytes: 32 << 20,
        vcpus: 1,
        tracking: TrackingMode::DirtyRing,
        ring_entries: DEFAULT_RING_ENTRIES,
        backend,
        boot: Boot::Payload("payload,ws=1M".to_owned()),
        cpu: CpuConfig::default(),
        devices: Vec::new(),
    }
}

/// Returns the configuration of an untracked guest with one vCPU, 16 MiB and no devices that runs
/// `kernel`.
#[cfg(test)]
pub(crate) fn kernel_config(kernel: &Path) -> MachineConfig {
    MachineConfig {
        mem_bytes: 16 << 20,
        tracking: TrackingMode::None,
        boot: Boot::Kernel {
            kernel: kernel.to_owned(),
            initrd: None,
            cmdline: String::new(),
            bare: true,
        },
        ..payload_config(BackendKind::Kvm)
    }
}

/// Returns a KVM structure, encoded as bytes, in which each byte differs from its neighbours.
#[cfg(test)]
pub(crate) fn pattern<T: serde::de::DeserializeOwned>(first: u8) -> T {
    let mut bytes = postcard::to_stdvec(&size_of::<T>()).unwrap();
    bytes.extend((0..size_of::<T>()).map(|i| (i as u8).wrapping_mul(7).wrapping_add(first)));
    postcard::from_bytes(&bytes).unwrap()
}

/// Returns a deadline that a test on a busy host does not reach.
#[cfg(test)]
pub(crate) fn soon() -> std::time::Instant {
    std::time::Instant::now() + std::time::Duration::from_secs(20)
}

/// Returns whether tests with a long form run that form: with `DRIFTLINE_FULL=1`.
pub fn full() -> bool {
    driftline_guest::testing::repeats(false, true)
}

/// Runs `test` of this binary, named with its path, in a process of its own, where the environment
/// variable `variable` is `value`.
///
/// # Panics
///
/// Fails the calling test if that process fails or does not run the test.
#[allow(clippy::unwrap_used)]
pub fn run_in_child(test: &str, variable: &str, value: &str, stdin: impl Into<Stdio>) {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", test, "--nocapture", "--test-threads=1"]).env(variable, value);
    let out = child.stdin(stdin).output().unwrap();
    let output = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{output}{}", String::from_utf8_lossy(&out.stderr));
    assert!(output.contains("1 passed"), "{output}");
}

/// Returns the body of the answer of the API at `socket` to `GET path`; `None` if no process
/// listens there, or unless the status is 200. Tests that wait for a state send many requests: a
/// process for each would take most of their processor time.
pub fn get(socket: &Path, path: &str) -> Option<String> {
    /// Longer than any answer takes on a busy machine.
    const LIMIT: Duration = Duration::from_secs(60);
    let end = Instant::now() + LIMIT;
    // A server with too many requests answers 503, or closes a connection without an answer.
    while Instant::now() < end {
        let mut stream = UnixStream::connect(socket).ok()?;
        stream.set_read_timeout(Some(LIMIT)).ok()?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        let mut answer = String::new();
        let asked = stream.write_all(request.as_bytes());
        let answered = asked.and_then(|()| stream.read_to_string(&mut answer));
        if answered.is_ok_and(|len| len > 0) && !answer.starts_with("HTTP/1.1 503") {
            let (head, body) = answer.split_once("\r\n\r\n")?;
            return head.starts_with("HTTP/1.1 200").then(|| body.to_owned());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    None
}

/// Reports that `test` of this binary is skipped, as [`kvm_or_skip`] does, for another reason.
pub fn skip(test: &str, why: &str) {
    let exe = std::env::current_exe().unwrap_or_default();
    let line = skip_line(&binary_name(&exe), test, why);
    // Written directly to standard error: the test harness would capture the line.
    let _ = write!(io::stderr(), "SKIPPED: {line}");
    if let Some(path) = std::env::var_os(SKIP_LOG) {
        let log = OpenOptions::new().create(true).append(true).open(path);
        // One write call: other test binaries append to the same file.
        if let Err(e) = log.and_then(|mut f| f.write_all(line.as_bytes())) {
            let _ = writeln!(io::stderr(), "the skip log cannot be written: {e}");
        }
    }
}

/// Environment variable that names the directory of the Linux guest, for tests that boot one.
pub const LINUX_GUEST: &str = "DRIFTLINE_LINUX_GUEST";

/// Returns the directory that [`LINUX_GUEST`] names, which must contain a `vmlinux`. The tests do
/// not search for one: booting Linux takes minutes where KVM emulates kernels.
///
/// # Errors
///
/// The variable is not set, or the directory has no kernel.
pub fn linux_guest() -> io::Result<PathBuf> {
    let missing = |what: String| io::Error::new(io::ErrorKind::NotFound, what);
    let folder = std::env::var_os(LINUX_GUEST).map(PathBuf::from).ok_or_else(|| {
        missing(format!("{LINUX_GUEST} names no folder; images/linux/build.sh makes one"))
    })?;
    match folder.join("vmlinux").exists() {
        true => Ok(folder),
        false => Err(missing(format!("there is no vmlinux in {LINUX_GUEST}={}", folder.display()))),
    }
}

/// Makes `fdatasync` fail with EIO on this thread and on those that it starts, as on a disk that
/// has lost data.
///
/// # Errors
///
/// The filter cannot be installed.
pub fn fail_fdatasync() -> io::Result<()> {
    fail([(libc::SYS_fdatasync, Vec::new())], libc::EIO)
}

/// Makes every attempt to lock a file on this thread fail.
#[cfg(test)]
pub(crate) fn fail_locks() -> io::Result<()> {
    let locks = libc::F_OFD_SETLK.unsigned_abs().into();
    let asks = SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, locks)
        .and_then(|asks| SeccompRule::new(vec![asks]))
        .map_err(io::Error::other)?;
    fail([(libc::SYS_fcntl, vec![asks])], libc::ENOLCK)
}

/// Hides userfaultfd from this thread and from those that it starts: the system call and the device
/// both fail.
///
/// # Errors
///
/// The filter cannot be installed.
pub fn hide_userfaultfd() -> io::Result<()> {
    let request = crate::memory::USERFAULTFD_IOC_NEW();
    let asks = SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, request)
        .and_then(|asks| SeccompRule::new(vec![asks]))
        .map_err(io::Error::other)?;
    let calls = [(libc::SYS_userfaultfd, Vec::new()), (libc::SYS_ioctl, vec![asks])];
    fail(calls, libc::ENOSYS)
}

/// Makes these calls fail on this thread and on those that it starts.
fn fail<const N: usize>(
    calls: [(libc::c_long, Vec<SeccompRule>); N],
    errno: i32,
) -> io::Result<()> {
    let fails = SeccompAction::Errno(errno.unsigned_abs());
    let rules = calls.into_iter().collect();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, fails, TargetArch::x86_64);
    let program: BpfProgram = filter.and_then(TryInto::try_into).map_err(io::Error::other)?;
    apply_filter(&program).map_err(io::Error::other)
}

/// Returns a disk that the guest may write to, over the first `bytes` of the file at `path`,
/// without an identity.
pub fn disk(id: &str, path: &Path, bytes: u64) -> DiskConfig {
    DiskConfig {
        id: id.to_owned(),
        path: path.to_owned(),
        readonly: false,
        serial: String::new(),
        bytes,
        block_bytes: 512,
        identity: None,
        limits: RateLimits::default(),
    }
}

/// Returns the capabilities of a host whose KVM has everything, with dirty rings of at most
/// `ring_entries` entries (0: none).
pub fn capabilities_with_rings(ring_entries: u32) -> kvm::Capabilities {
    let bytes = ring_entries as i32 * size_of::<kvm_bindings::kvm_dirty_gfn>() as i32;
    let rings =
        [kvm_bindings::KVM_CAP_DIRTY_LOG_RING, kvm_bindings::KVM_CAP_DIRTY_LOG_RING_ACQ_REL];
    kvm::Capabilities::from_answers(|number| if rings.contains(&number) { bytes } else { 1 })
}

fn skip_line(binary: &str, test: &str, why: &str) -> String {
    format!("{binary}::{test}: {}\n", why.replace('\n', " "))
}

/// Returns the name of a test binary without the hash of 16 digits that cargo appends.
fn binary_name(exe: &Path) -> String {
    let stem = exe.file_stem().map(OsStr::to_string_lossy).unwrap_or_default();
    match stem.rsplit_once('-') {
        Some((name, hash)) if hash.len() == 16 && hash.bytes().all(|b| b.is_ascii_hexdigit()) => {
            name.to_owned()
        }
        _ => stem.into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skip_line_names_binary_test_and_reason() {
        let binary = |path: &str| binary_name(Path::new(path));
        assert_eq!(binary("/t/debug/deps/kvm-0123456789abcdef"), "kvm");
        assert_eq!(binary("/t/debug/whole-system"), "whole-system");
        assert_eq!(skip_line("kvm", "boots", "no\nKVM"), "kvm::boots: no KVM\n");
    }
}
