//! A disk's file that a restore overwrites, so that it has the content of the epoch.
//!
//! The file is locked for its guest during the restore: no guest can run from it, and no second
//! restore can write to it. What the restore has written stays in the file, however the restore
//! ends.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use driftline_format::range_lock::RangeLock;
use driftline_guest::{DriveCopy, DriveHead, GuestError, VmId};

use super::error::{DiskError, DiskListDefect, ParentsDisk};
use super::file::{DiskFile, write_zeroes};
use super::file_identity::{is_named, require_name};
use super::identity;
use super::lock;
use super::request::SECTOR;
use crate::config::{DeviceConfig, DiskConfig, DiskIdentity, HostConfig, MachineConfig, disks};

/// The guest in the checkpoint, with its devices at that time.
pub(crate) struct ParentGuest<'c> {
    pub(crate) guest: VmId,
    pub(crate) devices: &'c [DeviceConfig],
}

/// Opens and locks the files that `config` has on this host for `drives`. The list is hostile
/// input. The content of the files is not changed yet.
///
/// # Errors
///
/// - `drives` are not all the disks that the guest can write to.
/// - The operator did not name a file, and it is not known to be that of `parent`.
/// - The guest is not `parent`, and a file is that of `parent`, whether the operator named it or
///   not.
pub(crate) fn open_drives(
    guest: VmId,
    parent: &ParentGuest<'_>,
    config: &MachineConfig,
    drives: &[DriveHead],
    host: &HostConfig,
) -> Result<Vec<Box<dyn DriveCopy>>, GuestError> {
    let malformed =
        |defect: DiskListDefect| GuestError::malformed("the checkpoint's list of disks", defect);
    if drives.is_empty() {
        return Ok(Vec::new());
    }
    let written = || disks(&config.devices).filter(|disk| !disk.readonly);
    let listed = |disk: &&DiskConfig| drives.iter().any(|drive| drive.id == disk.id);
    if let Some(disk) = written().find(|disk| !listed(disk)) {
        return Err(malformed(DiskListDefect::Unlisted { id: disk.id.clone() }));
    }
    let mut opened: Vec<Box<dyn DriveCopy>> = Vec::new();
    for (drive, i) in drives.iter().zip(0..) {
        let named = || drive.clone();
        let disk = written().find(|disk| disk.id == drive.id);
        let disk = disk.ok_or_else(|| malformed(DiskListDefect::Foreign { drive: named() }))?;
        if disk.bytes != drive.bytes {
            return Err(malformed(DiskListDefect::Differs { drive: named() }));
        }
        if drives[..i].iter().any(|other| other.id == drive.id) {
            return Err(malformed(DiskListDefect::Twice { drive: named() }));
        }
        let is_unnamed = !host.names(disk);
        let refused = |e: DiskError| GuestError::System {
            what: "opening the disks to restore",
            cause: Box::new(e),
        };
        let is_parents = |why: ParentsDisk| {
            let (id, path) = (disk.id.clone(), disk.path.clone());
            refused(DiskError::Parents { id, path, guest: parent.guest, bytes: disk.bytes, why })
        };
        if is_unnamed && guest != parent.guest {
            return Err(is_parents(ParentsDisk::Itself));
        }
        let file = RestoredDisk::open(disk, guest, is_unnamed).map_err(refused)?;
        if guest != parent.guest
            && let Some(why) = parent.claim_to(&file.file, host.takes_any_identity_for(disk))
        {
            return Err(is_parents(why));
        }
        opened.push(Box::new(file));
    }
    Ok(opened)
}

impl ParentGuest<'_> {
    /// Returns why another guest must not use `file` as its disk; `None` if it may.
    /// `may_be_snapshot`: the operator states that the file is a copy wherever it can be one.
    fn claim_to(&self, file: &DiskFile, may_be_snapshot: bool) -> Option<ParentsDisk> {
        let found = file.disk_identity();
        disks(self.devices).find_map(|disk| {
            let path = ParentsPath {
                leads_to_it: is_named(file.file(), &disk.path).unwrap_or(false),
                identity: || identity_at(&disk.path),
            };
            claim_to_disk(disk.identity.as_ref(), found.as_ref(), path, may_be_snapshot)
        })
    }
}

