//! Takes the requests of Firecracker's API, before and after there is a guest.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};

use driftline_control::api::{ApiEvent, Caller};
use driftline_control::firecracker::{
    Answer, ApiCounts, ApiFault, MetricsFault, MicroVm, MicroVmAction, MicroVmEvent, Operation,
    Task,
};
use driftline_guest::VmId;
use driftline_machine::start_memory;

use super::metrics::{MetricsFile, MetricsWriter};
use super::opened::ClientFiles;
use super::start::{GuestStarter, StartedGuest};
use crate::failure::Failure;
use crate::firecracker_log;

/// The requests of one process, and the state that they change.
pub(super) struct ApiRequests {
    vm: MicroVm<Caller>,
    /// Requests that precede those of the API; the last one starts the guest.
    first: VecDeque<Operation>,
    events: Receiver<ApiEvent>,
    /// The metrics' file, until there is a guest.
    metrics: Option<MetricsFile>,
    counts: Arc<ApiCounts>,
}

/// How the time before the guest's start ends.
pub(super) enum ConfigurationEnd {
    /// The process is to end with this code.
    Exit(u8),
    /// The process is to end, for this reason.
    Stopped(String),
    /// There is a guest.
    Started(StartedGuest),
    /// A request of the process itself was refused: the start, or one before it.
    Refused { fault: ApiFault, starts: bool },
}

impl ApiRequests {
    pub(super) fn new(
        mut vm: MicroVm<Caller>,
        first: Vec<Operation>,
        events: Receiver<ApiEvent>,
        metrics: Option<MetricsFile>,
        counts: Arc<ApiCounts>,
    ) -> Self {
        if metrics.is_some() {
            vm.set_has_metrics();
        }
        Self { vm, first: first.into(), events, metrics, counts }
    }

    /// Performs what the requests ask for until there is a guest or the process is to end. Callers
    /// that still wait are dropped with this value, and the server answers them.
    ///
    /// # Errors
    ///
    /// The API has ended.
    pub(super) fn configure(&mut self, starter: GuestStarter) -> Result<ConfigurationEnd, Failure> {
        let mut files = ClientFiles::default();
        let mut next = VecDeque::new();
        let mut started = None;
        let is_from_file = !self.first.is_empty();
        loop {
            let event = match next.pop_front() {
                Some(event) => event,
                None => match self.next_request()? {
                    ApiEvent::Call(caller, operation) => MicroVmEvent::Request(caller, operation),
                    ApiEvent::Stop(why) => return Ok(ConfigurationEnd::Stopped(why)),
                },
            };
            for action in self.vm.step(event) {
                match action {
                    MicroVmAction::Reply(caller, Answer::Fault(fault)) if caller.is_own() => {
                        let starts = self.first.is_empty();
                        return Ok(ConfigurationEnd::Refused { fault, starts });
                    }
                    MicroVmAction::Reply(caller, answer) => caller.answer(answer),
                    MicroVmAction::Perform(Task::Start(config)) => {
                        let result = starter.start(&config, &files);
                        let result = result.map(|guest| _ = started.insert(guest));
                        next.push_back(MicroVmEvent::Finished(result));
                    }
                    MicroVmAction::Perform(Task::Load(snapshot, own)) => {
                        let loaded = self.counts.time_load(|| starter.load(&snapshot, &own));
                        next.push_back(match loaded {
                            Ok((guest, shown)) => {
                                started = Some(guest);
                                MicroVmEvent::Loaded(Box::new(shown))
                            }
                            Err(fault) => MicroVmEvent::Finished(Err(fault)),
                        });
                    }
                    MicroVmAction::Perform(task) => {
                        let result = self.perform(&task, &mut files, starter.vm_id());
                        next.push_back(MicroVmEvent::Finished(result));
                    }
                    // A request that waited for the start.
                    MicroVmAction::ToGuest(caller, operation) => match &started {
                        Some(guest) => caller.answer(self.ask_guest(&operation, guest)),
                        None => caller.refuse(ApiFault::BeforeStart),
                    },
                    MicroVmAction::Exit(code) => return Ok(ConfigurationEnd::Exit(code)),
                }
            }
            // The start has been answered.
            if next.is_empty()
                && let Some(guest) = started.take()
            {
                if is_from_file {
                    tracing::info!(
                        "Successfully started microvm that was configured from one single json"
                    );
                }
                return Ok(ConfigurationEnd::Started(guest));
            }
        }
    }

