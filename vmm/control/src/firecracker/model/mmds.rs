//! The metadata service.

use std::net::Ipv4Addr;

use driftline_machine::config::MetadataVersion;
use serde::{Deserialize, Serialize};

/// Version of the metadata service.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum MmdsVersion {
    /// Requests need no token.
    #[default]
    V1,
    /// Requests need a session's token.
    V2,
}

impl From<MmdsVersion> for MetadataVersion {
    fn from(version: MmdsVersion) -> Self {
        match version {
            MmdsVersion::V1 => Self::V1,
            MmdsVersion::V2 => Self::V2,
        }
    }
}

/// Body of `PUT /mmds/config`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MmdsConfig {
    /// The service's version.
    #[serde(default)]
    pub version: MmdsVersion,
    /// Names of the interfaces through which the guest reaches the service.
    pub network_interfaces: Vec<String>,
    /// The service's address. Absent means 169.254.169.254.
    pub ipv4_address: Option<Ipv4Addr>,
    /// Whether answers are those of EC2's service, whatever the guest accepts.
    #[serde(default)]
    pub imds_compat: bool,
}