/// The path of one of the parent's disks, on this host.
struct ParentsPath<F> {
    /// Whether the path leads to the file in question.
    leads_to_it: bool,
    /// Returns the identity of the file to which the path leads.
    identity: F,
}

/// Returns why another guest must not use the disk `found`; `None` if it may. The parent's disk is
/// `parents`.
///
/// A file in a snapshot of the parent's file system has the inode number and the creation time of
/// the parent's file. So has the parent's file itself through another mount, which may have another
/// device number. Nothing distinguishes these two cases, so the operator must.
fn claim_to_disk(
    parents: Option<&DiskIdentity>,
    found: Option<&DiskIdentity>,
    path: ParentsPath<impl FnOnce() -> Option<DiskIdentity>>,
    may_be_snapshot: bool,
) -> Option<ParentsDisk> {
    let Some(parents) =
        parents.filter(|parents| found.is_some_and(|found| !parents.differs(found)))
    else {
        return path.leads_to_it.then_some(ParentsDisk::Path);
    };
    let can_be_snapshot = !path.leads_to_it
        && matches!(parents, DiskIdentity::File { .. })
        && (path.identity)().is_some_and(|there| !parents.differs(&there));
    match can_be_snapshot {
        false => Some(ParentsDisk::Itself),
        true if may_be_snapshot => None,
        true => Some(ParentsDisk::OrSnapshot),
    }
}

/// Returns the identity of the file to which `path` leads on this host, if it is a regular file.
fn identity_at(path: &Path) -> Option<DiskIdentity> {
    // Limited to regular files: opening anything else may have a side effect, or block.
    let is_file = fs::metadata(path).is_ok_and(|metadata| metadata.is_file());
    is_file.then(|| File::open(path).ok()).flatten().as_ref().and_then(identity::of)
}

/// A file that a restore overwrites; see the module.
#[derive(Debug)]
struct RestoredDisk {
    file: DiskFile,
    guest: VmId,
    /// Whether the file has holes, or may have: zeros are then written as holes. Otherwise the file
    /// keeps its allocated storage.
    sparse: bool,
}

impl RestoredDisk {
    fn open(disk: &DiskConfig, guest: VmId, is_unnamed: bool) -> Result<Self, DiskError> {
        let file = DiskFile::open(disk, guest)?;
        if is_unnamed && (disk.identity.is_none() || file.disk_identity().is_none()) {
            return Err(DiskError::Nameless { id: disk.id.clone(), path: disk.path.clone() });
        }
        file.lock()?;
        let opened = Self { sparse: is_sparse(file.file()), file, guest };
        // The previous holder of the lock may have replaced the file.
        match opened.require_name() {
            Ok(()) => Ok(opened),
            Err(cause) => Err(DiskError::Open { path: disk.path.clone(), readonly: false, cause }),
        }
    }

    /// Fails if the path leads to another file: the guest would get that file, unrestored.
    fn require_name(&self) -> io::Result<()> {
        require_name(self.file(), self.file.path())
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
        write_zeroes(self.file(), offset, len, self.sparse)
    }

    fn make_durable(&self) -> io::Result<()> {
        self.file().sync_data()
    }

    fn yield_to_guest(&self) -> io::Result<()> {
        self.require_name()?;
        lock::set(self.file(), RangeLock::Free, self.guest).map(drop)
    }

    fn keep(&self) {}
}

