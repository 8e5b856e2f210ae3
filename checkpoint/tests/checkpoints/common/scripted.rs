//! A guest whose writes follow a script: they happen between the steps of the epoch, in an order
//! that does not depend on threads. Records its memory at each pause.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn, Layout, Subscription};
use driftline_guest::testing::{MemoryGuest, image};
use driftline_guest::{
    Clock, CollectionReport, DirtyLog, GuestContents, GuestDrive, GuestError, GuestIdentity,
    GuestRam, HandOver, Lifecycle, Populate, RunState, SavedPause, Section, SectionHead, Stateful,
    VcpuPauses, WriteProtection, WriteThrottle,
};
use parking_lot::{Mutex, MutexGuard};
use vm_memory::{Bytes, GuestAddress};

/// Limit for the query that is to fail.
const QUERY_LIMIT: Duration = Duration::from_secs(60);

/// A write, and its behaviour if it has to wait.
#[derive(Clone, Copy, Debug)]
pub struct Write {
    /// Index among all frames of memory.
    pub frame: u64,
    pub value: u8,
    /// Earliest phase in which it begins: 0 before the first pause, 1 after it, 2 before the
    /// second, and so on.
    pub phase: u8,
    /// After its release it does not write before the next pause is over: a vCPU that was stopped
    /// before it could.
    pub slow: bool,
}

/// Whether a query for waiting writers fails.
#[derive(Clone, Copy, PartialEq, Eq)]
enum QueryFailure {
    None,
    /// The next one fails, and nothing is protected before that.
    Requested,
    /// It has failed.
    Failed,
}

struct ScriptState {
    script: VecDeque<Write>,
    /// Writes that wait, or that were released and have not happened yet.
    waiting: Vec<Write>,
    protected: FrameSet,
    awaited: VecDeque<Gfn>,
    paused: bool,
    /// Number of queries for waiting writers since one was last found.
    looks: u32,
    phase: u8,
    query_failure: QueryFailure,
    /// All of memory at its last pause.
    was: Vec<u8>,
}

/// See the module.
pub struct Scripted {
    guest: Arc<MemoryGuest>,
    state: Mutex<ScriptState>,
    /// The frame that `save_state` writes to.
    frame_written_by_save: u64,
}

impl Scripted {
    pub fn new(
        guest: Arc<MemoryGuest>,
        mut script: Vec<Write>,
        frame_written_by_save: u64,
    ) -> Arc<Self> {
        script.sort_by_key(|write| write.phase);
        let state = ScriptState {
            script: script.into(),
            waiting: Vec::new(),
            protected: FrameSet::new(),
            awaited: VecDeque::new(),
            paused: false,
            looks: 0,
            phase: 0,
            query_failure: QueryFailure::None,
            was: Vec::new(),
        };
        let state = Mutex::new(state);
        Arc::new(Self { guest, state, frame_written_by_save })
    }

    fn lock(&self) -> MutexGuard<'_, ScriptState> {
        self.state.lock()
    }

    /// Makes the next query for waiting writers fail, before the next frames are protected.
    pub fn fail_next_query(&self) {
        self.lock().query_failure = QueryFailure::Requested;
    }

    /// Returns memory at its last pause.
    pub fn memory_at_pause(&self) -> Vec<u8> {
        self.lock().was.clone()
    }

    /// Returns the number of protected frames and of waiting writes.
    pub fn protected_and_waiting(&self) -> (u64, usize) {
        let mut state = self.lock();
        self.retry_writes(&mut state, true);
        (state.protected.frames(), state.waiting.len())
    }

    fn gfn(&self, frame: u64) -> Gfn {
        let mut n = frame % self.guest.layout().frames();
        for slot in self.guest.layout().slots() {
            if n < slot.frames {
                return Gfn(slot.base.0 + n);
            }
            n -= slot.frames;
        }
        unreachable!("the layout has as many frames as it says")
    }

    fn write(&self, state: &mut ScriptState, write: Write) {
        let gfn = self.gfn(write.frame);
        if state.protected.contains(gfn) {
            state.awaited.push_back(gfn);
            state.waiting.push(write);
            return;
        }
        // One byte only: the rest of the frame must keep its content.
        let at = gfn.gpa() + u64::from(write.value) * 16;
        self.guest.ram().write_obj(write.value, GuestAddress(at)).unwrap();
    }

    /// Lets waiting writes try again.
    fn retry_writes(&self, state: &mut ScriptState, slow: bool) {
        if !state.paused {
            for write in std::mem::take(&mut state.waiting) {
                if write.slow && !slow {
                    state.waiting.push(write);
                } else {
                    self.write(state, write);
                }
            }
        }
    }

    /// Executes the next step of the guest.
    fn step(&self, state: &mut ScriptState) {
        if state.paused {
            return;
        }
        self.retry_writes(state, false);
        if state.script.front().is_some_and(|write| write.phase <= state.phase)
            && let Some(write) = state.script.pop_front()
        {
            self.write(state, write);
        }
    }
}

/// The write protection of the guest.
struct ScriptedProtection(Arc<Scripted>);

impl WriteProtection for ScriptedProtection {
    fn protect(&self, frames: &[FrameRun]) -> Result<(), GuestError> {
        let since = Instant::now();
        while self.0.lock().query_failure == QueryFailure::Requested {
            assert!(since.elapsed() < QUERY_LIMIT, "no query for waiting writers");
            std::thread::yield_now();
        }
        if self.0.lock().query_failure == QueryFailure::Failed {
            // Time for the copy thread to unprotect everything, if it can.
            std::thread::sleep(Duration::from_millis(50));
        }
        for run in frames {
            assert!(self.0.layout().contains(*run), "{run:?} is not in one slot");
            let mut state = self.0.lock();
            state.protected.insert(*run);
            state.looks = 0;
            self.0.step(&mut state);
        }
        Ok(())
    }

