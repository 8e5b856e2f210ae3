//! Frames that a driver names in a chain, and that this host gets back.

use std::io;
use std::sync::Arc;

use driftline_dirty_tracker::{FrameRun, Gfn, PAGE_SIZE};
use driftline_guest::GuestRam;
use vm_memory::{GuestAddress, GuestMemoryBackend};

use super::shared::{BalloonCounters, DiscardCounters, SharedBalloonState};
use crate::devices::virtio::{Buffer, Chain, RequestDefect, Violation};
use crate::memory::{Discarder, ProtectedFrames};

/// Most frame numbers in one chain; Linux sends 256. More would let a driver delay a pause.
pub(super) const MAX_FRAME_NUMBERS: u32 = 4096;

/// Discards frames, and counts them.
pub(super) struct FrameDiscarder {
    discarder: Discarder,
    shared: Arc<SharedBalloonState>,
    /// The frames of the current chain. Each run lies in one memory slot.
    runs: Vec<FrameRun>,
    failures: u64,
}

impl FrameDiscarder {
    /// Creates a discarder that leaves frames alone as long as they are in `protected`.
    pub(super) fn open(
        protected: Arc<ProtectedFrames>,
        shared: Arc<SharedBalloonState>,
    ) -> io::Result<Self> {
        let discarder = Discarder::open(protected)?;
        Ok(Self { discarder, shared, runs: Vec::new(), failures: 0 })
    }

    /// Discards the frames whose numbers are in the chain of queue `queue`.
    ///
    /// # Errors
    ///
    /// The chain's bytes are not whole frame numbers, there are too many, or a frame is not guest
    /// memory.
    pub(super) fn discard_numbered(
        &mut self,
        queue: usize,
        chain: &Chain,
        ram: &GuestRam,
    ) -> Result<(), Violation> {
        let wrong = |cause| Violation::Malformed { queue: queue as u16, cause };
        let len = chain.readable.len();
        if !len.is_multiple_of(4) || len > 4 * MAX_FRAME_NUMBERS {
            return Err(wrong(RequestDefect::FrameNumbers { bytes: len, most: MAX_FRAME_NUMBERS }));
        }
        let mut bytes = vec![0; len as usize];
        chain.readable.read(ram, 0, &mut bytes)?;
        let mut numbers: Vec<u32> = Vec::with_capacity(bytes.len() / 4);
        for number in bytes.chunks_exact(4) {
            let number = u32::from_le_bytes([number[0], number[1], number[2], number[3]]);
            let addr = GuestAddress(Gfn(number.into()).gpa());
            if ram.get_slice(addr, PAGE_SIZE as usize).is_err() {
                return Err(wrong(RequestDefect::NoFrame { number }));
            }
            numbers.push(number);
        }
        numbers.sort_unstable();
        numbers.dedup();
        self.runs.clear();
        for gfn in numbers.into_iter().map(|number| Gfn(number.into())) {
            match self.runs.last_mut() {
                Some(run) if run.end() == gfn => run.count += 1,
                _ => self.runs.push(FrameRun { start: gfn, count: 1 }),
            }
        }
        self.discard(ram);
        Ok(())
    }

    /// Discards the frames that the chain's buffers contain, and counts the buffers.
    pub(super) fn discard_pieces(
        &mut self,
        chain: &Chain,
        ram: &GuestRam,
        counters: fn(&BalloonCounters) -> &DiscardCounters,
    ) {
        self.runs.clear();
        self.runs.extend(chain.writable.pieces().iter().filter_map(whole_frames));
        let (frames, failures) = self.discard(ram);
        let counters = counters(&self.shared.counters);
        counters.pieces.add(self.runs.len() as u64);
        counters.bytes.add(frames * PAGE_SIZE);
        counters.failures.add(failures);
    }

    /// Discards the runs. Returns how many frames had memory, and how many runs failed.
    fn discard(&mut self, ram: &GuestRam) -> (u64, u64) {
        let (mut discarded, mut failed) = (0, 0);
        for run in &self.runs {
            match self.discarder.discard(ram, *run) {
                Ok(frames) => discarded += frames,
                Err(e) => {
                    failed += 1;
                    self.failures += 1;
                    match self.failures {
                        // The guest does not notice: it has no use for the content.
                        1 => tracing::warn!("memory that the guest gave up cannot be freed: {e}"),
                        n => tracing::debug!("freeing memory failed, for the {n}th time: {e}"),
                    }
                }
            }
        }
        self.shared.count_discarded(discarded);
        (discarded, failed)
    }
}

/// Returns the frames that lie entirely in a buffer.
pub(super) fn whole_frames(buffer: &Buffer) -> Option<FrameRun> {
    let start = buffer.addr.0.div_ceil(PAGE_SIZE);
    let end = (buffer.addr.0 + u64::from(buffer.len)) / PAGE_SIZE;
    (end > start).then(|| FrameRun { start: Gfn(start), count: end - start })
}
