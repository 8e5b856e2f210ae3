//! What is handed over to another process of this host, and its descriptors (MEMORY, FILES).

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use driftline_guest::{MAX_DEVICE_FILES, NextHost, SharedGuest};
use rustix::process::geteuid;

use super::drives::CopyDrives;
use super::guest::Migratable;
use super::job::SendJob;
use super::options::SendOptions;
use crate::error::{Cause, LocalConflict, fits};
use crate::protocol::features::DEVICE_FILES;
use crate::protocol::limits::{MAX_DESCRIPTORS, MAX_SLOTS};
use crate::protocol::message::{DeviceFileNames, MemoryPlace, MemoryPlaces, WireMessage};
use crate::transport::address::Address;
use crate::transport::compression::Compression;
use crate::transport::link::Link;
use crate::transport::wire::Wire;

impl<G: Migratable + ?Sized> SendJob<'_, G> {
    /// Returns what is handed over as it is; `None` if memory is copied. Fails if the options do
    /// not fit together.
    pub(super) fn local_guest(&self) -> Result<Option<SharedGuest>, Cause> {
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

/// Returns where the guest continues if the destination offers `features`.
pub(super) fn next_host(options: &SendOptions, features: u64) -> NextHost {
    match options.local && features & DEVICE_FILES != 0 {
        true => NextHost::This,
        false => NextHost::Another,
    }
}

/// Sends MEMORY and, if the destination offers that, FILES.
pub(super) fn send(
    wire: &mut Wire<Link>,
    shared: &SharedGuest,
    features: u64,
) -> Result<(), Cause> {
    send_memory(wire, shared)?;
    let files = shared.device_files();
    if files.is_empty() || features & DEVICE_FILES == 0 {
        return Ok(());
    }
    fits("the list of the devices' files", files.len() as u64, MAX_DEVICE_FILES as u64, "files")?;
    let descriptors: Vec<BorrowedFd<'_>> = files.iter().map(|f| f.descriptor().as_fd()).collect();
    let names = files.iter().map(|file| file.name().to_owned()).collect();
    Ok(wire.send_with_descriptors(&WireMessage::Files(DeviceFileNames(names)), &descriptors)?)
}

/// Sends MEMORY. Several slots of one file share its descriptor; those of the claim are the last.
fn send_memory(wire: &mut Wire<Link>, memory: &SharedGuest) -> Result<(), Cause> {
    let asking = |cause| Cause::System { what: "finding the user of the receiver", cause };
    let theirs = wire.stream().peer_user().map_err(asking)?;
    let ours = geteuid().as_raw();
    if !may_receive(theirs, ours) {
        return Err(LocalConflict::Receiver { theirs, ours }.into());
    }
    let slots = memory.slots();
    fits("the guest's memory layout", slots.len() as u64, MAX_SLOTS.into(), "slots")?;
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
    let claim = memory.claim();
    files.push(claim.file.clone());
    let files = files.iter().map(|file| file.as_fd());
    let descriptors: Vec<BorrowedFd<'_>> = files.chain([claim.alive.as_fd()]).collect();
    let count = descriptors.len() as u64;
    fits("the list of memory files", count, MAX_DESCRIPTORS.into(), "descriptors")?;
    let places = MemoryPlaces { descriptors: descriptors.len(), slots: places };
    Ok(wire.send_with_descriptors(&WireMessage::Memory(places), &descriptors)?)
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
