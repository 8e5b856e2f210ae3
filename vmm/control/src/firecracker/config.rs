//! The configuration that the requests before the start build up, and its rules.

use std::net::Ipv4Addr;

use driftline_machine::boot::LINUX_CMDLINE_BYTES;
use driftline_machine::config::{MAX_DEVICES, MIN_MTU, MacAddr, NetMetadata, VsockConfig};
use driftline_machine::metadata::MetadataStore;

use super::fault::{
    ApiFault, BalloonFault, BootFault, DriveFault, MachineFault, MmdsFault, NetFault,
};
use super::model::{
    BalloonDeviceConfig, BlockDeviceConfig, BootSourceConfig, CustomCpuTemplate,
    EntropyDeviceConfig, MachineConfigUpdate, MachineConfiguration, MmdsConfig,
    NetworkInterfaceConfig, SerialConfig, StaticCpuTemplate, VmmConfig, VsockDeviceConfig,
};
use super::name_limit::check_name;

/// Address of the metadata service if none is given.
const DEFAULT_MMDS_ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);

/// A guest's configuration before it starts.
#[derive(Clone, PartialEq, Debug)]
pub struct MicroVmConfig {
    /// What the guest boots.
    pub boot_source: Option<BootSourceConfig>,
    /// vCPUs and memory.
    pub machine: MachineConfiguration,
    /// The custom CPU template.
    pub cpu_template: Option<CustomCpuTemplate>,
    /// The drives, the root device first.
    pub drives: Vec<BlockDeviceConfig>,
    /// The network interfaces.
    pub interfaces: Vec<NetworkInterfaceConfig>,
    /// The vsock device.
    pub vsock: Option<VsockDeviceConfig>,
    /// The balloon.
    pub balloon: Option<BalloonDeviceConfig>,
    /// The entropy device.
    pub entropy: Option<EntropyDeviceConfig>,
    /// The serial port.
    pub serial: SerialConfig,
    /// The metadata service.
    pub mmds: Option<MmdsConfig>,
    /// What the guest reads there. A copy of the configuration shares it.
    pub metadata: MetadataStore,
}

impl MicroVmConfig {
    /// Creates the configuration of a process that has had no request. `metadata_limit` is the
    /// longest metadata, in bytes.
    pub fn new(metadata_limit: usize) -> Self {
        Self {
            boot_source: None,
            machine: MachineConfiguration::default(),
            cpu_template: None,
            drives: Vec::new(),
            interfaces: Vec::new(),
            vsock: None,
            balloon: None,
            entropy: None,
            serial: SerialConfig::default(),
            mmds: None,
            metadata: MetadataStore::new(metadata_limit),
        }
    }

    /// Returns what `GET /vm/config` shows.
    pub(crate) fn shown(&self) -> VmmConfig {
        VmmConfig {
            balloon: self.balloon.clone(),
            drives: self.drives.clone(),
            boot_source: self.boot_source.clone().unwrap_or_default(),
            machine_config: self.machine.clone(),
            mmds_config: self.mmds.clone(),
            network_interfaces: self.interfaces.clone(),
            vsock: self.vsock.clone(),
            entropy: self.entropy.clone(),
            ..VmmConfig::default()
        }
    }

    pub(crate) fn update_machine(&mut self, update: &MachineConfigUpdate) -> Result<(), ApiFault> {
        let updated = self.machine.updated(update)?;
        let balloon_mib = self.balloon.as_ref().map_or(0, |balloon| balloon.amount_mib);
        if updated.mem_size_mib < balloon_mib as usize {
            return Err(MachineFault::SmallerThanBalloon.into());
        }
        match update.cpu_template {
            Some(StaticCpuTemplate::None) | None => {}
            Some(_) => {
                return Err(ApiFault::NotInDriftline(
                    "static CPU templates: give a custom one to PUT /cpu-config",
                ));
            }
        }
        if update.cpu_template.is_some() {
            self.cpu_template = None;
        }
        self.machine = updated;
        Ok(())
    }

    /// Refuses a new device, with `fault`, if the guest has as many as a machine can have.
    pub(crate) fn require_room(&self, fault: impl Into<ApiFault>) -> Result<(), ApiFault> {
        let single = [self.vsock.is_some(), self.balloon.is_some(), self.entropy.is_some()];
        let single = single.into_iter().filter(|is_there| *is_there).count();
        match self.drives.len() + self.interfaces.len() + single < MAX_DEVICES {
            true => Ok(()),
            false => Err(fault.into()),
        }
    }

    /// Returns how the interface `iface_id` answers requests for the metadata, if it does.
    pub fn interface_metadata(&self, iface_id: &str) -> Option<NetMetadata> {
        let mmds = self.mmds.as_ref()?;
        mmds.network_interfaces.iter().any(|id| id == iface_id).then(|| NetMetadata {
            address: mmds.ipv4_address.unwrap_or(DEFAULT_MMDS_ADDRESS),
            version: mmds.version.into(),
            imds_compat: mmds.imds_compat,
        })
    }

    /// Checks a vsock device before its socket is bound.
    pub(crate) fn check_vsock(&self, vsock: &VsockDeviceConfig) -> Result<(), ApiFault> {
        let uds = std::path::absolute(&vsock.uds_path).map_err(ApiFault::Vsock)?;
        VsockConfig { cid: vsock.guest_cid, uds }.check().map_err(ApiFault::VsockConfig)?;
        match self.vsock.is_some() {
            true => Ok(()),
            false => self.require_room(ApiFault::TooManyDevices("Vsock")),
        }
    }

