//! Builds test guests from a configuration, as a host that receives or restores a guest does.

use std::sync::Arc;

use super::config::MemoryConfig;
use super::device_file;
use super::drives::{TestDisk, TestDiskHandle};
use super::faults::{ExclusiveDrive, Faults, Op};
use super::guest::MemoryGuest;
use super::memory::TestGuestMemory;
use crate::drive::{DriveCopy, DriveHead};
use crate::error::GuestError;
use crate::factory::{GuestFactory, GuestWithCopies};
use crate::lineage::Origin;
use crate::shared_guest::SharedGuest;
use crate::vm_id::VmId;

/// Builds [`MemoryGuest`]s with the faults and the drive that the test chose.
#[derive(Clone, Debug, Default)]
pub struct MemoryGuestFactory {
    /// The faults of every guest that it builds, and of building.
    pub faults: Arc<Faults>,
    /// The drive of every guest that it builds.
    pub drive: Arc<ExclusiveDrive>,
    /// The drives with data of every guest that it builds, which a restore overwrites.
    pub disks: Vec<Arc<TestDisk>>,
    /// Whether the memory of every guest that it builds is in files.
    pub shares_memory: bool,
}

impl MemoryGuestFactory {
    fn build(
        &self,
        vm_id: VmId,
        config: &[u8],
        memory: TestGuestMemory<'_>,
    ) -> Result<Arc<MemoryGuest>, GuestError> {
        self.faults.check(Op::Create, "building the guest")?;
        let config = MemoryConfig::decode(config)?;
        let (faults, drive) = (self.faults.clone(), self.drive.clone());
        MemoryGuest::build(vm_id, config, memory, faults, drive, self.disks.clone())
    }
}

impl GuestFactory for MemoryGuestFactory {
    type Guest = MemoryGuest;

    fn create_with_copies(
        &self,
        vm_id: VmId,
        config: &[u8],
        drives: &[DriveHead],
    ) -> Result<GuestWithCopies<MemoryGuest>, GuestError> {
        if let Some(drive) = drives.first() {
            return Err(GuestError::unsupported(drive, "no copies of drives are made here"));
        }
        let memory =
            if self.shares_memory { TestGuestMemory::Files } else { TestGuestMemory::Private };
        Ok((self.build(vm_id, config, memory)?, Vec::new()))
    }

    fn create_on(
        &self,
        vm_id: VmId,
        config: &[u8],
        shared: &SharedGuest,
    ) -> Result<Arc<MemoryGuest>, GuestError> {
        device_file::check(shared, vm_id)?;
        self.build(vm_id, config, TestGuestMemory::Shared(shared))
    }

    fn create_with_drives(
        &self,
        from: &Origin,
        config: &[u8],
        drives: &[DriveHead],
    ) -> Result<GuestWithCopies<MemoryGuest>, GuestError> {
        let mut found: Vec<Box<dyn DriveCopy>> = Vec::new();
        for head in drives {
            let disk = self.disks.iter().find(|disk| disk.head() == head);
            let missing = || GuestError::unsupported(head, "this guest has no such drive");
            let disk = disk.ok_or_else(missing)?;
            found.push(Box::new(TestDiskHandle(disk.clone())));
        }
        Ok((self.create(from.vm_id, config)?, found))
    }
}
