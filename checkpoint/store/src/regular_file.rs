//! Opens files whose names come from a user, which may be of any kind.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;

/// Opens a regular file for reading. Never waits for a writer, as opening a named pipe would.
///
/// ```
/// let e = driftline_store::open_regular("/dev/zero".as_ref()).unwrap_err();
/// assert_eq!(e.to_string(), "it is not a regular file");
/// ```
///
/// # Errors
///
/// There is no such file, it cannot be opened, or it is of another kind.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")),
    }
}
