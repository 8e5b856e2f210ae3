//! The `THREAD_WORKER` sections, one for each worker.

use driftline_guest::{GuestError, Section, SectionTag};
use driftline_images::PayloadSpec;
use driftline_machine::codec::{decode_versioned, encode_versioned};
use serde::{Deserialize, Serialize};

use super::error::{Lack, ThreadMachineError, WorkerStateError};
use super::worker::{self, WorkerState};

/// Latest time of a saved guest, in nanoseconds: 146 years. It leaves room for the time that passes
/// after the save.
const MAX_GUEST_NS: u64 = 1 << 62;

/// The content of one section.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedThreadWorker {
    /// The guest's clock at the save, in nanoseconds; the same in all sections of a state.
    pub(super) guest_ns: u64,
    /// The host's time of day at the save, in nanoseconds.
    pub(super) wall_ns: u64,
    pub(super) worker: WorkerState,
}

pub(super) fn encode(index: usize, saved: &SavedThreadWorker) -> Result<Section, GuestError> {
    let instance = u16::try_from(index).map_err(ThreadMachineError::Index)?;
    let bytes = encode_versioned(saved).map_err(ThreadMachineError::Encode)?;
    Ok(Section::new(SectionTag::THREAD_WORKER, instance, bytes))
}

/// Returns the states of all workers, in order. `sections` are hostile input.
pub(super) fn decode(
    sections: &[Section],
    spec: &PayloadSpec,
    vcpus: u32,
) -> Result<Vec<SavedThreadWorker>, GuestError> {
    let mut workers: Vec<Option<SavedThreadWorker>> = vec![None; vcpus as usize];
    for section in sections {
        if section.tag != SectionTag::THREAD_WORKER {
            if section.must_understand && section.tag != SectionTag::CONFIG {
                return Err(GuestError::unsupported(
                    format_args!("the state section \"{}\"", section.tag),
                    Lack::Section,
                ));
            }
            continue;
        }
        let index = section.instance;
        let place = workers
            .get_mut(usize::from(index))
            .ok_or_else(|| malformed(index, WorkerStateError::NoVcpu { vcpus }))?;
        if place.is_some() {
            return Err(malformed(index, WorkerStateError::Twice));
        }
        *place = Some(decode_one(section, spec, vcpus)?);
    }
    let missing = |index| malformed(index, WorkerStateError::Missing);
    (0u16..).zip(workers).map(|(index, w)| w.ok_or_else(|| missing(index))).collect()
}

fn decode_one(
    section: &Section,
    spec: &PayloadSpec,
    vcpus: u32,
) -> Result<SavedThreadWorker, GuestError> {
    let index = section.instance;
    let saved: SavedThreadWorker = decode_versioned(state_of(index), &section.bytes)?;
    let (guest_ns, limit) = (saved.guest_ns, MAX_GUEST_NS);
    if guest_ns > limit {
        return Err(malformed(index, WorkerStateError::Time { guest_ns, limit }));
    }
    if !worker::fits(&saved.worker, spec, vcpus, u32::from(index)) {
        return Err(malformed(index, WorkerStateError::OtherWorkload));
    }
    Ok(saved)
}

fn state_of(index: u16) -> String {
    format!("the state of worker {index}")
}

fn malformed(index: u16, cause: WorkerStateError) -> GuestError {
    GuestError::malformed(state_of(index), cause)
}
