//! A process without a guest, which is configured over Firecracker's API: `driftline serve`, or the
//! program as `firecracker`. Its guest boots, or is loaded from a snapshot.
//!
//! ```text
//! main thread                                   thread "api"
//! configures, and starts the guest -----------> asks the guest
//! waits for the guest's end <-- the last request has been answered
//! ```
//!
//! One thread at a time owns the machine's state and performs its tasks. The control thread parses
//! the requests and sends the answers.

mod load;
mod metrics;
mod opened;
mod plan;
mod requests;
mod start;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::thread::Builder;

use driftline_control::api::{ApiEvent, App, Caller, Listeners, Server};
use driftline_control::firecracker::MicroVm;
use driftline_machine::config::guest_span;
use driftline_machine::sandbox::SandboxOptions;
use driftline_machine::socket::ListeningSocket;

use super::args::ServeArgs;
use super::end::{run_to_end, stop_reason};
use super::failure::Failure;
use super::firecracker_log;
use super::notify;
use super::setup::{enter_sandbox, log_machine};
use super::values;
pub(super) use metrics::MetricsFile;
use requests::{ApiRequests, ConfigurationEnd};
use start::GuestStarter;

/// The largest body of a request and the longest metadata, in bytes. Firecracker's defaults.
const PAYLOAD_LIMIT: usize = 51_200;

/// How a process serves Firecracker's API.
pub(super) struct ServeOptions {
    /// Id of the instance.
    pub(super) id: String,
    /// Path of the API's socket.
    pub(super) api_sock: PathBuf,
    /// Whether to filter system calls.
    pub(super) seccomp: bool,
    /// The largest body of a request, in bytes.
    pub(super) payload_limit: usize,
    /// The machine to be configured.
    pub(super) vm: MicroVm<Caller>,
    /// The metrics' file, if the machine has metrics before there are requests.
    pub(super) metrics: Option<MetricsFile>,
    /// Time that the start took, in microseconds: wall-clock time and processor time.
    pub(super) start_up_us: (Option<u64>, Option<u64>),
}

/// `driftline serve`.
pub(super) fn serve(args: ServeArgs) -> Result<ExitCode, Failure> {
    let socket = ListeningSocket::bind(&args.api_sock)?;
    firecracker_log::set_id(&args.id);
    let options = ServeOptions {
        vm: MicroVm::new(args.id.clone(), "Driftline", PAYLOAD_LIMIT),
        id: args.id,
        api_sock: args.api_sock,
        seccomp: true,
        payload_limit: PAYLOAD_LIMIT,
        metrics: None,
        start_up_us: (None, None),
    };
    serve_api(socket, options).result
}

/// How a process that serves Firecracker's API ends.
pub(super) struct ServeEnd {
    pub(super) result: Result<ExitCode, Failure>,
    /// The signal that asked for the end.
    pub(super) signal: Option<i32>,
}

/// Serves Firecracker's API on `socket` until the process is to end.
pub(super) fn serve_api(socket: ListeningSocket, options: ServeOptions) -> ServeEnd {
    let (app, events) = App::configuring(options.payload_limit);
    let (wall_us, cpu_us) = options.start_up_us;
    app.api_counts().set_start_up(wall_us, cpu_us);
    let termination = app.termination().clone();
    let result = serve_app(socket, options, app, events);
    ServeEnd { result, signal: termination.signal() }
}

fn serve_app(
    socket: ListeningSocket,
    options: ServeOptions,
    app: Arc<App>,
    events: Receiver<ApiEvent>,
) -> Result<ExitCode, Failure> {
    notify::connect();
    // Clients may name any file until the guest starts.
    let restricted = SandboxOptions {
        seccomp: options.seccomp,
        landlock: true,
        sockets: vec![options.api_sock.clone()],
        ..SandboxOptions::default()
    };
    enter_sandbox(&SandboxOptions { write: vec!["/".into()], ..restricted.clone() })?;
    driftline_machine::log_thread::start()?;
    if let Some(metrics) = &options.metrics {
        metrics.start_thread()?;
    }
    let listeners = Listeners { api: Some(socket), ..Listeners::default() };
    // Dropping the server sends the last answers.
    let server = Server::start(listeners, app.clone())?;
    tracing::info!("API socket {}", options.api_sock.display());
    notify::ready("the guest has not been started");
    let state_dir = values::state_dir();
    let (id, counts) = (options.id.clone(), app.api_counts().clone());
    let starter =
        GuestStarter::new(options.id, restricted, state_dir, server.control_thread(), app);
    let mut requests = ApiRequests::new(options.vm, events, options.metrics, counts);
    let guest = match requests.configure(starter)? {
        ConfigurationEnd::Exit(code) => return Ok(code),
        ConfigurationEnd::Stopped(why) => return Err(stopped(&why)),
        ConfigurationEnd::Started(guest) => guest,
    };
    let (vm, jobs) = (guest.vm.clone(), guest.jobs.clone());
    let _logged = guest_span(vm.vm_id(), &vm.machine_config().identity).entered();
    log_machine(&*vm, &guest.memory);
    notify::ready(format_args!("guest {} is {}", vm.vm_id(), vm.run_state()));
    let thread = Builder::new().name("api".to_owned());
    let thread = thread.spawn(move || requests.ask(&id, &guest))?;
    run_to_end(vm, jobs, server, Some(thread))
}

/// Returns the failure of a process that was stopped without a guest.
fn stopped(why: &str) -> Failure {
    notify::stopping();
    Failure::error(format_args!("{} before a guest was started", stop_reason(why)))
}
