//! Where a disk's file is offered to its device, and where the device gives the old one back.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use super::engine::Engine;
use super::error::DiskError;
use super::file::DiskFile;
use crate::config::DiskConfig;

/// Token of the event that announces completions of the engine.
pub(super) const COMPLETIONS: u32 = 0;
/// Token by which the caller makes the device look for an offer.
pub(super) const EXCHANGE: u32 = 1;

/// What a disk gets.
pub(super) struct NewFile {
    pub(super) disk: DiskConfig,
    /// The file, locked, and its engine. `None`: the old file stays, with another size.
    pub(super) opened: Option<(Arc<DiskFile>, Engine)>,
    /// Limit on waiting for the requests in flight.
    pub(super) deadline: Instant,
}

/// What the caller and the device share. The lock is held while the device exchanges its file, so
/// that the caller either withdraws the offer before that or sees the outcome.
#[derive(Default)]
pub(super) struct FileOffer(Mutex<OfferState>);

/// The state of an exchange.
#[derive(Default)]
enum OfferState {
    /// Nothing is offered.
    #[default]
    None,
    /// The device is to take this.
    Offered(NewFile),
    /// The device waits for its requests in flight, with what was offered.
    Taken,
    /// The device is done. It gives the old file back if it has taken the new one.
    Done(NewFile, Result<(), DiskError>),
}

impl FileOffer {
    /// Offers `new` to the device.
    pub(super) fn put(&self, new: NewFile) {
        *self.0.lock() = OfferState::Offered(new);
    }

    /// Ends the exchange for the caller, and closes what the device does not have. Returns the
    /// outcome, or `None` if the device has not exchanged its file and will not do so later.
    pub(super) fn close(&self) -> Option<Result<(), DiskError>> {
        let ended = std::mem::take(&mut *self.0.lock());
        match ended {
            OfferState::Done(old, outcome) => {
                drop(old);
                Some(outcome)
            }
            OfferState::None | OfferState::Offered(_) | OfferState::Taken => None,
        }
    }

    /// Takes what is offered, for the device.
    pub(super) fn take(&self) -> Option<NewFile> {
        let mut state = self.0.lock();
        match std::mem::take(&mut *state) {
            OfferState::Offered(new) => {
                *state = OfferState::Taken;
                Some(new)
            }
            other => {
                *state = other;
                None
            }
        }
    }

    /// Lets the device `exchange` its file for `new`, unless the caller has stopped waiting.
    pub(super) fn finish(
        &self,
        mut new: NewFile,
        exchange: impl FnOnce(&mut NewFile) -> Result<(), DiskError>,
    ) {
        let mut state = self.0.lock();
        if matches!(*state, OfferState::Taken) {
            let outcome = exchange(&mut new);
            *state = OfferState::Done(new, outcome);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new_file() -> NewFile {
        let disk = crate::testing::disk("d", "/disk".as_ref(), 512);
        NewFile { disk, opened: None, deadline: Instant::now() }
    }

    #[test]
    fn outcome_reaches_the_caller() {
        let offer = FileOffer::default();
        assert!(offer.take().is_none());
        offer.put(new_file());
        let taken = offer.take().unwrap();
        assert!(offer.take().is_none(), "it is taken once");
        offer.finish(taken, |_| Ok(()));
        assert!(matches!(offer.close(), Some(Ok(()))));
        assert!(offer.close().is_none());
    }

    #[test]
    fn withdrawn_exchange_never_happens() {
        let offer = FileOffer::default();
        offer.put(new_file());
        let taken = offer.take().unwrap();
        assert!(offer.close().is_none());
        offer.finish(taken, |_| panic!("the caller has been told that it did not happen"));
        // Nor does it take the place of the next one.
        offer.put(new_file());
        let late = offer.take().unwrap();
        offer.close();
        offer.put(new_file());
        offer.finish(late, |_| panic!("the caller has been told that it did not happen"));
        assert!(offer.take().is_some());
    }
}
