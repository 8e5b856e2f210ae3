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

use super::net::{TAP_CLAIMS, check_tap_queue};
use super::vsock::SHARED_FILES as VSOCK_FILES;
use crate::config::{
    DeviceConfig, DiskCache, DiskConfig, DiskEngine, HandedOverVsock, HostConfig, NetConfig,
    OpenedDisk, OpenedFiles, OpenedTap, VsockSpec,
};

/// Why the open files of a guest cannot be used.
#[derive(Debug, thiserror::Error)]
enum HandedOverError {
    /// The receiver's command line names files for the guest's devices.
    #[error(
        "--disk and --net of the receiver, and a --vsock of another path, cannot be combined with \
         a hand-over on one host: the guest's devices keep the files that are open"
    )]
    Named,
    /// A file belongs to no device of the guest.
    #[error("the file \"{name}\" belongs to no device of the guest")]
    Unknown {
        /// Name of the file.
        name: String,
    },
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
        /// The kind or mode that it lacks.
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

/// Returns the name of a device's files. `None` if the device has none.
fn name_of(device: &DeviceConfig) -> Option<String> {
    match device {
        DeviceConfig::Disk(disk) => Some(format!("disk/{}", disk.id)),
        DeviceConfig::Net(net) => Some(format!("net/{}", net.id)),
        DeviceConfig::Vsock(_) => Some("vsock".to_owned()),
        DeviceConfig::Rng(_) | DeviceConfig::Balloon(_) => None,
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

/// Returns the files that the other process has sent for `devices`, which it has configured. The
/// files are hostile input. If it has sent none, each device opens its own.
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
    let is_same = |spec: &VsockSpec| {
        devices.iter().any(|d| matches!(d, DeviceConfig::Vsock(vsock) if vsock.uds == spec.uds))
    };
    // The same path only permits the receiver's sandbox to use it.
    let has_other_vsock = host.vsock.as_ref().is_some_and(|spec| !is_same(spec));
    if !host.disks.is_empty() || !host.nets.is_empty() || has_other_vsock {
        return Err(HandedOverError::Named.into());
    }
    let is_known =
        |file: &&DeviceFile| devices.iter().any(|d| name_of(d).as_deref() == Some(file.name()));
    if let Some(file) = files.iter().find(|file| !is_known(file)) {
        return Err(HandedOverError::Unknown { name: file.name().to_owned() }.into());
    }
    for device in devices {
        let Some(name) = name_of(device) else { continue };
        let own: Vec<&DeviceFile> = files.iter().filter(|file| file.name() == name).collect();
        match device {
            DeviceConfig::Disk(disk) => opened.disks.push(opened_disk(disk, &name, &own)?),
            DeviceConfig::Net(net) => opened.taps.push(opened_tap(net, &name, &own)?),
            DeviceConfig::Vsock(_) => opened.handed_over_vsock = handed_over_vsock(&name, &own)?,
            DeviceConfig::Rng(_) | DeviceConfig::Balloon(_) => {}
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
    let kind_of_file = file.metadata().map_err(&system)?.file_type();
    if !kind_of_file.is_file() && !kind_of_file.is_block_device() {
        return Err(kind("is neither a regular file nor a block device"));
    }
    let flags = fcntl_getfl(&file).map_err(|e| system(e.into()))?;
    if flags.intersects(OFlags::APPEND | OFlags::PATH | OFlags::DIRECT) {
        return Err(kind("is open for appending, for direct access, or with O_PATH"));
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
    if own.len() != queues + TAP_CLAIMS {
        return Err(count(name, own, queues + TAP_CLAIMS));
    }
    let system = system(name);
    let files: io::Result<Vec<File>> = own.iter().map(|file| duplicate(file)).collect();
    let mut files = files.map_err(&system)?;
    let claims: Vec<UnixDatagram> =
        files.drain(queues..).map(|file| OwnedFd::from(file).into()).collect();
    for queue in &files {
        check_tap_queue(queue, &net.tap).map_err(&system)?;
    }
    let mut tap = OpenedTap::new(&net.id, files, Arc::from(claims));
    tap.is_handed_over = true;
    Ok(tap)
}

/// Returns the files of a vsock device; `None` if it had no listener in the other process.
fn handed_over_vsock(
    name: &str,
    own: &[&DeviceFile],
) -> Result<Option<HandedOverVsock>, HandedOverError> {
    let Ok(&[listener, channel, state]) = <&[&DeviceFile; VSOCK_FILES]>::try_from(own) else {
        return if own.is_empty() { Ok(None) } else { Err(count(name, own, VSOCK_FILES)) };
    };
    let system = system(name);
    let owned = |file: &DeviceFile| file.descriptor().try_clone();
    let state = duplicate(state).map_err(&system)?;
    if !state.metadata().map_err(&system)?.is_file() {
        let why = "with the state of its connections is not a regular file";
        return Err(HandedOverError::Kind { name: name.to_owned(), why });
    }
    let (listener, channel) = (owned(listener).map_err(&system)?, owned(channel).map_err(&system)?);
    Ok(Some(HandedOverVsock::new(listener, channel, state)))
}

fn duplicate(file: &DeviceFile) -> io::Result<File> {
    Ok(file.descriptor().try_clone()?.into())
}

fn count(name: &str, own: &[&DeviceFile], expected: usize) -> HandedOverError {
    HandedOverError::Count { name: name.to_owned(), found: own.len(), expected }
}

fn system(name: &str) -> impl Fn(io::Error) -> HandedOverError {
    move |cause| HandedOverError::System { name: name.to_owned(), cause }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::{MacAddr, NetLimits};
    use crate::testing::disk;

    fn net(tap: &str) -> DeviceConfig {
        let (id, mac, limits) = ("n".to_owned(), MacAddr::random(), NetLimits::default());
        let tap = tap.to_owned();
        DeviceConfig::Net(NetConfig { id, tap, mac, queues: 1, mtu: None, limits, metadata: None })
    }

    /// Returns why `files`, each with its name, are not those of a disk and an interface.
    fn refusal(files: Vec<(&str, File)>) -> String {
        let devices = [DeviceConfig::Disk(disk("d", Path::new("/none"), 1 << 20)), net("tap0")];
        let files: Vec<_> =
            files.into_iter().map(|(name, file)| DeviceFile::new(name, file.into())).collect();
        opened_files(&devices, &files, &HostConfig::default()).unwrap_err().to_string()
    }

    fn file(options: &mut std::fs::OpenOptions) -> File {
        let path = tempfile::NamedTempFile::new().unwrap();
        options.open(path.path()).unwrap()
    }

    #[test]
    fn files_of_other_kinds_are_refused() {
        let disk = || file(File::options().read(true).write(true));
        let null = || File::options().read(true).write(true).open("/dev/null").unwrap();
        for (files, why) in [
            (vec![("disk/e", disk())], "\"disk/e\" belongs to no device"),
            (vec![("disk/d", disk()), ("disk/d", disk())], "\"disk/d\" has 2 files, and needs 1"),
            (vec![("disk/d", null())], "neither a regular file nor a block device"),
            (vec![("disk/d", file(File::options().read(true)))], "not open as the disk needs it"),
            (vec![("disk/d", file(File::options().read(true).append(true)))], "for appending"),
            (vec![("disk/d", disk())], "\"net/n\" has 0 files, and needs 3"),
            (
                vec![("disk/d", disk()), ("net/n", null()), ("net/n", null()), ("net/n", null())],
                "it is not an open /dev/net/tun",
            ),
        ] {
            let said = refusal(files);
            assert!(said.contains(why), "{why}: {said}");
        }
    }

    #[test]
    fn receiver_names_no_files() {
        let devices = [DeviceConfig::Disk(disk("d", Path::new("/none"), 1 << 20))];
        let file = file(File::options().read(true).write(true));
        let files = device_files(&devices, vec![vec![file.into()]]);
        let opened = opened_files(&devices, &files, &HostConfig::default()).unwrap();
        assert!(opened.are_handed_over());
        let disks = vec!["path=/none".parse().unwrap()];
        let host = HostConfig { disks, ..HostConfig::default() };
        let said = opened_files(&devices, &files, &host).unwrap_err().to_string();
        assert!(said.contains("--disk and --net of the receiver, and a"), "{said}");
    }
}
