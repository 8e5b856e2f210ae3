//! A destination of lines: a file, a FIFO, or standard output. A write waits for a reader only up
//! to a limit.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;

/// Limit on waiting for the rest of a line whose beginning a FIFO has taken.
const REST_LIMIT: Duration = Duration::from_millis(100);
/// Limit on waiting until standard output takes a line. The caller can then try again.
const STDOUT_LIMIT: Duration = Duration::from_millis(100);
/// Bytes that a pipe takes without blocking if it says that it has room.
const PIPE_BUF: usize = 4096;

/// The destination of lines. It loses whole lines only: the rest of a line that it took in part
/// precedes the next line.
#[derive(Debug)]
pub(super) struct LineFile {
    file: File,
    /// Whether a write waits for room. Other processes use standard output as well, so its mode
    /// stays.
    blocks: bool,
    /// What is to be written before the next line.
    rest: Vec<u8>,
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
        Ok(Self { file: options.open(path)?, blocks: false, rest: Vec::new() })
    }

    /// Returns standard output, by a descriptor of its own: a write to it holds no lock of the
    /// standard library.
    ///
    /// # Errors
    ///
    /// There are too many descriptors.
    pub(super) fn stdout() -> io::Result<Self> {
        Ok(Self::blocking(io::stdout().as_fd().try_clone_to_owned()?.into()))
    }

    /// Returns a destination whose descriptor blocks.
    pub(super) fn blocking(file: File) -> Self {
        Self { file, blocks: true, rest: Vec::new() }
    }

    /// Returns whether a line waits for room before any of it is written, as on standard output.
    pub(super) fn blocks(&self) -> bool {
        self.blocks
    }

    /// Writes a line with its end. If a FIFO has no room, the line is lost immediately. Once the
    /// FIFO has taken the beginning of the line, the rest waits for room for [`REST_LIMIT`].
    /// Standard output may delay a line for [`STDOUT_LIMIT`], and a regular file for as long as its
    /// storage takes.
    ///
    /// # Errors
    ///
    /// The line is lost. [`ErrorKind::WouldBlock`] says that nothing of it was written for lack of
    /// room.
    pub(super) fn write_line(&mut self, line: &[u8]) -> io::Result<()> {
        let limit = if self.blocks { STDOUT_LIMIT } else { Duration::ZERO };
        let until = Instant::now() + limit;
        self.write_rest(until)?;
        if !self.rest.is_empty() {
            return Err(ErrorKind::WouldBlock.into());
        }
        match self.write_until(line, until) {
            (0, Ok(())) => Err(ErrorKind::WouldBlock.into()),
            (0, Err(e)) => Err(e),
            (_, Err(e)) => {
                // The line is incomplete, but the next one begins where a line begins.
                self.rest = b"\n".to_vec();
                Err(e)
            }
            (written, Ok(())) => {
                self.rest = line.get(written..).unwrap_or_default().to_vec();
                // The rest stays if that fails.
                let _ = self.write_rest(Instant::now() + REST_LIMIT);
                Ok(())
            }
        }
    }

    /// Writes what there is room for of the rest of a line. Returns whether nothing of it is left.
    pub(super) fn finish(&mut self) -> bool {
        // What fails now may work later.
        let _ = self.write_rest(Instant::now());
        self.rest.is_empty()
    }

    /// Takes the place of `old`: writes the rest of its last line. Returns whether that line is
    /// lost.
    pub(super) fn replace(&mut self, mut old: Self) -> bool {
        if old.finish() {
            return false;
        }
        match self.is_same_file(&old) {
            true => self.rest = old.rest,
            // A part of a line in another file would be of no use.
            false => return true,
        }
        false
    }

    fn is_same_file(&self, other: &Self) -> bool {
        let identity = |file: &File| file.metadata().map(|file| (file.dev(), file.ino())).ok();
        identity(&self.file).is_some_and(|own| identity(&other.file) == Some(own))
    }

    fn write_rest(&mut self, until: Instant) -> io::Result<()> {
        let (written, result) = self.write_until(&self.rest, until);
        self.rest.drain(..written);
        result
    }

    /// Writes as much as there is room for until `until`. Returns the number of bytes, and the
    /// error that ended this.
    fn write_until(&self, bytes: &[u8], until: Instant) -> (usize, io::Result<()>) {
        let mut written = 0;
        // A descriptor that does not block says itself whether there is room.
        let mut awaits_room = self.blocks;
        let most = if self.blocks { PIPE_BUF } else { usize::MAX };
        while let Some(left) = bytes.get(written..).filter(|left| !left.is_empty()) {
            if awaits_room {
                match self.await_room(until) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(e) => return (written, Err(e)),
                }
            }
            match (&self.file).write(left.get(..most).unwrap_or(left)) {
                Ok(0) => return (written, Err(ErrorKind::WriteZero.into())),
                Ok(more) => {
                    written += more;
                    awaits_room = self.blocks;
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                // Another process has taken the room.
                Err(e) if e.kind() == ErrorKind::WouldBlock && awaits_room => break,
                Err(e) if e.kind() == ErrorKind::WouldBlock => awaits_room = true,
                Err(e) => return (written, Err(e)),
            }
        }
        (written, Ok(()))
    }

    /// Waits until `until` at most. Returns whether a write finds room.
    fn await_room(&self, until: Instant) -> io::Result<bool> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).map_err(io::Error::other)?;
            match poll(&mut [PollFd::new(&self.file, PollFlags::OUT)], Some(&left)) {
                Ok(ready) => return Ok(ready > 0),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
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
    use std::path::PathBuf;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    /// A FIFO in a directory of its own.
    fn fifo() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fifo");
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        (dir, path)
    }

    /// Returns what can be read from a FIFO now.
    fn read_now(path: &Path) -> String {
        let mut reader = LineFile::open(path).unwrap().file;
        let (mut read, mut chunk) = (Vec::new(), [0; 4096]);
        while let Ok(bytes) = reader.read(&mut chunk) {
            read.extend_from_slice(&chunk[..bytes]);
        }
        String::from_utf8(read).unwrap()
    }

    fn line(n: usize) -> String {
        format!("{n}{}\n", "x".repeat(9_998))
    }

    /// Writes lines until one is written in part: the room is not a multiple of a line. Returns
    /// their number.
    fn fill(file: &mut LineFile) -> usize {
        let mut lines = 0;
        while file.finish() {
            file.write_line(line(lines).as_bytes()).unwrap();
            lines += 1;
        }
        lines
    }

    #[test]
    fn full_fifo_loses_whole_lines_only() {
        let (_dir, path) = fifo();
        let mut file = LineFile::open(&path).unwrap();
        let taken = fill(&mut file);
        assert!(file.write_line(line(taken).as_bytes()).is_err());
        let mut read = read_now(&path);
        assert!(file.finish(), "without another line");
        file.write_line(b"next\n").unwrap();
        read += &read_now(&path);
        let expected: String = (0..taken).map(line).collect();
        assert_eq!(read.len(), expected.len() + 5);
        assert!(read == expected + "next\n");
    }

    #[test]
    fn fifo_opened_again_gets_the_lines_rest() {
        let (dir, path) = fifo();
        let mut file = LineFile::open(&path).unwrap();
        let taken = fill(&mut file);
        let mut again = LineFile::open(&path).unwrap();
        assert!(!again.replace(file), "the line is not lost");
        let mut read = read_now(&path);
        again.write_line(b"next\n").unwrap();
        read += &read_now(&path);
        assert!(read == (0..taken).map(line).collect::<String>() + "next\n");
        fill(&mut again);
        let mut other = LineFile::open(&dir.path().join("file")).unwrap();
        assert!(other.replace(again), "its rest has no place in another file");
        other.write_line(b"first\n").unwrap();
        assert_eq!(std::fs::read_to_string(dir.path().join("file")).unwrap(), "first\n");
    }

    #[test]
    fn blocking_pipe_without_room_is_not_written() {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let mut file = LineFile::blocking(std::os::fd::OwnedFd::from(writer).into());
        let taken = fill(&mut file);
        let refused = file.write_line(b"next\n").unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::WouldBlock);
        let expected: String = (0..taken).map(line).collect();
        let mut read = vec![0; expected.len()];
        let reading = std::thread::spawn(move || {
            reader.read_exact(&mut read).unwrap();
            read
        });
        while !file.finish() {}
        assert!(reading.join().unwrap() == expected.into_bytes());
    }

    #[test]
    fn file_keeps_what_it_contains() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        std::fs::write(&path, "a\n").unwrap();
        LineFile::open(&path).unwrap().write_line(b"b\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "a\nb\n");
        assert!(LineFile::open(dir.path()).is_err(), "a directory");
        let refused = LineFile::open(Path::new("/dev/full")).unwrap().write_line(b"c\n");
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::StorageFull);
    }
}
