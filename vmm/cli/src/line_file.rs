//! A file or FIFO that receives lines without being waited for.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use rustix::fs::OFlags;

/// The destination of lines. A FIFO without room loses whole lines only: the end of a line that it
/// took in part precedes the next line.
#[derive(Debug)]
pub(super) struct LineFile {
    file: File,
    /// The end of a line whose beginning has been written.
    rest: Mutex<Vec<u8>>,
}

impl LineFile {
    /// Opens a file, which is created if necessary, or a FIFO, whose reader is not waited for. What
    /// it contains stays.
    ///
    /// # Errors
    ///
    /// It cannot be opened.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let mut options = OpenOptions::new();
        options.read(true).append(true).create(true).custom_flags(flags);
        Ok(Self { file: options.open(path)?, rest: Mutex::default() })
    }

    /// Writes a line with its end. Waits for a regular file only.
    ///
    /// # Errors
    ///
    /// Nothing of the line was written, and nothing will be.
    pub(super) fn write_line(&self, line: &[u8]) -> io::Result<()> {
        let mut rest = self.rest.lock().unwrap_or_else(PoisonError::into_inner);
        let written = self.write_some(&rest)?;
        rest.drain(..written);
        if !rest.is_empty() {
            return Err(ErrorKind::WouldBlock.into());
        }
        let written = self.write_some(line)?;
        if written == 0 {
            return Err(ErrorKind::WouldBlock.into());
        }
        rest.extend_from_slice(&line[written..]);
        Ok(())
    }

    /// Writes as much as there is room for. Returns the number of bytes.
    fn write_some(&self, bytes: &[u8]) -> io::Result<usize> {
        let mut written = 0;
        while written < bytes.len() {
            match (&self.file).write(&bytes[written..]) {
                Ok(0) => break,
                Ok(more) => written += more,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock || written > 0 => break,
                Err(e) => return Err(e),
            }
        }
        Ok(written)
    }
}

impl AsFd for LineFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn full_fifo_loses_whole_lines_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fifo");
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let file = LineFile::open(&path).unwrap();
        let line = |n: usize| format!("{n}{}\n", "x".repeat(9_998));
        // The last line that is taken is so in part: the room is not a multiple of a line.
        let taken = (0..).find(|&n| file.write_line(line(n).as_bytes()).is_err()).unwrap();
        assert!(!file.rest.lock().unwrap().is_empty());
        assert!(file.write_line(line(taken).as_bytes()).is_err());
        let mut reader = LineFile::open(&path).unwrap().file;
        let mut read = String::new();
        let mut chunk = [0; 4096];
        let mut read_all = |read: &mut String| {
            while let Ok(bytes) = reader.read(&mut chunk) {
                read.push_str(str::from_utf8(&chunk[..bytes]).unwrap());
            }
        };
        read_all(&mut read);
        file.write_line(b"next\n").unwrap();
        read_all(&mut read);
        let expected: String = (0..taken).map(line).collect();
        assert_eq!(read.len(), expected.len() + 5);
        assert!(read == expected + "next\n");
    }

    #[test]
    fn file_keeps_what_it_contains() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        std::fs::write(&path, "a\n").unwrap();
        LineFile::open(&path).unwrap().write_line(b"b\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "a\nb\n");
        assert!(LineFile::open(dir.path()).is_err(), "a directory");
    }
}
