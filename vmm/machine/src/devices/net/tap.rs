//! A tap of the host: finding it, attaching to it, and reading and writing one frame at a time.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;

use driftline_guest::VmId;
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::net::{AddressFamily, SocketType};
use virtio_bindings::virtio_net::*;

use super::frame::HEADER;
use super::tun;
use crate::config::OpenedTap;
use crate::fail_point;

/// Device number of `/dev/net/tun`.
const TUN_DEVICE: u64 = libc::makedev(10, 200);

/// Number of sockets whose names keep other processes away from a tap.
pub(in crate::devices) const CLAIMS: usize = 2;

/// Reason why a tap cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// No tap of that name exists.
    #[error(
        "tap \"{name}\" does not exist on this host; `ip tuntap add {name} mode tap` creates it"
    )]
    Missing {
        /// Name of the tap.
        name: String,
    },
    /// The host has no taps, or this process may not use any.
    #[error("tap \"{name}\": opening /dev/net/tun failed: {cause}")]
    NoTun {
        /// Name of the tap.
        name: String,
        /// The system's error.
        #[source]
        cause: io::Error,
    },
    /// The tap is in use; it can have one owner only.
    #[error("tap \"{name}\" is in use by another process")]
    InUse {
        /// Name of the tap.
        name: String,
    },
    /// The interface is not a tap, or not one for this number of queues.
    #[error(
        "\"{name}\" cannot be used as a tap with {queues} pair{} of queues: it is not a tap, or \
         was created {} `multi_queue` ({cause})",
        if *queues == 1 { "" } else { "s" },
        if *queues == 1 { "with" } else { "without" }
    )]
    Kind {
        /// Name of the tap.
        name: String,
        /// Number of queue pairs.
        queues: u8,
        /// The system's error.
        #[source]
        cause: io::Error,
    },
    /// The tap lacks what the guest's driver has negotiated.
    #[error("tap \"{name}\" lacks what the guest's driver negotiated: {cause}")]
    Features {
        /// Name of the tap.
        name: String,
        /// The system's error.
        #[source]
        cause: io::Error,
    },
    /// A system call failed.
    #[error("tap \"{name}\": {what} failed: {cause}")]
    System {
        /// Name of the tap.
        name: String,
        /// Operation that failed.
        what: &'static str,
        /// The system's error.
        #[source]
        cause: io::Error,
    },
}

/// An attached tap. Dropping it detaches from it.
#[derive(Debug)]
pub(super) struct Tap {
    /// One file for each queue pair. In tests and fuzzing these are datagram sockets, which also
    /// keep frames apart.
    queues: Vec<File>,
    /// Whether it is a real tap, which supports the tap ioctls.
    is_tap: bool,
    /// Number of queue pairs that the kernel uses.
    enabled: u8,
    /// Claims that other processes of this host see while this process holds the tap.
    claims: Arc<[UnixDatagram]>,
    /// Whether it comes from the process that had the guest before.
    is_handed_over: bool,
}

