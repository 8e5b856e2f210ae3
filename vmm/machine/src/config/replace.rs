//! Replaces the host-specific parts of an arriving guest's devices.

use std::collections::HashSet;
use std::path::PathBuf;

use driftline_guest::GuestError;

use super::devices::DeviceConfig;
use super::disk::{DiskConfig, DiskSpec};
use super::host::HostConfig;
use super::net::{MacAddr, NetConfig, NetSpec, VsockConfig, VsockSpec};
use super::rate_limits::NetLimits;

/// The reason why the devices that are given on this host do not fit the guest.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ReplaceError {
    /// No file is given for a disk that is copied with the guest.
    #[error(
        "disk \"{id}\" is copied with the guest (--copy-disks), and this host names no file for \
         its copy: add --disk path=FILE,id={id},copy"
    )]
    NoFileForCopy {
        /// The disk's name.
        id: String,
    },
    /// A file is given for the copy of a disk that is not copied with the guest.
    #[error(
        "\"{}\" is to be made as a copy of disk \"{id}\", which is not copied with the guest: send \
         it with send-migration --copy-disks, or name a disk that both hosts have, without copy",
        path.display()
    )]
    NotCopied {
        /// The file that is given.
        path: PathBuf,
        /// The disk's name.
        id: String,
    },
    /// Rate limits are given for a device of an arriving guest.
    #[error("{kind} \"{id}\" comes with its rate limits: give none here")]
    LimitsOfGuest {
        /// The kind of the device.
        kind: &'static str,
        /// The name.
        id: String,
    },
    /// The guest has no device of a given name.
    #[error("the guest has no {kind} \"{id}\"")]
    UnknownId {
        /// The kind of the device.
        kind: &'static str,
        /// The name.
        id: String,
    },
    /// Two devices are given for the guest's device of this name.
    #[error("{kind} \"{id}\" of the guest is given twice (id={id}): give it once")]
    GivenTwice {
        /// The kind of the device.
        kind: &'static str,
        /// The name.
        id: String,
    },
    /// A device is given, and the guest has none of its kind.
    #[error("a {kind} is given ({option}=), but the guest has no {kind}")]
    NoSuchKind {
        /// The kind of the device.
        kind: &'static str,
        /// The option that every device of the kind needs.
        option: &'static str,
    },
    /// More devices are given without a name than the guest has left for them.
    #[error(
        "{given} {kind}s are given without id=, but only {left} of the guest's are left for them"
    )]
    TooMany {
        /// The kind of the devices.
        kind: &'static str,
        /// Number of devices that are given without a name.
        given: usize,
        /// Number of the guest's devices that no name selects.
        left: usize,
    },
    /// A disk is given with other settings than the guest's.
    #[error(
        "disk \"{id}\" of the guest is {}, and only its path can be another one here: give \
         readonly only for a read-only disk, and no serial=",
        if *readonly { "read-only" } else { "writable" }
    )]
    OtherDisk {
        /// The disk's name.
        id: String,
        /// Whether the guest cannot write to it.
        readonly: bool,
    },
    /// A network interface is given with other settings than the guest's.
    #[error(
        "network interface \"{id}\" of the guest has the address {mac} and {queues} pairs of \
         queues, and only its tap can be another one here: leave mac= and queues= out"
    )]
    OtherInterface {
        /// The interface's name.
        id: String,
        /// Its address.
        mac: MacAddr,
        /// Its number of queue pairs.
        queues: u8,
    },
    /// A vsock is given, and the guest has none.
    #[error("a vsock is given (--vsock), but the guest has no vsock")]
    NoVsock,
    /// A vsock is given with another context ID than the guest's.
    #[error("the guest's vsock has context ID {has}, which cannot be {given} here: leave cid= out")]
    OtherCid {
        /// The guest's context ID.
        has: u32,
        /// The context ID that is given.
        given: u32,
    },
}

impl From<ReplaceError> for GuestError {
    fn from(e: ReplaceError) -> Self {
        Self::System { what: "giving the guest these devices", cause: Box::new(e) }
    }
}

/// A kind of device that is replaced by name or in order.
#[derive(Clone, Copy)]
struct ReplacedKind {
    name: &'static str,
    /// The option that every device of the kind needs.
    option: &'static str,
}

const DISK: ReplacedKind = ReplacedKind { name: "disk", option: "path" };
const INTERFACE: ReplacedKind = ReplacedKind { name: "network interface", option: "tap" };

