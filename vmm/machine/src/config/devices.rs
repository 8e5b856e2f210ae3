//! The devices of a machine, as its configuration has them and as the command line gives them.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::DiskIdentity;
use super::balloon::{self, BalloonConfig};
use super::device_id::check_id;
use super::net::{NetConfig, NetSpec, VsockConfig, VsockSpec, replace_net, replace_vsock};
use super::replace::ReplaceError;

/// Most virtio devices: there are no more interrupts for them.
pub const MAX_DEVICES: usize = 16;
/// Longest serial number of a drive, in bytes: what virtio has room for.
pub const MAX_SERIAL_BYTES: usize = 20;
/// Largest block of a disk, in bytes: a page, since Linux takes no larger ones.
pub const MAX_BLOCK_BYTES: u32 = 4096;
/// A virtio device. Where it is in the list decides its registers' place and its interrupt.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceConfig {
    /// A disk.
    Disk(DiskConfig),
    /// A source of randomness.
    Rng,
    /// A network interface.
    Net(NetConfig),
    /// A socket device; a machine has one at most.
    Vsock(VsockConfig),
    /// A balloon.
    Balloon(BalloonConfig),
}

impl DeviceConfig {
    /// The name by which people know the device, one of its own in each machine.
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
    /// Its name.
    pub id: String,
    /// A raw image or a block device; on another host perhaps another one, see
    /// [`HostConfig::disks`](super::HostConfig::disks).
    pub path: PathBuf,
    /// The guest cannot write to it.
    pub readonly: bool,
    /// What the guest reads as its serial number.
    pub serial: String,
    /// What the guest sees of the file: whole sectors of 512 bytes.
    pub bytes: u64,
    /// The block that the guest is told of, a power of two of bytes: reads and writes of whole ones
    /// suit the file best.
    pub block_bytes: u32,
    /// Which disk it is, where that is known. Of a configuration that has come from elsewhere:
    /// there.
    pub identity: Option<DiskIdentity>,
}

/// A disk as asked for: `path=F[,readonly][,id=NAME][,serial=TEXT][,identity=any][,copy]`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DiskSpec {
    /// A raw image or a block device.
    pub path: PathBuf,
    /// The guest shall not write to it.
    pub readonly: bool,
    /// Its name.
    pub id: Option<String>,
    /// What the guest reads as its serial number.
    pub serial: Option<String>,
    /// It may be another disk than the one that the guest comes with.
    pub any_identity: bool,
    /// It comes along with its guest: the file is made for it.
    pub copy: bool,
}

impl FromStr for DiskSpec {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let (mut path, mut readonly, mut id, mut serial) = (None, false, None, None);
        let (mut any_identity, mut copy) = (false, false);
        for option in s.split(',') {
            match option.split_once('=') {
                None if path.is_none() && option.contains(['.', '/']) => {
                    return Err(format!("a disk wants path=FILE, so: --disk path={s}"));
                }
                Some(("path", value)) if !value.is_empty() => path = Some(PathBuf::from(value)),
                Some(("id", value)) => id = Some(check_id(value)?),
                Some(("serial", value)) => serial = Some(check_serial(value)?),
                None if option == "readonly" => readonly = true,
                None if option == "copy" => copy = true,
                Some(("identity", "any")) => any_identity = true,
                _ => {
                    return Err(format!(
                        "\"{option}\" is not an option of a disk: they are path=FILE, readonly, id=NAME and serial=TEXT; \
                         receive-migration also takes identity=any and copy, restore identity=any"
                    ));
                }
            }
        }
        let path = path.ok_or_else(|| format!("\"{s}\" names no file: path=FILE is missing"))?;
        Ok(Self { path, readonly, id, serial, any_identity, copy })
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

/// Whether any host could have a guest of this memory with these devices; if not, why.
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

/// A driver can use blocks from a sector to a page, of which the disk has whole ones.
fn check_block(disk: &DiskConfig) -> Result<(), String> {
    let DiskConfig { id, block_bytes, bytes, .. } = disk;
    let usable = (512..=MAX_BLOCK_BYTES).contains(block_bytes) && block_bytes.is_power_of_two();
    if !usable || !bytes.is_multiple_of(u64::from(*block_bytes)) {
        return Err(format!("its disk \"{id}\" of {bytes} bytes has blocks of {block_bytes}"));
    }
    Ok(())
}

/// The files of `devices`, for whom it matters what they are named.
pub(super) fn paths(devices: &[DeviceConfig]) -> impl Iterator<Item = &Path> {
    devices.iter().filter_map(|device| match device {
        DeviceConfig::Disk(disk) => Some(disk.path.as_path()),
        DeviceConfig::Vsock(vsock) => Some(vsock.uds.as_path()),
        DeviceConfig::Net(_) | DeviceConfig::Rng | DeviceConfig::Balloon(_) => None,
    })
}

/// The disks of `devices`, in their order.
pub fn disks(devices: &[DeviceConfig]) -> impl Iterator<Item = &DiskConfig> {
    devices.iter().filter_map(|device| match device {
        DeviceConfig::Disk(disk) => Some(disk),
        _ => None,
    })
}

/// As [`disks`], to be changed.
pub(crate) fn disks_mut(devices: &mut [DeviceConfig]) -> impl Iterator<Item = &mut DiskConfig> {
    devices.iter_mut().filter_map(|device| match device {
        DeviceConfig::Disk(disk) => Some(disk),
        _ => None,
    })
}

/// Puts what is asked for on this host in the place of what a guest came with.
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

/// Things of a kind that a guest has, or that are given for it, with their names.
type Named<N, T> = Vec<(N, T)>;

/// Puts the named ones of `with` in the places of their names, the others in the order of the rest.
/// `what` is the kind, and the part of it that is always given.
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