impl Tap {
    /// Attaches to the tap `name` of this network namespace with `queues` queue pairs, for the
    /// guest `holder`. Only the first pair is enabled.
    pub(super) fn open(name: &str, queues: u8, holder: VmId) -> Result<Self, TapError> {
        let failed = |what: &'static str| {
            move |cause: io::Error| TapError::System { name: name.to_owned(), what, cause }
        };
        // Attaching to a tap that does not exist would create it.
        if !exists(name).map_err(failed("looking it up"))? {
            return Err(TapError::Missing { name: name.to_owned() });
        }
        // Several processes can attach to a tap with several queues. The claim keeps other
        // driftline processes away.
        let claims: [UnixDatagram; CLAIMS] =
            [claim(name, &sole(name))?, claim(name, &held_for(name, holder))?];
        let mut flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        if queues > 1 {
            flags |= libc::IFF_MULTI_QUEUE;
        }
        let mut files = Vec::new();
        for _ in 0..queues {
            let opened = fail_point::pass("tap queue").and_then(|()| {
                let mut options = OpenOptions::new();
                options.read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun")
            });
            let file = opened.map_err(|cause| TapError::NoTun { name: name.to_owned(), cause })?;
            tun::attach(&file, name, flags).map_err(|cause| match cause.raw_os_error() {
                Some(libc::EBUSY) => TapError::InUse { name: name.to_owned() },
                Some(libc::EINVAL) => TapError::Kind { name: name.to_owned(), queues, cause },
                _ => failed("attaching to it")(cause),
            })?;
            tun::set_header_size(&file, HEADER as i32)
                .map_err(failed("setting the header size"))?;
            files.push(file);
        }
        let (enabled, claims) = (queues, claims.into());
        let mut tap = Self { queues: files, is_tap: true, enabled, claims, is_handed_over: false };
        fail_point::pass("tap offloads").map_err(failed("setting offloads"))?;
        tap.set_offloads(0).map_err(failed("setting offloads"))?;
        tap.enable(1).map_err(failed("choosing a queue"))?;
        Ok(tap)
    }

    /// Returns a tap that was attached to earlier, and whose first `enabled` queue pairs the kernel
    /// uses.
    pub(super) fn of_opened(opened: &OpenedTap, enabled: u8) -> io::Result<Self> {
        let (queues, claims) = opened.parts()?;
        let enabled = enabled.min(queues.len() as u8);
        let is_handed_over = opened.is_handed_over;
        Ok(Self { queues, is_tap: true, enabled, claims, is_handed_over })
    }

    /// Returns whether the tap comes from the process that had the guest before.
    pub(super) fn is_handed_over(&self) -> bool {
        self.is_handed_over
    }

    /// Returns duplicates of the queues' files, and of the claims after them.
    pub(super) fn share(&self) -> io::Result<Vec<OwnedFd>> {
        let queues = self.queues.iter().map(|file| Ok(file.try_clone()?.into()));
        let claims = self.claims.iter().map(|claim| Ok(claim.try_clone()?.into()));
        queues.chain(claims).collect()
    }

    /// Returns a tap that uses datagram sockets instead.
    #[cfg(any(test, fuzzing))]
    pub(super) fn of_sockets(queues: Vec<File>) -> Self {
        let claims = Arc::new([]);
        Self { queues, is_tap: false, enabled: 1, claims, is_handed_over: false }
    }

    /// Returns the files. A readable file has frames.
    pub(super) fn files(&self) -> &[File] {
        &self.queues
    }

    /// Returns the number of queue pairs in use.
    pub(super) fn enabled(&self) -> u8 {
        self.enabled
    }

    /// Sets in the kernel the offloads that a driver with these virtio features supports.
    pub(super) fn set_offloads(&self, features: u64) -> io::Result<()> {
        let pairs = [
            (VIRTIO_NET_F_GUEST_CSUM, libc::TUN_F_CSUM),
            (VIRTIO_NET_F_GUEST_TSO4, libc::TUN_F_TSO4),
            (VIRTIO_NET_F_GUEST_TSO6, libc::TUN_F_TSO6),
        ];
        let chosen = pairs.iter().filter(|(feature, _)| features & 1 << feature != 0);
        let offloads = chosen.fold(0, |bits, (_, bit)| bits | bit);
        // The other offloads require checksum offload.
        let offloads = if offloads & libc::TUN_F_CSUM == 0 { 0 } else { offloads };
        match self.queues.first().filter(|_| self.is_tap) {
            Some(file) => tun::set_offloads(file, offloads),
            None => Ok(()),
        }
    }

    /// Makes the kernel use the first `pairs` queue pairs.
    pub(super) fn enable(&mut self, pairs: u8) -> io::Result<()> {
        for (file, i) in self.queues.iter().zip(0..) {
            let (is_enabled, enable) = (i < self.enabled, i < pairs);
            if is_enabled != enable && self.is_tap {
                tun::enable_queue(file, enable)?;
            }
        }
        self.enabled = pairs.min(self.queues.len() as u8);
        Ok(())
    }

    /// Reads a frame with its header. Returns `None` if there is none.
    pub(super) fn read(&self, pair: u8, to: &mut [u8]) -> io::Result<Option<usize>> {
        let Some(mut file) = self.queues.get(usize::from(pair)) else { return Ok(None) };
        match file.read(to) {
            Ok(0) => Ok(None),
            Ok(len) => Ok(Some(len)),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Writes a frame with its header.
    pub(super) fn write(&self, pair: u8, frame: &[u8]) -> io::Result<()> {
        let Some(mut file) = self.queues.get(usize::from(pair)) else { return Ok(()) };
        file.write(frame).map(drop)
    }
}

/// Attaches to the tap `name` with one queue pair, for the interface `id` of a guest `holder` that
/// is built later.
///
/// # Errors
///
/// The tap cannot be attached to.
pub fn open(id: &str, name: &str, holder: VmId) -> Result<OpenedTap, TapError> {
    let Tap { queues, claims, .. } = Tap::open(name, 1, holder)?;
    Ok(OpenedTap::new(id, queues, claims))
}

/// Checks that `file`, which comes from another process, is a queue of the tap `name` as
/// [`Tap::open`] opens it.
///
/// # Errors
///
/// It is another file.
pub(in crate::devices) fn check_queue(file: &File, name: &str) -> io::Result<()> {
    let is_tun = file.metadata()?.rdev() == TUN_DEVICE;
    let mode = fcntl_getfl(file)?;
    if !is_tun || mode & OFlags::ACCMODE != OFlags::RDWR || !mode.contains(OFlags::NONBLOCK) {
        return Err(io::Error::other("it is not an open /dev/net/tun that does not block"));
    }
    let (found, flags) = tun::attached_to(file)?;
    let needed = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    let is_opened_so = flags & needed == needed && tun::header_size(file)? == HEADER as i32;
    match found == name && is_opened_so {
        true => Ok(()),
        false => Err(io::Error::other(format!("it is no queue of tap \"{name}\" as opened here"))),
    }
}

/// Returns whether this network namespace has an interface of that name.
fn exists(name: &str) -> io::Result<bool> {
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::DGRAM, None)?;
    match rustix::net::netdevice::name_to_index(&socket, name) {
        Ok(_) => Ok(true),
        Err(rustix::io::Errno::NODEV) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// Returns whether a driftline process of this host holds the tap `name` for the guest `holder`.
pub(super) fn is_held_for(name: &str, holder: VmId) -> bool {
    matches!(claim(name, &held_for(name, holder)), Err(TapError::InUse { .. }))
}

fn sole(name: &str) -> String {
    format!("driftline/tap/{name}")
}

fn held_for(name: &str, holder: VmId) -> String {
    format!("driftline/tap/{name}/{holder}")
}

/// Claims the tap `name` by binding an abstract socket name, which only one process of a network
/// namespace can hold. The name is freed when its process ends.
fn claim(name: &str, by: &str) -> Result<UnixDatagram, TapError> {
    let address = SocketAddr::from_abstract_name(by);
    address.and_then(|address| UnixDatagram::bind_addr(&address)).map_err(|cause| {
        let name = name.to_owned();
        match cause.kind() {
            io::ErrorKind::AddrInUse => TapError::InUse { name },
            _ => TapError::System { name, what: "claiming it", cause },
        }
    })
}
