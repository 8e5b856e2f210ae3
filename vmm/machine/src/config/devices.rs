//! The devices of a machine in its configuration and on the command line.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::DiskIdentity;
use super::balloon::{self, BalloonConfig};
use super::device_id::check_id;
use super::net::{NetConfig, NetSpec, VsockConfig, VsockSpec, replace_net, replace_vsock};
use super::replace::ReplaceError;
use super::spec::{SpecError, Syntax};

/// Maximum number of virtio devices: there are no interrupts for more.
pub const MAX_DEVICES: usize = 16;
/// Maximum length of a drive's serial number, in bytes: the space that virtio has for it.
pub const MAX_SERIAL_BYTES: usize = 20;
/// Largest block of a disk, in bytes: a page, since Linux accepts no larger blocks.
pub const MAX_BLOCK_BYTES: u32 = 4096;
/// A virtio device. Its position in the list decides its register address and its interrupt.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceConfig {
    /// A disk.
    Disk(DiskConfig),
    /// A source of randomness.
    Rng,
    /// A network interface.
    Net(NetConfig),
    /// The vsock device; a machine has at most one.
    Vsock(VsockConfig),
    /// A balloon.
    Balloon(BalloonConfig),
}

impl DeviceConfig {
    /// Returns the name of the device, unique within the machine.
    pub fn id(&self) -> &str {
        match self {
            Self::Disk(disk) => &disk.id,
            Self::Rng => "rng",
            Self::Net(net) => &net.id,
            Self::Vsock(_) => "vsock",
            Self::Balloon(_) => "balloon",
        }
    }
}

/// A disk backed by a file.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DiskConfig {
    /// The disk's name.
    pub id: String,
    /// A raw image or a block device. Another host may use another one, see
    /// [`HostConfig::disks`](super::HostConfig::disks).
    pub path: PathBuf,
    /// Whether the guest cannot write to it.
    pub readonly: bool,
    /// The serial number that the guest reads.
    pub serial: String,
    /// Size that the guest sees, in bytes: whole sectors of 512 bytes.
    pub bytes: u64,
    /// Block size that the guest is told, in bytes, a power of two: reads and writes of whole
    /// blocks suit the file best.
    pub block_bytes: u32,
    /// Identity of the disk, if known. In a configuration from another host, the disk's identity on
    /// that host.
    pub identity: Option<DiskIdentity>,
}

/// A disk on the command line: `path=F[,readonly][,id=NAME][,serial=TEXT][,identity=any][,copy]`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DiskSpec {
    /// A raw image or a block device.
    pub path: PathBuf,
    /// Whether the guest must not write to it.
    pub readonly: bool,
    /// The disk's name.
    pub id: Option<String>,
    /// The serial number that the guest reads.
    pub serial: Option<String>,
    /// Whether it may be another disk than the one that the guest arrives with.
    pub any_identity: bool,
    /// Whether the disk is copied with its guest, into a file that is created for it.
    pub copy: bool,
}

static DISK: Syntax = Syntax {
    device: "a disk",
    options: &[
        "path=FILE",
        "readonly",
        "id=NAME",
        "serial=TEXT",
        "identity=any (for receive-migration and restore)",
        "copy (for receive-migration)",
    ],
};

impl FromStr for DiskSpec {
    type Err = SpecError;

    fn from_str(s: &str) -> Result<Self, SpecError> {
        if s.split(',').next().is_some_and(|o| !o.contains('=') && o.contains(['.', '/'])) {
            let sentence = format!("a disk wants path=FILE, so: --disk path={s}");
            return Err(SpecError::Value(sentence));
        }
        let options = DISK.read(s)?;
        if let Some(value) = options.get("identity").filter(|value| *value != "any") {
            return Err(SpecError::Value(format!(
                "\"identity={value}\" is no identity of a disk: it can only be any"
            )));
        }
        Ok(Self {
            path: options.require("path")?.into(),
            readonly: options.has("readonly"),
            id: options.get("id").map(check_id).transpose()?,
            serial: options.get("serial").map(check_serial).transpose()?,
            any_identity: options.has("identity"),
            copy: options.has("copy"),
        })
    }
}

