//! Network interfaces.

use std::fmt;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::model::RateLimiterConfig;

/// An Ethernet address. Any six bytes are accepted here, as in Firecracker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GuestMac(pub [u8; 6]);

impl fmt::Display for GuestMac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl Serialize for GuestMac {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for GuestMac {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let byte = |part: &str| match part.len() {
            2 => u8::from_str_radix(part, 16).ok(),
            _ => None,
        };
        let bytes: Option<Vec<u8>> = text.split(':').map(byte).collect();
        let bytes = bytes.and_then(|bytes| <[u8; 6]>::try_from(bytes).ok());
        bytes.map(Self).ok_or_else(|| D::Error::custom("The provided MAC address is invalid."))
    }
}

/// Body of `PUT /network-interfaces/{id}`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkInterfaceConfig {
    /// The interface's name, equal to the one in the path.
    pub iface_id: String,
    /// The tap.
    pub host_dev_name: String,
    /// The address that the guest sees.
    pub guest_mac: Option<GuestMac>,
    /// Largest frame that the guest is told to send, in bytes.
    pub mtu: Option<u16>,
    /// Limits of received frames.
    pub rx_rate_limiter: Option<RateLimiterConfig>,
    /// Limits of sent frames.
    pub tx_rate_limiter: Option<RateLimiterConfig>,
}

impl NetworkInterfaceConfig {
    /// Returns the interface as `GET /vm/config` shows it.
    pub(crate) fn in_effect(self) -> Self {
        Self {
            rx_rate_limiter: self.rx_rate_limiter.and_then(RateLimiterConfig::in_effect),
            tx_rate_limiter: self.tx_rate_limiter.and_then(RateLimiterConfig::in_effect),
            ..self
        }
    }
}

/// Body of `PATCH /network-interfaces/{id}`.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkInterfaceUpdateConfig {
    /// The interface's name, equal to the one in the path.
    pub iface_id: String,
    /// New limits of received frames.
    pub rx_rate_limiter: Option<RateLimiterConfig>,
    /// New limits of sent frames.
    pub tx_rate_limiter: Option<RateLimiterConfig>,
}
