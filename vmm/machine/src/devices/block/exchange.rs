//! Gives a disk another file while its guest runs, or another size after its file has changed.
//!
//! ```text
//! caller:          open, lock, create the engine -> offer        offer -> close the old file
//! device's thread:                                  offer -> drain, exchange, tell the driver
//! ```
//!
//! The device's thread can neither open files nor create rings (see
//! [`sandbox`](crate::sandbox)), so the caller does both.
//!
//! Checkpoints and migrations track and copy the file that a disk had at the guest's start. A
//! device whose file was exchanged therefore refuses to release its file to another host (I7), and
//! its disk cannot be copied. An epoch that still copies the old file ends with an error; the
//! caller makes sure that no epoch is under way. A snapshot only names the disk's file, and names
//! the new one from then on.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use driftline_guest::VmId;
use parking_lot::Mutex;
use vmm_sys_util::epoll::EventSet;

use super::engine::Engine;
use super::error::DiskError;
use super::file::{self, DiskFile};
use super::file_identity::{FileIdentity, identity_of};
use super::file_offer::{COMPLETIONS, EXCHANGE, FileOffer, NewFile};
use super::{BlockDevice, QUEUE_SIZE};
use crate::actor::CallError;
use crate::config::{DiskConfig, DiskEngine};
use crate::devices::virtio::{
    BackendCaller, Device, DeviceIo, QuiesceError, REPLY_GRACE, Violation,
};
use crate::sandbox::check_allowed;

/// What the device is asked to do, in errors.
const TAKE_FILE: &str = "take another file";

/// The disk as it is now.
#[derive(Debug)]
struct CurrentDisk {
    config: DiskConfig,
    file: FileIdentity,
    /// The path that was given last, as it was given; `None` before the first exchange.
    given: Option<PathBuf>,
    /// Whether the file or the size was exchanged since the guest's start.
    is_exchanged: bool,
}

/// The parts of a [`DiskFileControl`] that are known before the device has a thread.
pub(in crate::devices) struct ExchangeParts {
    disk: DiskConfig,
    file: FileIdentity,
    holder: VmId,
    engine: DiskEngine,
    queues: u16,
    offer: Arc<FileOffer>,
}

/// Handle by which a disk gets another file.
#[derive(Clone)]
pub struct DiskFileControl(Arc<ControlState>);

struct ControlState {
    id: String,
    holder: VmId,
    engine: DiskEngine,
    queues: u16,
    offer: Arc<FileOffer>,
    device: BackendCaller,
    /// Locked for as long as an exchange takes.
    current: Mutex<CurrentDisk>,
}

impl std::fmt::Debug for DiskFileControl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("DiskFileControl").field(&self.0.id).finish()
    }
}

/// The reason why a disk does not get another file.
#[derive(Debug, thiserror::Error)]
pub enum ExchangeError {
    /// The file cannot be used, or the disk is busy. The disk keeps its file.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The device's thread has not answered in time, or has ended. The disk keeps its file.
    #[error(transparent)]
    Call(#[from] CallError),
}

impl ExchangeParts {
    /// Returns the handle of the disk whose device `device` calls.
    pub(in crate::devices) fn served_by(self, device: BackendCaller) -> DiskFileControl {
        let Self { disk, file, holder, engine, queues, offer } = self;
        let id = disk.id.clone();
        let current =
            Mutex::new(CurrentDisk { config: disk, file, given: None, is_exchanged: false });
        let state = ControlState { id, holder, engine, queues, offer, device, current };
        DiskFileControl(Arc::new(state))
    }
}

impl DiskFileControl {
    /// Returns the disk's name.
    pub fn disk(&self) -> &str {
        &self.0.id
    }

    /// Returns the path of the file that the disk has been given last, or `None` if it still has
    /// the one of the guest's start.
    pub fn exchanged_path(&self) -> Option<PathBuf> {
        self.0.current.lock().given.clone()
    }

    /// Returns whether the disk's file or size was exchanged since the guest's start, even if the
    /// disk has its first file again. Checkpoints and migrations cannot copy the disk then.
    pub fn is_exchanged(&self) -> bool {
        self.0.current.lock().is_exchanged
    }

    /// Returns the disk as it is now, or `None` if no other file was given since the guest's start.
    pub(crate) fn exchanged_config(&self) -> Option<DiskConfig> {
        let current = self.0.current.lock();
        current.given.is_some().then(|| current.config.clone())
    }

