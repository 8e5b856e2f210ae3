//! A disk's file that a restore writes over, so that it is as it was in the epoch.
//!
//! It is locked for its guest meanwhile, so that nobody runs from it, and no second restore writes to it. What is in it by then stays,
//! however the restore ends.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use checkpoint::{DriveCopy, DriveHead, GuestError, VmId};

use super::file::{DiskError, DiskFile, write_zeroes};
use super::lock::{self, Lock};
use crate::config::{DiskConfig, MachineConfig, disks};

/// The files that `config` has on this host for `drives`, which are hostile input: locked, and as they were. They must be all the
/// disks that the guest can write to.
pub(crate) fn open_drives(
    guest: VmId,
    config: &MachineConfig,
    drives: &[DriveHead],
) -> Result<Vec<Box<dyn DriveCopy>>, GuestError> {
    let malformed = |what: String, why: &str| GuestError::Malformed {
        what: "the epoch's list of disks".to_owned(),
        why: format!("{what} {why}"),
    };
    if drives.is_empty() {
        return Ok(Vec::new());
    }
    let written = || disks(&config.devices).filter(|disk| !disk.readonly);
    let listed = |disk: &&DiskConfig| drives.iter().any(|drive| drive.id == disk.id);
    if let Some(disk) = written().find(|disk| !listed(disk)) {
        return Err(malformed(format!("disk \"{}\"", disk.id), "is not in it"));
    }
    let mut opened: Vec<Box<dyn DriveCopy>> = Vec::new();
    for (drive, i) in drives.iter().zip(0..) {
        let disk = written().find(|disk| disk.id == drive.id);
        let disk = disk.ok_or_else(|| malformed(drive.to_string(), "is none of the guest's"))?;
        if disk.bytes != drive.bytes {
            return Err(malformed(
                drive.to_string(),
                "has another size in the guest's configuration",
            ));
        }
        if drives[..i].iter().any(|other| other.id == drive.id) {
            return Err(malformed(drive.to_string(), "stands there twice"));
        }
        let disk = RestoredDisk::open(disk, guest).map_err(|e| GuestError::System {
            what: "opening the disks to restore",
            cause: Box::new(e),
        })?;
        opened.push(Box::new(disk));
    }
    Ok(opened)
}

/// See the module.
#[derive(Debug)]
struct RestoredDisk {
    file: DiskFile,
    guest: VmId,
}

impl RestoredDisk {
    fn open(disk: &DiskConfig, guest: VmId) -> Result<Self, DiskError> {
        let file = DiskFile::open(disk, guest)?;
        file.lock().map_err(DiskError::InUse)?;
        Ok(Self { file, guest })
    }

    fn file(&self) -> &File {
        self.file.file()
    }
}

impl DriveCopy for RestoredDisk {
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.file().write_all_at(bytes, offset)
    }

    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        write_zeroes(self.file(), offset, len, true)
    }

    fn make_durable(&self) -> io::Result<()> {
        self.file().sync_data()
    }

    fn yield_to_guest(&self) -> io::Result<()> {
        lock::set(self.file(), Lock::None, self.guest).map(drop)
    }

    fn keep(self: Box<Self>) {}
}
