//! The sandbox: restricts what the process, and each of its threads, may ask of the kernel once it
//! has a guest.
//!
//! A guest that breaks out of a device runs on a thread of this process. That thread may make these
//! calls:
//!
//! | thread | system calls | files by name, TCP |
//! | --- | --- | --- |
//! | main, `early-vm`, `control`, `opener`, `pool-*`, `lazy-restore`, `page-handler`, `page-fetch`, jobs, migrations | what a VMM needs: no programs, no mounts, no modules, only threads | see below |
//! | `vcpu*` | memory, waiting, KVM's vCPU ioctls, a timer of its own | none |
//! | `collector`, `supervisor` | memory, waiting, KVM ioctls for their job; the supervisor also the affinity of threads, the collector of `userfault-wp` also the userfaultfd ioctls that follow writes | none |
//! | `serial`, `log`, `last-work`, `awake`, workers of the threads backend | memory, waiting, open descriptors | none |
//! | `serial-input` | the same, and the port's interrupt | none |
//! | `virtio-*`, `flush-*` | events, data of open descriptors, and a few calls for each kind of device | none |
//!
//! Threads inherit filters and domains and can only narrow them. So main applies the widest ones
//! before it starts any thread, and each thread narrows itself before it does anything else:
//! [`spawn`]. All threads share one memory: an attacker who controls a thread can try to make
//! another thread act for it, and that thread may do what the first row allows.
//!
//! A forbidden call ends the process with `SIGSYS`, or with the exit code that `fatal_signals` has
//! for it, and a line that names the thread and the call. Filters are seccomp's (`seccomp.rs`).
//! Domains are landlock's (`landlock.rs`), which older kernels lack; a warning then says so. A
//! process that has not called [`start`], such as a test, is not restricted.
//!
//! A process that is configured over Firecracker's API closes its sandbox in two steps. Until its
//! guest starts, the first row may use any file, because clients may name any; [`close`] then
//! leaves the files of its guest, as in every other process.

mod calls;
mod class;
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

use parking_lot::RwLock;

pub use self::class::Class;
pub(crate) use self::landlock::offered as landlock_offered;
pub use self::options::{SandboxOptions, StartError};
use crate::fail_point;
use crate::{pool, schedule, signals};
use seccomp::Filters;

/// The restrictions that this process has applied.
#[derive(Debug)]
struct Started {
    filters: Option<Filters>,
    landlock: bool,
    /// Places that the process may write to.
    allowed: RwLock<Vec<PathBuf>>,
}

/// Set once by main, before any thread that serves a guest exists.
static STARTED: OnceLock<Started> = OnceLock::new();

/// Restricts the calling thread and all threads that it starts from now on. Main calls this once,
/// before it starts other threads. Logs a warning for each restriction that is switched off or that
/// the kernel lacks.
///
/// # Errors
///
/// See [`StartError`].
pub fn start(options: &SandboxOptions) -> Result<(), StartError> {
    let begun = Instant::now();
    native::use_one_arena();
    let landlock = options.landlock && landlock::enter_process(options)?;
    match (options.landlock, landlock) {
        (false, _) => tracing::warn!("--no-landlock: the process can reach all files of its user"),
        (true, false) => tracing::warn!(
            "this kernel has no landlock: the process can reach all files of its user; see \
             `driftline doctor`"
        ),
        (true, true) => {}
    }
    let in_landlock = begun.elapsed();
    let filters = if options.seccomp { Some(Filters::compile()?) } else { None };
    let compiled = begun.elapsed();
    match &filters {
        Some(filters) => filters.enter_process().map_err(StartError::Seccomp)?,
        None => tracing::warn!("--no-seccomp: the process can make all system calls"),
    }
    tracing::debug!(
        landlock_us = in_landlock.as_micros(),
        compile_us = (compiled - in_landlock).as_micros(),
        seccomp_us = (begun.elapsed() - compiled).as_micros(),
        "the process is restricted"
    );
    let allowed = RwLock::new(allowed_places(options));
    // A second start narrows main again. Its threads keep the filters of the first one.
    let _ = STARTED.set(Started { filters, landlock, allowed });
    Ok(())
}

/// Returns the places that `options` allow to be written, as canonical paths, because later
/// requests may name these directories by other paths.
fn allowed_places(options: &SandboxOptions) -> Vec<PathBuf> {
    let places = landlock::places(options).into_iter();
    places.filter_map(|path| path.canonicalize().ok()).collect()
}

