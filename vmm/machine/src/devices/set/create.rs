//! Creates the devices of a set, with the handles by which the rest of the machine reaches them.

use std::io;

use driftline_guest::VmId;

use super::{DeviceSet, Drive, OpenFile};
use crate::config::{DeviceConfig, DiskConfig, DiskEngine, HostConfig};
use crate::devices::balloon;
use crate::devices::block::{BlockDevice, DiskError, ExchangeParts};
use crate::devices::error::DeviceError;
use crate::devices::net::Net;
use crate::devices::opener::Opener;
use crate::devices::rng::Rng;
use crate::devices::stats::StatsHandle;
use crate::devices::virtio::Device;
use crate::devices::vsock::Vsock;

impl DeviceSet {
    /// Creates a device. A disk's `exchange` parts are set.
    pub(super) fn create(
        &mut self,
        device: &DeviceConfig,
        vcpus: u8,
        guest: VmId,
        host: &HostConfig,
        exchange: &mut Option<ExchangeParts>,
    ) -> Result<Box<dyn Device>, DeviceError> {
        let system = |cause| DeviceError::System { id: device.id().to_owned(), cause };
        Ok(match device {
            DeviceConfig::Disk(disk) => {
                let (block, parts) = self.create_disk(disk, vcpus, guest, host)?;
                *exchange = Some(parts);
                Box::new(block)
            }
            DeviceConfig::Rng(config) => {
                let rng = Rng::new(config);
                self.counters.rng = rng.counters().clone();
                Box::new(rng)
            }
            DeviceConfig::Net(config) => {
                let opened = host.opened.tap(&config.id);
                let net = Net::open(
                    config,
                    guest,
                    opened,
                    &host.metadata,
                    self.opener().map_err(system)?,
                )?;
                self.stats_handles
                    .push(StatsHandle::Net(config.id.clone(), net.counters().clone()));
                Box::new(net)
            }
            DeviceConfig::Vsock(vsock) => {
                let opener = self.opener().map_err(system)?;
                let vsock = match &host.opened.handed_over_vsock {
                    Some(files) => Vsock::of_other_process(vsock, files, opener)?,
                    None => Vsock::open(vsock, host.opened.vsock.as_ref(), opener)?,
                };
                self.counters.vsock = vsock.counters().clone();
                Box::new(vsock)
            }
            DeviceConfig::Balloon(config) => {
                let (balloon, control) =
                    balloon::open(config, self.protected_frames.clone()).map_err(system)?;
                self.balloon = Some(control);
                Box::new(balloon)
            }
        })
    }

    /// Creates a disk, and the parts with which its file can be exchanged.
    fn create_disk(
        &mut self,
        disk: &DiskConfig,
        vcpus: u8,
        guest: VmId,
        host: &HostConfig,
    ) -> Result<(BlockDevice, ExchangeParts), DeviceError> {
        let system = |cause| DeviceError::System { id: disk.id.clone(), cause };
        let opened = host.opened.disk(&disk.id);
        let mut block = BlockDevice::open(disk, vcpus, guest, opened)?;
        let engine = opened.map_or(DiskEngine::Automatic, |opened| opened.engine);
        let exchange = block.exchange_parts(guest, engine).map_err(system)?;
        if host.copied.contains(&disk.id) {
            block.note_created_here();
        }
        self.sources.push(block.source());
        self.stats_handles.push(StatsHandle::Disk(disk.id.clone(), block.counters().clone()));
        let file = OpenFile {
            disk: disk.id.clone(),
            file: block.file_identity().map_err(system)?,
            identity: block.disk_identity(),
            readonly: disk.readonly,
        };
        self.refuse_shared_file(disk, file)?;
        if !disk.readonly {
            self.drives.push(Drive(block.flusher().clone()));
        }
        Ok((block, exchange))
    }

    /// Returns the thread that opens files by name. The first device that needs it starts it.
    fn opener(&mut self) -> io::Result<&Opener> {
        let opener = match self.opener.take() {
            Some(opener) => opener,
            None => Opener::start()?,
        };
        Ok(self.opener.insert(opener))
    }

    /// Refuses a disk if another disk uses the same file and at least one of them is writable.
    fn refuse_shared_file(&mut self, disk: &DiskConfig, file: OpenFile) -> Result<(), DiskError> {
        let clashes =
            |other: &&OpenFile| other.file == file.file && !(other.readonly && file.readonly);
        if let Some(other) = self.files.iter().find(clashes) {
            let (first, second) = (other.disk.clone(), disk.id.clone());
            return Err(DiskError::Twice { first, second, path: disk.path.clone() });
        }
        self.files.push(file);
        Ok(())
    }
}
