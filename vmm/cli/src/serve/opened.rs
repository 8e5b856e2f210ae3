//! The files that a client of Firecracker's API names. Each is opened when it is named, so that a
//! wrong path is refused immediately, and stays open for the guest's start.

use std::collections::HashMap;
use std::fs::{File, FileType, OpenOptions};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use driftline_control::firecracker::{
    ApiFault, BlockDeviceConfig, BootFault, BootSourceConfig, CacheType, DriveFault,
    FileEngineType, MicroVmConfig,
};
use driftline_machine::config::{DiskCache, DiskEngine, OpenedDisk, OpenedFile, OpenedFiles};
use driftline_store::open_kind;

use super::opened_networks::ClientNetworks;

/// The open files.
#[derive(Default, Debug)]
pub(super) struct ClientFiles {
    kernel: Option<OpenedFile>,
    initrd: Option<OpenedFile>,
    /// The drives' files, by name.
    drives: HashMap<String, OpenedDisk>,
    /// Taps, and the vsock's socket.
    pub(super) networks: ClientNetworks,
}

impl ClientFiles {
    /// Opens the kernel and the initial RAM disk, in place of earlier ones.
    ///
    /// # Errors
    ///
    /// One of them cannot be opened. The earlier ones stay.
    pub(super) fn open_boot_source(&mut self, source: &BootSourceConfig) -> Result<(), ApiFault> {
        let open = |path: &str| {
            let why = "it is not a regular file";
            open(Path::new(path), OpenOptions::new().read(true), FileType::is_file, why)
        };
        let kernel = open(&source.kernel_image_path).map_err(BootFault::Kernel)?;
        let initrd = source.initrd_path.as_deref().map(open).transpose();
        self.initrd = initrd.map_err(BootFault::Initrd)?.map(OpenedFile::from);
        self.kernel = Some(kernel.into());
        Ok(())
    }

    /// Opens a drive's file, in place of the earlier file of the same drive.
    ///
    /// # Errors
    ///
    /// The drive has no file, or it cannot be opened. The earlier one stays.
    pub(super) fn open_drive(&mut self, drive: &BlockDeviceConfig) -> Result<(), ApiFault> {
        let path = drive.path_on_host.as_deref().ok_or(DriveFault::NoBackend)?;
        let writes = !drive.is_read_only.unwrap_or(false);
        let is_disk = |kind: &FileType| kind.is_file() || kind.is_block_device();
        let why = "it is neither a regular file nor a block device";
        let file = open(Path::new(path), OpenOptions::new().read(true).write(writes), is_disk, why);
        let failed = |cause| DriveFault::File { cause, path: path.to_owned() };
        let opened = OpenedDisk {
            is_handed_over: false,
            id: drive.drive_id.clone(),
            file: file.map_err(failed)?.into(),
            cache: match drive.cache_type {
                CacheType::Unsafe => DiskCache::Unsafe,
                CacheType::Writeback => DiskCache::Writeback,
            },
            // A client that names no engine gets the best one.
            engine: match drive.io_engine {
                None => DiskEngine::Automatic,
                Some(FileEngineType::Async) => DiskEngine::Uring,
                Some(FileEngineType::Sync) => DiskEngine::Blocking,
            },
        };
        self.drives.insert(opened.id.clone(), opened);
        Ok(())
    }

    /// Returns the file of the drive named `id`.
    pub(super) fn drive(&self, id: &str) -> Option<&OpenedDisk> {
        self.drives.get(id)
    }

    /// Returns the files as the machine of `config` takes them.
    pub(super) fn for_machine(&self, config: &MicroVmConfig) -> OpenedFiles {
        let disk =
            |disk: &OpenedDisk| OpenedDisk { id: config.drive_name(&disk.id), ..disk.clone() };
        OpenedFiles {
            kernel: self.kernel.clone(),
            initrd: self.initrd.clone(),
            disks: self.drives.values().map(disk).collect(),
            taps: self.networks.taps(config),
            vsock: self.networks.vsock(),
            handed_over_vsock: None,
        }
    }
}

/// Opens a file of an expected kind. `why` says why another kind is refused.
fn open(
    path: &Path,
    options: &OpenOptions,
    is_expected: impl Fn(&FileType) -> bool,
    why: &'static str,
) -> io::Result<File> {
    open_kind(path, options, is_expected)?.ok_or_else(|| io::Error::other(why))
}
