//! Which of two processes runs a guest in memory that both have.
//!
//! The answer is one word in a memory file that both processes map. So it does not depend on
//! messages: whichever of them dies, the other one can read it, and only one of them gets the
//! guest.
//!
//! ```text
//! Offered ---- take ---> Taken -- start --> Starting -- mark running --> Running
//!    |    <- give back -               |
//!    |    <------- give back ----------+
//!    +---- keep ---> Kept
//! ```
//!
//! The same page has the time at which the other process has resumed the guest, by the host's
//! clock. It is 0 until then.
//!
//! A pipe beside the word tells the process that has offered the guest when the other one has
//! ended: the other process has the writing end, which the kernel closes with it. What was only
//! taken by then has not run, and is kept after all.

use std::fs::File;
use std::io::{self, PipeReader};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use driftline_dirty_tracker::PAGE_SIZE;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, SealFlags};
use vm_memory::volatile_memory::VolatileMemory;
use vm_memory::{FileOffset, MmapRegion};

use crate::error::{ClaimError, GuestError};

const OFFERED: u32 = 0;
const KEPT: u32 = 1;
const TAKEN: u32 = 2;
const RUNNING: u32 = 3;
const STARTING: u32 = 4;

/// Offset, in the page of the word, of the time at which the guest was resumed.
const RESUMED_AT: usize = 8;

/// Seals of a claim's file: its size cannot change.
pub(crate) const SIZE_SEALS: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Which process may run a guest whose memory was offered to another process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ClaimState {
    /// The process that offered the guest, unless the other one takes it first.
    Offered,
    /// The process that offered the guest. The offer is over.
    Kept,
    /// The other process, which has not begun to run the guest and may still give it back.
    Taken,
    /// The other process, which has begun to run the guest and gives it back if that fails.
    Starting,
    /// The other process, which does not give the guest back any more.
    Running,
}

impl ClaimState {
    /// Returns the state of a word. A word that this program never writes counts as
    /// [`Starting`](Self::Starting), so that the process that offered the guest never runs it.
    fn of(word: u32) -> Self {
        match word {
            OFFERED => Self::Offered,
            KEPT => Self::Kept,
            RUNNING => Self::Running,
            TAKEN => Self::Taken,
            _ => Self::Starting,
        }
    }
}

/// What a process gets with memory that is offered to it.
#[derive(Clone, Debug)]
pub struct OfferedClaim {
    /// The file of the word.
    pub file: Arc<File>,
    /// The writing end of the pipe. The process that offers sees when the last one is closed.
    pub alive: Arc<OwnedFd>,
}

/// The word that says which of two processes may run the guest.
#[derive(Clone, Debug)]
struct MemoryClaim(Arc<MmapRegion<()>>);

impl MemoryClaim {
    /// Creates the word of an offer, in a file of its own.
    fn offer() -> io::Result<(Self, Arc<File>)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file: File = rustix::fs::memfd_create("driftline-claim", flags)?.into();
        file.set_len(PAGE_SIZE)?;
        rustix::fs::fcntl_add_seals(&file, SIZE_SEALS)?;
        let file = Arc::new(file);
        Ok((Self::map(file.clone())?, file))
    }

    /// Maps the word in `file`, which must have a page that cannot vanish.
    fn map(file: Arc<File>) -> io::Result<Self> {
        let place = FileOffset::from_arc(file, 0);
        let map = MmapRegion::from_file(place, PAGE_SIZE as usize).map_err(io::Error::other)?;
        Ok(Self(Arc::new(map)))
    }

    fn word(&self) -> io::Result<&AtomicU32> {
        // Aligned and within the page.
        self.0.get_atomic_ref(0).map_err(io::Error::other)
    }

    /// Returns the time at which the guest was resumed, in nanoseconds since 1970; 0 if it was not.
    fn resumed_ns(&self) -> io::Result<&AtomicU64> {
        // Aligned and within the page.
        self.0.get_atomic_ref(RESUMED_AT).map_err(io::Error::other)
    }

    fn state(&self) -> ClaimState {
        self.word().map_or(ClaimState::Starting, |word| ClaimState::of(word.load(SeqCst)))
    }

    /// Changes the word from `from` to `to`. Returns whether it was `from`.
    fn change(&self, from: u32, to: u32) -> bool {
        self.word().is_ok_and(|word| word.compare_exchange(from, to, SeqCst, SeqCst).is_ok())
    }
}

