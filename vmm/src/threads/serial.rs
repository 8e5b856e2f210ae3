//! Owns where the workers' lines go.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};

use crate::config::SerialSink;

/// The first serial port's output: whole lines, never mixed.
pub(super) struct Serial {
    sink: Mutex<Box<dyn Write + Send>>,
}

impl Serial {
    /// Opens `sink`.
    pub(super) fn open(sink: &SerialSink) -> io::Result<Self> {
        let sink: Box<dyn Write + Send> = match sink {
            SerialSink::Stdio => Box::new(io::stdout()),
            SerialSink::Null => Box::new(io::sink()),
            SerialSink::File(path) => {
                let file = OpenOptions::new().create(true).append(true).open(path);
                Box::new(file.map_err(|e| io::Error::other(format!("{}: {e}", path.display())))?)
            }
        };
        Ok(Self { sink: Mutex::new(sink) })
    }

    /// Writes a line. A sink that has gone away (a closed pipe) loses lines, not the guest.
    pub(super) fn print(&self, line: &[u8]) {
        let mut sink = self.sink.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = sink.write_all(line).and_then(|()| sink.flush());
    }
}
