//! Where the lines of a client's log go.

use std::io::{self, ErrorKind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use driftline_machine::log::LineSink;
use parking_lot::Mutex;

use crate::line_file::LineFile;

/// Limit on waiting until standard output takes a line.
const STDOUT_LIMIT: Duration = Duration::from_secs(10);

/// The destination of the lines, which a client can replace at any time.
pub(super) struct LogTarget {
    /// The destination now. The thread that writes holds the lock meanwhile, and nothing else needs
    /// it.
    current: Mutex<Option<LineFile>>,
    /// The destination of the next line, if it is another one.
    next: Mutex<Option<LineFile>>,
    /// Number of lines that could not be written.
    missed: AtomicU64,
}

impl LogTarget {
    /// Returns standard output as the destination.
    pub(super) fn stdout() -> Self {
        let stdout = LineFile::stdout();
        let stdout = stdout.inspect_err(|e| tracing::error!("there is no standard output: {e}"));
        Self { current: Mutex::new(stdout.ok()), next: Mutex::default(), missed: AtomicU64::new(0) }
    }

    /// Makes `file` the destination of the next line, even while a write to another one waits.
    pub(super) fn replace(&self, file: LineFile) {
        *self.next.lock() = Some(file);
    }

    /// Counts lines that were not written.
    pub(super) fn add_missed(&self, lines: u64) {
        self.missed.fetch_add(lines, Ordering::Relaxed);
    }

    /// Returns the number of lines that were not written so far.
    pub(super) fn missed(&self) -> u64 {
        self.missed.load(Ordering::Relaxed)
    }

    /// Takes the next destination, if there is one.
    fn update(&self, current: &mut Option<LineFile>) {
        let Some(mut next) = self.next.lock().take() else { return };
        if let Some(old) = current.take()
            && next.replace(old)
        {
            self.add_missed(1);
        }
        *current = Some(next);
    }

    fn try_write(&self, line: &[u8]) -> io::Result<()> {
        let mut current = self.current.lock();
        let until = Instant::now() + STDOUT_LIMIT;
        loop {
            self.update(&mut current);
            let file = current.as_mut().ok_or(ErrorKind::NotConnected)?;
            match file.write_line(line) {
                // A client may name another destination meanwhile.
                Err(e)
                    if e.kind() == ErrorKind::WouldBlock
                        && file.blocks()
                        && Instant::now() < until => {}
                written => return written,
            }
        }
    }
}

impl LineSink for LogTarget {
    fn write_line(&self, line: &[u8]) -> io::Result<()> {
        self.try_write(line).inspect_err(|_| self.add_missed(1))
    }

    fn finish(&self) -> bool {
        let mut current = self.current.lock();
        self.update(&mut current);
        current.as_mut().is_none_or(LineFile::finish)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use super::*;

    #[test]
    fn named_file_gets_lines_while_stdout_is_stuck() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let (reader, writer) = std::io::pipe().unwrap();
        let mut stuck = LineFile::blocking(OwnedFd::from(writer).into());
        while stuck.finish() {
            stuck.write_line(&[b'x'; 9_999]).unwrap();
        }
        let target = LogTarget::stdout();
        *target.current.lock() = Some(stuck);
        std::thread::scope(|scope| {
            let written = scope.spawn(|| target.write_line(b"a\n"));
            while target.current.try_lock().is_some() {
                std::thread::yield_now();
            }
            target.replace(LineFile::open(&path).unwrap());
            written.join().unwrap().unwrap();
        });
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "a\n");
        assert_eq!(target.missed(), 1, "the line whose beginning the pipe has");
        assert!(reader.as_fd().try_clone_to_owned().is_ok(), "it was open all the time");
    }
}