    /// Gives the disk the file at `path`, and tells the driver of the new size. If the disk has
    /// this file already, only its size is read again. The driver is not told whether the content
    /// has changed. Its requests in flight end on the old file. The device waits for them until
    /// `limit` is over.
    ///
    /// # Errors
    ///
    /// The file is not one for a disk, another guest uses it, requests are still in flight, or the
    /// device does not answer. The disk then keeps its file, now and later.
    pub fn exchange(&self, path: &Path, limit: Duration) -> Result<(), ExchangeError> {
        let state = &*self.0;
        let mut current = state.current.lock();
        let (new, file) = state.new_file(&current, path, Instant::now() + limit)?;
        let (deadline, config) = (new.deadline, new.disk.clone());
        state.offer.put(new);
        let called = state.device.call(TAKE_FILE, EXCHANGE, deadline + REPLY_GRACE);
        match state.offer.close() {
            Some(outcome) => outcome?,
            None => {
                called?;
                return Err(DiskError::Busy { id: state.id.clone() }.into());
            }
        }
        let is_other = file != current.file || config.bytes != current.config.bytes;
        let is_exchanged = current.is_exchanged || is_other;
        *current = CurrentDisk { config, file, given: Some(path.to_owned()), is_exchanged };
        Ok(())
    }
}

impl ControlState {
    /// Opens the file at `path`, and locks it.
    fn new_file(
        &self,
        current: &CurrentDisk,
        path: &Path,
        deadline: Instant,
    ) -> Result<(NewFile, FileIdentity), DiskError> {
        let old = &current.config;
        let file = file::open(path, old.readonly).map_err(sandbox_refusal)?;
        let size = file::size(&file, path, old.readonly)?;
        let bytes = size - size % u64::from(old.block_bytes);
        if bytes == 0 {
            return Err(DiskError::Empty { path: path.to_owned() });
        }
        let failed = |cause| {
            let (path, readonly) = (path.to_owned(), old.readonly);
            DiskError::Open { path, readonly, cause }
        };
        let serial = file::file_serial(&file).map_err(failed)?;
        let identity = identity_of(&file).map_err(failed)?;
        // A process that loads a snapshot of the guest may have another working directory.
        let absolute = std::path::absolute(path).map_err(failed)?;
        let disk = DiskConfig { path: absolute, bytes, serial, identity: None, ..old.clone() };
        let opened = match identity == current.file {
            true => None,
            false => {
                let file = Arc::new(DiskFile::of(&disk, self.holder, file)?);
                file.lock()?;
                let most = usize::from(self.queues) * usize::from(QUEUE_SIZE);
                let engine = Engine::new(self.engine, file.clone(), most, &self.id)?;
                Some((file, engine))
            }
        };
        Ok((NewFile { disk, opened, deadline }, identity))
    }
}

/// Returns the error of a file that cannot be opened because of the sandbox, which names the places
/// where files can be.
fn sandbox_refusal(e: DiskError) -> DiskError {
    match e {
        DiskError::Open { path, readonly: false, cause }
            if cause.kind() == io::ErrorKind::PermissionDenied =>
        {
            match check_allowed(&path) {
                Err(refusal) => DiskError::Outside { places: refusal.places().join(", "), path },
                Ok(()) => DiskError::Open { path, readonly: false, cause },
            }
        }
        other => other,
    }
}

impl BlockDevice {
    /// Returns the parts of the handle by which the disk gets another file.
    ///
    /// # Errors
    ///
    /// The file's identity cannot be read.
    pub(in crate::devices) fn exchange_parts(
        &self,
        holder: VmId,
        engine: DiskEngine,
    ) -> io::Result<ExchangeParts> {
        let (disk, queues, offer) = (self.disk.clone(), self.queues, self.offer.clone());
        Ok(ExchangeParts { disk, file: self.file.identity()?, holder, engine, queues, offer })
    }

    /// Takes the file that is offered, if there is one.
    pub(super) fn take_offer(&mut self, io: &mut DeviceIo<'_>) -> Result<(), Violation> {
        let Some(new) = self.offer.take() else { return Ok(()) };
        let drained = self.drain(Some(new.deadline), io);
        let (id, offer) = (self.disk.id.clone(), self.offer.clone());
        offer.finish(new, |new| match &drained {
            Ok(()) if self.locked => self.exchange(new, io),
            Ok(()) => Err(DiskError::Released { id }),
            Err(QuiesceError::InFlight(_)) => Err(DiskError::Busy { id }),
            Err(QuiesceError::Violation(_)) => Err(DiskError::Stopped { id }),
        });
        match drained {
            Err(QuiesceError::Violation(violation)) => Err(violation),
            _ => Ok(()),
        }
    }

    /// Exchanges the disk's file with that in `new`, while no request is in flight.
    fn exchange(&mut self, new: &mut NewFile, io: &mut DeviceIo<'_>) -> Result<(), DiskError> {
        if let Some((file, engine)) = &mut new.opened {
            if let Some(event) = engine.completion_event() {
                let failed = |cause| DiskError::Watch { id: self.disk.id.clone(), cause };
                io.watcher.watch(event, EventSet::IN, COMPLETIONS).map_err(failed)?;
            }
            if let Some(Err(e)) = self.engine.completion_event().map(|old| io.watcher.unwatch(old))
            {
                // Closing it has the same effect.
                tracing::debug!("disk \"{}\": its old event is still watched: {e}", self.disk.id);
            }
            if self.file.flusher().lost().is_some() {
                file.flusher().note_lost(&io::Error::from_raw_os_error(libc::EIO));
            }
            std::mem::swap(&mut self.file, file);
            std::mem::swap(&mut self.engine, engine);
        } else if new.disk.bytes == self.disk.bytes {
            return Ok(());
        }
        // Set before the flusher: a copier that gets the new flusher then sees that the file was
        // exchanged.
        self.is_exchanged.store(true, Ordering::Release);
        self.current_flusher.set(self.file.flusher().clone());
        // An epoch may copy blocks of the old file, and none of the new one.
        self.copy_before_write.release();
        (self.copy_before_write, self.tracker) = (Arc::default(), None);
        let DiskConfig { path, bytes, serial, .. } = new.disk.clone();
        self.disk = DiskConfig { path, bytes, serial, ..self.disk.clone() };
        tracing::info!(
            "disk \"{}\" has {bytes} bytes in \"{}\" from now on",
            self.disk.id,
            self.disk.path.display()
        );
        io.shared.change_config(self.config_space());
        Ok(())
    }
}
