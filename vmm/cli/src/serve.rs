//! `driftline serve`: a process without a guest, which is configured over Firecracker's API.
//!
//! The main thread owns the machine's state and performs its tasks. The control thread parses the
//! requests and sends the answers.

use std::collections::VecDeque;
use std::process::ExitCode;
use std::sync::mpsc::Receiver;

use driftline_control::api::{ApiEvent, App, Caller, Listeners, Server};
use driftline_control::firecracker::{ApiFault, MicroVm, MicroVmAction, MicroVmEvent};
use driftline_machine::sandbox::SandboxOptions;
use driftline_machine::socket::ListeningSocket;

use super::args::ServeArgs;
use super::end::stop_reason;
use super::failure::Failure;
use super::notify;
use super::setup::enter_sandbox;

/// The largest body of a request and the longest metadata, in bytes. Firecracker's defaults.
const PAYLOAD_LIMIT: usize = 51_200;

/// `driftline serve`.
pub(super) fn serve(args: ServeArgs) -> Result<ExitCode, Failure> {
    notify::connect();
    let socket = ListeningSocket::bind(&args.api_sock)?;
    enter_sandbox(&SandboxOptions {
        seccomp: true,
        landlock: true,
        read: Vec::new(),
        write: Vec::new(),
        sockets: vec![args.api_sock.clone()],
        allowed: Vec::new(),
    })?;
    driftline_machine::log_thread::start()?;
    let (app, events) = App::configuring(PAYLOAD_LIMIT);
    let listeners = Listeners { api: Some(socket), ..Listeners::default() };
    // Dropping the server sends the last answers.
    let _server = Server::start(listeners, app)?;
    tracing::info!("API socket {}", args.api_sock.display());
    notify::ready("the guest has not been started");
    configure(MicroVm::new(args.id, "Driftline", PAYLOAD_LIMIT), events)
}

/// Performs what the requests ask for until the process is to end. Callers that still wait are
/// dropped on return, and the server answers them.
fn configure(mut vm: MicroVm<Caller>, events: Receiver<ApiEvent>) -> Result<ExitCode, Failure> {
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
                    let refused = Err(ApiFault::NotBuilt(task.request()));
                    next.push_back(MicroVmEvent::Finished(refused));
                }
                MicroVmAction::ToGuest(caller, _) => {
                    caller.refuse(ApiFault::NotBuilt("a request to a started guest"));
                }
                MicroVmAction::Exit(code) => return Ok(ExitCode::from(code)),
            }
        }
    }
}

/// Returns the failure of a process that was stopped without a guest.
fn stopped(why: &str) -> Failure {
    notify::stopping();
    Failure::error(format_args!("{} before a guest was started", stop_reason(why)))
}