/// Replaces the host-specific parts of an arriving guest's devices with those of this host.
pub(super) fn replace(devices: &mut [DeviceConfig], host: &HostConfig) -> Result<(), ReplaceError> {
    let (mut disks, mut nets, mut vsock) = (Vec::new(), Vec::new(), None);
    for device in devices {
        match device {
            DeviceConfig::Disk(disk) => disks.push((disk.id.clone(), disk)),
            DeviceConfig::Net(net) => nets.push((net.id.clone(), net)),
            DeviceConfig::Vsock(v) => vsock = Some(v),
            DeviceConfig::Rng(_) | DeviceConfig::Balloon(_) => {}
        }
    }
    let disk_specs = host.disks.iter().map(|spec| (spec.id.as_deref(), spec)).collect();
    let mut copies = HashSet::new();
    replace_each(DISK, disks, disk_specs, |disk: &mut DiskConfig, spec| {
        replace_disk(disk, spec, host.copied.contains(&disk.id))?;
        if spec.any_identity || spec.copy || host.disks_are_copies {
            disk.identity = None;
        }
        if spec.copy {
            copies.insert(disk.id.clone());
        }
        Ok(())
    })?;
    if let Some(id) = host.copied.iter().find(|id| !copies.contains(*id)) {
        return Err(ReplaceError::NoFileForCopy { id: id.clone() });
    }
    let net_specs = host.nets.iter().map(|spec: &NetSpec| (spec.id.as_deref(), spec)).collect();
    replace_each(INTERFACE, nets, net_specs, replace_net)?;
    host.vsock.as_ref().map_or(Ok(()), |with: &VsockSpec| replace_vsock(vsock, with))
}

/// The guest's items of one kind, or the specs given for them, with their names.
type NamedItems<N, T> = Vec<(N, T)>;

/// Applies each named spec of `with` to the item of its name, and the others to the remaining items
/// in order.
fn replace_each<P, S>(
    kind: ReplacedKind,
    items: NamedItems<String, &mut P>,
    with: NamedItems<Option<&str>, &S>,
    mut replace: impl FnMut(&mut P, &S) -> Result<(), ReplaceError>,
) -> Result<(), ReplaceError> {
    let (mut rest, mut found) = (Vec::new(), HashSet::new());
    for (id, item) in items {
        match with.iter().find(|(name, _)| *name == Some(id.as_str())) {
            Some((_, spec)) => {
                replace(item, spec)?;
                found.insert(id);
            }
            None => rest.push(item),
        }
    }
    let mut given = HashSet::new();
    for id in with.iter().filter_map(|(name, _)| *name) {
        if !found.contains(id) {
            return Err(ReplaceError::UnknownId { kind: kind.name, id: id.to_owned() });
        }
        if !given.insert(id) {
            return Err(ReplaceError::GivenTwice { kind: kind.name, id: id.to_owned() });
        }
    }
    let unnamed: Vec<_> = with.iter().filter(|(name, _)| name.is_none()).collect();
    if unnamed.len() > rest.len() {
        return Err(match found.len() + rest.len() {
            0 => ReplaceError::NoSuchKind { kind: kind.name, option: kind.option },
            _ => {
                let (given, left) = (unnamed.len(), rest.len());
                ReplaceError::TooMany { kind: kind.name, given, left }
            }
        });
    }
    for (item, (_, spec)) in rest.into_iter().zip(unnamed) {
        replace(item, spec)?;
    }
    Ok(())
}

fn replace_disk(disk: &mut DiskConfig, with: &DiskSpec, copied: bool) -> Result<(), ReplaceError> {
    if with.copy && !copied {
        return Err(ReplaceError::NotCopied { path: with.path.clone(), id: disk.id.clone() });
    }
    if with.readonly != disk.readonly || with.serial.is_some() {
        return Err(ReplaceError::OtherDisk { id: disk.id.clone(), readonly: disk.readonly });
    }
    if !with.limits.is_none() {
        return Err(ReplaceError::LimitsOfGuest { kind: DISK.name, id: disk.id.clone() });
    }
    disk.path.clone_from(&with.path);
    Ok(())
}

fn replace_net(net: &mut NetConfig, with: &NetSpec) -> Result<(), ReplaceError> {
    if with.mac.is_some_and(|mac| mac != net.mac) || with.queues.is_some_and(|q| q != net.queues) {
        let NetConfig { id, mac, queues, .. } = net.clone();
        return Err(ReplaceError::OtherInterface { id, mac, queues });
    }
    if with.limits != NetLimits::default() {
        return Err(ReplaceError::LimitsOfGuest { kind: INTERFACE.name, id: net.id.clone() });
    }
    net.tap.clone_from(&with.tap);
    Ok(())
}