    pub(crate) fn put_balloon(&mut self, balloon: BalloonDeviceConfig) -> Result<(), ApiFault> {
        if self.balloon.is_none() {
            self.require_room(ApiFault::TooManyDevices("Balloon"))?;
        }
        if balloon.amount_mib as usize > self.machine.mem_size_mib {
            return Err(BalloonFault::TooLarge.into());
        }
        self.balloon = Some(balloon);
        Ok(())
    }

    /// Returns whether the root device is among the drives.
    pub(crate) fn has_root(&self) -> bool {
        self.drives.first().is_some_and(|drive| drive.is_root_device)
    }

    fn position(&self, drive_id: &str) -> Option<usize> {
        self.drives.iter().position(|drive| drive.drive_id == drive_id)
    }

    /// Checks a drive before its file is opened.
    pub(crate) fn check_drive(&self, drive: &BlockDeviceConfig) -> Result<(), ApiFault> {
        if drive.is_root_device && self.has_root() && self.position(&drive.drive_id) != Some(0) {
            return Err(DriveFault::SecondRoot.into());
        }
        check_name(&drive.drive_id)?;
        if self.position(&drive.drive_id).is_none() {
            self.require_room(DriveFault::TooMany)?;
        }
        // A vhost-user backend decides these three itself.
        let has_own_settings = drive.is_read_only.is_some()
            || drive.rate_limiter.is_some()
            || drive.io_engine.is_some();
        match (&drive.path_on_host, &drive.socket) {
            (Some(_), None) => Ok(()),
            (None, Some(_)) if !has_own_settings => {
                Err(ApiFault::NotInDriftline("vhost-user drives"))
            }
            _ => Err(DriveFault::NoBackend.into()),
        }
    }

    /// Adds a drive whose file is open. A drive of the same name is replaced in its place; the root
    /// device becomes the first.
    pub(crate) fn put_drive(&mut self, drive: BlockDeviceConfig) {
        let drive = drive.in_effect();
        let is_root = drive.is_root_device;
        match self.position(&drive.drive_id) {
            Some(at) => {
                self.drives[at] = drive;
                if is_root {
                    self.drives.swap(0, at);
                }
            }
            None if is_root => self.drives.insert(0, drive),
            None => self.drives.push(drive),
        }
    }

    /// Checks an interface before its tap is opened. An interface of the same name is removed
    /// first, because a tap can be open once only.
    pub(crate) fn prepare_interface(
        &mut self,
        net: &NetworkInterfaceConfig,
    ) -> Result<(), ApiFault> {
        check_name(&net.iface_id)?;
        if let Some(mac) = net.guest_mac {
            MacAddr(mac.0).check().map_err(NetFault::Mac)?;
        }
        let is_other = |other: &NetworkInterfaceConfig| other.iface_id != net.iface_id;
        let in_use = |mac| self.interfaces.iter().any(|o| is_other(o) && o.guest_mac == Some(mac));
        if let Some(mac) = net.guest_mac.filter(|&mac| in_use(mac)) {
            return Err(NetFault::MacInUse(mac.to_string()).into());
        }
        // Unlike in Firecracker, an interface stays if its successor is refused for this.
        if let Some(mtu) = net.mtu.filter(|mtu| *mtu < MIN_MTU) {
            return Err(NetFault::Mtu(mtu).into());
        }
        match self.interfaces.iter().position(|other| !is_other(other)) {
            Some(at) => {
                self.interfaces.swap_remove(at);
                self.forget_metadata_interface(&net.iface_id);
            }
            None => self.require_room(NetFault::TooMany)?,
        }
        Ok(())
    }

    /// Adds an interface whose tap is open.
    pub(crate) fn put_interface(&mut self, net: NetworkInterfaceConfig) {
        self.interfaces.push(net.in_effect());
    }

    /// Removes an interface from the metadata service. Its successor of the same name does not
    /// reach the service either.
    fn forget_metadata_interface(&mut self, iface_id: &str) {
        if let Some(mmds) = &mut self.mmds {
            mmds.network_interfaces.retain(|id| id != iface_id);
            if mmds.network_interfaces.is_empty() {
                self.mmds = None;
            }
        }
    }

    pub(crate) fn put_mmds(&mut self, config: MmdsConfig) -> Result<(), ApiFault> {
        let address = config.ipv4_address.unwrap_or(DEFAULT_MMDS_ADDRESS);
        let (version, imds_compat) = (config.version.into(), config.imds_compat);
        let as_served = NetMetadata { address, version, imds_compat };
        as_served.check().map_err(|_| MmdsFault::Address)?;
        if config.network_interfaces.is_empty() {
            return Err(MmdsFault::NoInterface.into());
        }
        let exists = |id: &String| self.interfaces.iter().any(|net| net.iface_id == *id);
        if !config.network_interfaces.iter().all(exists) {
            return Err(MmdsFault::UnknownInterface.into());
        }
        let ids = self.interfaces.iter().map(|net| net.iface_id.clone());
        let network_interfaces = ids.filter(|id| config.network_interfaces.contains(id)).collect();
        let ipv4_address = Some(address);
        self.mmds = Some(MmdsConfig { network_interfaces, ipv4_address, ..config });
        Ok(())
    }
}

/// Checks a kernel's command line before its files are opened.
pub(crate) fn check_boot_args(source: &BootSourceConfig) -> Result<(), ApiFault> {
    match source.boot_args.as_deref().unwrap_or_default().trim().len() < LINUX_CMDLINE_BYTES {
        true => Ok(()),
        false => Err(BootFault::TooLong.into()),
    }
}
