//! The file of the serial output: a regular file, a FIFO, or a character device such as a terminal.
//!
//! A FIFO or a device may have no reader, or a slow one. Opening it does not wait for a reader, and
//! output that finds no room is lost.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use driftline_guest::LogLimit;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;

use super::counts::SerialCounters;

/// Longest wait for room in a FIFO or device that had room at the last write. After a write that
/// found no room, later writes do not wait until one of them finds room.
const ROOM_LIMIT: Duration = Duration::from_millis(100);

/// The file of the serial output; see the module.
#[derive(Debug)]
pub(super) struct SerialFile {
    path: PathBuf,
    file: File,
    /// Whether the last write found no room.
    is_full: bool,
    /// Whether that was logged.
    is_announced: bool,
    losses: LogLimit,
    /// Bytes that were lost since the last line about lost bytes.
    lost: u64,
    counters: Arc<SerialCounters>,
}

impl SerialFile {
    /// Opens the file for appending. A regular file is created if nothing is there.
    ///
    /// # Errors
    ///
    /// It cannot be opened, or is of another kind.
    pub(super) fn open(path: &Path, counters: Arc<SerialCounters>) -> io::Result<Self> {
        // A FIFO that is open for writing only needs a reader, at the open and at each write. One
        // that is open for reading and writing does not.
        let is_fifo = fs::metadata(path).is_ok_and(|found| found.file_type().is_fifo());
        let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
        let mut options = OpenOptions::new();
        options.create(true).append(true).read(is_fifo);
        let file = options.custom_flags(flags.bits().cast_signed()).open(path)?;
        let kind = file.metadata()?.file_type();
        if kind.is_file() {
            fcntl_setfl(&file, fcntl_getfl(&file)?.difference(OFlags::NONBLOCK))?;
        } else if !kind.is_fifo() && !kind.is_char_device() {
            let why = "it is neither a regular file nor a FIFO nor a character device";
            return Err(io::Error::other(why));
        }
        Ok(Self {
            path: path.to_owned(),
            file,
            is_full: false,
            is_announced: false,
            losses: LogLimit::new(),
            lost: 0,
            counters,
        })
    }

    /// Waits until `until` at most. Returns whether a write finds room.
    fn await_room(&self, until: Instant) -> io::Result<bool> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).map_err(io::Error::other)?;
            match poll(&mut [PollFd::new(&self.file, PollFlags::OUT)], Some(&left)) {
                Ok(ready) => return Ok(ready > 0 && Instant::now() < until),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Logs what was lost, if the loss was announced: at most once a second, because the guest sets
    /// the pace.
    fn note_room(&mut self) {
        if std::mem::take(&mut self.is_full) && std::mem::take(&mut self.is_announced) {
            let (lost, path) = (std::mem::take(&mut self.lost), self.path.display());
            tracing::warn!("\"{path}\" has room again; {lost} bytes of serial output were dropped");
        }
    }

    fn lose(&mut self, bytes: usize) {
        self.is_full = true;
        if !self.is_announced && self.losses.add(bytes as u64).is_some() {
            self.is_announced = true;
            let path = self.path.display();
            tracing::warn!(
                "serial output is dropped: \"{path}\" has no room; have a program read it"
            );
        }
        self.lost += bytes as u64;
        self.counters.lost_bytes.add(bytes as u64);
    }
}

impl Write for SerialFile {
    /// Writes what there is room for. What is lost counts as written.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let until = Instant::now() + ROOM_LIMIT;
        loop {
            match self.file.write(bytes) {
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Ok(written) => {
                    self.note_room();
                    return Ok(written);
                }
                other => return other,
            }
            if self.is_full || !self.await_room(until)? {
                self.lose(bytes.len());
                return Ok(bytes.len());
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

    use super::*;
    use crate::devices::log_capture::warnings;

    fn open(path: &Path) -> io::Result<SerialFile> {
        SerialFile::open(path, Arc::default())
    }

    #[test]
    fn fifo_without_reader_delays_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fifo");
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let mut file = open(&path).unwrap();
        let begun = Instant::now();
        for line in 0..40_000u32 {
            writeln!(file, "{line:09}").unwrap();
        }
        assert!(begun.elapsed() < Duration::from_secs(10), "it waits for room once");
        assert!(file.is_full && file.lost > 300_000);
        assert_eq!(file.counters.lost_bytes.get(), file.lost);
        let mut reader = open(&path).unwrap().file;
        let mut read = vec![0; 1 << 20];
        let bytes = reader.read(&mut read).unwrap();
        assert!(bytes < 100_000 && read.starts_with(b"000000000\n000000001\n"));
        file.write_all(b"again\n").unwrap();
        let bytes = reader.read(&mut read).unwrap();
        assert_eq!((&read[..bytes], file.is_full), (&b"again\n"[..], false));
    }

    #[test]
    fn losses_are_logged_once_a_second() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fifo");
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let (mut file, mut reader) = (open(&path).unwrap(), open(&path).unwrap().file);
        let begun = Instant::now();
        let logged = warnings(|| {
            for _ in 0..3 {
                while !file.is_full {
                    file.write_all(&[b'x'; 4096]).unwrap();
                }
                assert!(reader.read(&mut vec![0; 1 << 20]).unwrap() > 0);
                file.write_all(b"again\n").unwrap();
            }
        });
        // A pair of lines, and another each second.
        let pairs = begun.elapsed().as_secs() + 1;
        assert!(logged.len() as u64 <= 2 * pairs, "{logged:?}");
        assert!(logged[0].contains("has no room") && logged[1].contains("has room again"));
    }

    #[test]
    fn character_device_gets_the_output() {
        let mut terminal = File::from(openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap());
        grantpt(&terminal).and_then(|()| unlockpt(&terminal)).unwrap();
        let path = ptsname(&terminal, Vec::new()).unwrap().into_string().unwrap();
        open(Path::new(&path)).unwrap().write_all(b"login: ").unwrap();
        let mut read = [0; 7];
        terminal.read_exact(&mut read).unwrap();
        assert_eq!(&read, b"login: ");
        open(Path::new("/dev/null")).unwrap().write_all(b"x").unwrap();
    }

    #[test]
    fn other_kinds_of_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert!(open(dir.path()).is_err(), "a directory");
        let path = dir.path().join("socket");
        let _socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert!(open(&path).is_err(), "a socket");
    }
}
