//! The files that a client of Firecracker's API names. Each is opened when it is named, so that a
//! wrong path is refused at once, and stays open for the guest's start.

use std::collections::HashMap;
use std::fs::{self, File, FileType, OpenOptions};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use driftline_control::firecracker::{
    ApiFault, BlockDeviceConfig, BootFault, BootSourceConfig, DriveFault,
};

/// The open files.
#[derive(Default, Debug)]
pub(super) struct OpenedFiles(HashMap<FileRole, File>);

/// What a file is for.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum FileRole {
    Kernel,
    Initrd,
    /// The drive with this name.
    Drive(String),
}

impl OpenedFiles {
    /// Opens the kernel and the initial RAM disk, in place of earlier ones.
    ///
    /// # Errors
    /// One of them cannot be opened. The earlier ones stay.
    pub(super) fn open_boot_source(&mut self, source: &BootSourceConfig) -> Result<(), ApiFault> {
        let open = |path: &str| {
            let why = "it is not a regular file";
            open(Path::new(path), OpenOptions::new().read(true), FileType::is_file, why)
        };
        let kernel = open(&source.kernel_image_path).map_err(BootFault::Kernel)?;
        let initrd = source.initrd_path.as_deref().map(open).transpose();
        let initrd = initrd.map_err(BootFault::Initrd)?;
        self.0.insert(FileRole::Kernel, kernel);
        match initrd {
            Some(initrd) => self.0.insert(FileRole::Initrd, initrd),
            None => self.0.remove(&FileRole::Initrd),
        };
        Ok(())
    }

    /// Opens a drive's file, in place of the earlier file of the same drive.
    ///
    /// # Errors
    /// The drive has no file, or it cannot be opened. The earlier one stays.
    pub(super) fn open_drive(&mut self, drive: &BlockDeviceConfig) -> Result<(), ApiFault> {
        let path = drive.path_on_host.as_deref().ok_or(DriveFault::NoBackend)?;
        let writes = !drive.is_read_only.unwrap_or(false);
        let is_disk = |kind: &FileType| kind.is_file() || kind.is_block_device();
        let why = "it is neither a regular file nor a block device";
        let file = open(Path::new(path), OpenOptions::new().read(true).write(writes), is_disk, why);
        let failed = |cause| DriveFault::File { cause, path: path.to_owned() };
        self.0.insert(FileRole::Drive(drive.drive_id.clone()), file.map_err(failed)?);
        Ok(())
    }
}

/// Opens a file of an expected kind. `why` says why another kind is refused.
fn open(
    path: &Path,
    options: &OpenOptions,
    is_expected: impl Fn(&FileType) -> bool,
    why: &'static str,
) -> io::Result<File> {
    // Checked before the file is opened: opening a FIFO would wait for its other end.
    if !is_expected(&fs::metadata(path)?.file_type()) {
        return Err(io::Error::other(why));
    }
    options.open(path)
}
