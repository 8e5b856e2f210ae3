//! Building guests.

use std::sync::Arc;

use crate::drive::{DriveCopy, DriveHead};
use crate::error::GuestError;
use crate::guest::Guest;
use crate::lineage::Origin;
use crate::shared_guest::SharedGuest;
use crate::vm_id::VmId;

/// A guest, and its drives or the copies of its drives that are being filled.
pub type GuestWithCopies<G> = (Arc<G>, Vec<Box<dyn DriveCopy>>);

/// Builds guests from what [`GuestIdentity::config`](crate::GuestIdentity::config) returned, on
/// this host or another. A new guest is paused and has zeroed memory; its state comes later.
/// `config` and `drives` are hostile input: bounds are checked before anything is allocated.
pub trait GuestFactory: Send + Sync {
    /// Type of the guests that the factory builds.
    type Guest: Guest + ?Sized;

    /// Builds a guest whose drives, if it has any, are on this host already.
    ///
    /// # Errors
    ///
    /// The configuration is malformed or cannot be used on this host.
    fn create(&self, vm_id: VmId, config: &[u8]) -> Result<Arc<Self::Guest>, GuestError> {
        self.create_with_copies(vm_id, config, &[]).map(|(guest, _)| guest)
    }

    /// Builds a guest whose `drives` are copied here. Also returns the copies to be filled, in the
    /// order of `drives`; the guest uses them as its drives.
    ///
    /// # Errors
    ///
    /// As [`create`](Self::create), or a copy cannot be made here.
    fn create_with_copies(
        &self,
        vm_id: VmId,
        config: &[u8],
        drives: &[DriveHead],
    ) -> Result<GuestWithCopies<Self::Guest>, GuestError>;

    /// Builds a guest on the memory and the open files of `shared`. Another process of this host
    /// has them too, and its guest may still be running with them. A device without files in
    /// `shared` opens its own. Until the guest is resumed, nothing is written to memory or files:
    /// not by building the guest, by restoring its state, or by ending it.
    ///
    /// # Errors
    ///
    /// As [`create`](Self::create), or `shared` does not fit the guest ([`SharedGuest::of`]).
    fn create_on(
        &self,
        vm_id: VmId,
        config: &[u8],
        shared: &SharedGuest,
    ) -> Result<Arc<Self::Guest>, GuestError>;

    /// Builds a guest that is restored from the checkpoint `from`. The factory decides whether the
    /// guest is the one that was checkpointed, or a new one.
    ///
    /// Returns the guest and, in the order of `drives`, the files that are about to be overwritten.
    /// Each is locked for this guest until it is yielded.
    ///
    /// # Errors
    ///
    /// As [`create`](Self::create). A drive that is missing, differs from its description, cannot
    /// be written to or is in use is refused by its name, before anything is written to any of
    /// them.
    fn create_with_drives(
        &self,
        from: &Origin,
        config: &[u8],
        drives: &[DriveHead],
    ) -> Result<GuestWithCopies<Self::Guest>, GuestError>;
}
