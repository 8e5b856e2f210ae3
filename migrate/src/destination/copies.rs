//! Copies of disks while they are received, and the threads that write them.
//!
//! The receiving thread never accesses a copy itself, because storage that does not answer would
//! block it for ever. It passes at most [`BUFFERS`] buffers to a writer thread. A second thread
//! syncs the copies while more blocks arrive, so that little is left at the end of a pass. The
//! receiving thread waits for both in slices. It gives up when one operation takes longer than its
//! limit, when one of its own waits takes longer than that limit plus [`MARGIN`], or when the
//! receiver is cancelled. Threads whose storage never answers are abandoned. A [`CopySet`] is the
//! only state that they share with the receiving thread.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use driftline_dirty_tracker::FrameRun;
use driftline_guest::{DriveCopy, DriveHead};
use parking_lot::Mutex;

use crate::error::{Cause, DriveFailure};
use crate::protocol::message::RunTable;
use crate::protocol::stream_state::DriveStep;
use crate::transport::stop::StopFlag;
use crate::transport::wait;

/// Upper bound on messages that wait for the writer thread, at most 1 MiB each (I9).
const BUFFERS: usize = 8;
/// Bytes of blocks after which a sync of the copies starts. At most twice as many bytes are not
/// durable.
const SYNC_EVERY: u64 = 64 << 20;
/// Upper bound on zero blocks in one operation, 64 MiB, so that storage which has to write the
/// zeros does so within the limit of an operation.
const ZEROS: u64 = 16 << 10;
/// Time that one wait may take in addition to the limit of an operation. The sum is less than the
/// source's default progress timeout, so that the source receives the reason of a failure. It does
/// not if several such waits delay one answer, or if the pause has a shorter limit.
pub(super) const MARGIN: Duration = Duration::from_secs(1);
/// Upper bound on waiting for files to be removed. A longer removal continues in the background.
const REMOVE_LIMIT: Duration = Duration::from_secs(5);

/// Timeouts of the storage of copies.
#[derive(Clone, Copy, Debug)]
pub(super) struct CopyLimits {
    /// Timeout of one operation.
    operation: Duration,
    /// Timeout of one wait of the receiving thread, which may be for several operations.
    wait: Duration,
}

impl CopyLimits {
    /// Returns the limits for a timeout of one operation.
    pub(super) fn of(operation: Duration) -> Self {
        Self { operation, wait: operation.saturating_add(MARGIN) }
    }
}

/// The copies of one guest's disks. Their files are removed on drop unless they were kept.
pub(super) struct Copies {
    /// `None` if no disk is copied.
    threads: Option<CopyThreads>,
}

/// The writer thread as the receiving thread sees it.
struct CopyThreads {
    set: Arc<CopySet>,
    stop: Arc<StopFlag>,
    tasks: Sender<WriterTask>,
    replies: Receiver<Result<WriterReply, Cause>>,
    /// Buffers that the writer thread does not use.
    free: Vec<CopyBuffer>,
    /// Whether blocks were written that may not be durable.
    unsynced: bool,
}

/// State that the receiving thread, the writer thread and the syncing thread share.
struct CopySet {
    heads: Vec<DriveHead>,
    /// Copies of the disks in `heads`, in the same order.
    copies: Vec<Box<dyn DriveCopy>>,
    /// Current operation of each thread, by [`CopyThreadRole`].
    operations: [Mutex<Option<CopyOperation>>; 2],
    limits: CopyLimits,
    /// Shared with the builder while a copy may still have to be removed.
    _busy: Arc<()>,
}

#[derive(Clone, Copy)]
enum CopyThreadRole {
    Writer,
    Syncer,
}

/// An operation in progress.
#[derive(Clone, Copy)]
struct CopyOperation {
    drive: usize,
    what: &'static str,
    since: Instant,
}

/// Blocks of one disk. Reused, so that its memory is allocated once.
#[derive(Default)]
struct CopyBuffer {
    drive: usize,
    runs: Vec<FrameRun>,
    /// Contents of `runs`; empty for zeros.
    contents: Vec<u8>,
}

enum WriterTask {
    Write(CopyBuffer),
    /// Make all written blocks durable.
    MakeDurable,
    /// Yield the copies to the guest.
    Yield,
}