fn replace_vsock(vsock: Option<&mut VsockConfig>, with: &VsockSpec) -> Result<(), ReplaceError> {
    let vsock = vsock.ok_or(ReplaceError::NoVsock)?;
    if let Some(given) = with.cid.filter(|cid| *cid != vsock.cid) {
        return Err(ReplaceError::OtherCid { has: vsock.cid, given });
    }
    vsock.uds.clone_from(&with.uds);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 9]);

    /// Replaces the devices of a guest with one disk, one network interface and a vsock.
    fn replaced(change: impl FnOnce(&mut HostConfig)) -> Result<(), ReplaceError> {
        let (id, tap) = ("wan".to_owned(), "t0".to_owned());
        let mut guest = [
            DeviceConfig::Disk(crate::testing::disk("root", Path::new("/a"), 512)),
            DeviceConfig::Net(NetConfig {
                id,
                tap,
                mac: MAC,
                queues: 2,
                mtu: None,
                limits: Default::default(),
                metadata: None,
            }),
            DeviceConfig::Vsock(VsockConfig { cid: 3, uds: "/v".into() }),
        ];
        let mut host = HostConfig::default();
        change(&mut host);
        replace(&mut guest, &host)
    }

    #[test]
    fn devices_that_do_not_fit_are_refused() {
        let disks = |specs: &[&str]| {
            replaced(|host| host.disks = specs.iter().map(|s| s.parse().unwrap()).collect())
        };
        let id = || "root".to_owned();
        assert_eq!(disks(&["path=/b"]), Ok(()));
        let unknown = ReplaceError::UnknownId { kind: "disk", id: "y".to_owned() };
        assert_eq!(disks(&["path=/b,id=y"]), Err(unknown));
        let many = ReplaceError::TooMany { kind: "disk", given: 2, left: 1 };
        assert_eq!(disks(&["path=/b", "path=/c"]), Err(many));
        let twice = ReplaceError::GivenTwice { kind: "disk", id: id() };
        assert_eq!(disks(&["path=/b,id=root", "path=/c,id=root"]), Err(twice));
        let other = Err(ReplaceError::OtherDisk { id: id(), readonly: false });
        assert_eq!(disks(&["path=/b,readonly"]), other);
        assert_eq!(disks(&["path=/b,serial=s"]), other);
        let limits = Err(ReplaceError::LimitsOfGuest { kind: "disk", id: id() });
        assert_eq!(disks(&["path=/b,iops=8"]), limits);
        let not_copied = ReplaceError::NotCopied { path: "/b".into(), id: id() };
        assert_eq!(disks(&["path=/b,copy"]), Err(not_copied));
        let no_file = replaced(|host| host.copied = vec![id()]);
        assert_eq!(no_file, Err(ReplaceError::NoFileForCopy { id: id() }));
        let net = |spec: &str| replaced(|host| host.nets = vec![spec.parse().unwrap()]);
        let other = ReplaceError::OtherInterface { id: "wan".to_owned(), mac: MAC, queues: 2 };
        assert_eq!(net("tap=t1,queues=2"), Ok(()));
        assert_eq!(net("tap=t1,queues=3"), Err(other));
        let (kind, id) = ("network interface", "wan".to_owned());
        let limits = Err(ReplaceError::LimitsOfGuest { kind, id });
        assert_eq!(net("tap=t1,rx-bandwidth=1M"), limits);
        let vsock = |spec: &str| replaced(|host| host.vsock = Some(spec.parse().unwrap()));
        assert_eq!(vsock("uds=/w"), Ok(()));
        assert_eq!(vsock("cid=4,uds=/w"), Err(ReplaceError::OtherCid { has: 3, given: 4 }));
        let host = HostConfig { vsock: Some("uds=/w".parse().unwrap()), ..HostConfig::default() };
        assert_eq!(replace(&mut [], &host), Err(ReplaceError::NoVsock));
        let host = HostConfig { nets: vec!["tap=t1".parse().unwrap()], ..HostConfig::default() };
        let none = ReplaceError::NoSuchKind { kind: "network interface", option: "tap" };
        assert_eq!(replace(&mut [], &host), Err(none));
    }
}
