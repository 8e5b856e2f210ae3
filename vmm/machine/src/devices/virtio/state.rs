//! A virtio device's state, stored in the section `VIRTIO` of the device's number.

use std::fmt::Display;

use driftline_guest::GuestError;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::registers::RegisterState;
use super::ring::RingPosition;
use crate::codec;
use crate::devices::error::StateError;
use crate::devices::rate_limit::SavedLimiter;

/// Most limiters of a device: those of a network interface.
const MAX_LIMITERS: usize = 2;

/// A device's state without its configuration: what the driver wrote to its registers, its
/// positions in the queues, and the device's own state.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct VirtioState {
    /// The virtio device ID.
    pub(super) device_id: u32,
    pub(super) registers: RegisterState,
    pub(super) interrupt_status: u32,
    /// Whether a violation stopped the device and the driver has not reset it since.
    pub(super) needs_reset: bool,
    pub(super) config_generation: u32,
    /// Position in each queue.
    pub(super) positions: Vec<RingPosition>,
    /// The device's own state, in its own encoding.
    pub(super) device: Vec<u8>,
    /// The device's rate limiters; none if it has no limits.
    #[serde(deserialize_with = "codec::at_most::<MAX_LIMITERS, _, _>")]
    pub(super) limiters: Vec<SavedLimiter>,
}

impl VirtioState {
    /// Returns the bytes of the section.
    pub(crate) fn encode(&self) -> Result<Vec<u8>, postcard::Error> {
        codec::encode_versioned(self)
    }

    /// Decodes the section `what`. The bytes are hostile.
    pub(crate) fn decode(what: impl Display, bytes: &[u8]) -> Result<Self, GuestError> {
        codec::decode_versioned(what, bytes)
    }
}

#[cfg(test)]
impl VirtioState {
    /// Returns a state whose fields all differ.
    pub(crate) fn example() -> Self {
        Self {
            device_id: 2,
            registers: RegisterState::example(),
            interrupt_status: 3,
            needs_reset: true,
            config_generation: 4,
            positions: vec![RingPosition::example()],
            device: b"its own".to_vec(),
            limiters: vec![SavedLimiter::example(), SavedLimiter::default()],
        }
    }

    /// Returns the device's own state.
    pub(crate) fn device(&self) -> &[u8] {
        &self.device
    }
}

/// Encodes a device's own state, for [`Device::save`](super::Device::save).
pub(crate) fn encode_state<T: Serialize>(state: &T) -> Result<Vec<u8>, StateError> {
    codec::encode(state).map_err(StateError::Encode)
}

/// Decodes a device's own state, for [`Device::restore`](super::Device::restore). The bytes are
/// hostile; there must be none after the state.
pub(crate) fn decode_state<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, StateError> {
    Ok(codec::decode(bytes)?)
}
