//! Which memory is handed over to another process of this host, and its descriptors (MEMORY).

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use driftline_guest::SharedGuest;
use rustix::process::geteuid;

use super::drives::CopyDrives;
use super::guest::Migratable;
use super::job::SendJob;
use crate::error::{Cause, LocalConflict, fits};
use crate::protocol::limits::{MAX_DESCRIPTORS, MAX_SLOTS};
use crate::protocol::message::{MemoryPlace, MemoryPlaces};
use crate::transport::address::Address;
use crate::transport::compression::Compression;
use crate::transport::link::Link;
use crate::transport::wire::Wire;

impl<G: Migratable + ?Sized> SendJob<'_, G> {
    /// Returns the memory that is handed over; `None` if it is copied. Fails if the options do not
    /// fit together.
    pub(super) fn local_memory(&self) -> Result<Option<SharedGuest>, Cause> {
        if !self.options.local {
            return Ok(None);
        }
        self.check_local()?;
        Ok(Some(self.guest.share()?))
    }

    fn check_local(&self) -> Result<(), LocalConflict> {
        if !matches!(self.to.parse(), Ok(Address::Unix(_))) {
            return Err(LocalConflict::Address { to: self.to.to_owned() });
        }
        let options = self.options;
        let conflicts = [
            (options.tls.is_some(), "TLS (--tls-dir)"),
            (options.copy_drives != CopyDrives::None, "copying disks (--copy-disks)"),
            (options.connections > 1, "more than one connection (--connections)"),
            (options.compression != Compression::None, "compression (--compress)"),
            (options.verify, "a digest of memory (--verify)"),
            (options.max_bandwidth.is_some(), "a bandwidth limit (--max-bandwidth)"),
        ];
        match conflicts.into_iter().find(|(is, _)| *is) {
            Some((_, option)) => Err(LocalConflict::Option { option }),
            None => Ok(()),
        }
    }
}

/// Whether a process of user `ours` gives its guest's memory to one of user `theirs`, who can write
/// to it even if the guest stays. A source that runs as root gives it to any user's receiver.
fn may_receive(theirs: u32, ours: u32) -> bool {
    theirs == ours || theirs == 0 || ours == 0
}

/// Sends MEMORY. Several slots of one file share its descriptor; that of the claim is the last.
pub(super) fn send_memory(wire: &mut Wire<Link>, memory: &SharedGuest) -> Result<(), Cause> {
    let asking = |cause| Cause::System { what: "finding the user of the receiver", cause };
    let theirs = wire.stream().peer_user().map_err(asking)?;
    let ours = geteuid().as_raw();
    if !may_receive(theirs, ours) {
        return Err(LocalConflict::Receiver { theirs, ours }.into());
    }
    let slots = memory.slots();
    fits("the guest's memory layout", slots.len() as u64, MAX_SLOTS.into())?;
    let mut files = Vec::new();
    let mut places = Vec::with_capacity(slots.len());
    for slot in slots {
        let known = files.iter().position(|file| Arc::ptr_eq(file, slot.arc()));
        let descriptor = known.unwrap_or_else(|| {
            files.push(slot.arc().clone());
            files.len() - 1
        });
        places.push(MemoryPlace { descriptor, offset: slot.start() });
    }
    files.push(memory.claim().clone());
    fits("the list of memory files", files.len() as u64, MAX_DESCRIPTORS.into())?;
    let descriptors: Vec<BorrowedFd<'_>> = files.iter().map(|file| file.as_fd()).collect();
    let places = MemoryPlaces { descriptors: descriptors.len(), slots: places };
    Ok(wire.send_memory(places, &descriptors)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_given_to_no_other_user() {
        assert!(may_receive(1000, 1000) && may_receive(0, 1000) && may_receive(1000, 0));
        assert!(!may_receive(1001, 1000));
    }
}
