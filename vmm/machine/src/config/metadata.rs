//! The metadata service that a guest reaches through a network interface.

use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

use super::error::ConfigError;

/// Which requests of a guest get its metadata.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum MetadataVersion {
    /// All.
    V1,
    /// Those with the token of a session.
    V2,
}

/// How an interface answers a guest's requests for its metadata.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NetMetadata {
    /// The address that the guest asks: one of 169.254.1.0 to 169.254.254.255.
    pub address: Ipv4Addr,
    /// Which requests are answered.
    pub version: MetadataVersion,
    /// Whether values are written as EC2's service writes them, whatever the guest accepts.
    pub imds_compat: bool,
}

impl NetMetadata {
    /// Checks the address.
    ///
    /// # Errors
    ///
    /// It is not link-local, or is reserved.
    pub fn check(&self) -> Result<(), ConfigError> {
        match self.address.octets() {
            [169, 254, 1..=254, _] => Ok(()),
            _ => {
                let form = "it is one of 169.254.1.0 to 169.254.254.255";
                let address = self.address.to_string();
                Err(ConfigError::malformed("address of the metadata service", address, form))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_link_local_addresses_are_taken() {
        let check = |address: &str| {
            let address = address.parse().unwrap();
            NetMetadata { address, version: MetadataVersion::V2, imds_compat: false }.check()
        };
        for good in ["169.254.1.0", "169.254.169.254", "169.254.254.255"] {
            check(good).unwrap();
        }
        for bad in ["169.254.0.255", "169.254.255.0", "10.0.0.1", "255.255.255.255", "0.0.0.0"] {
            assert!(check(bad).unwrap_err().to_string().contains(bad));
        }
    }
}
