//! The open files of a guest that continues in another process of its host: their names, and the
//! checks of those that arrive.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;

use driftline_guest::{DeviceFile, GuestError};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::fcntl_dupfd_cloexec;

use super::net::check_tap_queue;
use crate::config::{
    DeviceConfig, DiskCache, DiskConfig, DiskEngine, HostConfig, NetConfig, OpenedDisk,
    OpenedFiles, OpenedTap,
};

/// Why the open files of a guest cannot be used.
#[derive(Debug, thiserror::Error)]
enum HandedOverError {
    /// The receiver's command line names files for the guest's devices.
    #[error(
        "--disk, --net and --vsock of the receiver do not go with a hand-over on one host: the \
         guest's devices keep the files that are open"
    )]
    Named,
    /// A file belongs to no device of the guest.
    #[error("the file \"{0}\" is that of no device of the guest")]
    Unknown(String),
    /// A device has too few or too many files.
    #[error("\"{name}\" has {found} files, and needs {expected}")]
    Count {
        /// Name of the files.
        name: String,
        /// Number of files that came.
        found: usize,
        /// Number of files that the device has.
        expected: usize,
    },
    /// A file is not of the kind that the device has.
    #[error("the file \"{name}\" {why}")]
    Kind {
        /// Name of the file.
        name: String,
        /// What it is not.
        why: &'static str,
    },
    /// A system call failed.
    #[error("the file \"{name}\": {cause}")]
    System {
        /// Name of the file.
        name: String,
        /// The system's error.
        #[source]
        cause: io::Error,
    },
}

impl From<HandedOverError> for GuestError {
    fn from(e: HandedOverError) -> Self {
        Self::unsupported("the open files that were handed over", e)
    }
}

/// Sockets whose names keep other processes away from a tap.
const CLAIMS: usize = 2;

/// Returns the name of a device's files. `None` if the device has none.
fn name_of(device: &DeviceConfig) -> Option<String> {
    match device {
        DeviceConfig::Disk(disk) => Some(format!("disk/{}", disk.id)),
        DeviceConfig::Net(net) => Some(format!("net/{}", net.id)),
        DeviceConfig::Vsock(_) | DeviceConfig::Rng(_) | DeviceConfig::Balloon(_) => None,
    }
}

/// Names the files of `devices`.
pub(crate) fn device_files(devices: &[DeviceConfig], files: Vec<Vec<OwnedFd>>) -> Vec<DeviceFile> {
    let named = devices.iter().zip(files).filter_map(|(device, files)| {
        let name = name_of(device)?;
        Some(files.into_iter().map(move |file| DeviceFile::new(name.clone(), file)))
    });
    named.flatten().collect()
}

/// Returns the files of `devices` that have come from another process, which is not believed. A
/// device of which none has come opens its own.
///
/// # Errors
///
/// The files are not those of such devices, or `host` names others.
pub(crate) fn opened_files(
    devices: &[DeviceConfig],
    files: &[DeviceFile],
    host: &HostConfig,
) -> Result<OpenedFiles, GuestError> {
    let mut opened = host.opened.clone();
    if files.is_empty() {
        return Ok(opened);
    }
    if !host.disks.is_empty() || !host.nets.is_empty() || host.vsock.is_some() {
        return Err(HandedOverError::Named.into());
    }
    let is_known =
        |file: &&DeviceFile| devices.iter().any(|d| name_of(d).as_deref() == Some(file.name()));
    if let Some(file) = files.iter().find(|file| !is_known(file)) {
        return Err(HandedOverError::Unknown(file.name().to_owned()).into());
    }
    for device in devices {
        let Some(name) = name_of(device) else { continue };
        let own: Vec<&DeviceFile> = files.iter().filter(|file| file.name() == name).collect();
        match device {
            _ if own.is_empty() => {}
            DeviceConfig::Disk(disk) => opened.disks.push(opened_disk(disk, &name, &own)?),
            DeviceConfig::Net(net) => opened.taps.push(opened_tap(net, &name, &own)?),
            DeviceConfig::Vsock(_) | DeviceConfig::Rng(_) | DeviceConfig::Balloon(_) => {}
        }
    }
    Ok(opened)
}

fn opened_disk(
    disk: &DiskConfig,
    name: &str,
    own: &[&DeviceFile],
) -> Result<OpenedDisk, HandedOverError> {
    let [file] = own else { return Err(count(name, own, 1)) };
    let system = system(name);
    let file = duplicate(file).map_err(&system)?;
    let kind = |why| HandedOverError::Kind { name: name.to_owned(), why };
    let of = file.metadata().map_err(&system)?.file_type();
    if !of.is_file() && !of.is_block_device() {
        return Err(kind("is neither a regular file nor a block device"));
    }
    let flags = fcntl_getfl(&file).map_err(|e| system(e.into()))?;
    if flags.contains(OFlags::APPEND) || flags.contains(OFlags::PATH) {
        return Err(kind("is open for appending, or for no access"));
    }
    match flags & OFlags::ACCMODE {
        OFlags::RDWR => {}
        OFlags::RDONLY if disk.readonly => {}
        _ => return Err(kind("is not open as the disk needs it")),
    }
    Ok(OpenedDisk {
        id: disk.id.clone(),
        file: file.into(),
        cache: DiskCache::default(),
        engine: DiskEngine::default(),
        is_handed_over: true,
    })
}

fn opened_tap(
    net: &NetConfig,
    name: &str,
    own: &[&DeviceFile],
) -> Result<OpenedTap, HandedOverError> {
    let queues = usize::from(net.queues);
    if own.len() != queues + CLAIMS {
        return Err(count(name, own, queues + CLAIMS));
    }
    let system = system(name);
    let files: io::Result<Vec<File>> = own.iter().map(|file| duplicate(file)).collect();
    let mut files = files.map_err(&system)?;
    let claims: Vec<UnixDatagram> =
        files.drain(queues..).map(|file| OwnedFd::from(file).into()).collect();
    for queue in &files {
        if !queue.metadata().map_err(&system)?.file_type().is_char_device() {
            let why = "is not a queue of a tap";
            return Err(HandedOverError::Kind { name: name.to_owned(), why });
        }
        check_tap_queue(queue, &net.tap).map_err(&system)?;
    }
    let mut tap = OpenedTap::new(&net.id, files, Arc::from(claims));
    tap.is_handed_over = true;
    Ok(tap)
}

fn duplicate(file: &DeviceFile) -> io::Result<File> {
    // No number is reserved.
    Ok(File::from(fcntl_dupfd_cloexec(file.descriptor(), 0)?))
}

fn count(name: &str, own: &[&DeviceFile], expected: usize) -> HandedOverError {
    HandedOverError::Count { name: name.to_owned(), found: own.len(), expected }
}

fn system(name: &str) -> impl Fn(io::Error) -> HandedOverError {
    move |cause| HandedOverError::System { name: name.to_owned(), cause }
}