/// Takes away the files that `options` do not allow from the calling thread, and from all threads
/// that it starts from now on, after [`start`] has allowed more. Each thread without a class calls
/// this for itself, because a domain belongs to one thread. Does nothing in a process without
/// domains.
///
/// # Errors
///
/// See [`StartError`].
pub fn close(options: &SandboxOptions) -> Result<(), StartError> {
    let Some(started) = STARTED.get().filter(|started| started.landlock) else { return Ok(()) };
    landlock::enter_process(options)?;
    *started.allowed.write() = allowed_places(options);
    Ok(())
}

/// Behaves like [`close`], for the threads of the process's pool, which the memory of a large guest
/// starts.
///
/// # Errors
///
/// See [`StartError`].
pub fn close_pool(options: &SandboxOptions) -> Result<(), StartError> {
    match STARTED.get().is_some_and(|started| started.landlock) {
        true => pool::on_each_thread(|| landlock::enter_process(options).map(drop)),
        false => Ok(()),
    }
}

/// Starts a thread of `class`. If the process is restricted, the thread restricts itself before it
/// does anything else.
///
/// The thread takes none of the signals that are sent to the process. The kernel delivers such a
/// signal to any thread that does not block it, and a handler writes to the control thread, which
/// this thread's filter may not allow.
///
/// # Errors
///
/// The thread cannot be started.
pub fn spawn<T: Send + 'static>(
    class: Class,
    name: impl Into<String>,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    spawn_late(class, name, move |narrow| {
        narrow();
        work()
    })
}

/// Starts a thread like [`spawn`], but the thread applies the restrictions of `class` only when
/// `work` calls its argument. Until then it may open files by name, and it serves no guest.
///
/// # Errors
///
/// The thread cannot be started.
pub(crate) fn spawn_late<T: Send + 'static>(
    class: Class,
    name: impl Into<String>,
    work: impl FnOnce(&dyn Fn()) -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    // The span of the guest that the thread serves, for its log lines.
    let logged = tracing::Span::current();
    let name = name.into();
    fail_point::pass(&name)?;
    Builder::new().name(name).spawn(move || {
        let _logged = logged.entered();
        signals::block();
        set_time_slices(class);
        work(&|| enter(class))
    })
}

/// Gives the calling thread the time slices of `class`. Otherwise it would have its creator's.
fn set_time_slices(class: Class) {
    match class {
        Class::Vcpu | Class::Worker => schedule::default_slices(),
        _ => schedule::short_slices(),
    }
}

/// Restricts the calling thread to `class`. If that fails, the process exits: a partial sandbox is
/// not a sandbox.
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

/// The sandbox does not let this process write to a path.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "the VMM's sandbox does not allow writes to {}: restart the guest with --allow-path, or use a \
     directory under {}",
    path.display(),
    places.join(", ")
)]
pub struct NotAllowed {
    /// The path.
    path: PathBuf,
    /// Directories that the process may write to.
    places: Vec<String>,
}

impl NotAllowed {
    /// Returns the directories that the process may write to.
    pub(crate) fn places(&self) -> &[String] {
        &self.places
    }
}

/// Checks whether landlock lets this process write to `path`.
///
/// # Errors
///
/// Landlock does not let it.
pub fn check_allowed(path: &Path) -> Result<(), NotAllowed> {
    let Some(Started { landlock: true, allowed, .. }) = STARTED.get() else { return Ok(()) };
    let allowed = allowed.read();
    // A path that does not exist yet will be in its nearest existing ancestor directory.
    let existing = path.ancestors().find_map(|p| p.canonicalize().ok());
    if existing.is_none_or(|p| allowed.iter().any(|a| p.starts_with(a))) {
        return Ok(());
    }
    let dirs = allowed.iter().filter(|a| a.is_dir() && !a.starts_with("/dev"));
    let places = dirs.map(|a| a.display().to_string()).collect();
    Err(NotAllowed { path: path.to_owned(), places })
}

/// Returns text to append to `cause`, an error at `path`, if this sandbox may have caused it.
pub(crate) fn permission_hint(path: &Path, cause: &io::Error) -> &'static str {
    match cause.kind() == io::ErrorKind::PermissionDenied && check_allowed(path).is_err() {
        true => {
            "; if the file's permissions allow it, the VMM's sandbox does not: name the file when \
             the VMM starts (--disk, --vsock), or start the VMM with --allow-path"
        }
        false => "",
    }
}

#[cfg(test)]
mod tests;
