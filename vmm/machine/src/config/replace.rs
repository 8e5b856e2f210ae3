//! Replaces the host-specific parts of an arriving guest's devices.

use std::collections::HashSet;
use std::fmt;

use driftline_guest::GuestError;

use super::devices::DeviceConfig;
use super::disk::{DiskConfig, DiskSpec};
use super::host::HostConfig;
use super::net::{NetConfig, NetSpec, VsockConfig, VsockSpec};

/// The parts that are given on this host do not fit the guest.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReplaceError(pub(super) String);

impl fmt::Display for ReplaceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ReplaceError {}

impl From<ReplaceError> for GuestError {
    fn from(e: ReplaceError) -> Self {
        Self::System { what: "giving the guest these devices", cause: Box::new(e) }
    }
}

/// Replaces the host-specific parts of an arriving guest's devices with those of this host.
pub(super) fn replace(devices: &mut [DeviceConfig], host: &HostConfig) -> Result<(), ReplaceError> {
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
type NamedItems<N, T> = Vec<(N, T)>;

/// Applies each named spec of `with` to the item of its name, and the others to the remaining items
/// in order. `what` is the kind and its mandatory option.
fn replace_each<P, S>(
    what: (&str, &str),
    places: NamedItems<String, &mut P>,
    with: NamedItems<Option<&str>, &S>,
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

fn replace_net(net: &mut NetConfig, with: &NetSpec) -> Result<(), ReplaceError> {
    if with.mac.is_some_and(|mac| mac != net.mac) || with.queues.is_some_and(|q| q != net.queues) {
        return Err(ReplaceError(format!(
            "network interface \"{}\" is the guest's as it is: only its tap can be another one here",
            net.id
        )));
    }
    net.tap.clone_from(&with.tap);
    Ok(())
}

fn replace_vsock(vsock: Option<&mut VsockConfig>, with: &VsockSpec) -> Result<(), ReplaceError> {
    let none = || ReplaceError("the guest has no vsock, and one is given".to_owned());
    let vsock = vsock.ok_or_else(none)?;
    if let Some(cid) = with.cid.filter(|cid| *cid != vsock.cid) {
        return Err(ReplaceError(format!(
            "the guest's vsock has context ID {}, which cannot be {cid} here",
            vsock.cid
        )));
    }
    vsock.uds.clone_from(&with.uds);
    Ok(())
}
