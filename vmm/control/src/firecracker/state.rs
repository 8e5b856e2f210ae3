//! Decides what each request does, before and after the guest starts: events in, actions out. Does
//! no I/O and has no clock.
//!
//! ```text
//! Configuring --Start, Finished(Ok)--> Started
//!      |       --Load, Loaded--------> Started
//!      +-------Load, Finished(Err)---> Ending, or Configuring if the load was not tried
//! ```
//!
//! At most one task (opening a file, starting, loading, writing metrics) is under way. Requests
//! that arrive meanwhile wait in their order. A task's request is answered by the task's `Finished`
//! or `Loaded`.

use std::collections::VecDeque;

use driftline_machine::metadata::MetadataStore;
use serde_json::Value;

use super::answer::Answer;
use super::config::{MicroVmConfig, check_boot_args};
use super::fault::{ApiFault, BalloonFault, LoadFault, MetricsFault, StartFault};
use super::instance::{IMITATED_VERSION, InstanceName};
use super::model::{
    BlockDeviceConfig, BootSourceConfig, LoadSnapshotParams, LoggerConfig, MetricsConfig,
    NetworkInterfaceConfig, VsockDeviceConfig,
};
use super::operation::Operation;

/// Exit code of a process whose snapshot could not be loaded.
const LOAD_FAILED: u8 = 1;

/// What happens to a machine. `C` is the handle with which a request is answered.
#[derive(Debug)]
pub enum MicroVmEvent<C> {
    /// A request was received.
    Request(C, Operation),
    /// The task under way has ended.
    Finished(Result<(), ApiFault>),
    /// The load under way has ended: there is a guest of this configuration.
    Loaded(Box<MicroVmConfig>),
}

/// What the owner of a machine is to do.
#[derive(Debug)]
pub enum MicroVmAction<C> {
    /// Send an answer.
    Reply(C, Answer),
    /// Perform a task, and report its end by [`MicroVmEvent::Finished`].
    Perform(Task),
    /// Let the guest, which has been started, answer.
    ToGuest(C, Operation),
    /// End the process with this exit code, after the answers above.
    Exit(u8),
}

/// Work outside the machine's state.
#[derive(Clone, PartialEq, Debug)]
pub enum Task {
    /// Open the kernel and the initial RAM disk.
    OpenBootSource(BootSourceConfig),
    /// Open a drive's file.
    OpenDrive(BlockDeviceConfig),
    /// Open a tap.
    OpenTap(NetworkInterfaceConfig),
    /// Bind the vsock's socket.
    BindVsock(VsockDeviceConfig),
    /// Change the log.
    SetLogger(LoggerConfig),
    /// Open the metrics' file.
    OpenMetrics(MetricsConfig),
    /// Write the metrics of a started guest.
    FlushMetrics,
    /// Build the guest and run it.
    Start(Box<MicroVmConfig>),
    /// Load the guest from a snapshot, in a process of this configuration. Its end, if there is a
    /// guest, is [`MicroVmEvent::Loaded`].
    Load(Box<LoadSnapshotParams>, Box<MicroVmConfig>),
}

impl Task {
    /// Returns the request that leads to the task.
    pub fn request(&self) -> &'static str {
        match self {
            Self::OpenBootSource(_) => "PUT /boot-source",
            Self::OpenDrive(_) => "PUT /drives",
            Self::OpenTap(_) => "PUT /network-interfaces",
            Self::BindVsock(_) => "PUT /vsock",
            Self::SetLogger(_) => "PUT /logger",
            Self::OpenMetrics(_) => "PUT /metrics",
            Self::FlushMetrics => "FlushMetrics of PUT /actions",
            Self::Start(_) => "InstanceStart of PUT /actions",
            Self::Load(..) => "PUT /snapshot/load",
        }
    }
}

/// Which requests are possible.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum MicroVmStage {
    /// There is no guest yet.
    Configuring,
    /// There is a guest.
    Started,
    /// The process ends.
    Ending,
}

/// A machine as Firecracker's API presents it.
#[derive(Debug)]
pub struct MicroVm<C> {
    name: InstanceName,
    stage: MicroVmStage,
    config: MicroVmConfig,
    /// Whether a request, even one that failed, has configured a guest that boots. No snapshot is
    /// loaded after that.
    is_boot_path: bool,
    /// Whether the metrics have a file.
    has_metrics: bool,
    /// The task under way and the caller that waits for it.
    under_way: Option<(C, Task)>,
    /// Requests that wait for the task under way. The server bounds how many requests are under way
    /// simultaneously.
    waiting: VecDeque<(C, Operation)>,
}

/// The outcome of a request before the start.
enum Outcome {
    Answered(Answer),
    Begun(Task),
}

/// The outcome of a request that changes something and returns nothing.
const DONE: Outcome = Outcome::Answered(Answer::Done);

impl<C> MicroVm<C> {
    /// Creates a machine that is not started. `metadata_limit` is the longest metadata, in bytes.
    pub fn new(id: String, app_name: &'static str, metadata_limit: usize) -> Self {
        Self {
            name: InstanceName { id, app_name },
            stage: MicroVmStage::Configuring,
            config: MicroVmConfig::new(metadata_limit),
            is_boot_path: false,
            has_metrics: false,
            under_way: None,
            waiting: VecDeque::new(),
        }
    }

