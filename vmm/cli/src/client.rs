//! Implements the short commands that send a single request to a running VMM.

use std::fmt::Display;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use driftline_control::api::{Client, ClientError};
use driftline_control::model::{GuestState, Info, InfoPage, MigrationPage, VmRequest, VmTarget};
use driftline_machine::devices::DeviceStats;
use driftline_machine::vm::VcpuInfo;
use hyper::Method;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::runtime::Builder;

use super::args::{ApiArgs, QueryArgs, StopArgs};
use super::failure::Failure;
use super::output::{self, print, print_json, print_message};
use super::progress::{progress_line, receiving_line};

/// `driftline info`.
pub(super) fn info(args: &QueryArgs) -> Result<ExitCode, Failure> {
    let page: InfoPage = ask(&args.api, Method::GET, "/v1/info", None::<&()>)?;
    match &page {
        _ if args.json => print_json(&page)?,
        InfoPage::Guest(info) => print(info_table(info, &args.api.api_sock))?,
        InfoPage::Arriving(info) => {
            let lines =
                [("state", "receiving".to_owned()), ("migration", receiving_line(&info.migration))];
            print(output::table(&lines))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn info_table(info: &Info, api_sock: &Path) -> String {
    let mut lines = vec![
        ("state", info.state.name().to_owned()),
        ("guest", info.vm_id.to_string()),
        ("name", info.name.as_ref().map_or("none".to_owned(), ToString::to_string)),
        ("began as", info.lineage.map_or("booted".to_owned(), |lineage| lineage.to_string())),
        ("vcpus", info.vcpus.to_string()),
        ("memory", output::bytes(info.mem_bytes)),
        ("tracking", info.tracking.to_string()),
        ("backend", info.backend.to_string()),
        ("uptime", format!("{:.1} s", info.uptime_ms as f64 / 1e3)),
        ("checkpointing", checkpointing(info)),
        ("ring overruns", info.ring_overruns.to_string()),
        ("dirty subscribers", info.dirty.subscribers.to_string()),
        ("pages marked", info.dirty.marked_frames.to_string()),
    ];
    lines.extend(info.migration.iter().map(|p| ("migration", progress_line(p))));
    lines.extend(info.devices.iter().map(device_line));
    lines.push(("API socket", api_sock.display().to_string()));
    lines.push(("VMM", format!("pid {}, version {}", info.pid, info.version)));
    let vcpus: Vec<String> = (0..info.vcpu.len()).map(|n| format!("vcpu {n}")).collect();
    let vcpus = vcpus.iter().zip(&info.vcpu);
    lines.extend(vcpus.map(|(name, v)| (name.as_str(), vcpu_line(v))));
    output::table(&lines)
}

/// Says whether a checkpoint run is active, with the interval and the store of that run or of the
/// last one.
fn checkpointing(info: &Info) -> String {
    let run = info.store.as_ref().map(|store| match info.every_ms {
        Some(every) => format!("every {every} ms into {}", store.display()),
        None => format!("one checkpoint into {}", store.display()),
    });
    match run {
        Some(run) if info.checkpointing => run,
        Some(run) => format!("no; the last run: {run}"),
        None => "no".to_owned(),
    }
}

fn vcpu_line(v: &VcpuInfo) -> String {
    let VcpuInfo { exits, ring_full_exits, throttled_ms, .. } = v;
    format!(
        "{exits} exits, {ring_full_exits} for a full dirty ring, throttled for {throttled_ms} ms"
    )
}

fn device_line(figures: &DeviceStats) -> (&str, String) {
    match figures {
        DeviceStats::Disk {
            id, reads, read_bytes, writes, written_bytes, flushes, errors, ..
        } => {
            let (read, written) = (output::bytes(*read_bytes), output::bytes(*written_bytes));
            let text = format!(
                "{reads} reads ({read}), {writes} writes ({written}), {flushes} flushes, \
                 {errors} errors"
            );
            (id, text)
        }
        DeviceStats::Net {
            id,
            received_frames,
            received_bytes,
            sent_frames,
            sent_bytes,
            lost_frames,
            ..
        } => {
            let (received, sent) = (output::bytes(*received_bytes), output::bytes(*sent_bytes));
            let text = format!(
                "{received_frames} packets received ({received}), {sent_frames} sent ({sent}), \
                 {lost_frames} lost"
            );
            (id, text)
        }
    }
}

/// `driftline pause`.
pub(super) fn pause(args: &QueryArgs) -> Result<ExitCode, Failure> {
    set_state(args, VmTarget::Paused)
}

/// `driftline resume`.
pub(super) fn resume(args: &QueryArgs) -> Result<ExitCode, Failure> {
    set_state(args, VmTarget::Resumed)
}

fn set_state(args: &QueryArgs, state: VmTarget) -> Result<ExitCode, Failure> {
    ask::<()>(&args.api, Method::PATCH, "/vm", Some(&VmRequest { state }))?;
    let (state, message) = match state {
        VmTarget::Paused => (GuestState::Paused, "the guest is paused"),
        VmTarget::Resumed => (GuestState::Running, "the guest runs"),
    };
    match args.json {
        true => print_json(&json!({ "state": state }))?,
        false => print_message(message),
    }
    Ok(ExitCode::SUCCESS)
}

/// `driftline nmi`.
pub(super) fn nmi(args: &QueryArgs) -> Result<ExitCode, Failure> {
    ask::<()>(&args.api, Method::POST, "/v1/nmi", None::<&()>)?;
    match args.json {
        true => print_json(&json!({ "sent": true }))?,
        false => print_message("every vCPU gets a non-maskable interrupt"),
    }
    Ok(ExitCode::SUCCESS)
}

/// `driftline stop`.
pub(super) fn stop(args: &StopArgs) -> Result<ExitCode, Failure> {
    let QueryArgs { api, json } = &args.query;
    let deadline = Instant::now() + api.timeout;
    // Identify the process before the request, while its id cannot have been reused.
    let process = if args.wait { Some(VmmProcess::of(api)?) } else { None };
    ask::<()>(api, Method::POST, "/v1/stop", None::<&()>)?;
    if let Some(process) = process {
        process.await_end(deadline, api)?;
    }
    match (json, args.wait) {
        (true, ended) => {
            print_json(&json!({ "state": GuestState::Stopped, "vmm_ended": ended }))?;
        }
        (false, false) => print_message("stopped; the VMM is ending"),
        (false, true) => print_message("stopped; the VMM has ended"),
    }
    Ok(ExitCode::SUCCESS)
}

/// The process of a VMM.
struct VmmProcess {
    pid: Pid,
    fd: OwnedFd,
}

impl VmmProcess {
    fn of(api: &ApiArgs) -> Result<Self, Failure> {
        let found = block_on(api.client().process())??;
        let pid = found.and_then(Pid::from_raw).ok_or_else(|| {
            Failure::error(format_args!(
                "the process that listens on {} is in another PID namespace, so --wait cannot see \
                 its end: stop without --wait",
                api.api_sock.display()
            ))
        })?;
        let fd = pidfd_open(pid, PidfdFlags::empty())?;
        Ok(Self { pid, fd })
    }

    fn await_end(&self, deadline: Instant, api: &ApiArgs) -> Result<(), Failure> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = Timespec {
                tv_sec: left.as_secs().try_into()?,
                tv_nsec: left.subsec_nanos().into(),
            };
            match poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], Some(&left)) {
                Ok(0) => {
                    return Err(Failure::error(format_args!(
                        "the VMM on {} (process {}) has not ended within {:?}: its storage may be \
                         stuck; --timeout waits longer",
                        api.api_sock.display(),
                        self.pid,
                        api.timeout
                    )));
                }
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
}

/// Where a VMM's guest is, after an operation on it failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum GuestPresence {
    /// The guest is here, in this state.
    Here(GuestState),
    /// The guest has been handed over to a host that may run it; `to` names the host if known.
    InDoubt { to: Option<String> },
    /// The guest has ended, or no process listens.
    Ended,
    /// The VMM has not said: it does not answer, or the guest has not arrived yet.
    Unknown,
}

impl GuestPresence {
    /// Asks the VMM.
    pub(super) async fn ask(client: &Client) -> Self {
        let state = match client.get("/v1/info").await {
            Ok(InfoPage::Guest(info)) => info.state,
            Ok(InfoPage::Arriving(_)) => return Self::Unknown,
            Err(ClientError::Connect { .. } | ClientError::Broken { .. })
                if has_ended(client).await =>
            {
                return Self::Ended;
            }
            Err(_) => return Self::Unknown,
        };
        let to = match state {
            GuestState::InDoubt => client.get::<MigrationPage>("/v1/migration").await.ok(),
            _ => None,
        };
        Self::of(state, to.map(|page| page.to))
    }

    fn of(state: GuestState, to: Option<String>) -> Self {
        match state {
            GuestState::Running | GuestState::Paused | GuestState::Migrating => Self::Here(state),
            GuestState::InDoubt => Self::InDoubt { to },
            GuestState::Stopped => Self::Ended,
        }
    }

    /// Returns the failure `why`, with exit code 4 only if the guest is here.
    pub(super) fn failure(&self, why: impl Display) -> Failure {
        match self {
            Self::Here(_) => Failure::still_running(why),
            Self::InDoubt { to } => Failure::error(format_args!(
                "{why}; the guest has been handed over to {} and may run there: resolve it with \
                 `driftline resolve --run` or `--discard`",
                to.as_deref().unwrap_or("a host that does not answer")
            )),
            Self::Ended | Self::Unknown => Failure::error(why),
        }
    }
}

/// Time limit within which a process that is ending closes its listening socket after it has closed
/// a connection. 2 s, chosen: a process may free a large guest's memory in between. The message
/// that no VMM answers is delayed by at most this.
const ENDING_LIMIT: Duration = Duration::from_secs(2);
/// Interval of the checks. 20 ms, chosen: a user does not notice it, and a hundred connections to a
/// local socket cost nothing.
const ENDING_POLL: Duration = Duration::from_millis(20);

/// Returns whether nothing listens on the socket, now or within [`ENDING_LIMIT`]. A VMM whose
/// connection backlog is full counts as listening.
pub(super) async fn has_ended(client: &Client) -> bool {
    let since = Instant::now();
    loop {
        if let Err(ClientError::Connect { cause, .. }) = client.process().await
            && matches!(cause.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound)
        {
            return true;
        }
        if since.elapsed() >= ENDING_LIMIT {
            return false;
        }
        tokio::time::sleep(ENDING_POLL).await;
    }
}

/// Returns the failure of a request that starts a job. Only a refusal proves that the job did not
/// start; without an answer it may have started.
pub(super) async fn not_begun(client: &Client, e: ClientError) -> Failure {
    match e {
        ClientError::Fault(why) => GuestPresence::ask(client).await.failure(why),
        e => unanswered(e),
    }
}

/// Returns the failure for a missing answer to the request that starts a job.
fn unanswered(e: ClientError) -> Failure {
    let connected = !matches!(e, ClientError::Connect { .. });
    let failure = Failure::from(e);
    match connected {
        true => failure.followed_by("; the job may have started: see `driftline info`"),
        false => failure,
    }
}

/// Sends one request and returns its answer.
pub(super) fn ask<T: DeserializeOwned>(
    args: &ApiArgs,
    method: Method,
    path: &str,
    body: Option<&impl Serialize>,
) -> Result<T, Failure> {
    block_on(args.client().call(method, path, body))?.map_err(Failure::from)
}

/// Runs a client's future to completion.
pub(super) fn block_on<T>(future: impl Future<Output = T>) -> Result<T, Failure> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(future))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_4_means_the_guest_is_here() {
        for state in [GuestState::Running, GuestState::Paused, GuestState::Migrating] {
            let failure = GuestPresence::of(state, None).failure("no");
            assert!(failure.is_still_running(), "{state:?}");
            assert_eq!(failure.message(), "no");
        }
        let failure = GuestPresence::of(GuestState::Stopped, None).failure("no");
        assert!(!failure.is_still_running() && failure.message() == "no");
    }

    #[test]
    fn silent_vmm_is_no_end_of_the_guest() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api.sock");
        let client = Client::new(&path).with_timeout(Duration::from_millis(50));
        assert_eq!(block_on(GuestPresence::ask(&client)).unwrap(), GuestPresence::Ended);
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert_eq!(block_on(GuestPresence::ask(&client)).unwrap(), GuestPresence::Unknown);
        assert!(!GuestPresence::Unknown.failure("no").is_still_running());
    }

    #[test]
    fn guest_in_doubt_names_its_peer_and_resolve() {
        for (to, named) in
            [(Some("tcp:there:1"), "tcp:there:1"), (None, "a host that does not answer")]
        {
            let presence = GuestPresence::of(GuestState::InDoubt, to.map(str::to_owned));
            let failure = presence.failure("a migration is under way");
            assert!(!failure.is_still_running());
            let text = failure.message();
            assert!(text.starts_with("a migration is under way; "), "{text}");
            assert!(text.contains(&format!("handed over to {named} ")), "{text}");
            assert!(text.contains("`driftline resolve --run`"), "{text}");
        }
    }

    #[test]
    fn request_without_an_answer_may_have_begun() {
        let socket = std::path::PathBuf::from("/run/it.sock");
        let cause = "reset".into();
        let failure = unanswered(ClientError::Broken { socket: socket.clone(), cause });
        assert!(!failure.is_still_running());
        assert!(failure.message().contains("the job may have started"));
        let cause = std::io::ErrorKind::NotFound.into();
        let failure = unanswered(ClientError::Connect { socket, cause });
        assert!(!failure.is_still_running());
        assert!(!failure.message().contains("may have started"), "no VMM received the request");
    }
}
