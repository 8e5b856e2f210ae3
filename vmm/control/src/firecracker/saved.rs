//! The configuration of the API in a snapshot: what a loaded guest shows, and what its machine's
//! own configuration does not say.

use driftline_guest::{Section, SectionTag};
use serde::{Deserialize, Serialize};

use super::config::MicroVmConfig;
use super::model::{
    BalloonDeviceConfig, BlockDeviceConfig, BootSourceConfig, EntropyDeviceConfig,
    MachineConfiguration, MmdsConfig, NetworkInterfaceConfig, VsockDeviceConfig,
};

/// The parts that are saved. The log, the metrics, the metadata and the serial port's output belong
/// to a process, not to its guest.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct SavedConfig {
    boot_source: Option<BootSourceConfig>,
    machine_config: MachineConfiguration,
    drives: Vec<BlockDeviceConfig>,
    network_interfaces: Vec<NetworkInterfaceConfig>,
    vsock: Option<VsockDeviceConfig>,
    balloon: Option<BalloonDeviceConfig>,
    entropy: Option<EntropyDeviceConfig>,
    mmds_config: Option<MmdsConfig>,
}

/// Returns the section of a snapshot's state that has `config`. `balloon` is the balloon as it is
/// now.
pub(crate) fn to_section(
    config: &MicroVmConfig,
    balloon: Option<BalloonDeviceConfig>,
) -> Result<Section, serde_json::Error> {
    let saved = SavedConfig {
        boot_source: config.boot_source.clone(),
        machine_config: config.machine.clone(),
        drives: config.drives.clone(),
        network_interfaces: config.interfaces.clone(),
        vsock: config.vsock.clone(),
        balloon,
        entropy: config.entropy.clone(),
        mmds_config: config.mmds.clone(),
    };
    let bytes = serde_json::to_vec(&saved)?;
    Ok(Section { must_understand: false, ..Section::new(SectionTag::API, 0, bytes) })
}

impl MicroVmConfig {
    /// Replaces this configuration with that of a snapshot's guest, from the section that a
    /// snapshot's state has for it. What belongs to this process stays. The section is hostile
    /// input: the caller compares it with the machine's configuration.
    ///
    /// # Errors
    ///
    /// The section is malformed.
    pub fn load(&mut self, section: &Section) -> Result<(), serde_json::Error> {
        let saved: SavedConfig = serde_json::from_slice(&section.bytes)?;
        self.boot_source = saved.boot_source;
        self.machine = saved.machine_config;
        self.drives = saved.drives;
        self.interfaces = saved.network_interfaces;
        self.vsock = saved.vsock;
        self.balloon = saved.balloon;
        self.entropy = saved.entropy;
        self.mmds = saved.mmds_config;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn configured() -> MicroVmConfig {
        let mut config = MicroVmConfig::new(100);
        let drive = json!({ "drive_id": "a", "is_root_device": true, "partuuid": "0a-01",
            "cache_type": "Writeback", "io_engine": "Async", "path_on_host": "f",
            "is_read_only": true, "rate_limiter": { "ops": { "size": 1, "refill_time": 2 } } });
        config.drives = vec![serde_json::from_value(drive).unwrap()];
        let net = json!({ "iface_id": "n", "host_dev_name": "t",
            "guest_mac": "06:00:00:00:00:01", "mtu": 1400 });
        config.interfaces = vec![serde_json::from_value(net).unwrap()];
        let machine = json!({ "vcpu_count": 2, "mem_size_mib": 64, "track_dirty_pages": true });
        config.machine = serde_json::from_value(machine).unwrap();
        config.boot_source = serde_json::from_value(json!({ "kernel_image_path": "k" })).unwrap();
        config.vsock = serde_json::from_value(json!({ "guest_cid": 3, "uds_path": "v" })).unwrap();
        config.entropy = serde_json::from_value(json!({})).unwrap();
        config.mmds = serde_json::from_value(json!({ "network_interfaces": ["n"] })).unwrap();
        config
    }

    #[test]
    fn saved_configuration_is_shown_again() {
        let config = configured();
        let balloon = json!({ "amount_mib": 7, "deflate_on_oom": true });
        let balloon: BalloonDeviceConfig = serde_json::from_value(balloon).unwrap();
        let section = to_section(&config, Some(balloon.clone())).unwrap();
        assert!(!section.must_understand, "a machine is restored without it");
        let mut loaded = MicroVmConfig::new(100);
        loaded.metadata.put(json!({ "a": 1 })).unwrap();
        loaded.load(&section).unwrap();
        let expected =
            MicroVmConfig { balloon: Some(balloon), metadata: loaded.metadata.clone(), ..config };
        assert_eq!(loaded, expected);
    }

    #[test]
    fn malformed_section_changes_nothing() {
        let before = configured();
        let section = to_section(&before, None).unwrap();
        for cut in 0..section.bytes.len() {
            let mut config = before.clone();
            let bytes = section.bytes[..cut].to_vec();
            config.load(&Section { bytes, ..section.clone() }).unwrap_err();
            assert_eq!(config, before);
        }
    }
}