enum WriterReply {
    Written(CopyBuffer),
    Done,
}

impl CopySet {
    /// Performs one operation on a copy, and shows it in `operations` meanwhile.
    fn attempt(
        &self,
        role: CopyThreadRole,
        drive: usize,
        what: &'static str,
        operation: impl FnOnce(&dyn DriveCopy) -> io::Result<()>,
    ) -> Result<(), Cause> {
        let current = &self.operations[role as usize];
        *current.lock() = Some(CopyOperation { drive, what, since: Instant::now() });
        let done = operation(&*self.copies[drive]);
        *current.lock() = None;
        done.map_err(|cause| self.failed(drive, what, cause.into()))
    }

    fn failed(&self, drive: usize, what: &'static str, cause: DriveFailure) -> Cause {
        Cause::Drive { id: self.heads[drive].id.clone(), what, cause }
    }

    /// Returns the failure of an operation that has taken longer than the limit.
    fn overdue(&self) -> Option<Cause> {
        let limit = self.limits.operation;
        let running = self.operation_running(limit)?;
        Some(self.failed(running.drive, running.what, DriveFailure::Unanswered { limit }))
    }

    /// Returns the failure of a wait that has taken too long. Each operation may be within its
    /// limit.
    fn too_slow(&self) -> Cause {
        let cause = DriveFailure::TooSlow { limit: self.limits.wait };
        match self.operation_running(Duration::ZERO) {
            Some(running) => self.failed(running.drive, running.what, cause),
            None => Cause::Copies { cause },
        }
    }

    /// Returns an operation that has taken at least `least`.
    fn operation_running(&self, least: Duration) -> Option<CopyOperation> {
        let is_running = |operation: &CopyOperation| operation.since.elapsed() >= least;
        self.operations.iter().find_map(|current| current.lock().filter(is_running))
    }

    /// Performs `operation` on each copy in turn.
    fn each(
        &self,
        role: CopyThreadRole,
        what: &'static str,
        operation: impl Fn(&dyn DriveCopy) -> io::Result<()>,
    ) -> Result<(), Cause> {
        (0..self.copies.len()).try_for_each(|drive| self.attempt(role, drive, what, &operation))
    }

    /// Writes a buffer. Returns its number of bytes.
    fn write(&self, buffer: &CopyBuffer) -> Result<u64, Cause> {
        let (drive, mut contents) = (buffer.drive, &buffer.contents[..]);
        for run in &buffer.runs {
            if contents.is_empty() {
                for part in run.chunks(ZEROS) {
                    let (at, has) = (part.start.gpa(), self.bytes_on_disk(drive, &part));
                    let zero = |copy: &dyn DriveCopy| copy.zero(at, has);
                    self.attempt(CopyThreadRole::Writer, drive, "writing zeros to its copy", zero)?;
                }
                continue;
            }
            let (at, has) = (run.start.gpa(), self.bytes_on_disk(drive, run));
            // Decoding has checked that the runs fit the length.
            let (bytes, rest) = contents.split_at(run.bytes() as usize);
            let write = |copy: &dyn DriveCopy| copy.write(at, &bytes[..has as usize]);
            self.attempt(CopyThreadRole::Writer, drive, "writing its copy", write)?;
            contents = rest;
        }
        Ok(buffer.runs.iter().map(|run| run.bytes()).sum())
    }

    /// Returns the bytes of `run` that the disk has, because its last block may be partial.
    fn bytes_on_disk(&self, drive: usize, run: &FrameRun) -> u64 {
        self.heads[drive].bytes.saturating_sub(run.start.gpa()).min(run.bytes())
    }
}

