//! What files the process may reach. Two domains: that of the threads that answer the operator, and
//! that of all others, which reach no file by its name and no TCP port.
//!
//! A domain can never be widened, and where checkpoints are to be stored is said long after the
//! start. So the operator's threads keep the places where stores can be, all but the system's own
//! directories, unless the operator has said with `--allow-path` which places it shall be.

use std::fs;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, LandlockStatus, PathFd, RestrictionStatus, Ruleset,
    RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError, RulesetStatus,
    path_beneath_rules,
};

use super::options::{Options, StartError};

/// The newest whose rights are told apart here; older kernels enforce what they know of them.
const KNOWN: ABI = ABI::V7;

/// Never written to: what a host is made of. `/dev` but for the devices below, `/run` but for the
/// users'.
const SYSTEM: &[&str] = &[
    "bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "run", "sbin", "sys",
    "usr",
];
/// Written to although they lie in those.
const SCRATCH: &[&str] = &["/dev/shm", "/run/user"];
/// Devices that a VMM uses; those that are missing are left out.
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
/// Read by libraries: processors and memory, name services, locales.
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

/// What a store needs of its directory, and no program, device or link.
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

/// A device, or a file that may be one.
fn device() -> BitFlags<AccessFs> {
    AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::Truncate | AccessFs::IoctlDev
}

/// Restricts the calling thread, and all that it will start, to what `options` names. Whether the
/// kernel enforces any of it.
pub(super) fn enter_process(options: &Options) -> Result<bool, StartError> {
    let rules = || -> Result<RulesetCreated, RulesetError> {
        let rules = Ruleset::default().handle_access(AccessFs::from_all(KNOWN))?.create()?;
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
        PathFd::new(path)
            .map_err(|e| StartError::Given { path: path.clone(), why: given(path, &e) })?;
    }
    let status = rules().and_then(RulesetCreated::restrict_self).map_err(StartError::Landlock)?;
    tracing::debug!("landlock: {:?}, {:?}", status.ruleset, status.landlock);
    Ok(status.ruleset != RulesetStatus::NotEnforced)
}

/// Why an allowed directory is none.
fn given(path: &Path, e: &impl ToString) -> String {
    match path.try_exists() {
        Ok(false) => "it does not exist".to_owned(),
        _ => e.to_string(),
    }
}

/// Takes all files and TCP ports from the calling thread; what is open stays open.
pub(super) fn enter_nowhere() -> Result<RestrictionStatus, RulesetError> {
    let rules = Ruleset::default()
        .handle_access(AccessFs::from_all(KNOWN))?
        .handle_access(AccessNet::from_all(KNOWN))?
        .create()?;
    rules.restrict_self()
}

/// Where something can be written that the operator names.
pub(super) fn places(options: &Options) -> Vec<PathBuf> {
    let whole = if options.allowed.is_empty() { anywhere() } else { options.allowed.clone() };
    whole.into_iter().chain(options.write.iter().cloned()).collect()
}

/// The directories in which an operator may want a store.
fn anywhere() -> Vec<PathBuf> {
    let entries = fs::read_dir("/").into_iter().flatten().flatten();
    let own = entries.filter(|entry| {
        let system = SYSTEM.iter().any(|name| entry.file_name() == *name);
        // Links lead to places that are listed by their own names.
        !system && entry.file_type().is_ok_and(|kind| kind.is_dir())
    });
    own.map(|entry| entry.path()).chain(SCRATCH.iter().map(PathBuf::from)).collect()
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The version of landlock that this kernel enforces, as far as it is known here; told by a thread
/// that is restricted, and ends.
pub(crate) fn offered() -> Option<i32> {
    let restricted = std::thread::spawn(enter_nowhere).join().ok()?.ok()?;
    match restricted.landlock {
        LandlockStatus::Available { effective_abi, kernel_abi } => {
            Some(kernel_abi.unwrap_or(effective_abi as i32))
        }
        LandlockStatus::NotEnabled | LandlockStatus::NotImplemented => None,
    }
}
