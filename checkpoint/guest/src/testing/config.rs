//! The configuration of a guest of host threads.

use driftline_dirty_tracker::{Gfn, Layout, Slot, SlotId};
use serde::{Deserialize, Serialize};

use crate::error::GuestError;

/// Maximum number of frames of a guest built from hostile bytes: 1 GiB.
const MAX_FRAMES: u64 = 1 << 18;
const MAX_SLOTS: usize = 16;
const MAX_WRITERS: u16 = 16;

/// The configuration of a [`MemoryGuest`](super::MemoryGuest). `GuestIdentity::config` is this in
/// postcard.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MemoryConfig {
    /// Memory slots, at most 1 GiB in total.
    pub slots: Vec<Slot>,
    /// Number of writing threads; with 0, only the test writes memory.
    pub writers: u16,
    /// Frames that the writers share, from the first of memory on.
    pub working_set: u64,
    /// Page writes per second of each writer; 0 is as fast as possible.
    pub writes_per_s: u32,
    /// Seed of the order of the writes.
    pub seed: u64,
}

impl MemoryConfig {
    /// 4 MiB in two slots with a hole between, two writers on 2 MiB, 5,000 writes a second each.
    pub fn small() -> Self {
        let slots = vec![
            Slot { id: SlotId(0), base: Gfn(0), frames: 300 },
            Slot { id: SlotId(1), base: Gfn(0x400), frames: 724 },
        ];
        Self { slots, writers: 2, working_set: 512, writes_per_s: 5_000, seed: 1 }
    }

    /// The same without writers.
    pub fn still() -> Self {
        Self { writers: 0, working_set: 0, ..Self::small() }
    }

    /// Two slots of these numbers of frames with a hole between, without writers.
    pub fn still_of(frames: [u64; 2]) -> Self {
        let slots = vec![
            Slot { id: SlotId(0), base: Gfn(0), frames: frames[0] },
            Slot { id: SlotId(1), base: Gfn(0x1000), frames: frames[1] },
        ];
        Self { slots, writers: 0, working_set: 0, writes_per_s: 1, seed: 3 }
    }

    /// Decodes hostile bytes; allocates nothing beyond the bounds.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, GuestError> {
        const WHAT: &str = "the configuration";
        let (config, rest): (Self, _) =
            postcard::take_from_bytes(bytes).map_err(|e| GuestError::malformed(WHAT, e))?;
        if !rest.is_empty() {
            let left = format!("{} bytes are left over", rest.len());
            return Err(GuestError::malformed(WHAT, left));
        }
        Ok(config)
    }

    pub(super) fn layout(&self) -> Result<Layout, GuestError> {
        let malformed = |why: String| GuestError::malformed("the configuration", why);
        if self.slots.len() > MAX_SLOTS {
            return Err(malformed(format!("{} slots; {MAX_SLOTS} are allowed", self.slots.len())));
        }
        let layout = Layout::new(self.slots.iter().copied())
            .map_err(|e| GuestError::malformed("the configuration", e))?;
        let frames = layout.frames();
        if frames > MAX_FRAMES {
            return Err(malformed(format!("{frames} frames; {MAX_FRAMES} are allowed")));
        }
        let (writers, set) = (self.writers, self.working_set);
        if writers > MAX_WRITERS || set > frames || set < u64::from(writers) {
            return Err(malformed(format!("{writers} writers on {set} of {frames} frames")));
        }
        Ok(layout)
    }
}
