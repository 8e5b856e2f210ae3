//! The resource of a test guest that only one host may hold: its
//! [`ExclusiveDrive`](super::ExclusiveDrive).

use std::time::Duration;

use driftline_dirty_tracker::TrackedBitmap;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap};

use super::MemoryGuest;
use crate::error::GuestError;
use crate::hand_over::{HandOver, NextHost};
use crate::shared_guest::SharedGuest;
use crate::testing::device_file;
use crate::testing::faults::Op;

impl HandOver for MemoryGuest {
    fn stay_awake(&self) {}

    fn share(&self) -> Result<SharedGuest, GuestError> {
        let place = |region: &GuestRegionMmap<TrackedBitmap>| region.file_offset().cloned();
        let places: Option<Vec<_>> = self.ram.iter().map(place).collect();
        let private = || GuestError::unsupported("its memory", "it is private to its process");
        let shared = SharedGuest::new(places.ok_or_else(private)?, self.right.offer()?);
        Ok(shared.with_device_files(vec![device_file::of(self.vm_id)?]))
    }

    fn flush(&self, _: Duration) -> Result<bool, GuestError> {
        self.faults.check(Op::Flush, "flushing the drive")?;
        self.drive.flush();
        Ok(true)
    }

    fn release(&self, _: NextHost) -> Result<(), GuestError> {
        self.must_be_paused("release")?;
        // As a guest with two drives does if the second fails.
        self.drive.release(self.serial);
        self.faults.check(Op::Release, "releasing the drive")
    }

    fn detach(&self, _: NextHost) -> Result<Vec<u8>, GuestError> {
        self.must_be_paused("detach")?;
        self.faults.check(Op::Detach, "detaching")?;
        self.drive.detach(self.serial);
        // Only a guest with writers has queued packets.
        Ok(if self.config.writers > 0 { self.mark() } else { Vec::new() })
    }

    fn attach(&self, packets: &[u8]) {
        // If this fails, the packets are lost.
        if self.faults.check(Op::Attach, "attaching").is_ok() {
            *self.received_packets.lock() = packets.to_vec();
        }
    }

    fn acquire(&self) -> Result<(), GuestError> {
        self.right.keep()?;
        self.faults.check(Op::Acquire, "acquiring the drive")?;
        self.drive.acquire(self.serial)
    }
}