fn check_serial(serial: &str) -> Result<String, String> {
    if serial.len() > MAX_SERIAL_BYTES || !serial.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(format!(
            "\"{serial}\" is no serial number of a disk: it has at most {MAX_SERIAL_BYTES} printable ASCII characters"
        ));
    }
    Ok(serial.to_owned())
}

/// Checks that a host could run a guest of this memory with these devices. The error says why not.
pub(super) fn check(devices: &[DeviceConfig], mem_bytes: u64) -> Result<(), String> {
    if devices.len() > MAX_DEVICES {
        return Err(format!("it has {} virtio devices, more than {MAX_DEVICES}", devices.len()));
    }
    let (mut ids, mut taps) = (HashSet::new(), HashSet::new());
    for device in devices {
        check_id(device.id())?;
        if !ids.insert(device.id()) {
            return Err(format!("it has two devices with the name \"{}\"", device.id()));
        }
        match device {
            DeviceConfig::Disk(disk) => {
                check_serial(&disk.serial)?;
                if disk.bytes == 0 || !disk.bytes.is_multiple_of(512) {
                    return Err(format!(
                        "its disk \"{}\" has {} bytes, not whole sectors of 512",
                        disk.id, disk.bytes
                    ));
                }
                check_block(disk)?;
                disk.identity.as_ref().map_or(Ok(()), DiskIdentity::check)?;
            }
            DeviceConfig::Net(net) => {
                net.check()?;
                if !taps.insert(&net.tap) {
                    return Err(format!(
                        "it has two network interfaces over the tap \"{}\"",
                        net.tap
                    ));
                }
            }
            DeviceConfig::Vsock(vsock) => vsock.check()?,
            DeviceConfig::Balloon(config) => balloon::check(config, mem_bytes)?,
            DeviceConfig::Rng => {}
        }
    }
    Ok(())
}

/// Checks the block size: from a sector to a page, and the disk has whole blocks.
fn check_block(disk: &DiskConfig) -> Result<(), String> {
    let DiskConfig { id, block_bytes, bytes, .. } = disk;
    let usable = (512..=MAX_BLOCK_BYTES).contains(block_bytes) && block_bytes.is_power_of_two();
    if !usable || !bytes.is_multiple_of(u64::from(*block_bytes)) {
        return Err(format!("its disk \"{id}\" of {bytes} bytes has blocks of {block_bytes}"));
    }
    Ok(())
}

/// Returns the paths in `devices`, which must be UTF-8 to be encoded.
pub(super) fn paths(devices: &[DeviceConfig]) -> impl Iterator<Item = &Path> {
    devices.iter().filter_map(|device| match device {
        DeviceConfig::Disk(disk) => Some(disk.path.as_path()),
        DeviceConfig::Vsock(vsock) => Some(vsock.uds.as_path()),
        DeviceConfig::Net(_) | DeviceConfig::Rng | DeviceConfig::Balloon(_) => None,
    })
}

/// Returns the disks of `devices`, in order.
pub fn disks(devices: &[DeviceConfig]) -> impl Iterator<Item = &DiskConfig> {
    devices.iter().filter_map(|device| match device {
        DeviceConfig::Disk(disk) => Some(disk),
        _ => None,
    })
}

/// Returns the disks of `devices` as [`disks`] does, mutably.
pub(crate) fn disks_mut(devices: &mut [DeviceConfig]) -> impl Iterator<Item = &mut DiskConfig> {
    devices.iter_mut().filter_map(|device| match device {
        DeviceConfig::Disk(disk) => Some(disk),
        _ => None,
    })
}

