//! A virtio device's state, in the section `VIRTIO` of its number.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::registers::RegisterState;
use super::ring::RingPosition;

/// What a device is made of besides its configuration: what the driver wrote to its registers, how
/// far its queues are, and what the device itself says.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct VirtioState {
    /// The virtio device ID.
    pub(super) device_id: u32,
    pub(super) registers: RegisterState,
    pub(super) interrupt_status: u32,
    /// A violation stopped it, and the driver has not reset it since.
    pub(super) needs_reset: bool,
    pub(super) config_generation: u32,
    /// Of each queue.
    pub(super) positions: Vec<RingPosition>,
    /// The device's own, in its own encoding.
    pub(super) device: Vec<u8>,
}

#[cfg(test)]
impl VirtioState {
    /// One whose fields differ.
    pub(crate) fn example() -> Self {
        Self {
            device_id: 2,
            registers: RegisterState::example(),
            interrupt_status: 3,
            needs_reset: true,
            config_generation: 4,
            positions: vec![RingPosition::example()],
            device: b"its own".to_vec(),
        }
    }
}

/// The bytes of a device's own state, for [`Device::save`](super::Device::save).
pub(crate) fn encode_state<T: Serialize>(state: &T) -> Result<Vec<u8>, String> {
    postcard::to_stdvec(state).map_err(|e| e.to_string())
}

/// Reads a device's own state, for [`Device::restore`](super::Device::restore): all of the bytes,
/// which are hostile.
pub(crate) fn decode_state<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    match postcard::take_from_bytes(bytes).map_err(|e| e.to_string())? {
        (state, []) => Ok(state),
        (_, rest) => Err(format!("{} bytes follow its end", rest.len())),
    }
}
