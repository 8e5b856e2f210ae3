//! The entropy device, which has no backend.

use super::device::FuzzedDevice;
use super::input::FuzzInput;
use super::memory::FuzzMemory;
use crate::devices::rng::Rng;
use crate::devices::virtio::{Device, DriverBuffer};

pub(super) struct FuzzedRng;

impl FuzzedDevice for FuzzedRng {
    fn make(&mut self) -> Box<dyn Device> {
        Box::new(Rng::default())
    }

    fn queue(&self) -> usize {
        0
    }

    fn request(
        &mut self,
        _: usize,
        from: &mut FuzzInput<'_>,
        _: &mut FuzzMemory,
    ) -> Vec<DriverBuffer> {
        let writable = from.u8() < 240;
        from.pieces(writable)
    }
}