/// Returns whether `file` has less storage than its length. A block device does not tell, and
/// counts as sparse.
fn is_sparse(file: &File) -> bool {
    let metadata = file.metadata();
    metadata.map_or(true, |m| m.blocks().saturating_mul(SECTOR) < m.len() || !m.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::BackendKind;
    use crate::testing::{disk, payload_config};

    const BYTES: u64 = 1 << 20;

    #[test]
    fn fully_allocated_file_stays_allocated() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        let config = disk("d", &path, BYTES);
        for (allocated, sparse) in [(BYTES, false), (BYTES / 2, true)] {
            let file = File::create(&path).unwrap();
            file.set_len(BYTES).unwrap();
            let flags = rustix::fs::FallocateFlags::empty();
            rustix::fs::fallocate(&file, flags, 0, allocated).unwrap();
            file.write_all_at(&[7; 8192], 0).unwrap();
            let room = file.metadata().unwrap().blocks();
            let opened = RestoredDisk::open(&config, VmId::random(), false).unwrap();
            opened.zero(0, BYTES).unwrap();
            assert_eq!(file.metadata().unwrap().blocks() < room, sparse, "{allocated}");
            assert!(fs::read(&path).unwrap() == vec![0; BYTES as usize]);
        }
    }

    #[test]
    fn replaced_file_is_not_given_to_the_guest() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        let config = disk("d", &path, BYTES);
        File::create(&path).unwrap().set_len(BYTES).unwrap();
        let guest = VmId::random();
        let opened = RestoredDisk::open(&config, guest, false).unwrap();
        assert!(
            RestoredDisk::open(&config, guest, false)
                .unwrap_err()
                .to_string()
                .contains("in use by")
        );
        fs::rename(&path, dir.path().join("aside")).unwrap();
        let error = opened.yield_to_guest().unwrap_err().to_string();
        assert!(error.contains("No such file"), "{error}");
        File::create(&path).unwrap().set_len(BYTES).unwrap();
        let error = opened.yield_to_guest().unwrap_err().to_string();
        assert!(error.contains("its path leads to another file now"), "{error}");
        fs::rename(dir.path().join("aside"), &path).unwrap();
        opened.yield_to_guest().unwrap();
    }

    fn machine(devices: Vec<DeviceConfig>) -> MachineConfig {
        MachineConfig { devices, ..payload_config(BackendKind::Kvm) }
    }

    fn drives(devices: &[DeviceConfig]) -> Vec<DriveHead> {
        let head = |disk: &DiskConfig| DriveHead {
            id: disk.id.clone(),
            bytes: disk.bytes,
            readonly: disk.readonly,
        };
        disks(devices).map(head).collect()
    }

    /// The guest of the checkpoint may continue with its disk.
    #[test]
    fn new_guest_needs_disks_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        for name in ["disk", "copy"] {
            File::create(dir.path().join(name)).unwrap().set_len(BYTES).unwrap();
        }
        let mut parents = disk("d", &path, BYTES);
        parents.identity = identity::of(&File::open(&path).unwrap());
        let config = machine(vec![DeviceConfig::Disk(parents)]);
        let drives = drives(&config.devices);
        let (guest, parent) = (VmId::random(), VmId::random());
        let stored = config.devices.clone();
        let open = |host: &HostConfig| {
            let config = config.clone().on_host(&host.writing_over(&drives))?;
            let parent = &ParentGuest { guest: parent, devices: &stored };
            open_drives(guest, parent, &config, &drives, host).map(|opened| opened.len())
        };
        let host = HostConfig { disks_are_copies: true, ..Default::default() };
        let error = open(&host).unwrap_err().to_string();
        assert!(error.contains(&format!("guest {parent}'s")), "{error}");
        assert!(error.contains("--disk id=d,path=FILE") && error.contains("--same-id"), "{error}");
        // The parent's file is refused by its name and by any other name.
        fs::hard_link(&path, dir.path().join("link")).unwrap();
        std::os::unix::fs::symlink(&path, dir.path().join("symlink")).unwrap();
        let named = |name: &str, more: &str| {
            let spec = format!("path={}{more}", dir.path().join(name).display()).parse().unwrap();
            open(&HostConfig { disks: vec![spec], ..host.clone() })
        };
        for (name, more) in [("disk", ""), ("disk", ",identity=any"), ("link", ""), ("symlink", "")]
        {
            let error = named(name, more).unwrap_err().to_string();
            let file = dir.path().join(name);
            assert!(
                error.contains(&format!("in file \"{}\", is guest", file.display())),
                "{error}"
            );
            assert!(error.contains("give the new guest a file of its own"), "{error}");
            assert!(!error.contains("identity=any"), "no snapshot: {error}");
        }
        assert_eq!(named("copy", "").unwrap(), 1);
        // The file that is now at the parent's path is refused too: the parent's disk may have been
        // restored from a backup.
        let copy = dir.path().join("copy");
        fs::rename(&path, dir.path().join("was")).unwrap();
        fs::copy(&copy, &path).unwrap();
        let error = named("disk", ",identity=any").unwrap_err().to_string();
        let why = format!("has the path of guest {parent}'s disk: name another path");
        assert!(error.contains(&why) && error.contains("(--same-id)"), "{error}");
        assert!(named("was", "").is_err(), "it has moved, and is known");
    }

    /// A file in a snapshot and the parent's file through another mount have the same inode number
    /// and creation time.
    #[test]
    fn snapshot_needs_the_operators_confirmation() {
        let file = |inode| DiskIdentity::File { inode, born_ns: Some(7) };
        let device = DiskIdentity::device("naa.50").unwrap();
        let (itself, path) = (Some(ParentsDisk::Itself), Some(ParentsDisk::Path));
        let why = |known: &DiskIdentity, found: Option<&_>, leads_to_it, there, may_be_snapshot| {
            claim_to_disk(
                Some(known),
                found,
                ParentsPath { leads_to_it, identity: || there },
                may_be_snapshot,
            )
        };
        for (found, has_path, there, without_option, with_option) in [
            (Some(file(3)), false, Some(file(3)), Some(ParentsDisk::OrSnapshot), None),
            (Some(file(3)), true, Some(file(3)), itself, itself),
            (Some(file(3)), false, Some(file(4)), itself, itself),
            (Some(file(3)), false, None, itself, itself),
            (Some(file(4)), false, Some(file(3)), None, None),
            (Some(file(4)), true, Some(file(4)), path, path),
            (None, false, None, None, None),
            (None, true, None, path, path),
        ] {
            for (may_be_snapshot, expected) in [(false, without_option), (true, with_option)] {
                let why = why(&file(3), found.as_ref(), has_path, there.clone(), may_be_snapshot);
                assert_eq!(why, expected, "{found:?} {has_path} {there:?} {may_be_snapshot}");
            }
        }
        // Two paths to one device have one name.
        assert_eq!(why(&device, Some(&device), false, Some(device.clone()), true), itself);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        assert!(identity_at(&path).is_none() && identity_at(dir.path()).is_none());
        File::create(&path).unwrap();
        assert_eq!(identity_at(&path), identity::of(&File::open(&path).unwrap()));
    }

    /// After a reboot a path may lead to another disk. It is overwritten only if the operator names
    /// it.
    #[test]
    fn unknown_disk_is_overwritten_only_if_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        for name in ["disk", "other"] {
            File::create(dir.path().join(name)).unwrap().set_len(BYTES).unwrap();
        }
        let mut recorded = disk("d", &path, BYTES);
        recorded.identity = identity::of(&File::open(&path).unwrap());
        let config = machine(vec![DeviceConfig::Disk(recorded)]);
        let drives = drives(&config.devices);
        let open = |host: &HostConfig, drives: &[DriveHead]| {
            let config = config.clone().on_host(&host.writing_over(drives))?;
            let guest = VmId::random();
            let parent = &ParentGuest { guest, devices: &config.devices };
            open_drives(guest, parent, &config, drives, host).map(|opened| opened.len())
        };
        let host = HostConfig { disks_are_copies: true, ..Default::default() };
        assert_eq!(open(&host, &drives).unwrap(), 1);
        fs::rename(dir.path().join("other"), &path).unwrap();
        let error = open(&host, &drives).unwrap_err().to_string();
        assert!(error.contains("disk \"d\" is a different disk on this host"), "{error}");
        let named = format!("path={},id=d", path.display());
        assert!(
            error.contains(&format!("--disk id=d,path={},identity=any", path.display())),
            "{error}"
        );
        for spec in [named.clone(), format!("{named},identity=any")] {
            let host = HostConfig { disks: vec![spec.parse().unwrap()], ..host.clone() };
            assert_eq!(open(&host, &drives).unwrap(), 1);
        }
        // A disk without a known identity, such as a device without a name, is refused too.
        let mut nameless = config.clone();
        crate::config::disks_mut(&mut nameless.devices).for_each(|disk| disk.identity = None);
        let guest = VmId::random();
        let parent = &ParentGuest { guest, devices: &nameless.devices };
        let unknown = open_drives(guest, parent, &nameless, &drives, &host).map(drop).unwrap_err();
        assert!(unknown.to_string().contains("no identity shows"), "{unknown}");
        // Without drives in the epoch nothing is overwritten, and the file is expected to be a
        // copy.
        let there = config.clone().on_host(&host.writing_over(&[])).unwrap();
        assert_eq!(disks(&there.devices).next().unwrap().identity, None);
        assert_eq!(open(&host, &[]).unwrap(), 0);
    }
}
