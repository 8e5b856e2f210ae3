//! The open file of a test guest's device, which changes hands with memory in files.

use std::fs::File;
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, memfd_create};

use super::memory::system;
use crate::error::GuestError;
use crate::shared_guest::{DeviceFile, SharedGuest};
use crate::vm_id::VmId;

const NAME: &str = "drive";

/// Creates the file of guest `vm_id`.
pub(super) fn of(vm_id: VmId) -> Result<DeviceFile, GuestError> {
    let failed = |e| system("creating the drive's file", e);
    let file = memfd_create("drive", MemfdFlags::CLOEXEC).map_err(|e| failed(e.into()))?;
    let file = File::from(file);
    file.write_all_at(vm_id.to_string().as_bytes(), 0).map_err(failed)?;
    Ok(DeviceFile::new(NAME, file.into()))
}

/// Checks that `shared` has the file of guest `vm_id`, or no file.
pub(super) fn check(shared: &SharedGuest, vm_id: VmId) -> Result<(), GuestError> {
    let [file] = shared.device_files() else {
        assert!(shared.device_files().is_empty(), "a test guest has one device file");
        return Ok(());
    };
    assert_eq!(file.name(), NAME);
    let failed = |e| system("reading the drive's file", e);
    let content = File::from(file.descriptor().try_clone().map_err(failed)?);
    let mut found = vec![0; vm_id.to_string().len()];
    content.read_exact_at(&mut found, 0).map_err(failed)?;
    assert_eq!(found, vm_id.to_string().as_bytes(), "the file is another guest's");
    Ok(())
}