/// This process's right to run a guest in its memory, which another process may have as well.
#[derive(Debug, Default)]
pub struct MemoryRight(Mutex<Side>);

/// The side of the latest offer on which this process is.
#[derive(Debug, Default)]
enum Side {
    /// The memory is not offered, or the offer is over.
    #[default]
    Alone,
    /// The other process may have the writing end of the pipe.
    Offers(MemoryClaim, PipeReader),
    Receives {
        claim: MemoryClaim,
        /// That end, which this process has for as long as it has the memory.
        _alive: Arc<OwnedFd>,
    },
}

/// Returns whether all writing ends are closed.
fn is_closed(alive: &PipeReader) -> bool {
    let mut polled = [PollFd::new(alive, PollFlags::empty())];
    // Nothing is written. The kernel reports the end whatever was asked for.
    poll(&mut polled, Some(&Timespec::default())).is_ok()
        && polled[0].revents().contains(PollFlags::HUP)
}

impl MemoryRight {
    /// Returns the right of a process to which memory was offered with `claim`: none, until it
    /// [takes](Self::take) the guest. The caller has checked that the claim's file has a page,
    /// which cannot vanish.
    ///
    /// # Errors
    ///
    /// The file cannot be mapped.
    pub(crate) fn received(claim: OfferedClaim) -> io::Result<Self> {
        let OfferedClaim { file, alive } = claim;
        Ok(Self(Mutex::new(Side::Receives { claim: MemoryClaim::map(file)?, _alive: alive })))
    }

    /// Offers the guest to another process. Returns what that process needs. The caller drops it
    /// once it is sent, or [`receiver_has_ended`](Self::receiver_has_ended) cannot see the end of
    /// that process. An earlier offer is withdrawn.
    ///
    /// # Errors
    ///
    /// An earlier offer was taken, or the system has no memory.
    pub fn offer(&self) -> Result<OfferedClaim, GuestError> {
        self.keep()?;
        let failed = |e: io::Error| GuestError::System {
            what: "offering the guest's memory",
            cause: e.into(),
        };
        let (claim, file) = MemoryClaim::offer().map_err(failed)?;
        let (reader, writer) = io::pipe().map_err(failed)?;
        *self.0.lock() = Side::Offers(claim, reader);
        Ok(OfferedClaim { file, alive: Arc::new(writer.into()) })
    }

    /// Withdraws the offer, so that the guest may run here. No effect if there is none. A guest
    /// that the other process has taken is kept if that process has ended before it began to run
    /// it.
    ///
    /// # Errors
    ///
    /// The other process has taken the guest.
    pub fn keep(&self) -> Result<(), ClaimError> {
        let mut side = self.0.lock();
        let kept = match &*side {
            Side::Alone | Side::Receives { .. } => return Ok(()),
            Side::Offers(claim, alive) => {
                claim.change(OFFERED, KEPT) || (is_closed(alive) && claim.change(TAKEN, KEPT))
            }
        };
        if !kept {
            return Err(ClaimError::Taken);
        }
        // Unmapped: nothing that the other process does to it matters any more.
        *side = Side::Alone;
        Ok(())
    }

    /// Returns whether the process to which the guest was offered has ended, or has dropped the
    /// memory. `false` if there is no offer.
    pub fn receiver_has_ended(&self) -> bool {
        match &*self.0.lock() {
            Side::Offers(_, alive) => is_closed(alive),
            Side::Alone | Side::Receives { .. } => false,
        }
    }

