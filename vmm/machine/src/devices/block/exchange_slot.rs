//! Where a disk's file is offered to its device, and where the device gives the old one back.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use super::engine::Engine;
use super::error::DiskError;
use super::file::DiskFile;
use crate::config::DiskConfig;

/// Token by which the caller makes the device look into the slot.
pub(super) const EXCHANGE: u32 = 1;

/// What a disk gets.
pub(super) struct NewFile {
    pub(super) disk: DiskConfig,
    /// The file, locked, and its engine. `None`: the old file stays, with another size.
    pub(super) opened: Option<(Arc<DiskFile>, Engine)>,
    /// Limit on waiting for the requests in flight.
    pub(super) deadline: Instant,
}

/// What the caller and the device share.
#[derive(Default)]
pub(super) struct ExchangeSlot {
    /// What the device is to take.
    pub(super) offered: Mutex<Option<NewFile>>,
    /// What the device has given back, the old file if it took the new one, and the outcome.
    pub(super) returned: Mutex<Option<(NewFile, Result<(), DiskError>)>>,
}
