//! Opens files whose names come from a user, which may be of any kind.

use std::fs::{File, FileType, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

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
    let file = open_kind(path, OpenOptions::new().read(true), FileType::is_file)?;
    file.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"))
}

/// Opens a file with `options`, and returns it if its kind is one that `is_expected` accepts. Never
/// waits for the other end of a named pipe. The kind is that of the open file, so that no other one
/// can take its path in between.
///
/// ```
/// use std::fs::{FileType, OpenOptions};
/// let reads = OpenOptions::new().read(true).clone();
/// let zeros = driftline_store::open_kind("/dev/zero".as_ref(), &reads, FileType::is_file);
/// assert!(zeros.unwrap().is_none());
/// ```
///
/// # Errors
///
/// There is no such file, or it cannot be opened.
pub fn open_kind(
    path: &Path,
    options: &OpenOptions,
    is_expected: impl Fn(&FileType) -> bool,
) -> io::Result<Option<File>> {
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
    let file = match options.clone().custom_flags(flags).open(path) {
        // A directory cannot be opened for writing.
        Err(e) if e.kind() == io::ErrorKind::IsADirectory => return Ok(None),
        opened => opened?,
    };
    if !is_expected(&file.metadata()?.file_type()) {
        return Ok(None);
    }
    // An io_uring request to a file with this flag fails where it would have to wait.
    let kept = fcntl_getfl(&file)?.difference(OFlags::NONBLOCK);
    fcntl_setfl(&file, kept)?;
    Ok(Some(file))
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, Mode, mknodat};

    use super::*;

    #[test]
    fn named_pipe_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        mknodat(CWD, &fifo, rustix::fs::FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let mut options = OpenOptions::new();
        options.read(true);
        for writes in [false, true] {
            options.write(writes);
            for path in [&fifo, dir.path()] {
                let opened = open_kind(path, &options, FileType::is_file).unwrap();
                assert!(opened.is_none(), "{}", path.display());
            }
        }
    }

    #[test]
    fn opened_file_waits_for_its_data() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let options = OpenOptions::new().read(true).write(true).clone();
        let file = open_kind(file.path(), &options, FileType::is_file).unwrap().unwrap();
        assert!(!fcntl_getfl(&file).unwrap().contains(OFlags::NONBLOCK));
    }
}