    /// Takes the guest that was offered to this process. No effect if none was.
    ///
    /// # Errors
    ///
    /// The process that offered it has kept it, or it was taken before.
    pub fn take(&self) -> Result<(), ClaimError> {
        match &*self.0.lock() {
            Side::Alone | Side::Offers(..) => Ok(()),
            Side::Receives { claim, .. } if claim.change(OFFERED, TAKEN) => Ok(()),
            Side::Receives { .. } => Err(ClaimError::Kept),
        }
    }

    /// Notes that this process begins to run the guest that it has taken: if it ends from here on,
    /// memory is no longer what it was.
    pub fn start(&self) {
        if let Side::Receives { claim, .. } = &*self.0.lock() {
            claim.change(TAKEN, STARTING);
        }
    }

    /// Gives a guest back that this process has taken and cannot run.
    pub fn give_back(&self) {
        if let Side::Receives { claim, .. } = &*self.0.lock() {
            let _ = claim.change(TAKEN, OFFERED) || claim.change(STARTING, OFFERED);
        }
    }

    /// Notes that the take-over is complete: this process does not give the guest back any more. It
    /// has run the guest since `resumed`, or keeps it paused as it arrived.
    pub fn mark_running(&self, resumed: SystemTime) {
        if let Side::Receives { claim, .. } = &*self.0.lock() {
            let since_epoch = resumed.duration_since(UNIX_EPOCH).unwrap_or_default();
            if let Ok(place) = claim.resumed_ns() {
                place.store(since_epoch.as_nanos() as u64, SeqCst);
            }
            claim.change(STARTING, RUNNING);
        }
    }

    /// Returns when the other process has resumed the guest that was offered to it. `None` if it
    /// has not, or does not note the time. Only for reports: the other process may write any time.
    pub fn resumed_there(&self) -> Option<SystemTime> {
        match &*self.0.lock() {
            Side::Alone | Side::Receives { .. } => None,
            Side::Offers(claim, _) => {
                let ns = claim.resumed_ns().ok()?.load(SeqCst);
                let noted = claim.state() == ClaimState::Running && ns != 0;
                noted.then(|| UNIX_EPOCH + Duration::from_nanos(ns))
            }
        }
    }

    /// Returns the state of this process's offer. `None` if it has made none, or has kept the
    /// guest.
    pub fn offered(&self) -> Option<ClaimState> {
        match &*self.0.lock() {
            Side::Alone | Side::Receives { .. } => None,
            Side::Offers(claim, _) => Some(claim.state()),
        }
    }

    /// Returns whether this process was offered the guest, and the take-over is not complete: the
    /// process that offered it may still run it.
    pub fn is_borrowed(&self) -> bool {
        match &*self.0.lock() {
            Side::Alone | Side::Offers(..) => false,
            Side::Receives { claim, .. } => claim.state() != ClaimState::Running,
        }
    }

    /// Checks that no other process has written to the memory. What was read before the call is
    /// then what this process's guest had.
    ///
    /// # Errors
    ///
    /// Another process has taken the guest.
    pub fn check(&self) -> Result<(), ClaimError> {
        match self.offered() {
            None | Some(ClaimState::Offered | ClaimState::Kept) => Ok(()),
            Some(ClaimState::Taken | ClaimState::Starting | ClaimState::Running) => {
                Err(ClaimError::Taken)
            }
        }
    }
}

