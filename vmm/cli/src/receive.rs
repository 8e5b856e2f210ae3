//! `driftline receive-migration`: runs a guest that another process sends.

use std::process::ExitCode;
use std::sync::{Arc, OnceLock};

use driftline_backends::Factory;
use driftline_control::api::{App, Arriving, Server};
use driftline_control::jobs::Jobs;
use driftline_machine::config::guest_span;
use driftline_migrate::{
    Address, Cause, Phase, ReceiveControl, ReceiveError, ReceiveOptions, ReceiveReport, ReceiveTls,
    Received,
};

use super::args::ReceiveArgs;
use super::end::{end_in_bounded_time, run_to_end, stop_reason};
use super::failure::Failure;
use super::notify;
use super::output::{bytes, count, print_json, print_message};
use super::process_line::process_line;
use super::progress::{ReceiveProgress, receiving_line};
use super::receiver_socket::ReceiverSocket;
use super::setup::{NamedFiles, check_state_dir, guest_failure, host_config, log_machine, prepare};

/// Outcome for a guest that was refused. Until COMMIT its source keeps the guest, whatever this
/// process does.
const NOT_RECEIVED: &str = "no guest was received, and none runs here";

/// `driftline receive-migration`.
pub(super) fn receive(args: ReceiveArgs) -> Result<ExitCode, Failure> {
    check_state_dir(&args.host)?;
    let mut named = NamedFiles::of_devices(&args.devices.disks, args.devices.vsock.as_ref());
    if let Address::Unix(path) = &args.address {
        named.sockets.push(path.clone());
    }
    named.read.extend(args.tls_dir.clone());
    let inherited = ReceiverSocket::inherited(&args.address)?;
    let listeners = prepare(&args.host, named)?;
    let ReceiverSocket { listener, _socket } = match inherited {
        Some(socket) => socket,
        None => ReceiverSocket::open(&args.address)?,
    };
    let tls_dir = args.tls_dir.map(std::path::absolute).transpose()?;
    let options = ReceiveOptions {
        answer_timeout: args.answer_timeout,
        once: args.once,
        insecure: args.insecure,
        tls: tls_dir.map(|dir| ReceiveTls { dir, allow: args.allow_peer }),
        ..ReceiveOptions::new(&args.host.state_dir)
    };
    options.check_protection(&listener).map_err(Failure::error)?;
    let address = listener.address().to_owned();
    let control = ReceiveControl::new();
    let stopped = Arc::new(OnceLock::new());
    let app = waiting_app(&control, &stopped);
    app.set_process_line(process_line(&args.host));
    let server = Server::start(listeners, app.clone())?;
    // From here on the server handles signals, which a reader of this message may send.
    print_message(format_args!("waiting for a migration on {address}"));
    notify::ready(format_args!("waiting for a migration on {address}"));
    let host = host_config(&args.host, args.devices)?;
    let memory = host.memory;
    let factory = Factory::new(host);
    let progress_view = ReceiveProgress::show(&control);
    let received = driftline_migrate::receive(listener, Arc::new(factory), &options, &control);
    drop(progress_view);
    let Received { guest: vm, report, responder } = received.map_err(|e| {
        end_in_bounded_time(0, NOT_RECEIVED);
        receive_failure(e, stopped.get().map(String::as_str))
    })?;
    let _logged = guest_span(vm.vm_id(), &vm.machine_config().identity).entered();
    log_machine(&*vm, &memory);
    let jobs = Jobs::new(vm.clone(), args.host.state_dir);
    jobs.keep_responder(responder);
    app.provide(jobs.clone());
    drop(app);
    notify::ready(format_args!("guest {} has arrived", vm.vm_id()));
    print_arrival(&report);
    if args.json {
        print_json(&report)?;
    }
    run_to_end(vm, jobs, server, None)
}

/// Creates the API of a process whose guest has not arrived yet. Sets `stopped` to the reason why
/// the process is stopped before that.
fn waiting_app(control: &Arc<ReceiveControl>, stopped: &Arc<OnceLock<String>>) -> Arc<App> {
    let watched = control.clone();
    let arriving = move || {
        let progress = watched.progress();
        Arriving { reason: receiving_line(&progress), progress }
    };
    // Until COMMIT the guest can be refused. If the source has received PREPARED, the refusal is
    // made durable first. From COMMIT on this host owns the guest (I7).
    let (give_up, stopped) = (control.clone(), stopped.clone());
    App::waiting(arriving, move |why| {
        let _ = stopped.set(stop_reason(why));
        if give_up.cancel().is_err() {
            return false;
        }
        end_in_bounded_time(0, NOT_RECEIVED);
        true
    })
}

fn print_arrival(report: &ReceiveReport) {
    if report.disk_bytes > 0 {
        print_message(format_args!("{} of its disks were copied", bytes(report.disk_bytes)));
    }
    print_message(format_args!(
        "guest {} has arrived and {}: {} in {:.1} ms, taken over in {:.1} ms",
        report.vm_id,
        if report.running { "runs" } else { "is paused, as it was" },
        count(report.passes.into(), "pass"),
        report.total_time_ms,
        report.take_over_ms
    ));
}

/// Returns the failure for a guest that was not received. `stopped` says how the process was
/// stopped, if it was.
fn receive_failure(e: ReceiveError, stopped: Option<&str>) -> Failure {
    match e.cause {
        Cause::Cancelled if matches!(e.phase, Phase::Waiting) => {
            let stopped = stopped.unwrap_or("stopped");
            Failure::error(format_args!("{stopped} before a guest arrived"))
        }
        Cause::Cancelled => Failure::error(format_args!(
            "the receiver was stopped before its guest had arrived ({}): the guest stays at its \
             source",
            e.phase
        )),
        Cause::Guest(ref cause) => guest_failure(cause, &e),
        _ => Failure::error(e),
    }
}
