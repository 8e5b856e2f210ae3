//! Takes the requests of Firecracker's API, before and after there is a guest.

use std::collections::VecDeque;
use std::process::ExitCode;
use std::sync::mpsc::Receiver;

use driftline_control::api::{ApiEvent, Caller};
use driftline_control::firecracker::{ApiFault, MicroVm, MicroVmAction, MicroVmEvent, Task};

use super::opened::ClientFiles;
use super::start::{GuestStarter, StartedGuest};
use crate::failure::Failure;

/// The requests of one process, and the state that they change.
pub(super) struct ApiRequests {
    vm: MicroVm<Caller>,
    events: Receiver<ApiEvent>,
}

/// How the time before the guest's start ends.
pub(super) enum ConfigurationEnd {
    /// The process is to end with this code.
    Exit(ExitCode),
    /// The process is to end, for this reason.
    Stopped(String),
    /// There is a guest.
    Started(StartedGuest),
}

impl ApiRequests {
    pub(super) fn new(vm: MicroVm<Caller>, events: Receiver<ApiEvent>) -> Self {
        Self { vm, events }
    }

    /// Performs what the requests ask for until there is a guest or the process is to end. Callers
    /// that still wait are dropped with this value, and the server answers them.
    ///
    /// # Errors
    /// The API has ended.
    pub(super) fn configure(&mut self, starter: GuestStarter) -> Result<ConfigurationEnd, Failure> {
        let mut files = ClientFiles::default();
        let mut next = VecDeque::new();
        let mut started = None;
        loop {
            let event = match next.pop_front() {
                Some(event) => event,
                None => match self.events.recv()? {
                    ApiEvent::Call(caller, operation) => MicroVmEvent::Request(caller, operation),
                    ApiEvent::Stop(why) => return Ok(ConfigurationEnd::Stopped(why)),
                },
            };
            for action in self.vm.step(event) {
                match action {
                    MicroVmAction::Reply(caller, answer) => caller.answer(answer),
                    MicroVmAction::Perform(Task::Start(config)) => {
                        let result = starter.start(&config, &files);
                        let result = result.map(|guest| _ = started.insert(guest));
                        next.push_back(MicroVmEvent::Finished(result));
                    }
                    MicroVmAction::Perform(Task::Load(snapshot, own)) => {
                        next.push_back(match starter.load(&snapshot, &own) {
                            Ok((guest, shown)) => {
                                started = Some(guest);
                                MicroVmEvent::Loaded(Box::new(shown))
                            }
                            Err(fault) => MicroVmEvent::Finished(Err(fault)),
                        });
                    }
                    MicroVmAction::Perform(task) => {
                        next.push_back(MicroVmEvent::Finished(perform(&task, &mut files)));
                    }
                    // A request that waited for the start.
                    MicroVmAction::ToGuest(caller, operation) => match &started {
                        Some(guest) => caller.answer(self.vm.ask_guest(&operation, &guest.jobs)),
                        None => caller.refuse(ApiFault::BeforeStart),
                    },
                    MicroVmAction::Exit(code) => {
                        return Ok(ConfigurationEnd::Exit(ExitCode::from(code)));
                    }
                }
            }
            // The start has been answered.
            if next.is_empty()
                && let Some(guest) = started.take()
            {
                return Ok(ConfigurationEnd::Started(guest));
            }
        }
    }

    /// Lets the guest answer until the API ends.
    pub(super) fn ask(mut self, guest: &StartedGuest) {
        let _logged = guest.jobs.span().clone().entered();
        while let Ok(event) = self.events.recv() {
            let event = match event {
                ApiEvent::Call(caller, operation) => MicroVmEvent::Request(caller, operation),
                // It was asked for while the guest started.
                ApiEvent::Stop(why) => {
                    if let Err(e) = guest.jobs.stop(&why) {
                        tracing::error!("{why}, but the guest does not end: {e}");
                    }
                    continue;
                }
            };
            for action in self.vm.step(event) {
                match action {
                    MicroVmAction::Reply(caller, answer) => caller.answer(answer),
                    MicroVmAction::ToGuest(caller, operation) => {
                        caller.answer(self.vm.ask_guest(&operation, &guest.jobs));
                    }
                    // A started machine has no tasks, and only a failed load ends the process.
                    MicroVmAction::Perform(_) | MicroVmAction::Exit(_) => {}
                }
            }
        }
    }
}

/// Performs a task that makes no guest.
fn perform(task: &Task, files: &mut ClientFiles) -> Result<(), ApiFault> {
    match task {
        Task::OpenBootSource(source) => files.open_boot_source(source),
        Task::OpenDrive(drive) => files.open_drive(drive),
        other => Err(ApiFault::NotBuilt(other.request())),
    }
}
