//! Names of a configuration's devices in its machine, where all kinds share one set of names.
//!
//! Firecracker has one set for each kind, and its clients use that: `1` may name a drive and an
//! interface. A name that is taken gets a prefix with a `-`, which no name of a client has.

use super::config::MicroVmConfig;
use super::name_limit::NET_PREFIX;

/// Names of devices that a machine has at most once.
const FIXED: [&str; 3] = ["balloon", "rng", "vsock"];

impl MicroVmConfig {
    /// Returns the machine's name for the drive `id`.
    pub fn drive_name(&self, id: &str) -> String {
        if FIXED.contains(&id) { format!("disk-{id}") } else { id.to_owned() }
    }

    /// Returns the machine's name for the network interface `id`.
    pub fn interface_name(&self, id: &str) -> String {
        let is_drive = self.drives.iter().any(|drive| drive.drive_id == id);
        if is_drive || FIXED.contains(&id) { format!("{NET_PREFIX}{id}") } else { id.to_owned() }
    }
}
