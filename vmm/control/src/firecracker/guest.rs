//! Answers of a guest that has been started. Unlike the rest of this module, they depend on the
//! guest and may wait for it.

use driftline_checkpoint::SnapshotKind;
use driftline_guest::{GuestError, RunState};
use driftline_machine::devices::KeyboardFull;

use super::answer::Answer;
use super::balloon;
use super::changes::{patch_drive, patch_interface, show_changes, show_files};
use super::fault::{ApiFault, CreateFault};
use super::instance::{IMITATED_VERSION, InstanceName};
use super::model::{CreateSnapshotParams, SnapshotType};
use super::operation::Operation;
use super::saved::to_section;
use super::state::MicroVm;
use crate::jobs::{Jobs, OperatorError, SnapshotFailure, SnapshotOrder};
use crate::model::{GuestState, InstanceInfo};

impl<C> MicroVm<C> {
    /// Answers a request to the started guest of `jobs`. Pausing the guest may wait for its
    /// devices.
    pub fn ask_guest(&self, operation: &Operation, jobs: &Jobs) -> Answer {
        self.try_ask(operation, jobs).unwrap_or_else(Answer::Fault)
    }

    fn try_ask(&self, operation: &Operation, jobs: &Jobs) -> Result<Answer, ApiFault> {
        match operation {
            Operation::GetInstance => Answer::page(&started_instance(self.name(), jobs)),
            Operation::GetVersion => Ok(Answer::version(IMITATED_VERSION)),
            Operation::GetMachine => Answer::page(&self.config().machine),
            Operation::GetConfig => {
                let mut shown = self.config().shown();
                shown.balloon = jobs.vm().balloon().map(balloon::balloon_shown);
                show_changes(&mut shown, self.config(), jobs);
                Answer::page(&shown)
            }
            Operation::GetBalloon => balloon::show_balloon(jobs),
            Operation::PatchBalloon(update) => balloon::resize(update, jobs),
            Operation::GetBalloonStatistics => balloon::show_statistics(jobs),
            Operation::PatchBalloonStatistics(update) => balloon::change_interval(update, jobs),
            Operation::StartHinting(command) => balloon::start_hinting(command, jobs),
            Operation::StopHinting => balloon::stop_hinting(jobs),
            Operation::GetHinting => balloon::show_hinting(jobs),
            Operation::PatchDrive(update) => patch_drive(update, self.config(), jobs),
            Operation::PatchInterface(update) => patch_interface(update, self.config(), jobs),
            Operation::Pause => done(jobs.pause()),
            Operation::Resume => {
                let was_paused = jobs.vm().run_state() == RunState::Paused;
                let resumed = done(jobs.resume())?;
                // While the guest runs, a copy of its memory may be waiting for hints.
                if was_paused {
                    balloon::end_hinting(jobs);
                }
                Ok(resumed)
            }
            Operation::SendCtrlAltDel => press_ctrl_alt_del(jobs),
            Operation::CreateSnapshot(params) => self.create_snapshot(params, jobs),
            // No interface reaches the metadata.
            Operation::GetMetadata | Operation::PatchMetadata(_) | Operation::PutMetadata(_)
                if self.config().mmds.is_none() =>
            {
                Err(ApiFault::NoMetadata)
            }
            Operation::GetMetadata => Answer::page(&self.metadata().shown()),
            Operation::PutMetadata(value) => {
                self.metadata().put(value.clone())?;
                Ok(Answer::Done)
            }
            Operation::PatchMetadata(patch) => {
                self.metadata().patch(patch)?;
                Ok(Answer::Done)
            }
            Operation::GetMemoryHotplug | Operation::PatchMemoryHotplug(_) => {
                Err(ApiFault::NotInDriftline("memory hotplug"))
            }
            Operation::PatchPmem(_) => Err(ApiFault::NotInDriftline("pmem devices")),
            _ => Err(ApiFault::NotBuilt("this request to a started guest")),
        }
    }

    /// Takes a snapshot, which is durable once this returns.
    fn create_snapshot(
        &self,
        params: &CreateSnapshotParams,
        jobs: &Jobs,
    ) -> Result<Answer, ApiFault> {
        let kind = match params.snapshot_type {
            SnapshotType::Full => SnapshotKind::Full,
            SnapshotType::Diff => SnapshotKind::Diff,
        };
        // No other file can be given to a drive while this request is answered.
        let mut config = self.config().clone();
        show_files(&mut config.drives, self.config(), jobs);
        let api = to_section(&config, jobs.vm().balloon().map(balloon::balloon_shown))?;
        let (state, memory) = (&params.snapshot_path, &params.mem_file_path);
        match jobs.take_snapshot(SnapshotOrder { kind, state, memory, live: params.live, api }) {
            Ok(_) => Ok(Answer::Done),
            Err(e) => Err(create_fault(e).into()),
        }
    }
}

/// Returns what `GET /` shows of the guest of `jobs`. Does not wait for the guest.
pub(crate) fn started_instance(name: &InstanceName, jobs: &Jobs) -> InstanceInfo {
    // Firecracker has two states for a started guest.
    let runs = jobs.state() == GuestState::Running;
    name.shown(if runs { "Running" } else { "Paused" })
}

/// Returns Firecracker's words for a snapshot that was not taken.
fn create_fault(failure: SnapshotFailure) -> CreateFault {
    match failure {
        SnapshotFailure::Paused(OperatorError::Running) => CreateFault::Running,
        SnapshotFailure::File { what, is_memory, cause, .. } => {
            let what = match what {
                "opening" | "creating" => "open",
                "growing" => "set_length",
                "syncing" => "sync_all",
                other => other,
            };
            match is_memory {
                true => CreateFault::Memory { what, cause },
                false => CreateFault::State { what, cause },
            }
        }
        other => CreateFault::Other(other.to_string()),
    }
}

fn done(result: Result<(), OperatorError>) -> Result<Answer, ApiFault> {
    result.map(|()| Answer::Done).map_err(|e| ApiFault::Guest(e.to_string()))
}

fn press_ctrl_alt_del(jobs: &Jobs) -> Result<Answer, ApiFault> {
    let pressed = jobs.vm().press_ctrl_alt_del();
    pressed.map(|()| Answer::Done).map_err(|e| {
        ApiFault::Guest(match &e {
            GuestError::System { cause, .. } if cause.is::<KeyboardFull>() => {
                format!("I8042 error: {cause}")
            }
            other => other.to_string(),
        })
    })
}
