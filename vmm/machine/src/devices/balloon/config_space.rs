//! Configuration space of a balloon.
//!
//! ```text
//!  0  num_pages              frames that should be in the balloon      written by the operator
//!  4  actual                 frames that are in the balloon            written by the driver
//!  8  free_page_hint_cmd_id  the hinting command, DONE, or STOP        written by the device
//! 12  poison_val             content of freed frames                   written by the driver
//! ```

use serde::{Deserialize, Serialize};

use super::hints::STOP;

const LEN: usize = 16;

/// Fields of the space as last published to the driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct BalloonConfigSpace {
    pub(super) target: u32,
    pub(super) actual: u32,
    pub(super) command: u32,
    pub(super) poison: u32,
}

impl BalloonConfigSpace {
    /// Returns the space for a driver that has done nothing yet.
    pub(super) fn new(target: u32) -> Self {
        Self { target, actual: 0, command: STOP, poison: 0 }
    }

    /// Returns the space as the driver reads it.
    pub(super) fn bytes(&self) -> Vec<u8> {
        [self.target, self.actual, self.command, self.poison].map(u32::to_le_bytes).concat()
    }

    /// Handles a write of the driver. Only the driver's own fields change.
    pub(super) fn write(&mut self, offset: usize, data: &[u8]) {
        let mut bytes = self.bytes();
        for (place, byte) in bytes.iter_mut().skip(offset).zip(data) {
            *place = *byte;
        }
        debug_assert_eq!(bytes.len(), LEN);
        let field = |at: usize| bytes.get(at..at + 4).and_then(|b| b.try_into().ok());
        self.actual = field(4).map_or(self.actual, u32::from_le_bytes);
        self.poison = field(12).map_or(self.poison, u32::from_le_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_writes_only_its_own_fields() {
        let mut space = BalloonConfigSpace { target: 9, actual: 1, command: 7, poison: 0 };
        space.write(0, &[0xff; 16]);
        assert_eq!(space, BalloonConfigSpace { target: 9, actual: !0, command: 7, poison: !0 });
        space.write(5, &[0]);
        assert_eq!(space.actual, 0xffff_00ff);
        for (offset, len) in [(16, 4), (15, 9), (usize::MAX, 1), (4, 0)] {
            space.write(offset, &vec![0; len]);
        }
        assert_eq!(
            space,
            BalloonConfigSpace { target: 9, actual: 0xffff_00ff, command: 7, poison: 0x00ff_ffff }
        );
        assert_eq!(space.bytes()[..4], [9, 0, 0, 0]);
    }
}
