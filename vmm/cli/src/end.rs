//! Owns the end of a process that has a guest: reports how the guest ended, and the result of
//! `--shadow`.

use std::process::ExitCode;
use std::sync::{Arc, Once};
use std::thread::JoinHandle;
use std::time::Duration;

use driftline_control::api::Server;
use driftline_control::jobs::{Jobs, ShadowReport};
use driftline_machine::vm::{EndReason, SharedVm};

use super::failure::Failure;
use super::notify;
use super::output::{count, print_message};
use super::report;

/// Waits for the guest's end, lets the API send its last answers, and reports why the guest ended.
/// `requests` is a thread that has a reference to the guest and ends with the server.
pub(super) fn run_to_end(
    vm: SharedVm,
    jobs: Arc<Jobs>,
    server: Server,
    requests: Option<JoinHandle<()>>,
) -> Result<ExitCode, Failure> {
    let end = vm.wait_end(None);
    // After an upgrade, the service and its socket belong to the next process.
    match jobs.is_upgraded() {
        true => server.leave_socket(),
        false => notify::stopping(),
    }
    // The last check reads all guest memory and waits for no device.
    let shadow = jobs.end_shadow();
    let outcome = "what the guest last wrote to its disks may not be durable";
    end_in_bounded_time(vm.machine_config().mem_bytes, outcome);
    jobs.await_last_readers();
    drop(server);
    if requests.is_some_and(|thread| thread.join().is_err()) {
        tracing::error!("the thread of the API's requests had panicked");
    }
    // Dropping them writes the guest's last serial output, which must precede the last message
    // here.
    let is_upgraded = jobs.is_upgraded();
    drop((jobs, vm));
    let end = match is_upgraded {
        // The guest continues in the next process, which reports that.
        true => Ok(()),
        false => report_end(end),
    };
    // The shadow of a crashed guest counts as well: a missed frame may be the cause.
    let shadow_result =
        shadow.map_or(Ok(()), |shadow| report_shadow(shadow.map_err(Failure::error)?));
    combine(end, shadow_result)?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the reason why a process without a guest was stopped, as the beginning of a sentence.
pub(super) fn stop_reason(why: &str) -> String {
    // Only a guest is interrupted.
    why.replacen("interrupted", "stopped", 1)
}

/// Time limit for the process to end once its guest has. Everything else that the process waits for
/// then has its own limit, but closing a file on dead storage has none.
const END_LIMIT: Duration = Duration::from_secs(20);
/// Minimum amount of guest memory that the kernel unmaps per second, in bytes.
const UNMAPPED_PER_S: u64 = 1 << 30;

/// Ends the process after [`END_LIMIT`] plus the time to unmap `mem_bytes`, whatever it waits for.
/// `outcome` says what then becomes of the guest. Only the first call has an effect.
pub(super) fn end_in_bounded_time(mem_bytes: u64, outcome: &'static str) {
    static BEGUN: Once = Once::new();
    let mut is_first = false;
    BEGUN.call_once(|| is_first = true);
    if !is_first {
        return;
    }
    let limit = END_LIMIT + Duration::from_secs(mem_bytes / UNMAPPED_PER_S);
    let end = move || {
        std::thread::sleep(limit);
        print_message(format_args!(
            "storage or a reader of the serial port has been stuck for {} s: ending without it; \
             {outcome}",
            limit.as_secs()
        ));
        driftline_machine::exit::now(1);
    };
    let thread = std::thread::Builder::new().name("end-limit".into()).spawn(end);
    if let Err(e) = thread {
        tracing::warn!("cannot start the thread that bounds the end of this process: {e}");
    }
}

/// Reports how the guest ended, or returns that as a failure.
fn report_end(end: Option<EndReason>) -> Result<(), Failure> {
    match end {
        Some(end @ (EndReason::Panicked | EndReason::Crashed(_))) => {
            Err(Failure::error(describe_end(&end)))
        }
        Some(end) => {
            print_message(describe_end(&end));
            Ok(())
        }
        None => Err(Failure::error("the guest ended for an unknown reason")),
    }
}

/// Time limit for a guest whose memory is lost to end in an orderly way. A thread that waits for a
/// lost page does not receive the request to end.
const LOST_LIMIT: Duration = Duration::from_millis(300);

/// Ends the process, which cannot continue without a page of its guest's memory, even if its
/// orderly end does not complete.
pub(super) fn end_without_memory(why: &str) {
    let failure = Failure::error(format_args!("the guest crashed: {why}"));
    let end = move || {
        std::thread::sleep(LOST_LIMIT);
        report::report(failure);
        driftline_machine::exit::now(1)
    };
    if std::thread::Builder::new().name("lost-memory".into()).spawn(end).is_err() {
        print_message(format_args!("{why}, and no thread can be started to end this process"));
    }
}

/// Describes how a guest ended.
pub(super) fn describe_end(end: &EndReason) -> String {
    match end {
        EndReason::PowerOff => "the guest powered itself off".to_owned(),
        EndReason::Reset => "the guest asked for a reset".to_owned(),
        EndReason::Stopped(why) => format!("the guest was stopped: {why}"),
        EndReason::Panicked => "the guest's kernel has panicked; its console says why".to_owned(),
        EndReason::Crashed(why) => format!("the guest crashed: {why}"),
    }
}

/// Combines two results: the failure of the guest's end also contains that of the shadow.
fn combine(end: Result<(), Failure>, shadow_result: Result<(), Failure>) -> Result<(), Failure> {
    match (end, shadow_result) {
        (Err(end), Err(shadow_result)) => {
            Err(shadow_result.prefixed(format_args!("{}; ", end.message())))
        }
        (end, shadow_result) => end.and(shadow_result),
    }
}

/// Reports the result of the shadow. A missed frame is an error, and so is a shadow that never
/// checked.
fn report_shadow(report: ShadowReport) -> Result<(), Failure> {
    let ShadowReport { checks, failed, reported_frames, unchanged_frames, missed_frames, .. } =
        report;
    let extent = format!(
        "{} of {}, {unchanged_frames} of them unchanged",
        count(checks, "check"),
        count(reported_frames, "reported page")
    );
    if missed_frames > 0 {
        let names = report.names();
        return Err(Failure::error(format_args!(
            "{} changed unreported, the first: {names} ({extent})",
            count(missed_frames, "page")
        )));
    }
    if failed > 0 || checks == 0 {
        return Err(Failure::error(format_args!(
            "it is unknown whether a page was missed: {} failed ({extent})",
            count(failed, "check")
        )));
    }
    print_message(format_args!("no page was missed: {extent}"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crash_does_not_hide_missed_pages() {
        let crash = || report_end(Some(EndReason::Crashed("a triple fault".to_owned())));
        let lost = || Err(Failure::error("3 frames were not reported"));
        let message = |result: Result<(), Failure>| result.err().map(|e| e.message().to_owned());
        let crashed = "the guest crashed: a triple fault";
        let all = format!("{crashed}; 3 frames were not reported");
        assert_eq!(message(combine(crash(), lost())), Some(all));
        assert_eq!(message(combine(crash(), Ok(()))).as_deref(), Some(crashed));
        assert_eq!(message(combine(Ok(()), lost())).as_deref(), Some("3 frames were not reported"));
        assert_eq!(message(combine(Ok(()), Ok(()))), None);
    }
}