/// Replaces the host-specific parts of an arriving guest's devices with those of this host.
pub(super) fn replace(
    devices: &mut [DeviceConfig],
    host: &super::HostConfig,
) -> Result<(), ReplaceError> {
    let (mut disks, mut nets, mut vsock) = (Vec::new(), Vec::new(), None);
    for device in devices {
        match device {
            DeviceConfig::Disk(disk) => disks.push((disk.id.clone(), disk)),
            DeviceConfig::Net(net) => nets.push((net.id.clone(), net)),
            DeviceConfig::Vsock(v) => vsock = Some(v),
            DeviceConfig::Rng | DeviceConfig::Balloon(_) => {}
        }
    }
    let disk_specs = host.disks.iter().map(|spec| (spec.id.as_deref(), spec)).collect();
    let mut made = HashSet::new();
    replace_each(("disk", "path"), disks, disk_specs, |disk: &mut DiskConfig, spec| {
        replace_disk(disk, spec, host.copied.contains(&disk.id))?;
        if spec.any_identity || spec.copy || host.disks_are_copies {
            disk.identity = None;
        }
        if spec.copy {
            made.insert(disk.id.clone());
        }
        Ok(())
    })?;
    if let Some(id) = host.copied.iter().find(|id| !made.contains(*id)) {
        return Err(ReplaceError(format!(
            "disk \"{id}\" comes along (--copy-disks), and this host names no file for its copy: --disk \
             path=FILE,id={id},copy does"
        )));
    }
    let net_specs = host.nets.iter().map(|spec: &NetSpec| (spec.id.as_deref(), spec)).collect();
    replace_each(("network interface", "tap"), nets, net_specs, replace_net)?;
    host.vsock.as_ref().map_or(Ok(()), |with: &VsockSpec| replace_vsock(vsock, with))
}

/// The guest's items of one kind, or the specs given for them, with their names.
type Named<N, T> = Vec<(N, T)>;

/// Applies each named spec of `with` to the item of its name, and the others to the remaining items
/// in order. `what` is the kind and its mandatory option.
fn replace_each<P, S>(
    what: (&str, &str),
    places: Named<String, &mut P>,
    with: Named<Option<&str>, &S>,
    mut replace: impl FnMut(&mut P, &S) -> Result<(), ReplaceError>,
) -> Result<(), ReplaceError> {
    let (kind, part) = what;
    let (mut rest, mut found) = (Vec::new(), HashSet::new());
    for (id, place) in places {
        match with.iter().find(|(name, _)| *name == Some(id.as_str())) {
            Some((_, spec)) => {
                replace(place, spec)?;
                found.insert(id);
            }
            None => rest.push(place),
        }
    }
    if let Some(id) = with.iter().filter_map(|(name, _)| *name).find(|id| !found.contains(*id)) {
        return Err(ReplaceError(format!("the guest has no {kind} \"{id}\"")));
    }
    let unnamed: Vec<_> = with.iter().filter(|(name, _)| name.is_none()).collect();
    if unnamed.len() > rest.len() {
        let (given, has) = (unnamed.len(), rest.len());
        return Err(ReplaceError(match found.len() + has {
            0 => format!("a {kind} is given ({part}=), but the guest has no {kind}"),
            _ => format!(
                "{given} {kind}s are given without id=, but only {has} of the guest's are left for them"
            ),
        }));
    }
    for (place, (_, spec)) in rest.into_iter().zip(unnamed) {
        replace(place, spec)?;
    }
    Ok(())
}

fn replace_disk(disk: &mut DiskConfig, with: &DiskSpec, copied: bool) -> Result<(), ReplaceError> {
    if with.copy && !copied {
        return Err(ReplaceError(format!(
            "\"{}\" is to be made as a copy of disk \"{}\", which does not come along: send-migration --copy-disks sends it; without \
             copy, a disk is used that both hosts have",
            with.path.display(),
            disk.id
        )));
    }
    if with.readonly != disk.readonly || with.serial.is_some() {
        return Err(ReplaceError(format!(
            "disk \"{}\" is the guest's as it is: only its path can be another one here",
            disk.id
        )));
    }
    disk.path.clone_from(&with.path);
    Ok(())
}