impl Copies {
    /// Starts the threads. `copies` are those of `heads`, in the same order. `busy` is shared until
    /// the copies are kept or removed and their threads have ended.
    pub(super) fn new(
        copies: Vec<Box<dyn DriveCopy>>,
        heads: &[DriveHead],
        limits: CopyLimits,
        stop: Arc<StopFlag>,
        busy: Arc<()>,
    ) -> Result<Self, Cause> {
        if copies.is_empty() {
            return Ok(Self { threads: None });
        }
        let heads = heads.to_vec();
        let operations = Default::default();
        let set = Arc::new(CopySet { heads, copies, operations, limits, _busy: busy });
        let ((tasks, requests), (reply, replies)) = (mpsc::channel(), mpsc::channel());
        let syncer = CopySyncer::spawn(set.clone())?;
        let writer = CopyWriter { set: set.clone(), syncer, unsynced: 0 };
        spawn("migrate-disks", move || writer.run(&requests, reply))?;
        let free = (0..BUFFERS).map(|_| CopyBuffer::default()).collect();
        let threads = CopyThreads { set, stop, tasks, replies, free, unsynced: false };
        Ok(Self { threads: Some(threads) })
    }

    /// Passes blocks to the writer thread. Returns the time spent waiting for a free buffer. Fails
    /// if an earlier write has failed.
    pub(super) fn take(&mut self, step: DriveStep<'_>) -> Result<Duration, Cause> {
        let (drive, runs, contents): (_, RunTable<'_>, &[u8]) = match step {
            DriveStep::Noted => return Ok(Duration::ZERO),
            DriveStep::Place { drive, runs, contents } => (drive, runs, contents),
            DriveStep::Zero { drive, runs } => (drive, runs, &[]),
        };
        let threads = self.threads.as_mut().ok_or_else(thread_ended)?;
        let begun = Instant::now();
        let mut buffer = threads.free_buffer()?;
        let waited = begun.elapsed();
        buffer.drive = drive;
        buffer.runs.clear();
        buffer.runs.extend(runs.iter());
        buffer.contents.clear();
        buffer.contents.extend_from_slice(contents);
        threads.unsynced = true;
        threads.submit(WriterTask::Write(buffer));
        Ok(waited)
    }

