//! A process without a guest, which is configured over Firecracker's API: `driftline serve`, or the
//! program as `firecracker`.
//!
//! The main thread owns the machine's state and performs its tasks. The control thread parses the
//! requests and sends the answers.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::mpsc::Receiver;

use driftline_control::api::{ApiEvent, App, Caller, Listeners, Server};
use driftline_control::firecracker::{ApiFault, MicroVm, MicroVmAction, MicroVmEvent, Task};
use driftline_machine::sandbox::SandboxOptions;
use driftline_machine::socket::ListeningSocket;
use serde_json::Value;

use super::args::ServeArgs;
use super::end::stop_reason;
use super::failure::Failure;
use super::notify;
use super::opened::OpenedFiles;
use super::setup::enter_sandbox;

/// The largest body of a request and the longest metadata, in bytes. Firecracker's defaults.
const PAYLOAD_LIMIT: usize = 51_200;

/// How a process serves Firecracker's API.
pub(super) struct ServeOptions {
    /// Id of the instance.
    pub(super) id: String,
    /// The name that `GET /` shows.
    pub(super) app_name: &'static str,
    /// Path of the API's socket.
    pub(super) api_sock: PathBuf,
    /// Whether to filter system calls.
    pub(super) seccomp: bool,
    /// The largest body of a request, in bytes.
    pub(super) payload_limit: usize,
    /// The longest metadata, in bytes.
    pub(super) metadata_limit: usize,
    /// The first metadata.
    pub(super) metadata: Option<Value>,
}

/// `driftline serve`.
pub(super) fn serve(args: ServeArgs) -> Result<ExitCode, Failure> {
    let socket = ListeningSocket::bind(&args.api_sock)?;
    let options = ServeOptions {
        id: args.id,
        app_name: "Driftline",
        api_sock: args.api_sock,
        seccomp: true,
        payload_limit: PAYLOAD_LIMIT,
        metadata_limit: PAYLOAD_LIMIT,
        metadata: None,
    };
    serve_api(socket, options)
}

/// Serves Firecracker's API on `socket` until the process is to end. Returns its exit code.
pub(super) fn serve_api(
    socket: ListeningSocket,
    options: ServeOptions,
) -> Result<ExitCode, Failure> {
    notify::connect();
    let mut vm = MicroVm::new(options.id, options.app_name, options.metadata_limit);
    if let Some(metadata) = options.metadata {
        vm.set_metadata(metadata)?;
    }
    enter_sandbox(&SandboxOptions {
        seccomp: options.seccomp,
        landlock: true,
        read: Vec::new(),
        write: Vec::new(),
        sockets: vec![options.api_sock.clone()],
        allowed: Vec::new(),
    })?;
    driftline_machine::log_thread::start()?;
    let (app, events) = App::configuring(options.payload_limit);
    let listeners = Listeners { api: Some(socket), ..Listeners::default() };
    // Dropping the server sends the last answers.
    let _server = Server::start(listeners, app)?;
    tracing::info!("API socket {}", options.api_sock.display());
    notify::ready("the guest has not been started");
    configure(vm, events)
}

/// Performs what the requests ask for until the process is to end. Callers that still wait are
/// dropped on return, and the server answers them.
fn configure(mut vm: MicroVm<Caller>, events: Receiver<ApiEvent>) -> Result<ExitCode, Failure> {
    let mut files = OpenedFiles::default();
    let mut next = VecDeque::new();
    loop {
        let event = match next.pop_front() {
            Some(event) => event,
            None => match events.recv()? {
                ApiEvent::Call(caller, operation) => MicroVmEvent::Request(caller, operation),
                ApiEvent::Stop(why) => return Err(stopped(&why)),
            },
        };
        for action in vm.step(event) {
            match action {
                MicroVmAction::Reply(caller, answer) => caller.answer(answer),
                MicroVmAction::Perform(task) => {
                    next.push_back(MicroVmEvent::Finished(perform(&task, &mut files)));
                }
                MicroVmAction::ToGuest(caller, _) => {
                    caller.refuse(ApiFault::NotBuilt("a request to a started guest"));
                }
                MicroVmAction::Exit(code) => return Ok(ExitCode::from(code)),
            }
        }
    }
}

/// Performs a task.
fn perform(task: &Task, files: &mut OpenedFiles) -> Result<(), ApiFault> {
    match task {
        Task::OpenBootSource(source) => files.open_boot_source(source),
        Task::OpenDrive(drive) => files.open_drive(drive),
        other => Err(ApiFault::NotBuilt(other.request())),
    }
}

/// Returns the failure of a process that was stopped without a guest.
fn stopped(why: &str) -> Failure {
    notify::stopping();
    Failure::error(format_args!("{} before a guest was started", stop_reason(why)))
}
