//! The next process of a guest, which `driftline upgrade` starts: continues with the command line,
//! the open files and the guest of the process that it replaces.

use std::env;
use std::io;
use std::io::Read;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use driftline_backends::Factory;
use driftline_control::api::{
    App, Listeners, OfferedFiles, Server, TakenOffer, notify_socket, receive_run,
};
use driftline_control::jobs::{FollowingFactory, JobNumbers, Jobs, OfferedRun};
use driftline_machine::config::guest_span;
use driftline_machine::exit::SocketFile;
use driftline_machine::inherited;
use driftline_machine::memory::MemoryOptions;
use driftline_machine::socket::ListeningSocket;
use driftline_migrate::{Listener, Phase, ReceiveControl, ReceiveOptions, Received};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::setsid;
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};

use super::args::{Cli, Command, DeviceArgs, HostArgs, StartCommand, TakeOverArgs};
use super::config_file;
use super::end::{end_in_bounded_time, run_to_end};
use super::failure::Failure;
use super::notify;
use super::output::print_message;
use super::process_line::{continues, process_line};
use super::setup::{NamedFiles, check_state_dir, host_config, log_machine, prepare_to_continue};

/// Upper bound on waiting for the guest's process, which is asked for the guest at once.
const OFFER_LIMIT: Duration = Duration::from_secs(30);
/// Interval between two checks whether an offer can still come.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Why a process of another service is refused: the service manager would end the guest with the
/// service's main process.
const OTHER_SERVICE: &str = "it is not of the same service (NOTIFY_SOCKET differs): for a unit, \
                             use `systemctl reload`, which starts it there";

/// What the guest's process has given to this one.
pub(super) struct TakenProcess {
    listener: UnixListener,
    stream: UnixStream,
    api: Option<OwnedFd>,
    api_file: Option<SocketFile>,
    metrics: Option<OwnedFd>,
    connections: UnixStream,
    numbers: JobNumbers,
    run: Option<OfferedRun>,
    /// The socket over which the checkpoint run comes.
    run_socket: Option<OwnedFd>,
}

/// Takes the place of the guest's process: its working directory, its standard streams and its
/// command line, which is returned.
pub(super) fn begin(args: &TakeOverArgs) -> Result<(Cli, TakenProcess), Failure> {
    let listener = UnixListener::from(inherited::take(args.listener)?);
    // Terminals and their signals are for the process that has started this one.
    setsid()?;
    let stream = accept(&listener)?;
    let (offer, files, mut stream) = TakenOffer::receive(stream)?.into_parts();
    let taken = || -> Result<Cli, Failure> {
        if offer.notify_socket != notify_socket() {
            return Err(Failure::error(OTHER_SERVICE));
        }
        env::set_current_dir(&offer.line.directory)?;
        Cli::parse_guest(&offer.line.arguments).map_err(|e| {
            Failure::usage(format_args!(
                "this program does not understand the command line of the guest's process: {}",
                e.to_string().lines().next().unwrap_or_default()
            ))
        })
    };
    let cli = taken().inspect_err(|e| TakenOffer::refuse(&mut stream, e.message()))?;
    let OfferedFiles {
        standard: [stdin, stdout, stderr],
        api,
        metrics,
        connections,
        run: run_socket,
    } = files;
    dup2_stdin(stdin)?;
    dup2_stdout(stdout)?;
    dup2_stderr(stderr)?;
    continues(offer.line);
    let connections = UnixStream::from(connections);
    let api_file = offer.api_file;
    let (numbers, run) = (offer.numbers, offer.run);
    let taken = TakenProcess {
        listener,
        stream,
        api,
        api_file,
        metrics,
        connections,
        numbers,
        run,
        run_socket,
    };
    Ok((cli, taken))
}

/// Waits for the guest's process. Once the command that has started this process has ended, the
/// socket is gone, and no process can connect any more.
fn accept(listener: &UnixListener) -> Result<UnixStream, Failure> {
    let interval = Timespec::try_from(CHECK_INTERVAL).map_err(io::Error::other)?;
    let path = listener.local_addr()?.as_pathname().map(Path::to_owned);
    let end = Instant::now() + OFFER_LIMIT;
    loop {
        let is_over = Instant::now() > end || path.as_ref().is_some_and(|path| !path.exists());
        let mut polled = [PollFd::new(listener, PollFlags::IN)];
        match poll(&mut polled, Some(&interval))? {
            0 if is_over => return Err(Failure::error("no guest was offered")),
            0 => {}
            _ => return Ok(listener.accept()?.0),
        }
    }
}

/// The host's part of the command line, and the files that it names.
struct GuestLine {
    host: HostArgs,
    named: NamedFiles,
}

impl GuestLine {
    fn of(command: Command) -> Result<Self, Failure> {
        let (host, devices) = match command {
            Command::Start(StartCommand::Run(args)) => {
                let args = config_file::complete(*args)?;
                (args.host, DeviceArgs { disks: args.disks, nets: args.nets, vsock: args.vsock })
            }
            Command::Start(StartCommand::Restore(args)) => (args.host, args.devices),
            Command::Start(StartCommand::ReceiveMigration(args)) => (args.host, args.devices),
            _ => return Err(Failure::usage("this command line is not that of one guest")),
        };
        let named = NamedFiles::of_devices(&devices.disks, devices.vsock.as_ref());
        Ok(Self { host, named })
    }
}

