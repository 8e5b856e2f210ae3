//! `driftline demo`: one guest in three processes. The guest is launched and checkpointed, and its
//! VMM is killed. It is restored in a second process, live-migrated to a third, and stopped there.
//! It verifies its own memory throughout.

mod child;
mod error;
mod figures;

use std::fmt::Display;
use std::num::NonZeroU64;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use driftline_control::model::{
    CheckpointPage, CheckpointRequest, EpochOutcome, JobStarted, MigrationPage, MigrationRequest,
    MigrationState,
};
use driftline_images::PayloadReport;
use driftline_machine::config::{BackendKind, DEFAULT_RING_ENTRIES};
use driftline_machine::kvm::Capabilities;
use driftline_machine::tracking::TrackingMode;
use hyper::Method;

use crate::args::DemoArgs;
use crate::failure::Failure;
use crate::output::{print, print_json, print_message};
use crate::status_line::StatusLine;
use child::DemoVmm;
use error::StepError;
use figures::DemoFigures;

const VCPUS: usize = 2;
const GUEST: &str = "payload,ws=64M,rate=160M";
const CHECKPOINTS: u64 = 10;
const CHECKPOINT_EVERY_MS: NonZeroU64 = NonZeroU64::new(100).unwrap();
/// How long the guest continues to run after its migration.
const RUN_AFTER_MIGRATION: Duration = Duration::from_secs(2);

