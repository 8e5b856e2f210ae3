//! A digest of guest memory that does not depend on the order in which frames were sent.
//!
//! The digest is the sum, modulo 2^128, of XXH3 over each frame that is not all zeros, seeded with
//! the frame's number. A zero frame that only one end has allocated does not change it; exchanging
//! two frames does. It detects accidents, not attacks.

use std::fmt;
use std::io;
use std::thread::ScopedJoinHandle;
use std::time::Duration;

use driftline_dirty_tracker::{FrameRun, PAGE_SIZE};
use driftline_format::is_zero;
use driftline_guest::GuestRam;
use parking_lot::Mutex;
use vm_memory::{Bytes, GuestAddress};
use xxhash_rust::xxh3::xxh3_128_with_seed;

/// The digests of both ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryDigests {
    /// The source's.
    pub ours: u128,
    /// The destination's.
    pub theirs: u128,
}

impl fmt::Display for MemoryDigests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "its digest is {:032x} there and {:032x} here", self.theirs, self.ours)
    }
}

/// Lower bound on the rate of digesting memory, bytes/s, for limits.
const LEAST_RATE: u64 = 250 << 20;

/// Returns the time to add to a limit for digesting this number of frames, at either end.
pub(crate) fn allowance(frames: u64) -> Duration {
    Duration::from_secs(1 + frames.saturating_mul(PAGE_SIZE) / LEAST_RATE)
}

/// Frames that a thread digests at a time, 2 MiB.
const PIECE: u64 = 512;

/// Upper bound on threads; more do not increase memory bandwidth.
const MAX_THREADS: usize = 8;

/// Computes the digest of `runs`, which the guest must not write meanwhile. Reads each frame once.
pub(crate) fn of(ram: &GuestRam, runs: &[FrameRun]) -> io::Result<u128> {
    let pieces = Mutex::new(runs.iter().flat_map(|run| run.chunks(PIECE)));
    let next = || pieces.lock().next();
    let sum = || -> io::Result<u128> {
        let mut sum = 0u128;
        while let Some(piece) = next() {
            sum = sum.wrapping_add(of_piece(ram, piece)?);
        }
        Ok(sum)
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
    std::thread::scope(|scope| {
        // Without further threads this one digests all frames.
        let named = || std::thread::Builder::new().name("migrate-digest".into());
        let start = |_| named().spawn_scoped(scope, sum).ok();
        let others: Vec<ScopedJoinHandle<'_, _>> = (1..threads).filter_map(start).collect();
        others.into_iter().try_fold(sum()?, |all, thread| match thread.join() {
            Ok(sum) => Ok(all.wrapping_add(sum?)),
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })
}

fn of_piece(ram: &GuestRam, piece: FrameRun) -> io::Result<u128> {
    let mut frame = [0; PAGE_SIZE as usize];
    let mut sum = 0u128;
    for gfn in piece.frames() {
        ram.read_slice(&mut frame, GuestAddress(gfn.gpa())).map_err(io::Error::other)?;
        if !is_zero(&frame) {
            sum = sum.wrapping_add(xxh3_128_with_seed(&frame, gfn.0));
        }
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use driftline_dirty_tracker::Gfn;
    use driftline_guest::testing::{MemoryConfig, MemoryGuest};
    use driftline_guest::{GuestContents, VmId};

    use super::*;

    #[test]
    fn digest_ignores_zeros_and_depends_on_position() {
        let config = MemoryConfig::still();
        let guest = MemoryGuest::new(VmId::random(), config).unwrap();
        let (ram, page) = (guest.ram(), PAGE_SIZE);
        let run = |start, count| FrameRun { start: Gfn(start), count };
        let all = [run(0, 300), run(0x400, 724)];
        assert_eq!(of(ram, &all).unwrap(), 0);
        ram.write_slice(&[7; 4096], GuestAddress(5 * page)).unwrap();
        ram.write_slice(&[8; 4096], GuestAddress(0x500 * page)).unwrap();
        let digest = of(ram, &all).unwrap();
        assert_eq!(of(ram, &[run(0x500, 1), run(5, 1)]).unwrap(), digest);
        assert_ne!(of(ram, &[run(5, 1)]).unwrap(), digest);
        // The same two frames, exchanged.
        ram.write_slice(&[8; 4096], GuestAddress(5 * page)).unwrap();
        ram.write_slice(&[7; 4096], GuestAddress(0x500 * page)).unwrap();
        assert_ne!(of(ram, &all).unwrap(), digest);
        // The last bit of a frame.
        ram.write_slice(&[8; 4096], GuestAddress(0x500 * page)).unwrap();
        let digest = of(ram, &all).unwrap();
        ram.write_slice(&[0x88], GuestAddress(0x501 * page - 1)).unwrap();
        assert_ne!(of(ram, &all).unwrap(), digest);
    }
}
