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
mod opened_networks;
mod plan;
mod requests;
mod start;
mod start_times;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::thread::Builder;

use driftline_control::api::{ApiEvent, App, Caller, Listeners, Server};
use driftline_control::firecracker::{ApiFault, MicroVm, Operation};
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
pub(super) use start_times::StartTimes;

/// The largest body of a request and the longest metadata, in bytes. Firecracker's defaults.
pub(super) const PAYLOAD_LIMIT: usize = 51_200;

/// How a process serves Firecracker's API.
pub(super) struct ServeOptions {
    /// Id of the instance.
    pub(super) id: String,
    /// The API's socket and its path, if there is an API.
    pub(super) api: Option<(PathBuf, ListeningSocket)>,
    /// Requests that precede those of the API; the last one starts the guest.
    pub(super) first: Vec<Operation>,
    /// Whether to filter system calls.
    pub(super) seccomp: bool,
    /// The largest body of a request, in bytes.
    pub(super) payload_limit: usize,
    /// The machine to be configured.
    pub(super) vm: MicroVm<Caller>,
    /// Whether the guest has the register by which it reports that it has booted.
    pub(super) has_boot_timer: bool,
    /// The metrics' file, if the machine has metrics before there are requests.
    pub(super) metrics: Option<MetricsFile>,
    /// When the process was started, if its starter says so.
    pub(super) start_times: StartTimes,
}

/// `driftline serve`.
pub(super) fn serve(args: ServeArgs) -> Result<ExitCode, Failure> {
    let socket = ListeningSocket::bind(&args.api_sock)?;
    firecracker_log::set_id(&args.id);
    let options = ServeOptions {
        vm: MicroVm::new(args.id.clone(), "Driftline", PAYLOAD_LIMIT),
        id: args.id,
        api: Some((args.api_sock, socket)),
        first: Vec::new(),
        seccomp: true,
        payload_limit: PAYLOAD_LIMIT,
        has_boot_timer: false,
        metrics: None,
        start_times: StartTimes::default(),
    };
    match serve_api(options).result? {
        ServeResult::Ended(code) => Ok(code.into()),
        ServeResult::Refused { fault, .. } => Err(Failure::error(fault)),
    }
}

/// How a process that serves Firecracker's API ends.
pub(super) struct ServeEnd {
    pub(super) result: Result<ServeResult, Failure>,
    /// The signal that asked for the end.
    pub(super) signal: Option<i32>,
}

/// What became of a process that serves Firecracker's API.
pub(super) enum ServeResult {
    /// It ends with this code.
    Ended(u8),
    /// A request of the process itself was refused: the start, or one before it.
    Refused { fault: ApiFault, starts: bool },
}

/// Serves Firecracker's API until the process is to end.
pub(super) fn serve_api(options: ServeOptions) -> ServeEnd {
    let (app, events) = App::configuring(options.vm.name().clone(), options.payload_limit);
    let termination = app.termination().clone();
    let result = serve_app(options, app, events);
    ServeEnd { result, signal: termination.signal() }
}

fn serve_app(
    options: ServeOptions,
    app: Arc<App>,
    events: Receiver<ApiEvent>,
) -> Result<ServeResult, Failure> {
    notify::connect();
    // Clients may name any file until the guest starts.
    let restricted = SandboxOptions {
        seccomp: options.seccomp,
        landlock: true,
        sockets: options.api.iter().map(|(path, _)| path.clone()).collect(),
        ..SandboxOptions::default()
    };
    enter_sandbox(&SandboxOptions { write: vec!["/".into()], ..restricted.clone() })?;
    driftline_machine::log_thread::start()?;
    if let Some(metrics) = &options.metrics {
        metrics.start_thread()?;
    }
    if let Some((path, _)) = &options.api {
        tracing::info!("API socket {}", path.display());
    }
    let api = options.api.map(|(_, socket)| socket);
    let has_api = api.is_some();
    let listeners = Listeners { api, ..Listeners::default() };
    // Dropping the server sends the last answers.
    let server = Server::start(listeners, app.clone())?;
    if has_api {
        tracing::info!("API server started.");
        options.start_times.record(app.api_counts());
    }
    notify::ready("the guest has not been started");
    let state_dir = values::state_dir();
    let (id, counts) = (options.id.clone(), app.api_counts().clone());
    let starter = GuestStarter::new(
        options.id,
        restricted,
        state_dir,
        server.control_thread(),
        app,
        options.has_boot_timer,
    );
    let mut requests = ApiRequests::new(options.vm, options.first, events, options.metrics, counts);
    let guest = match requests.configure(starter)? {
        ConfigurationEnd::Exit(code) => return Ok(ServeResult::Ended(code)),
        ConfigurationEnd::Stopped(why) => return Err(stopped(&why)),
        ConfigurationEnd::Refused { fault, starts } => {
            return Ok(ServeResult::Refused { fault, starts });
        }
        ConfigurationEnd::Started(guest) => guest,
    };
    let (vm, jobs) = (guest.vm.clone(), guest.jobs.clone());
    let _logged = guest_span(vm.vm_id(), &vm.machine_config().identity).entered();
    log_machine(&*vm, &guest.memory);
    notify::ready(format_args!("guest {} is {}", vm.vm_id(), vm.run_state()));
    let thread = Builder::new().name("api".to_owned());
    let thread = thread.spawn(move || requests.ask(&id, &guest))?;
    // A guest that ends by itself is a success.
    run_to_end(vm, jobs, server, Some(thread)).map(|_| ServeResult::Ended(0))
}

/// Returns the failure of a process that was stopped without a guest.
fn stopped(why: &str) -> Failure {
    notify::stopping();
    Failure::error(format_args!("{} before a guest was started", stop_reason(why)))
}