    /// Returns the next request: those of the process itself precede those of the API.
    fn next_request(&mut self) -> Result<ApiEvent, Failure> {
        match self.first.pop_front() {
            Some(operation) => Ok(ApiEvent::Call(Caller::own(), operation)),
            None => Ok(self.events.recv()?),
        }
    }

    /// Lets the guest answer until the API ends, and writes the metrics of the instance `id`.
    pub(super) fn ask(mut self, id: &str, guest: &StartedGuest) {
        let _logged = guest.jobs.span().clone().entered();
        start_memory::unmap_program();
        let file = self.metrics.take();
        let mut metrics = file.map(|file| {
            let metadata = self.vm.metadata().clone();
            MetricsWriter::start(file, id, self.counts.clone(), metadata, guest.vm.clone())
        });
        loop {
            let event = match self.next_event(metrics.as_mut()) {
                None => break,
                Some(ApiEvent::Call(caller, operation)) => MicroVmEvent::Request(caller, operation),
                // It was asked for while the guest started.
                Some(ApiEvent::Stop(why)) => {
                    if let Err(e) = guest.jobs.stop(&why) {
                        tracing::error!("{why}, but the guest does not end: {e}");
                    }
                    continue;
                }
            };
            let mut next = VecDeque::from([event]);
            while let Some(event) = next.pop_front() {
                for action in self.vm.step(event) {
                    match action {
                        MicroVmAction::Reply(caller, answer) => caller.answer(answer),
                        MicroVmAction::ToGuest(caller, operation) => {
                            caller.answer(self.ask_guest(&operation, guest));
                        }
                        MicroVmAction::Perform(task) => {
                            let result = perform_started(&task, metrics.as_mut());
                            next.push_back(MicroVmEvent::Finished(result));
                        }
                        // Only a failed load ends the process.
                        MicroVmAction::Exit(_) => {}
                    }
                }
            }
        }
        tracing::info!("Vmm is stopping.");
    }

    /// Waits for an event, and writes metrics meanwhile. Returns `None` once the API has ended.
    fn next_event(&self, metrics: Option<&mut MetricsWriter>) -> Option<ApiEvent> {
        let Some(metrics) = metrics else { return self.events.recv().ok() };
        loop {
            metrics.write_if_due();
            match self.events.recv_timeout(metrics.due_in()) {
                Ok(event) => return Some(event),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return None,
            }
        }
    }

    fn ask_guest(&self, operation: &Operation, guest: &StartedGuest) -> Answer {
        self.counts.time_guest(operation, || self.vm.ask_guest(operation, &guest.jobs))
    }

    /// Performs a task other than the start. `vm_id` is that of the guest to be started.
    fn perform(
        &mut self,
        task: &Task,
        files: &mut ClientFiles,
        vm_id: VmId,
    ) -> Result<(), ApiFault> {
        match task {
            Task::OpenBootSource(source) => files.open_boot_source(source),
            Task::OpenDrive(drive) => files.open_drive(drive),
            Task::OpenTap(net) => files.networks.open_tap(net, vm_id),
            Task::BindVsock(vsock) => files.networks.bind_vsock(vsock),
            Task::OpenMetrics(config) => {
                let file = MetricsFile::open(config)?;
                file.start_thread().map_err(MetricsFault::File)?;
                self.metrics = Some(file);
                Ok(())
            }
            Task::SetLogger(logger) => firecracker_log::configure(logger).map_err(ApiFault::Logger),
            other => Err(ApiFault::NotBuilt(other.request())),
        }
    }
}

/// Performs a task of a started guest.
fn perform_started(task: &Task, metrics: Option<&mut MetricsWriter>) -> Result<(), ApiFault> {
    match (task, metrics) {
        (Task::FlushMetrics, Some(metrics)) => metrics.flush(),
        (other, _) => Err(ApiFault::NotBuilt(other.request())),
    }
}