    /// Returns the id and the program name that `GET /` shows.
    pub fn name(&self) -> &InstanceName {
        &self.name
    }

    /// Returns the configuration, which a started guest keeps.
    pub(super) fn config(&self) -> &MicroVmConfig {
        &self.config
    }

    /// Records that the metrics have a file before there are requests.
    pub fn set_has_metrics(&mut self) {
        self.has_metrics = true;
    }

    /// Sets the metadata before there are requests.
    ///
    /// # Errors
    ///
    /// The metadata is too long.
    pub fn set_metadata(&mut self, value: Value) -> Result<(), ApiFault> {
        Ok(self.config.metadata.put(value)?)
    }

    /// Returns the metadata, which a started guest reads.
    pub fn metadata(&self) -> &MetadataStore {
        &self.config.metadata
    }

    /// Takes an event. Returns the actions that follow, in order.
    pub fn step(&mut self, event: MicroVmEvent<C>) -> Vec<MicroVmAction<C>> {
        let mut actions = Vec::new();
        match event {
            MicroVmEvent::Request(caller, operation) => {
                self.waiting.push_back((caller, operation));
            }
            MicroVmEvent::Finished(result) => {
                if let Some((caller, task)) = self.under_way.take() {
                    self.finish(caller, task, result, &mut actions);
                }
            }
            MicroVmEvent::Loaded(config) => {
                if let Some((caller, task)) = self.under_way.take() {
                    self.config = *config;
                    self.finish(caller, task, Ok(()), &mut actions);
                }
            }
        }
        while self.under_way.is_none()
            && let Some((caller, operation)) = self.waiting.pop_front()
        {
            self.answer(caller, operation, &mut actions);
        }
        actions
    }

    fn answer(&mut self, caller: C, operation: Operation, to: &mut Vec<MicroVmAction<C>>) {
        let outcome = match self.stage {
            MicroVmStage::Configuring => self.before_start(operation),
            MicroVmStage::Started => match after_start(&operation) {
                Ok(()) if operation == Operation::FlushMetrics => Ok(match self.has_metrics {
                    true => Outcome::Begun(Task::FlushMetrics),
                    // There is nothing to write.
                    false => DONE,
                }),
                Ok(()) => return to.push(MicroVmAction::ToGuest(caller, operation)),
                Err(fault) => Err(fault),
            },
            MicroVmStage::Ending => Err(ApiFault::Ending),
        };
        match outcome {
            Ok(Outcome::Answered(answer)) => to.push(MicroVmAction::Reply(caller, answer)),
            Ok(Outcome::Begun(task)) => {
                to.push(MicroVmAction::Perform(task.clone()));
                self.under_way = Some((caller, task));
            }
            Err(fault) => to.push(MicroVmAction::Reply(caller, Answer::Fault(fault))),
        }
    }

    /// Does what a request says while there is no guest.
    fn before_start(&mut self, operation: Operation) -> Result<Outcome, ApiFault> {
        self.is_boot_path |= sets_boot_path(&operation);
        match operation {
            Operation::GetInstance => {
                Ok(Outcome::Answered(Answer::page(&self.name.shown("Not started"))?))
            }
            Operation::GetVersion => Ok(Outcome::Answered(Answer::version(IMITATED_VERSION))),
            Operation::GetMachine => Ok(Outcome::Answered(Answer::page(&self.config.machine)?)),
            Operation::GetConfig => Ok(Outcome::Answered(Answer::page(&self.config.shown())?)),
            Operation::GetMetadata => {
                Ok(Outcome::Answered(Answer::page(&self.config.metadata.shown())?))
            }
            Operation::GetBalloon => {
                let balloon = self.config.balloon.as_ref().ok_or(BalloonFault::None)?;
                Ok(Outcome::Answered(Answer::page(balloon)?))
            }
            Operation::Start => match self.config.boot_source {
                Some(_) => Ok(Outcome::Begun(Task::Start(Box::new(self.config.clone())))),
                None => Err(StartFault::NoKernel.into()),
            },
            Operation::LoadSnapshot(_) if self.is_boot_path => Err(LoadFault::Configured.into()),
            Operation::LoadSnapshot(snapshot) => {
                let config = Box::new(self.config.clone());
                Ok(Outcome::Begun(Task::Load(Box::new(snapshot), config)))
            }
            operation => self.configure(operation),
        }
    }