    /// Waits until all received blocks are durable. Returns whether there were any that were not.
    pub(super) fn make_durable(&mut self) -> Result<bool, Cause> {
        match &mut self.threads {
            Some(threads) if threads.unsynced => {
                threads.perform(WriterTask::MakeDurable)?;
                threads.unsynced = false;
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Yields the copies to the guest by releasing their locks.
    pub(super) fn yield_to_guest(&mut self) -> Result<(), Cause> {
        self.threads.as_mut().map_or(Ok(()), |threads| threads.perform(WriterTask::Yield))
    }

    /// Keeps the copies, which are the guest's disks from now on.
    pub(super) fn keep(&self) {
        let copies = self.threads.iter().flat_map(|threads| &threads.set.copies);
        copies.for_each(|copy| copy.keep());
    }

    /// Ends the threads, and removes copies that were not kept, which takes some time for large
    /// files. Returns when they are removed, or after [`REMOVE_LIMIT`].
    pub(super) fn remove(&mut self) {
        let Some(CopyThreads { set, replies, tasks, .. }) = self.threads.take() else { return };
        let until = Instant::now() + REMOVE_LIMIT;
        let names: Vec<_> = set.heads.iter().map(|head| format!("\"{}\"", head.id)).collect();
        // The writer thread has the last reference now, and removes the files before it closes its
        // channel.
        drop((set, tasks));
        loop {
            match replies.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => break,
            }
        }
        tracing::warn!(
            "removing incomplete copies of disks takes longer than {REMOVE_LIMIT:?}; their files \
             may stay: {}",
            names.join(", ")
        );
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        self.remove();
    }
}

impl CopyThreads {
    fn submit(&self, task: WriterTask) {
        // If the thread has ended, reading its reply fails with the reason.
        let _ = self.tasks.send(task);
    }

    /// Waits for a free buffer.
    fn free_buffer(&mut self) -> Result<CopyBuffer, Cause> {
        let until = self.give_up_at();
        loop {
            while let Ok(reply) = self.replies.try_recv() {
                self.note(reply?);
            }
            if let Some(buffer) = self.free.pop() {
                return Ok(buffer);
            }
            let reply = self.next(until)?;
            self.note(reply);
        }
    }

    fn note(&mut self, reply: WriterReply) {
        match reply {
            WriterReply::Written(buffer) => self.free.push(buffer),
            WriterReply::Done => {}
        }
    }

    /// Waits until a task is performed, after all earlier ones.
    fn perform(&mut self, task: WriterTask) -> Result<(), Cause> {
        self.submit(task);
        let until = self.give_up_at();
        loop {
            match self.next(until)? {
                WriterReply::Done => return Ok(()),
                written => self.note(written),
            }
        }
    }

    /// Returns the time at which a wait that begins now has taken too long.
    fn give_up_at(&self) -> Instant {
        Instant::now() + self.set.limits.wait
    }

    /// Waits for the writer thread's next reply, until `until`.
    fn next(&mut self, until: Instant) -> Result<WriterReply, Cause> {
        wait::answer(&self.replies, thread_ended, || {
            if self.stop.is_cancelled() {
                return Err(Cause::Cancelled);
            }
            if let Some(overdue) = self.set.overdue() {
                return Err(overdue);
            }
            match Instant::now() >= until {
                true => Err(self.set.too_slow()),
                false => Ok(()),
            }
        })?
    }
}

/// The writer thread.
struct CopyWriter {
    set: Arc<CopySet>,
    syncer: CopySyncer,
    /// Bytes written since the last sync was started.
    unsynced: u64,
}

impl CopyWriter {
    fn run(mut self, tasks: &Receiver<WriterTask>, reply: Sender<Result<WriterReply, Cause>>) {
        for task in tasks {
            let done = self.perform(task);
            let failed = done.is_err();
            if reply.send(done).is_err() || failed {
                break;
            }
        }
        let Self { set, syncer, .. } = self;
        syncer.end();
        // This may be the last reference, which removes the files. It is dropped before `reply`,
        // whose end `remove` waits for.
        drop(set);
        drop(reply);
    }

    fn perform(&mut self, task: WriterTask) -> Result<WriterReply, Cause> {
        match task {
            WriterTask::Write(buffer) => {
                self.unsynced = self.unsynced.saturating_add(self.set.write(&buffer)?);
                if self.unsynced >= SYNC_EVERY {
                    self.begin_sync()?;
                }
                Ok(WriterReply::Written(buffer))
            }
            WriterTask::MakeDurable => {
                if self.unsynced > 0 {
                    self.begin_sync()?;
                }
                self.syncer.wait()?;
                Ok(WriterReply::Done)
            }
            WriterTask::Yield => {
                let what = "giving its copy to the guest";
                self.set.each(CopyThreadRole::Writer, what, |copy| copy.yield_to_guest())?;
                Ok(WriterReply::Done)
            }
        }
    }

    /// Starts a sync of all blocks written so far, after waiting for the previous sync.
    fn begin_sync(&mut self) -> Result<(), Cause> {
        self.syncer.wait()?;
        self.unsynced = 0;
        self.syncer.begin()
    }
}

/// The syncing thread, as the writer thread sees it.
struct CopySyncer {
    start: Sender<()>,
    replies: Receiver<Result<(), Cause>>,
    under_way: bool,
    thread: JoinHandle<()>,
}

impl CopySyncer {
    fn spawn(set: Arc<CopySet>) -> Result<Self, Cause> {
        let ((start, requests), (reply, replies)) = (mpsc::channel(), mpsc::channel());
        let thread = spawn("migrate-sync", move || {
            for () in requests {
                let what = "making its copy durable";
                if reply
                    .send(set.each(CopyThreadRole::Syncer, what, |copy| copy.make_durable()))
                    .is_err()
                {
                    return;
                }
            }
        })?;
        Ok(Self { start, replies, under_way: false, thread })
    }

    fn begin(&mut self) -> Result<(), Cause> {
        self.under_way = true;
        self.start.send(()).map_err(|_| thread_ended())
    }

    fn wait(&mut self) -> Result<(), Cause> {
        match std::mem::take(&mut self.under_way) {
            true => self.replies.recv().map_err(|_| thread_ended())?,
            false => Ok(()),
        }
    }

    fn end(self) {
        let Self { start, thread, .. } = self;
        drop(start);
        // If the thread has panicked, `wait` has failed already.
        let _ = thread.join();
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, Cause> {
    let thread = Builder::new().name(name.into()).spawn(work);
    thread.map_err(|cause| Cause::System { what: "starting a thread", cause })
}

fn thread_ended() -> Cause {
    Cause::Copies { cause: DriveFailure::ThreadEnded }
}

#[cfg(test)]
mod tests;