/// Tells the guest's process why this one does not continue.
pub(super) fn refuse(mut taken: TakenProcess, why: &Failure) {
    TakenOffer::refuse(&mut taken.stream, why.message());
}

/// Continues with the guest of the process that this one replaces.
pub(super) fn take_over(command: Command, taken: TakenProcess) -> Result<ExitCode, Failure> {
    let TakenProcess { listener, mut stream, api, api_file, metrics, connections, .. } = taken;
    // Checked now, because the guest is lost if that fails once it is here.
    let prepared = prepare(command).and_then(|prepared| {
        if let Some(api) = &api {
            ListeningSocket::adopt(api.try_clone()?, None)?;
        }
        let metrics = metrics.map(listener_of_metrics).transpose()?;
        Ok((prepared, metrics))
    });
    let prepared = prepared.inspect_err(|e| TakenOffer::refuse(&mut stream, e.message()));
    let (ContinuedProcess { host, mut server, factory, memory }, metrics) = prepared?;
    let control = ReceiveControl::new();
    watch(stream.try_clone()?, &control)?;
    TakenOffer::accept(&mut stream)?;
    let options = ReceiveOptions { once: true, ..ReceiveOptions::new(&host.state_dir) };
    let listener = Listener::inherited(listener.into())?;
    let factory = Arc::new(FollowingFactory::new(factory, taken.run));
    let received = driftline_migrate::receive(listener, factory.clone(), &options, &control);
    let Received { guest: vm, report, responder } = received.map_err(|e| {
        end_in_bounded_time(0, "the guest stays in the process that has it");
        Failure::error(e)
    })?;
    let _logged = guest_span(vm.vm_id(), &vm.machine_config().identity).entered();
    let jobs = Jobs::new(vm.clone(), host.state_dir.clone());
    jobs.keep_responder(responder);
    jobs.number_after(taken.numbers);
    continue_run(&jobs, &factory, taken.run_socket);
    let app = App::new(jobs.clone());
    app.set_process_line(process_line(&host));
    let api = api.map(|api| ListeningSocket::adopt(api, api_file)).transpose()?;
    if let Some(Err(e)) = api.as_ref().map(ListeningSocket::listen_here) {
        tracing::warn!("clients of the API see the previous process behind its socket: {e}");
    }
    server.serve(Listeners { api, metrics, adopted: Some(connections) }, app)?;
    notify::continued(format_args!("guest {} runs", vm.vm_id()));
    TakenOffer::note_serving(&stream);
    log_machine(&*vm, &memory);
    print_message(format_args!(
        "guest {} continues in process {}, taken over in {:.1} ms",
        report.vm_id,
        std::process::id(),
        report.take_over_ms
    ));
    run_to_end(vm, jobs, server, None)
}

/// Continues the checkpoint run of the guest's process, if it had one.
fn continue_run(jobs: &Jobs, factory: &FollowingFactory<Factory>, socket: Option<OwnedFd>) {
    // Taken even without a run, so that the writes are not followed any longer.
    let writes = factory.take_writes();
    let Some((run, socket)) = factory.run().zip(socket) else { return };
    if let Err(e) = jobs.continue_run(run, receive_run(socket, run), writes) {
        tracing::error!("the checkpoint run does not continue: {e}");
    }
}

/// A process in its sandbox that is ready for the guest.
struct ContinuedProcess {
    host: HostArgs,
    server: Server,
    factory: Factory,
    memory: MemoryOptions,
}

fn prepare(command: Command) -> Result<ContinuedProcess, Failure> {
    let GuestLine { host, named } = GuestLine::of(command)?;
    check_state_dir(&host)?;
    prepare_to_continue(&host, named)?;
    let server = Server::begin()?;
    // The guest's devices keep the files that are open.
    let config = host_config(&host, DeviceArgs::default())?;
    let memory = config.memory;
    Ok(ContinuedProcess { host, server, factory: Factory::new(config), memory })
}

/// Ends the wait for the guest when the other process closes `stream`: it has ended, or keeps its
/// guest. Once the guest arrives, the connection over which it comes tells that.
fn watch(mut stream: UnixStream, control: &Arc<ReceiveControl>) -> io::Result<()> {
    let control = control.clone();
    stream.set_read_timeout(None)?;
    let wait = move || {
        // Nothing is sent.
        let _ = stream.read(&mut [0]);
        if control.progress().phase == Phase::Waiting {
            let _ = control.cancel();
        }
    };
    thread::Builder::new().name("upgrade-watch".into()).spawn(wait).map(drop)
}

fn listener_of_metrics(descriptor: OwnedFd) -> io::Result<TcpListener> {
    let listener = TcpListener::from(descriptor);
    listener.set_nonblocking(true)?;
    Ok(listener)
}
