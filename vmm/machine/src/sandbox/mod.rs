//! The sandbox: what the process, and each of its threads, may ask of the kernel once it has a
//! guest.
//!
//! A guest that breaks out of a device runs on a thread of this process. What it finds there:
//!
//! | thread | system calls | files by name, TCP |
//! | --- | --- | --- |
//! | main, `early-vm`, `control`, `opener`, jobs, migrations | those of a VMM: no programs, no mounts, no modules, only threads | see below |
//! | `vcpu*` | memory, waiting, KVM's ioctls of a vCPU, a timer of its own | none |
//! | `collector`, `supervisor` | the same with their own ioctls of KVM; the collector of `userfault-wp` those by which userfaultfd follows writes | none |
//! | `serial`, `log`, workers of the threads backend | memory, waiting, what is open | none |
//! | `serial-input` | the same, and the port's interrupt | none |
//! | `virtio-*` | events, and data of what is open: each kind of device its own few | none |
//!
//! Threads inherit filters and domains and can only narrow them. So the widest ones go on main,
//! before it starts anything, and each thread narrows itself before its first own step: [`spawn`].
//! All threads share one memory: whoever takes over a thread can try to have another one act for
//! it, which may do what the first row says.
//!
//! A forbidden call ends the process with `SIGSYS` and a line that names thread and call. Filters
//! are seccomp's (`seccomp.rs`), domains landlock's (`landlock.rs`), which older kernels lack: a
//! warning says so. A process that has not called [`start`], such as a test, is not restricted at
//! all.

mod calls;
mod filters;
mod landlock;
mod native;
mod options;
mod seccomp;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

pub(crate) use self::landlock::offered as landlock_offered;
pub use self::options::{Options, StartError};
use crate::fail_point;
use crate::{schedule, signals};
use seccomp::Filters;

/// Kinds of threads that serve the guest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Class {
    /// Runs a vCPU.
    Vcpu,
    /// Runs a vCPU's share of the threads backend.
    Worker,
    /// Owns the dirty source.
    Collector,
    /// The same where writes are followed by userfaultfd.
    Watcher,
    /// Decides whether the machine runs.
    Supervisor,
    /// Copies serial output.
    Serial,
    /// Writes the log.
    Log,
    /// Copies serial input, and raises the port's interrupt for it.
    SerialInput,
    /// A virtio device of randomness.
    Rng,
    /// A balloon.
    Balloon,
    /// A disk.
    Block,
    /// A network interface.
    Net,
    /// A socket device.
    Vsock,
}

impl Class {
    /// All of them.
    pub const ALL: [Class; 13] = [
        Self::Vcpu,
        Self::Worker,
        Self::Collector,
        Self::Watcher,
        Self::Supervisor,
        Self::Serial,
        Self::Log,
        Self::SerialInput,
        Self::Rng,
        Self::Balloon,
        Self::Block,
        Self::Net,
        Self::Vsock,
    ];
}

/// What this process has been restricted to.
#[derive(Debug)]
struct Started {
    filters: Option<Filters>,
    landlock: bool,
    allowed: Vec<PathBuf>,
}

/// Set once, by main, before any thread that serves a guest exists.
static STARTED: OnceLock<Started> = OnceLock::new();

/// Restricts the calling thread and all that it starts from now on: to be called once, by main,
/// before there are others. Warns about what is switched off or missing.
pub fn start(options: &Options) -> Result<(), StartError> {
    let begun = Instant::now();
    native::one_arena();
    let landlock = options.landlock && landlock::enter_process(options)?;
    match (options.landlock, landlock) {
        (false, _) => tracing::warn!("--no-landlock: every file of the user's can be reached"),
        (true, false) => tracing::warn!(
            "this kernel has no landlock: every file of the user's can be reached; `driftline doctor` says more"
        ),
        (true, true) => {}
    }
    let in_landlock = begun.elapsed();
    let filters = if options.seccomp { Some(Filters::compile()?) } else { None };
    let compiled = begun.elapsed();
    match &filters {
        Some(filters) => filters.enter_process().map_err(StartError::Seccomp)?,
        None => tracing::warn!("--no-seccomp: every system call can be made"),
    }
    tracing::debug!(
        landlock_us = in_landlock.as_micros(),
        compile_us = (compiled - in_landlock).as_micros(),
        seccomp_us = (begun.elapsed() - compiled).as_micros(),
        "the process is restricted"
    );
    // As they are in full: what is asked for later may be named from another directory.
    let places = landlock::places(options).into_iter();
    let allowed = places.filter_map(|path| path.canonicalize().ok()).collect();
    // A second start narrows main again, and its threads as the first one said.
    let _ = STARTED.set(Started { filters, landlock, allowed });
    Ok(())
}