    /// Changes the configuration, or begins what must precede the change.
    fn configure(&mut self, operation: Operation) -> Result<Outcome, ApiFault> {
        let config = &mut self.config;
        match operation {
            Operation::PutBootSource(source) => {
                check_boot_args(&source)?;
                return Ok(Outcome::Begun(Task::OpenBootSource(source)));
            }
            Operation::PutDrive(drive) => {
                config.check_drive(&drive)?;
                return Ok(Outcome::Begun(Task::OpenDrive(drive)));
            }
            Operation::PutInterface(net) => {
                config.prepare_interface(&net)?;
                return Ok(Outcome::Begun(Task::OpenTap(net)));
            }
            Operation::PutVsock(vsock) => {
                config.check_vsock(&vsock)?;
                // The old socket is closed before the new one is bound.
                config.vsock = None;
                return Ok(Outcome::Begun(Task::BindVsock(vsock)));
            }
            Operation::PutLogger(logger) => return Ok(Outcome::Begun(Task::SetLogger(logger))),
            Operation::PutMetrics(_) if self.has_metrics => {
                return Err(MetricsFault::Again.into());
            }
            Operation::PutMetrics(metrics) => {
                return Ok(Outcome::Begun(Task::OpenMetrics(metrics)));
            }
            Operation::PutPmem(_) => return Err(ApiFault::NotInDriftline("pmem devices")),
            Operation::PutMemoryHotplug(_) => {
                return Err(ApiFault::NotInDriftline("memory hotplug"));
            }
            Operation::PutBalloon(balloon) => config.put_balloon(balloon)?,
            Operation::PutCpuTemplate(template) => config.cpu_template = Some(template),
            Operation::PutEntropy(mut entropy) => {
                if config.entropy.is_none() {
                    config.require_room(ApiFault::TooManyDevices("Entropy"))?;
                }
                let limits = entropy.rate_limiter.take();
                entropy.rate_limiter = limits.and_then(|limits| limits.in_effect());
                config.entropy = Some(entropy);
            }
            Operation::PutMetadata(value) => config.metadata.put(value)?,
            Operation::PatchMetadata(patch) => config.metadata.patch(&patch)?,
            Operation::PutMmds(mmds) => config.put_mmds(mmds)?,
            Operation::PutSerial(mut serial) => {
                let limit = serial.rate_limiter.take();
                serial.rate_limiter = limit.and_then(|limit| limit.in_effect());
                config.serial = serial;
            }
            Operation::UpdateMachine(update) => config.update_machine(&update)?,
            // All others need a guest.
            _ => return Err(ApiFault::BeforeStart),
        }
        Ok(DONE)
    }

    /// Answers the request of a task that has ended.
    fn finish(
        &mut self,
        caller: C,
        task: Task,
        result: Result<(), ApiFault>,
        to: &mut Vec<MicroVmAction<C>>,
    ) {
        if let Err(fault) = result {
            // A failed load leaves a process in an unknown state, as in Firecracker.
            let is_fatal = matches!(task, Task::Load(..)) && !fault.is_untried();
            to.push(MicroVmAction::Reply(caller, Answer::Fault(fault)));
            if is_fatal {
                self.stage = MicroVmStage::Ending;
                let waiting = std::mem::take(&mut self.waiting);
                to.extend(waiting.into_iter().map(|(caller, _)| {
                    MicroVmAction::Reply(caller, Answer::Fault(ApiFault::Ending))
                }));
                to.push(MicroVmAction::Exit(LOAD_FAILED));
            }
            return;
        }
        match task {
            Task::OpenBootSource(source) => self.config.boot_source = Some(source),
            Task::OpenDrive(drive) => self.config.put_drive(drive),
            Task::OpenTap(net) => self.config.put_interface(net),
            Task::BindVsock(vsock) => self.config.vsock = Some(vsock),
            Task::SetLogger(_) | Task::FlushMetrics => {}
            Task::OpenMetrics(_) => self.has_metrics = true,
            Task::Start(_) | Task::Load(..) => self.stage = MicroVmStage::Started,
        }
        to.push(MicroVmAction::Reply(caller, Answer::Done));
    }
}

/// Returns whether a request, even one that fails, configures a guest that boots.
fn sets_boot_path(operation: &Operation) -> bool {
    matches!(
        operation,
        Operation::PutBalloon(_)
            | Operation::PutBootSource(_)
            | Operation::PutDrive(_)
            | Operation::PutEntropy(_)
            | Operation::PutInterface(_)
            | Operation::PutMemoryHotplug(_)
            | Operation::PutMmds(_)
            | Operation::PutPmem(_)
            | Operation::PutVsock(_)
            | Operation::UpdateMachine(_)
    )
}

/// Refuses a request that a started guest does not answer.
fn after_start(operation: &Operation) -> Result<(), ApiFault> {
    match operation {
        Operation::PutDrive(_)
        | Operation::PutInterface(_)
        | Operation::PutPmem(_)
        | Operation::Unplug(_) => Err(ApiFault::NoPci),
        Operation::LoadSnapshot(_)
        | Operation::PutBalloon(_)
        | Operation::PutBootSource(_)
        | Operation::PutCpuTemplate(_)
        | Operation::PutEntropy(_)
        | Operation::PutLogger(_)
        | Operation::PutMemoryHotplug(_)
        | Operation::PutMetrics(_)
        | Operation::PutMmds(_)
        | Operation::PutSerial(_)
        | Operation::PutVsock(_)
        | Operation::Start
        | Operation::UpdateMachine(_) => Err(ApiFault::AfterStart),
        _ => Ok(()),
    }
}

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
#[cfg(test)]
mod tests;
