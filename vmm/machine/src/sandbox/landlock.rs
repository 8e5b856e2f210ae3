//! Restricts which files the process may reach. There are two domains: one for the threads that
//! serve the operator, and one for all other threads, which can open no file by name and use no TCP
//! port.
//!
//! A domain can never be widened, but the operator names the place for checkpoints long after the
//! start. So the operator's threads keep access to every place where a store can be: all
//! directories except the system's own, or only those that the operator allowed with
//! `--allow-path`. In a jail they keep access to the whole root directory, which the jail limits.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, LandlockStatus, PathFd, PathFdError,
    RestrictionStatus, Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError,
    RulesetStatus, path_beneath_rules,
};

use super::options::{SandboxOptions, StartError};

/// Newest landlock version whose rights are used here. Older kernels enforce the rights that they
/// know.
const NEWEST_ABI: ABI = ABI::V7;

/// System directories, which are not written to outside a jail. Exceptions: the devices below in
/// `/dev`, and the users' directories in `/run`.
const SYSTEM: &[&str] = &[
    "bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "run", "sbin", "sys",
    "usr",
];
/// Names of which every system's root directory has some. A root that has none of them is a jail,
/// such as Firecracker's jailer makes: it has `dev`, `run` and the client's files.
const NOT_IN_A_JAIL: &[&str] = &["bin", "boot", "etc", "proc", "sbin", "sys", "usr"];
/// Directories that may be written to although they are inside a system directory.
const SCRATCH: &[&str] = &["/dev/shm", "/run/user"];
/// Devices that a VMM uses. Missing ones are skipped.
const DEVICES: &[&str] = &[
    "/dev/kvm",
    "/dev/net/tun",
    "/dev/userfaultfd",
    "/dev/null",
    "/dev/zero",
    "/dev/random",
    "/dev/urandom",
    "/dev/full",
];
/// Paths that libraries read: processors and memory, name services, locales.
const READ: &[&str] = &[
    "/proc",
    "/sys",
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/share/zoneinfo",
    "/run/systemd/resolve",
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/resolv.conf",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/services",
    "/etc/ld.so.cache",
    "/etc/localtime",
];

fn readable() -> BitFlags<AccessFs> {
    AccessFs::ReadFile | AccessFs::ReadDir
}

/// Returns the rights that a store needs on its directory. They exclude executing programs and
/// making devices or links.
fn writable() -> BitFlags<AccessFs> {
    readable()
        | AccessFs::WriteFile
        | AccessFs::Truncate
        | AccessFs::MakeReg
        | AccessFs::MakeDir
        | AccessFs::MakeSock
        | AccessFs::RemoveFile
        | AccessFs::RemoveDir
        | AccessFs::Refer
}

/// Returns the rights for a device, or for a file that may be one.
fn device() -> BitFlags<AccessFs> {
    AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::Truncate | AccessFs::IoctlDev
}

/// Restricts the calling thread, and all threads that it starts, to the paths in `options`. Returns
/// whether the kernel enforces any of it.
pub(super) fn enter_process(options: &SandboxOptions) -> Result<bool, StartError> {
    let rules = || -> Result<RulesetCreated, RulesetError> {
        let rules = Ruleset::default().handle_access(AccessFs::from_all(NEWEST_ABI))?.create()?;
        let rules = rules
            .add_rules(path_beneath_rules(DEVICES, device()))?
            .add_rules(path_beneath_rules(&options.read, readable()))?
            .add_rules(path_beneath_rules(&options.write, writable() | AccessFs::IoctlDev))?
            .add_rules(path_beneath_rules(
                options.sockets.iter().map(|socket| parent(socket)),
                AccessFs::MakeSock | AccessFs::RemoveFile,
            ))?;
        if options.allowed.is_empty() {
            rules
                .add_rules(path_beneath_rules(["/"], readable()))?
                .add_rules(path_beneath_rules(anywhere(), writable()))
        } else {
            rules
                .add_rules(path_beneath_rules(READ, readable()))?
                .add_rules(path_beneath_rules(&options.allowed, writable()))
        }
    };
    for path in &options.allowed {
        PathFd::new(path).map_err(|e| unusable(path.clone(), e))?;
    }
    let status = rules().and_then(RulesetCreated::restrict_self).map_err(StartError::Landlock)?;
    tracing::debug!("landlock: {:?}, {:?}", status.ruleset, status.landlock);
    Ok(status.ruleset != RulesetStatus::NotEnforced)
}

/// Returns why an allowed directory cannot be used.
fn unusable(path: PathBuf, cause: PathFdError) -> StartError {
    match path.try_exists() {
        Ok(false) => StartError::NoAllowedPath(path),
        _ => StartError::AllowPath { path, cause },
    }
}

/// Removes access to all files and TCP ports from the calling thread. Open descriptors stay usable.
pub(super) fn enter_nowhere() -> Result<RestrictionStatus, RulesetError> {
    let rules = Ruleset::default()
        .handle_access(AccessFs::from_all(NEWEST_ABI))?
        .handle_access(AccessNet::from_all(NEWEST_ABI))?
        .create()?;
    rules.restrict_self()
}

/// Returns the paths that the operator may name for writing.
pub(super) fn places(options: &SandboxOptions) -> Vec<PathBuf> {
    let whole = if options.allowed.is_empty() { anywhere() } else { options.allowed.clone() };
    whole.into_iter().chain(options.write.iter().cloned()).collect()
}

/// Returns the directories in which an operator may put a store.
fn anywhere() -> Vec<PathBuf> {
    if is_jail() {
        return vec!["/".into()];
    }
    let entries = fs::read_dir("/").into_iter().flatten().flatten();
    let own = entries.filter(|entry| {
        let system = SYSTEM.iter().any(|name| entry.file_name() == *name);
        // Links are skipped: their targets are listed by their own names.
        !system && entry.file_type().is_ok_and(|kind| kind.is_dir())
    });
    own.map(|entry| entry.path()).chain(SCRATCH.iter().map(PathBuf::from)).collect()
}

/// Returns whether the process's root directory is that of a jail. In doubt it is not.
fn is_jail() -> bool {
    let is_missing = |name: &&str| {
        let found = fs::symlink_metadata(Path::new("/").join(name));
        found.is_err_and(|e| e.kind() == ErrorKind::NotFound)
    };
    NOT_IN_A_JAIL.iter().all(is_missing)
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Returns the landlock version that this kernel enforces, or `None`. A temporary thread finds it
/// out by restricting itself.
pub(crate) fn offered() -> Option<i32> {
    let restricted = std::thread::spawn(enter_nowhere).join().ok()?.ok()?;
    match restricted.landlock {
        LandlockStatus::Available { effective_abi, kernel_abi } => {
            Some(kernel_abi.unwrap_or(effective_abi as i32))
        }
        LandlockStatus::NotEnabled | LandlockStatus::NotImplemented => None,
    }
}
