//! The taps and the vsock's socket that a client of Firecracker's API names. Like the files, each
//! is opened when it is named, and stays open for the guest's start.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};

use driftline_control::firecracker::{
    ApiFault, MicroVmConfig, NetFault, NetworkInterfaceConfig, VsockDeviceConfig,
};
use driftline_guest::VmId;
use driftline_machine::config::{OpenedSocket, OpenedTap};
use driftline_machine::devices::{TapError, open_tap};
use driftline_machine::socket::{ListeningSocket, SocketError};
use rustix::io::Errno;

/// Longest name of a Linux network device, in bytes.
const MAX_TAP_BYTES: usize = 15;

/// The taps and the socket.
#[derive(Default, Debug)]
pub(super) struct ClientNetworks {
    /// The interfaces' taps, by name.
    taps: HashMap<String, OpenedTap>,
    /// The vsock's socket, and its path.
    vsock: Option<(PathBuf, OpenedSocket)>,
}

impl ClientNetworks {
    /// Attaches to an interface's tap for the guest `holder`. An earlier tap of the same interface
    /// is released first.
    ///
    /// # Errors
    ///
    /// The tap cannot be attached to. The interface has none then.
    pub(super) fn open_tap(
        &mut self,
        net: &NetworkInterfaceConfig,
        holder: VmId,
    ) -> Result<(), ApiFault> {
        let NetworkInterfaceConfig { iface_id: id, host_dev_name: tap, .. } = net;
        self.taps.remove(id);
        if tap.len() > MAX_TAP_BYTES {
            return Err(NetFault::TapName.into());
        }
        let opened = open_tap(id, tap, holder).map_err(|e| tap_fault(e, tap))?;
        self.taps.insert(id.clone(), opened);
        Ok(())
    }

    /// Binds the vsock's socket, whose file stays when the process ends. An earlier socket is
    /// closed and removed first.
    ///
    /// # Errors
    ///
    /// The old socket cannot be removed, or the new one cannot be bound. The vsock has none then.
    pub(super) fn bind_vsock(&mut self, vsock: &VsockDeviceConfig) -> Result<(), ApiFault> {
        if let Some((path, socket)) = self.vsock.take() {
            drop(socket);
            std::fs::remove_file(path).map_err(ApiFault::Vsock)?;
        }
        let path = Path::new(&vsock.uds_path);
        self.vsock = Some((path.to_owned(), bind_new(path).map_err(ApiFault::Vsock)?));
        Ok(())
    }

    /// Returns the taps as the machine of `config` takes them.
    pub(super) fn taps(&self, config: &MicroVmConfig) -> Vec<OpenedTap> {
        let tap = |net: &NetworkInterfaceConfig| {
            let mut tap = self.taps.get(&net.iface_id)?.clone();
            tap.id = config.interface_name(&net.iface_id);
            Some(tap)
        };
        config.interfaces.iter().filter_map(tap).collect()
    }

    /// Returns the vsock's socket.
    pub(super) fn vsock(&self) -> Option<OpenedSocket> {
        self.vsock.as_ref().map(|(_, socket)| socket.clone())
    }
}

/// Returns the fault that Firecracker answers for a tap that cannot be used.
fn tap_fault(e: TapError, tap: &str) -> ApiFault {
    let cause = match e {
        TapError::NoTun { cause, .. } => return NetFault::NoTun(cause).into(),
        // Firecracker would create it, if it may.
        TapError::Missing { .. } => Errno::NODEV.into(),
        TapError::InUse { .. } => Errno::BUSY.into(),
        TapError::Kind { cause, .. }
        | TapError::Features { cause, .. }
        | TapError::System { cause, .. } => cause,
    };
    NetFault::Tap { cause, tap: tap.to_owned() }.into()
}

/// Binds a vsock's socket at a path that no file has. The file stays when the process ends.
///
/// # Errors
///
/// Those that Firecracker names.
pub(super) fn bind_new(path: &Path) -> io::Result<OpenedSocket> {
    match ListeningSocket::bind_new(path) {
        Ok(bound) => Ok(bound.into()),
        Err(SocketError::Exists(_)) => Err(Errno::ADDRINUSE.into()),
        Err(SocketError::System { cause, .. }) => Err(cause),
        Err(other) => Err(io::Error::other(other)),
    }
}
