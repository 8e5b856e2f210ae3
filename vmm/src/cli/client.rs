//! Owns the short commands that ask a running driftline one thing.

use std::process::ExitCode;

use hyper::Method;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::runtime::Builder;
use vmm::api::model::{GuestState, Info, VmRequest, VmTarget};
use vmm::api::{Client, ClientError};

use super::args::{ApiArgs, QueryArgs};
use super::failure::Failure;
use super::output::{self, print, print_json};

/// `driftline info`.
pub(super) fn info(args: &QueryArgs) -> Result<ExitCode, Failure> {
    let info: Info = ask(&args.api, Method::GET, "/info", None::<&()>)?;
    if args.json {
        print_json(&info)?;
    } else {
        print(info_table(&info))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn info_table(info: &Info) -> String {
    let exits: Vec<String> = info.vcpu.iter().map(|v| v.exits.to_string()).collect();
    output::table(&[
        ("state", info.state.name().to_owned()),
        ("guest", info.vm_id.to_string()),
        ("vcpus", info.vcpus.to_string()),
        ("memory", output::bytes(info.mem_bytes)),
        ("tracking", info.tracking.to_string()),
        ("backend", info.backend.to_string()),
        ("here since", format!("{:.1} s", info.uptime_ms as f64 / 1e3)),
        ("checkpointing", if info.checkpointing { "yes" } else { "no" }.to_owned()),
        ("exits by vcpu", exits.join(" ")),
        ("ring overruns", info.ring_overruns.to_string()),
        ("dirty subscribers", info.dirty.subscribers.to_string()),
        ("frames marked", info.dirty.marked_frames.to_string()),
    ])
}

/// `driftline pause`.
pub(super) fn pause(args: &ApiArgs) -> Result<ExitCode, Failure> {
    change(args, VmTarget::Paused)
}

/// `driftline resume`.
pub(super) fn resume(args: &ApiArgs) -> Result<ExitCode, Failure> {
    change(args, VmTarget::Resumed)
}

fn change(args: &ApiArgs, state: VmTarget) -> Result<ExitCode, Failure> {
    ask::<()>(args, Method::PATCH, "/vm", Some(&VmRequest { state }))?;
    Ok(ExitCode::SUCCESS)
}

/// `driftline stop`.
pub(super) fn stop(args: &ApiArgs) -> Result<ExitCode, Failure> {
    ask::<()>(args, Method::POST, "/stop", None::<&()>)?;
    Ok(ExitCode::SUCCESS)
}

/// A job that did not begin: 4 if there is a guest, which goes on as it was.
pub(super) async fn not_begun(client: &Client, e: ClientError) -> Failure {
    match client.get::<Info>("/info").await {
        Ok(info) if info.state != GuestState::Stopped => Failure::still_running(e),
        _ => Failure::error(e),
    }
}

/// One question, one answer.
pub(super) fn ask<T: DeserializeOwned>(
    args: &ApiArgs,
    method: Method,
    path: &str,
    body: Option<&impl Serialize>,
) -> Result<T, Failure> {
    block_on(Client::new(&args.api_sock).call(method, path, body))?.map_err(Failure::from)
}

/// Runs a conversation with a driftline to its end.
pub(super) fn block_on<T>(conversation: impl Future<Output = T>) -> Result<T, Failure> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(conversation))
}
