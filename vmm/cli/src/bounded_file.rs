//! Reads files whose names come from a user, which may be of any kind and of any length.

use std::io::{self, ErrorKind, Read};
use std::path::Path;

use driftline_store::open_regular;

/// Largest configuration file, and largest file of a CPU template, in bytes. A guest of 16 devices
/// needs a few KiB. Firecracker has no limit.
pub(super) const MAX_CONFIG_FILE: u64 = 1 << 20;

/// Reads a regular file of at most `limit` bytes.
///
/// # Errors
///
/// It is not a regular file, it is longer, or it cannot be read.
pub(super) fn read_bounded(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_regular(path)?.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > limit {
        true => {
            Err(io::Error::new(ErrorKind::FileTooLarge, format!("it has more than {limit} bytes")))
        }
        false => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn longer_and_special_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "abc").unwrap();
        assert_eq!(read_bounded(&path, 3).unwrap(), b"abc");
        let longer = read_bounded(&path, 2).unwrap_err();
        assert_eq!(longer.to_string(), "it has more than 2 bytes");
        let fifo = dir.path().join("fifo");
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        for special in [&fifo, Path::new("/dev/zero")] {
            let refused = read_bounded(special, 3).unwrap_err();
            assert_eq!(refused.to_string(), "it is not a regular file", "{special:?}");
        }
    }
}
