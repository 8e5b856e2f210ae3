//! The engine that does a disk's work: io_uring, or plain reads and writes where the kernel has no
//! io_uring.

#[cfg(test)]
pub(super) mod manual;
mod sync;
mod uring;

use std::io;
use std::sync::Arc;
use std::time::Instant;

use driftline_guest::GuestRam;

use super::error::DiskError;
use super::file::DiskFile;
use super::operation::DiskOperation;
use crate::config::DiskEngine;
use crate::devices::latched_event::LatchedEvent;
use uring::Uring;

/// An engine; see the module.
pub(super) enum Engine {
    Uring(Box<Uring>),
    Sync(Arc<DiskFile>),
    #[cfg(test)]
    Manual(manual::ManualEngine),
}

impl Engine {
    /// Creates an engine for at most `most` operations at a time on `file`; `id` is used in
    /// messages.
    ///
    /// # Errors
    ///
    /// io_uring was asked for, and this host has none.
    pub(super) fn new(
        kind: DiskEngine,
        file: Arc<DiskFile>,
        most: usize,
        id: &str,
    ) -> Result<Self, DiskError> {
        if kind == DiskEngine::Blocking {
            return Ok(Self::Sync(file));
        }
        Self::with_uring(file.clone(), most).or_else(|cause| match kind {
            DiskEngine::Uring => Err(DiskError::NoUring { id: id.to_owned(), cause }),
            DiskEngine::Automatic | DiskEngine::Blocking => {
                tracing::info!("disk \"{id}\" does without io_uring: {cause}");
                Ok(Self::Sync(file))
            }
        })
    }

    /// Creates an io_uring engine for at most `most` operations at a time on `file`.
    pub(super) fn with_uring(file: Arc<DiskFile>, most: usize) -> io::Result<Self> {
        Ok(Self::Uring(Box::new(Uring::new(file, most)?)))
    }

    /// Returns the event that becomes readable when operations have ended; `None` for an engine
    /// that has done its work when `submit` returns.
    pub(super) fn completion_event(&self) -> Option<&LatchedEvent> {
        match self {
            Self::Uring(uring) => Some(uring.completion_event()),
            Self::Sync(_) => None,
            #[cfg(test)]
            Self::Manual(engine) => Some(engine.completion_event()),
        }
    }

    /// Begins an operation. Returns its outcome if the operation has ended already.
    pub(super) fn submit(
        &mut self,
        operation: DiskOperation,
        ram: &GuestRam,
    ) -> Option<io::Result<()>> {
        let file = match self {
            Self::Uring(uring) if uring.supports(&operation.work) => {
                return uring.submit(operation, ram).err().map(Err);
            }
            Self::Uring(uring) => uring.file(),
            Self::Sync(file) => file,
            #[cfg(test)]
            Self::Manual(engine) => return engine.submit(operation),
        };
        Some(sync::perform(file, &operation, ram))
    }

    /// Takes the operations that have ended.
    pub(super) fn completions(&mut self, ram: &GuestRam) -> Vec<(u64, io::Result<()>)> {
        match self {
            Self::Uring(uring) => uring.completions(ram),
            Self::Sync(_) => Vec::new(),
            #[cfg(test)]
            Self::Manual(engine) => engine.completions(),
        }
    }

    /// Waits for the end of an operation, until `deadline`. Returns `false` if the deadline passes
    /// first.
    pub(super) fn wait(&mut self, deadline: Option<Instant>) -> bool {
        match self {
            Self::Uring(uring) => uring.wait(deadline),
            Self::Sync(_) => true,
            #[cfg(test)]
            Self::Manual(engine) => engine.wait(deadline),
        }
    }
}