/// `driftline demo`.
pub(crate) fn demo(args: &DemoArgs) -> Result<ExitCode, Failure> {
    let setup = choose(args)?;
    let dir = tempfile::Builder::new().prefix("driftline-demo-").tempdir()?;
    let mut demo = Demo {
        dir: dir.path(),
        setup,
        line: StatusLine::spinner(),
        begun: Instant::now(),
        figures: DemoFigures { backend: setup.backend.to_string(), ..DemoFigures::default() },
        step: "",
    };
    let outcome = demo.run();
    let Demo { figures, step, line, .. } = demo;
    // The line must not be redrawn between the results.
    drop(line);
    match outcome {
        Ok(()) if args.json => print_json(&figures)?,
        Ok(()) => print(figures.table())?,
        Err(why) => {
            let dir = dir.keep();
            return Err(Failure::error(format_args!(
                "the demo failed at the step \"{step}\": {why}; everything is kept in {}",
                dir.display()
            )));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The backend and the tracking mode of the demo.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct DemoSetup {
    backend: BackendKind,
    tracking: TrackingMode,
}

/// Chooses what the demo runs on, and prints a line that says so.
fn choose(args: &DemoArgs) -> Result<DemoSetup, Failure> {
    let kvm = driftline_machine::doctor::usable_kvm();
    let (setup, line) = setup(args.backend, &kvm).map_err(Failure::host_lacks)?;
    if args.json {
        print_message(line);
    } else {
        print(format_args!("driftline demo: {line}"))?;
    }
    Ok(setup)
}

/// Returns what a host with `kvm` can run, and a line that says so.
fn setup<E: Display>(
    requested: Option<BackendKind>,
    kvm: &Result<Capabilities, E>,
) -> Result<(DemoSetup, String), &E> {
    let threads = DemoSetup { backend: BackendKind::Threads, tracking: TrackingMode::DirtyRing };
    let capabilities = match (requested, kvm) {
        (Some(BackendKind::Threads), _) => {
            return Ok((
                threads,
                "the guest's workload runs on host threads, as requested".to_owned(),
            ));
        }
        (None, Err(why)) => {
            let line = format!("{why}; the guest's workload runs on host threads instead");
            return Ok((threads, line));
        }
        (Some(BackendKind::Kvm), Err(why)) => return Err(why),
        (_, Ok(capabilities)) => capabilities,
    };
    let tracking = capabilities.best_tracking(DEFAULT_RING_ENTRIES);
    let mut line = format!("a KVM guest of {VCPUS} vCPUs and 1 GiB that checks its memory");
    if tracking != TrackingMode::DirtyRing {
        line += &format!(
            "; this host's KVM has no dirty rings of {DEFAULT_RING_ENTRIES} entries, so its writes \
             are tracked by {tracking}"
        );
    }
    Ok((DemoSetup { backend: BackendKind::Kvm, tracking }, line))
}

struct Demo<'d> {
    dir: &'d Path,
    setup: DemoSetup,
    line: StatusLine,
    begun: Instant,
    figures: DemoFigures,
    /// The step in progress.
    step: &'static str,
}

impl Demo<'_> {
    /// Runs the steps, one per line.
    fn run(&mut self) -> Result<(), StepError> {
        self.begin("launch");
        let (mut first, before) = self.launch()?;
        self.begin("checkpoint");
        self.take_checkpoints(&first)?;
        self.begin("kill the VMM");
        first.kill()?;
        self.begin("restore");
        let (mut second, before) = self.restore(&before)?;
        self.begin("live-migrate");
        let mut third = self.migrate(&mut second)?;
        self.begin("keep running");
        keep_running(&mut third, &before)?;
        self.begin("stop");
        third.call::<()>(Method::POST, "/v1/stop", None::<&()>)?;
        third.await_exit()?;
        self.figures.add_reports(&third.reports()?);
        Ok(())
    }

    fn begin(&mut self, step: &'static str) {
        self.step = step;
        match self.line.is_shown() {
            true => self.line.show(step.to_owned()),
            false => {
                print_message(format_args!("{:5.1} s  {step}", self.begun.elapsed().as_secs_f64()))
            }
        }
    }

    fn detail(&self, detail: impl Display) {
        self.line.show(format!("{} {detail}", self.step));
    }

    /// Starts the guest in the first process and waits until every vCPU has reported.
    fn launch(&mut self) -> Result<(DemoVmm, Vec<PayloadReport>), StepError> {
        let begun = Instant::now();
        let DemoSetup { backend, tracking } = self.setup;
        let vcpus = VCPUS.to_string();
        let guest = ["run", "--guest", GUEST, "--mem", "1G", "--vcpus", &vcpus];
        let host = ["--backend", backend.name(), "--tracking", tracking.name()];
        let args = [&guest[..], &host[..]].concat();
        let mut vmm = DemoVmm::start(self.dir, "first", &args)?;
        vmm.await_running()?;
        self.figures.launch_ms = begun.elapsed().as_secs_f64() * 1e3;
        let reports = vmm.await_progress(VCPUS, &[])?;
        Ok((vmm, reports))
    }

    fn take_checkpoints(&mut self, vmm: &DemoVmm) -> Result<(), StepError> {
        let request = CheckpointRequest {
            attached: false,
            new_store: false,
            store: self.dir.join("store"),
            every_ms: Some(CHECKPOINT_EVERY_MS),
            count: Some(CHECKPOINTS),
            max_pause_ms: None,
            keep: None,
            direct_io: false,
            disks: None,
        };
        let JobStarted { job } = vmm.call(Method::POST, "/v1/checkpoint", Some(&request))?;
        let (mut lines, mut since) = (Vec::new(), 0);
        let mut progress = Instant::now();
        loop {
            let page: CheckpointPage =
                vmm.get(&format!("/v1/checkpoint?job={job}&since={since}&wait_ms=5000"))?;
            if !page.epochs.is_empty() {
                progress = Instant::now();
            }
            for outcome in page.epochs {
                match outcome {
                    EpochOutcome::Stored(line) => lines.push(line),
                    EpochOutcome::Failed(why) => return Err(StepError::NotStored(why)),
                }
            }
            since = page.next;
            self.detail(format_args!("{} of {CHECKPOINTS} checkpoints", lines.len()));
            if !page.running {
                break;
            }
            if progress.elapsed() > child::TIMEOUT {
                let what = "the next checkpoint to be durable";
                return Err(StepError::TimedOut { what, limit: child::TIMEOUT });
            }
        }
        self.figures.add_checkpoints(&lines);
        vmm.reports()?;
        match lines.len() as u64 {
            CHECKPOINTS => Ok(()),
            taken => Err(StepError::MissingCheckpoints { taken, wanted: CHECKPOINTS }),
        }
    }

    /// Restores the guest in a second process. Each vCPU must report more pages than in `before`,
    /// which the first process reported before its checkpoints.
    fn restore(
        &mut self,
        before: &[PayloadReport],
    ) -> Result<(DemoVmm, Vec<PayloadReport>), StepError> {
        let begun = Instant::now();
        let store = self.dir.join("store");
        let store = store.display().to_string();
        let args = ["restore", "--same-id", "--store", &store];
        let mut vmm = DemoVmm::start(self.dir, "second", &args)?;
        vmm.await_running()?;
        self.figures.restore_ms = begun.elapsed().as_secs_f64() * 1e3;
        let reports = vmm.await_progress(VCPUS, before)?;
        Ok((vmm, reports))
    }

    /// Migrates the guest from the second process to a third. Returns the third, in which the guest
    /// runs.
    fn migrate(&mut self, source: &mut DemoVmm) -> Result<DemoVmm, StepError> {
        let args = ["receive-migration", "tcp:127.0.0.1:0"];
        let mut destination = DemoVmm::start(self.dir, "third", &args)?;
        let to = destination.wait("it to listen", |vmm| Ok(listening_on(&vmm.stderr())))?;
        let body = serde_json::json!({ "to": to });
        let request: MigrationRequest = serde_json::from_value(body)?;
        let JobStarted { job } = source.call(Method::POST, "/v1/migration", Some(&request))?;
        let end = Instant::now() + child::TIMEOUT;
        let report = loop {
            let page: MigrationPage =
                source.get(&format!("/v1/migration?job={job}&wait_ms=100"))?;
            match (page.state, page.report, page.failure) {
                (MigrationState::Completed, Some(report), _) => break report,
                (_, _, Some(failure)) => return Err(StepError::NotMigrated(failure.message)),
                (state, ..) if Instant::now() > end => {
                    return Err(StepError::Migrating(state));
                }
                _ => self.detail(format_args!("pass {}", page.progress.pass)),
            }
        };
        self.figures.add_migration(&report);
        source.await_exit()?;
        source.reports()?;
        destination.await_running()?;
        Ok(destination)
    }
}

/// Lets the guest run after its migration. Each vCPU must write more pages than in `before`.
fn keep_running(vmm: &mut DemoVmm, before: &[PayloadReport]) -> Result<(), StepError> {
    let begun = Instant::now();
    vmm.await_progress(VCPUS, before)?;
    std::thread::sleep(RUN_AFTER_MIGRATION.saturating_sub(begun.elapsed()));
    Ok(())
}

/// Returns the address in the message of a waiting receiver.
fn listening_on(stderr: &str) -> Option<String> {
    let (_, rest) = stderr.split_once("waiting for a migration on tcp:")?;
    let (address, _) = rest.split_once('\n')?;
    Some(address.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kvm(ring_entries: u32) -> Result<Capabilities, &'static str> {
        Ok(driftline_machine::testing::capabilities_with_rings(ring_entries))
    }

    #[test]
    fn first_line_names_what_the_host_lacks() {
        let (chosen, line) = setup(None, &kvm(65_536)).unwrap();
        let rings = DemoSetup { backend: BackendKind::Kvm, tracking: TrackingMode::DirtyRing };
        assert_eq!(chosen, rings);
        assert_eq!(line, "a KVM guest of 2 vCPUs and 1 GiB that checks its memory");
        for requested in [None, Some(BackendKind::Kvm)] {
            let (chosen, line) = setup(requested, &kvm(0)).unwrap();
            assert_eq!(chosen, DemoSetup { tracking: TrackingMode::DirtyBitmap, ..rings });
            assert!(line.ends_with("so its writes are tracked by dirty-bitmap"), "{line}");
        }
        let (chosen, line) = setup(None, &Err("no /dev/kvm")).unwrap();
        assert_eq!(chosen.backend, BackendKind::Threads);
        assert!(
            line.starts_with("no /dev/kvm; the guest's workload runs on host threads"),
            "{line}"
        );
        assert_eq!(setup(Some(BackendKind::Kvm), &Err("no /dev/kvm")), Err(&"no /dev/kvm"));
        assert_eq!(
            setup(Some(BackendKind::Threads), &kvm(0)).unwrap().0.backend,
            BackendKind::Threads
        );
    }
}