    fn unprotect(&self, frames: FrameRun) -> Result<(), GuestError> {
        let mut state = self.0.lock();
        state.protected.remove(frames);
        self.0.retry_writes(&mut state, false);
        Ok(())
    }

    fn unprotect_all(&self) {
        self.0.lock().protected.clear();
    }

    fn awaited(&self, _: Duration) -> Result<Option<FrameRun>, GuestError> {
        let mut state = self.0.lock();
        if state.query_failure == QueryFailure::Requested {
            state.query_failure = QueryFailure::Failed;
            let cause = std::io::Error::other("the script says so").into();
            return Err(GuestError::System { what: "looking for waiting writers", cause });
        }
        self.0.step(&mut state);
        state.looks = if state.awaited.is_empty() { state.looks + 1 } else { 0 };
        Ok(state.awaited.pop_front().map(|start| FrameRun { start, count: 1 }))
    }
}

/// A guest of its own that shares the script, so that its write protection can refer to it.
pub struct ScriptedGuest(pub Arc<Scripted>);

driftline_guest::delegate!(
    ScriptedGuest as scripted_guest => *scripted_guest.0.guest;
    GuestIdentity, Populate, WriteThrottle, HandOver,
);

impl GuestContents for ScriptedGuest {
    fn ram(&self) -> &GuestRam {
        self.0.guest.ram()
    }

    fn memory_right(&self) -> &driftline_guest::MemoryRight {
        self.0.guest.memory_right()
    }

    fn populated(&self) -> Result<Vec<FrameRun>, GuestError> {
        self.0.guest.populated()
    }

    fn resident(&self) -> Result<Vec<FrameRun>, GuestError> {
        self.0.guest.resident()
    }

    fn fetch(&self, frames: &[FrameRun]) -> Result<(), GuestError> {
        self.0.guest.fetch(frames)
    }

    fn write_protection(&self) -> Result<Option<Box<dyn WriteProtection>>, GuestError> {
        Ok(Some(Box::new(ScriptedProtection(self.0.clone()))))
    }

    fn drives(&self) -> Vec<Box<dyn GuestDrive>> {
        self.0.guest.drives()
    }
}

impl DirtyLog for ScriptedGuest {
    fn subscribe(&self, name: &str) -> Result<Subscription, GuestError> {
        self.0.guest.subscribe(name)
    }

    fn collect(&self) -> Result<CollectionReport, GuestError> {
        let mut state = self.0.lock();
        if !state.paused {
            // `collect` is the first step of an epoch.
            state.phase = state.phase.next_multiple_of(2);
        }
        self.0.step(&mut state);
        self.0.guest.collect()
    }
}

impl Lifecycle for ScriptedGuest {
    fn run_state(&self) -> RunState {
        self.0.guest.run_state()
    }

    fn pause(&self) -> Result<RunState, GuestError> {
        // Delays the pause until all waits have been reported: threads alone would seldom do that.
        while let Some(state) =
            Some(self.0.lock()).filter(|s| !s.protected.is_empty() && s.looks < 9)
        {
            drop(state);
            std::thread::yield_now();
        }
        let before = self.0.guest.pause()?;
        self.0.lock().paused = true;
        Ok(before)
    }

    fn pause_and_save(&self) -> Result<SavedPause, GuestError> {
        let since = Instant::now();
        let before = self.pause()?;
        Ok(SavedPause { before, since, saved: self.save_state() })
    }

    fn resume(&self) -> Result<(), GuestError> {
        let mut state = self.0.lock();
        state.was = image(&self.0.guest);
        state.paused = false;
        state.phase += 1;
        // Writers that were stopped run before anything else happens.
        self.0.retry_writes(&mut state, true);
        self.0.guest.resume()
    }

    fn stop(&self, why: &str) {
        self.0.guest.stop(why);
    }

    fn vcpu_pauses(&self) -> Vec<VcpuPauses> {
        self.0.guest.vcpu_pauses()
    }
}

impl Stateful for ScriptedGuest {
    fn save_state(&self) -> Result<Vec<Section>, GuestError> {
        // Like a write of the host's kernel for a vCPU, this waits for the frame to be unprotected,
        // too.
        let gfn = self.0.gfn(self.0.frame_written_by_save);
        loop {
            let mut state = self.0.lock();
            if !state.protected.contains(gfn) {
                self.0.guest.ram().write_obj(0xeeu8, GuestAddress(gfn.gpa() + 8)).unwrap();
                break;
            }
            if !state.awaited.contains(&gfn) {
                state.awaited.push_back(gfn);
            }
            drop(state);
            std::thread::yield_now();
        }
        self.0.guest.save_state()
    }

    fn restore_state(&self, sections: &[Section], clock: Clock) -> Result<(), GuestError> {
        self.0.guest.restore_state(sections, clock)
    }

    fn state_heads(&self) -> Vec<SectionHead> {
        self.0.guest.state_heads()
    }

    fn check_state_heads(&self, heads: &[SectionHead]) -> Result<(), GuestError> {
        self.0.guest.check_state_heads(heads)
    }
}

impl Scripted {
    fn layout(&self) -> &Layout {
        self.guest.layout()
    }
}
