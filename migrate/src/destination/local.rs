//! Taking over the memory and the open files of a source on this host: the descriptors of MEMORY
//! and of FILES.
//!
//! The peer is not believed. Its descriptors are used as guest memory only by
//! [`GuestFactory::create_on`](driftline_guest::GuestFactory::create_on), which checks that each is
//! a memory file that cannot shrink. Until COMMIT this side does not write to the memory: the guest
//! runs in it at the source, or will run in it again.

use std::fs::File;
use std::sync::Arc;

use driftline_guest::{DeviceFile, OfferedClaim, SharedGuest};
use rustix::process::geteuid;
use vm_memory::FileOffset;

use crate::protocol::error::WireError;
use crate::protocol::features::{DEVICE_FILES, FEATURES, LOCAL};
use crate::protocol::message::{DeviceFileNames, MemoryPlaces};
use crate::protocol::tag::Tag;
use crate::transport::link::Link;
use crate::transport::wire::Wire;

/// Returns the features that this end offers over `link`.
pub(super) fn features(link: &Link) -> u64 {
    if link.carries_descriptors() { FEATURES | LOCAL | DEVICE_FILES } else { FEATURES }
}

/// Receives the descriptors of MEMORY, which have not been checked.
pub(super) fn receive(
    wire: &mut Wire<Link>,
    places: &MemoryPlaces,
) -> Result<SharedGuest, WireError> {
    // First, so that whatever comes with the message is closed.
    let mut files = wire.receive_descriptors(Tag::Memory, places.descriptors)?;
    let (theirs, ours) = (wire.stream().peer_user()?, geteuid().as_raw());
    if !may_send(theirs, ours) {
        return Err(WireError::ForeignUser { theirs, ours });
    }
    let why = "it has no descriptors of the claim";
    let lacks = || WireError::Malformed { message: Tag::Memory, why };
    let alive = Arc::new(files.pop().ok_or_else(lacks)?);
    let mut files: Vec<Arc<File>> = files.into_iter().map(|file| Arc::new(file.into())).collect();
    let claim = OfferedClaim { file: files.pop().ok_or_else(lacks)?, alive };
    // No index is out of bounds: MEMORY was decoded, and has this number of descriptors.
    let slots = places.slots.iter().filter_map(|place| {
        let file = files.get(place.descriptor)?;
        Some(FileOffset::from_arc(file.clone(), place.offset))
    });
    Ok(SharedGuest::new(slots.collect(), claim))
}

/// Receives the descriptors of FILES, which have not been checked, and adds them to `shared`.
pub(super) fn receive_files(
    wire: &mut Wire<Link>,
    names: DeviceFileNames,
    shared: SharedGuest,
) -> Result<SharedGuest, WireError> {
    let files = wire.receive_descriptors(Tag::Files, names.0.len())?;
    let files = names.0.into_iter().zip(files);
    Ok(shared.with_device_files(files.map(|(name, fd)| DeviceFile::new(name, fd)).collect()))
}

/// Whether a process of user `ours` builds a guest on memory of user `theirs`.
fn may_send(theirs: u32, ours: u32) -> bool {
    theirs == ours || theirs == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_other_users_is_refused() {
        assert!(may_send(1000, 1000) && may_send(0, 1000));
        assert!(!may_send(1001, 1000) && !may_send(1000, 0));
    }
}
