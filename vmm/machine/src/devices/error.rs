//! Why a device cannot be used, or refuses what the machine asks.

use std::io;

use super::block::DiskError;
use super::misfit::DeviceMisfit;
use super::net::TapError;
use super::vsock::VsockError;
use crate::codec::DecodeError;
use crate::config::ConfigError;

/// Why a device cannot be used on this host, or refuses what the machine asks of it.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// A disk's file cannot be used, or the guest's writes to it are not durable.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// A network interface's tap cannot be used.
    #[error(transparent)]
    Tap(#[from] TapError),
    /// The vsock's unix socket cannot be used, or its connections cannot continue.
    #[error(transparent)]
    Vsock(#[from] VsockError),
    /// A system call failed.
    #[error("device \"{id}\" cannot be started: {cause}")]
    System {
        /// Name of the device.
        id: String,
        /// The system's error.
        #[source]
        cause: io::Error,
    },
    /// A state is not one of this device.
    #[error(transparent)]
    State(#[from] StateError),
}

/// Why the state of a device cannot be saved or restored. A saved state comes from a file or from
/// a peer.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The state cannot be encoded.
    #[error("it cannot be encoded: {0}")]
    Encode(postcard::Error),
    /// The bytes are not a valid state.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// No guest can bring a keyboard controller into the state.
    #[error("it is not a state of a keyboard controller")]
    Keyboard,
    /// The state has rate limits that no configuration can have.
    #[error(transparent)]
    Limit(#[from] ConfigError),
    /// The state is that of another device, or one that this device cannot have.
    #[error(transparent)]
    Misfit(Box<DeviceMisfit>),
}

impl From<DeviceMisfit> for StateError {
    fn from(misfit: DeviceMisfit) -> Self {
        Self::Misfit(Box::new(misfit))
    }
}