/// Returns the seals of a memory file. Fails for files of other kinds, which have none.
pub(crate) fn seals(file: BorrowedFd<'_>) -> io::Result<SealFlags> {
    Ok(rustix::fs::fcntl_get_seals(file.as_fd())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn both() -> (MemoryRight, MemoryRight) {
        let here = MemoryRight::default();
        let there = MemoryRight::received(here.offer().unwrap()).unwrap();
        (here, there)
    }

    #[test]
    fn memory_that_is_not_shared_is_always_here() {
        let alone = MemoryRight::default();
        alone.give_back();
        alone.mark_running(SystemTime::now());
        assert_eq!((alone.keep(), alone.take(), alone.check()), (Ok(()), Ok(()), Ok(())));
        assert_eq!(alone.offered(), None);
    }

    #[test]
    fn kept_guest_is_not_taken() {
        let (here, there) = both();
        assert_eq!((here.offered(), here.keep()), (Some(ClaimState::Offered), Ok(())));
        assert_eq!(there.take(), Err(ClaimError::Kept));
        // What the other process writes to the word has no effect any more.
        if let Side::Receives { claim, .. } = &*there.0.lock() {
            claim.word().unwrap().store(TAKEN, SeqCst);
        }
        assert_eq!((here.keep(), here.check(), here.offered()), (Ok(()), Ok(()), None));
    }

    #[test]
    fn taken_guest_is_kept_after_its_return() {
        let (here, there) = both();
        assert_eq!(there.take(), Ok(()));
        assert_eq!((here.keep(), here.check()), (Err(ClaimError::Taken), Err(ClaimError::Taken)));
        assert!(here.offer().is_err());
        there.give_back();
        assert_eq!((here.check(), here.keep()), (Ok(()), Ok(())));
        assert_eq!(there.take(), Err(ClaimError::Kept));
    }

    #[test]
    fn guest_that_has_run_is_not_given_back() {
        let (here, there) = both();
        there.take().unwrap();
        there.start();
        let at = UNIX_EPOCH + Duration::from_nanos(1_790_000_000_000_000_005);
        assert_eq!(here.resumed_there(), None);
        there.mark_running(at);
        assert_eq!(here.resumed_there(), Some(at));
        there.give_back();
        assert_eq!(
            (here.keep(), here.offered()),
            (Err(ClaimError::Taken), Some(ClaimState::Running))
        );
        // It may be offered again by the process that has it.
        let third = MemoryRight::received(there.offer().unwrap()).unwrap();
        assert_eq!((third.take(), there.keep()), (Ok(()), Err(ClaimError::Taken)));
        assert_eq!(here.offered(), Some(ClaimState::Running));
    }

    #[test]
    fn end_of_the_receiver_returns_the_guest() {
        for starts in [false, true] {
            let (here, there) = both();
            there.take().unwrap();
            if starts {
                there.start();
            }
            assert_eq!((here.receiver_has_ended(), here.keep().is_ok()), (false, false));
            drop(there);
            assert!(here.receiver_has_ended());
            assert_eq!(here.keep().is_ok(), !starts);
        }
        assert!(!MemoryRight::default().receiver_has_ended());
    }

    #[test]
    fn new_offer_withdraws_the_one_before() {
        let (here, slow) = both();
        let there = MemoryRight::received(here.offer().unwrap()).unwrap();
        assert_eq!((slow.take(), there.take()), (Err(ClaimError::Kept), Ok(())));
    }

    #[test]
    fn unknown_word_lets_neither_process_run() {
        let (here, there) = both();
        if let Side::Receives { claim, .. } = &*there.0.lock() {
            claim.word().unwrap().store(77, SeqCst);
        }
        assert_eq!((here.keep(), there.take()), (Err(ClaimError::Taken), Err(ClaimError::Kept)));
    }

    #[test]
    fn guest_is_taken_once() {
        let here = MemoryRight::default();
        let claim = here.offer().unwrap();
        let two = [claim.clone(), claim].map(|claim| MemoryRight::received(claim).unwrap());
        assert_eq!(two.map(|there| there.take().is_ok()), [true, false]);
    }

    #[test]
    fn one_of_two_threads_gets_the_guest() {
        for _ in 0..200 {
            let (here, there) = both();
            let (kept, taken) = std::thread::scope(|scope| {
                let kept = scope.spawn(|| here.keep().is_ok());
                (there.take().is_ok(), kept.join().unwrap())
            });
            assert!(kept != taken);
        }
    }
}