/// Starts a thread of `class`. If the process is restricted, the thread restricts itself before it
/// does anything else.
///
/// The thread takes none of the signals that are sent to the process. The kernel delivers such a
/// signal to any thread that does not block it, and a handler writes to the control thread, which
/// this thread's filter may not allow.
pub fn spawn<T: Send + 'static>(
    class: Class,
    name: impl Into<String>,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    // Whose guest it serves, for its log.
    let logged = tracing::Span::current();
    let name = name.into();
    fail_point::pass(&name)?;
    Builder::new().name(name).spawn(move || {
        let _logged = logged.entered();
        signals::block();
        if matches!(class, Class::Vcpu | Class::Worker) {
            schedule::default_slices();
        }
        enter(class);
        work()
    })
}

/// As [`spawn`], of a thread that is restricted to `class` when it says so: it opens by name first,
/// and serves no guest until then.
pub fn spawn_late<T: Send + 'static>(
    class: Class,
    name: impl Into<String>,
    work: impl FnOnce(&dyn Fn()) -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let name = name.into();
    fail_point::pass(&name)?;
    let logged = tracing::Span::current();
    Builder::new().name(name).spawn(move || {
        let _logged = logged.entered();
        signals::block();
        work(&|| enter(class))
    })
}

/// Restricts the calling thread to `class`. A thread that cannot be restricted does not go on, nor
/// does the process: half a sandbox is none.
fn enter(class: Class) {
    #[cfg(test)]
    tests::start_everywhere();
    let Some(started) = STARTED.get() else { return };
    let failed = |why: String| {
        tracing::error!("a thread of class {class:?} cannot be restricted: {why}");
        crate::exit::now(1);
    };
    if started.landlock
        && let Err(e) = landlock::enter_nowhere()
    {
        failed(e.to_string());
    }
    if let Some(filters) = &started.filters
        && let Err(e) = filters.enter(class)
    {
        failed(e.to_string());
    }
}

/// Whether landlock lets this process write to `path`; the error is a sentence.
pub fn check_allowed(path: &Path) -> Result<(), String> {
    let Some(Started { landlock: true, allowed, .. }) = STARTED.get() else { return Ok(()) };
    // What does not exist yet will lie where its nearest directory is.
    let known = path.ancestors().find_map(|p| p.canonicalize().ok());
    if known.is_none_or(|p| allowed.iter().any(|a| p.starts_with(a))) {
        return Ok(());
    }
    let dirs = allowed.iter().filter(|a| a.is_dir() && !a.starts_with("/dev"));
    let places: Vec<String> = dirs.map(|a| a.display().to_string()).collect();
    Err(format!(
        "the VMM's sandbox does not allow writes to {}: restart the guest with --allow-path, or use a \
         directory under {}",
        path.display(),
        places.join(", ")
    ))
}

/// What follows `cause`, an error at `path`, if it may be this sandbox that stands behind it.
pub(crate) fn hint(path: &Path, cause: &io::Error) -> &'static str {
    match cause.kind() == io::ErrorKind::PermissionDenied && check_allowed(path).is_err() {
        true => {
            "; if its permissions do allow it, the VMM's sandbox does not: name the file when the VMM \
             starts (--disk, --vsock), or start it with --allow-path"
        }
        false => "",
    }
}

#[cfg(test)]
mod tests;
