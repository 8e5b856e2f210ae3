//! A disk's reads, writes and flushes by io_uring: many at a time, while the device's thread stays
//! free.
//!
//! This module has the only unsafe code of the block device. The kernel reads and writes guest
//! memory at the addresses given here, until it has reported completion.

use std::collections::HashMap;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use driftline_guest::GuestRam;
use io_uring::register::Restriction;
use io_uring::{IoUring, Probe, opcode, squeue, types};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vm_memory::GuestMemoryBackend;

use crate::devices::block::file::DiskFile;
use crate::devices::block::operation::{DiskOperation, DiskWork};
use crate::devices::latched_event::LatchedEvent;
use crate::devices::virtio::Buffers;

/// Submission queue entries. The kernel takes them at each submit, so few are enough.
const ENTRIES: u32 = 128;
/// All operations that the ring may perform.
const OPERATIONS: [u8; 3] = [opcode::Readv::CODE, opcode::Writev::CODE, opcode::Fsync::CODE];
/// Time after which entries that the kernel did not take are submitted again.
const RETRY: Duration = Duration::from_millis(1);

/// An io_uring on one disk's file; see the module.
pub(crate) struct Uring {
    ring: IoUring,
    file: Arc<DiskFile>,
    completion_event: LatchedEvent,
    in_flight: HashMap<u64, UringOperation>,
    /// Keeps the mapping that the kernel writes to. The first operation sets it.
    ram: Option<GuestRam>,
    /// Whether it has been logged that the kernel takes no requests.
    refusal_logged: bool,
    /// Number of further submissions that fail.
    #[cfg(test)]
    refusals_left: u32,
}

/// An operation that the kernel has.
struct UringOperation {
    work: DiskWork,
    /// Whether the data must be durable before the operation ends.
    durable: bool,
    /// Buffer addresses given to the kernel, which reads them until the operation has ended.
    iovecs: Vec<libc::iovec>,
    /// Bytes that earlier rounds have moved. The kernel may move fewer bytes than requested.
    done: u32,
}

// SAFETY: the pointers in `iovecs` are addresses of guest memory, which `ram` keeps mapped and
// which belongs to no thread. Only the kernel dereferences them.
unsafe impl Send for UringOperation {}

impl Uring {
    /// Creates a ring for at most `most` operations at a time on `file`.
    pub(super) fn new(file: Arc<DiskFile>, most: usize) -> io::Result<Self> {
        let completions = u32::try_from(most).unwrap_or(u32::MAX).next_power_of_two();
        let ring: IoUring = IoUring::builder()
            .setup_cqsize(completions.max(ENTRIES * 2))
            .setup_r_disabled()
            .build(ENTRIES)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if let Some(code) = OPERATIONS.iter().find(|code| !probe.is_supported(**code)) {
            return Err(io::Error::other(format!("its operation {code} is missing")));
        }
        let completion_event = LatchedEvent::new()?;
        ring.submitter().register_eventfd(completion_event.as_raw_fd())?;
        // No filter of system calls sees what a ring does, so the ring itself is restricted to
        // these operations. It could be restricted to this file, too. But it would then hold the
        // file, and its lock, for some time after its process was killed.
        let mut only = OPERATIONS.map(Restriction::sqe_op);
        ring.submitter().register_restrictions(&mut only)?;
        ring.submitter().register_enable_rings()?;
        Ok(Self {
            ring,
            file,
            completion_event,
            in_flight: HashMap::new(),
            ram: None,
            refusal_logged: false,
            #[cfg(test)]
            refusals_left: 0,
        })
    }

    pub(super) fn file(&self) -> &DiskFile {
        &self.file
    }

    pub(super) fn completion_event(&self) -> &LatchedEvent {
        &self.completion_event
    }

    /// Returns whether the ring does this kind of work.
    pub(super) fn supports(&self, work: &DiskWork) -> bool {
        matches!(work, DiskWork::Read { .. } | DiskWork::Write { .. } | DiskWork::Flush)
    }

    /// Gives an operation to the kernel. An error is the operation's outcome.
    pub(super) fn submit(&mut self, operation: DiskOperation, ram: &GuestRam) -> io::Result<()> {
        let DiskOperation { token, work, durable } = operation;
        self.ram.get_or_insert_with(|| ram.clone());
        self.submit_rest(token, UringOperation { work, durable, iovecs: Vec::new(), done: 0 }, ram)
    }

    fn submit_rest(
        &mut self,
        token: u64,
        mut op: UringOperation,
        ram: &GuestRam,
    ) -> io::Result<()> {
        let fd = types::Fd(self.file.file().as_raw_fd());
        op.iovecs = match &op.work {
            DiskWork::Read { to, .. } => iovecs(to, op.done, ram)?,
            DiskWork::Write { from, .. } => iovecs(from, op.done, ram)?,
            _ => Vec::new(),
        };
        let (pointer, count) = (op.iovecs.as_ptr(), op.iovecs.len() as u32);
        let done = u64::from(op.done);
        let entry = match &op.work {
            DiskWork::Read { offset, .. } => {
                opcode::Readv::new(fd, pointer, count).offset(offset + done).build()
            }
            DiskWork::Write { offset, .. } => {
                // Applies to each part of the write: a flush after the whole of it would take one
                // more round.
                let flags = if op.durable { libc::RWF_DSYNC } else { 0 };
                opcode::Writev::new(fd, pointer, count)
                    .offset(offset + done)
                    .rw_flags(flags)
                    .build()
            }
            _ => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
        };
        // Moving the vector does not move its content.
        self.in_flight.insert(token, op);
        let pushed = self.push(&entry.user_data(token));
        if pushed.is_err() {
            self.in_flight.remove(&token);
        }
        pushed
    }

    /// Adds an entry to the ring and submits it. After an error the kernel never sees the entry.
    fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        self.flush();
        // SAFETY: `self` keeps the file and the iovecs until the operation has ended (`in_flight`;
        // a Uring that is dropped waits for it). The iovecs point to mappings that `ram` keeps.
        let pushed = unsafe { self.ring.submission().push(entry) };
        if pushed.is_err() {
            return Err(io::Error::other("io_uring has no room for a request"));
        }
        self.flush();
        Ok(())
    }

    /// Submits all entries in the ring. The kernel may refuse some because completions are in the
    /// way or memory is short. Those stay in the ring; `wait` and `completions` submit them again.
    fn flush(&mut self) {
        while !self.ring.submission().is_empty() {
            match self.try_submit() {
                Ok(taken) if taken > 0 => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                refused => {
                    if let Err(e) = refused
                        && !std::mem::replace(&mut self.refusal_logged, true)
                    {
                        tracing::warn!("io_uring takes no requests for now: {e}");
                    }
                    // Brings the device's thread back to these entries.
                    self.completion_event.signal();
                    return;
                }
            }
        }
    }

    fn try_submit(&mut self) -> io::Result<usize> {
        #[cfg(test)]
        if self.refusals_left > 0 {
            self.refusals_left -= 1;
            return Err(io::Error::from_raw_os_error(libc::EAGAIN));
        }
        self.ring.submit()
    }

    /// Takes the operations that have ended, and marks what the kernel wrote to guest memory.
    pub(super) fn completions(&mut self, ram: &GuestRam) -> Vec<(u64, io::Result<()>)> {
        // Cleared before the completions are read, so that none is missed.
        self.completion_event.clear();
        let ended: Vec<(u64, i32)> =
            self.ring.completion().map(|entry| (entry.user_data(), entry.result())).collect();
        let ended: Vec<_> = ended
            .into_iter()
            .filter_map(|(token, result)| self.ended(token, result, ram))
            .collect();
        if !self.ring.submission().is_empty() {
            if ended.is_empty() {
                // Memory is short, so the retry is delayed.
                std::thread::sleep(RETRY);
            }
            self.flush();
        }
        ended
    }

    fn ended(&mut self, token: u64, result: i32, ram: &GuestRam) -> Option<(u64, io::Result<()>)> {
        let mut op = self.in_flight.remove(&token)?;
        let whole = match &op.work {
            DiskWork::Read { to, .. } => {
                // Marked even after a failure: part of the data may have arrived.
                to.mark_dirty(ram);
                to.len()
            }
            DiskWork::Write { from, .. } => from.len(),
            _ => 0,
        };
        let outcome = match u32::try_from(result) {
            Err(_) if matches!(-result, libc::EINTR | libc::EAGAIN) => None,
            Err(_) => Some(Err(io::Error::from_raw_os_error(-result))),
            Ok(0) if whole > op.done => Some(Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the file is shorter than the disk",
            ))),
            Ok(moved) => {
                op.done = op.done.saturating_add(moved);
                (op.done >= whole).then_some(Ok(()))
            }
        };
        match outcome {
            Some(outcome) => Some((token, outcome)),
            // Submits the rest of the operation.
            None => self.submit_rest(token, op, ram).err().map(|e| (token, Err(e))),
        }
    }

    /// Waits for a completion, until `deadline`. Returns `false` if the deadline passes first.
    pub(super) fn wait(&mut self, deadline: Option<Instant>) -> bool {
        loop {
            self.flush();
            let mut left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
            if !self.ring.submission().is_empty() {
                left = Some(left.unwrap_or(RETRY).min(RETRY));
            }
            let left = left
                .map(|d| Timespec { tv_sec: d.as_secs() as i64, tv_nsec: d.subsec_nanos().into() });
            let mut fds = [PollFd::new(&self.ring, PollFlags::IN)];
            match poll(&mut fds, left.as_ref()) {
                Ok(0) if deadline.is_some_and(|d| Instant::now() >= d) => return false,
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                // After a failed poll the caller looks for completions and waits again.
                Ok(_) | Err(_) => return true,
            }
        }
    }

    /// Waits, without limit, until the kernel has no operation.
    fn finish(&mut self) {
        let Some(ram) = self.ram.clone() else { return };
        while !self.in_flight.is_empty() {
            self.wait(None);
            self.completions(&ram);
        }
    }
}

impl Drop for Uring {
    /// Waits for the kernel, which may still write to guest memory: it must stay mapped until then.
    fn drop(&mut self) {
        self.finish();
    }
}

/// Returns the addresses in this process of `buffers`, without the first `skip` bytes.
fn iovecs(buffers: &Buffers, skip: u32, ram: &GuestRam) -> io::Result<Vec<libc::iovec>> {
    let part = buffers.part(skip, u32::MAX);
    let iovec = |piece: &crate::devices::virtio::Buffer| {
        let slice = ram.get_slice(piece.addr, piece.len as usize).map_err(io::Error::other)?;
        let iov_base = slice.ptr_guard_mut().as_ptr().cast();
        Ok(libc::iovec { iov_base, iov_len: slice.len() })
    };
    part.pieces().iter().map(iovec).collect()
}

#[cfg(test)]
mod tests {
    use driftline_guest::VmId;
    use tempfile::NamedTempFile;
    use vm_memory::GuestAddress;

    use super::*;
    use crate::memory::Memory;

    /// Returns a ring on a file of 4 KiB. On a host without io_uring, reports `test` as skipped and
    /// returns `None`.
    fn uring(test: &str) -> Option<(Uring, NamedTempFile)> {
        let file = NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let disk = crate::testing::disk("d", file.path(), 4096);
        match Uring::new(Arc::new(DiskFile::open(&disk, VmId::random()).unwrap()), 8) {
            Ok(uring) => Some((uring, file)),
            Err(e) => {
                crate::testing::skip(test, &e.to_string());
                None
            }
        }
    }

    #[test]
    fn ring_permits_only_its_operations() {
        let Some((mut uring, _file)) = uring("ring_permits_only_its_operations") else { return };
        let here = types::Fd(libc::AT_FDCWD);
        let path = c"/etc/hosts";
        let forbidden = [
            opcode::OpenAt::new(here, path.as_ptr()).build(),
            opcode::Socket::new(libc::AF_INET, libc::SOCK_STREAM, 0).build(),
            opcode::Nop::new().build(),
        ];
        for (entry, token) in forbidden.into_iter().zip(100..) {
            uring.push(&entry.user_data(token)).unwrap();
            assert!(uring.wait(Some(Instant::now() + Duration::from_secs(20))));
            let ended: Vec<_> =
                uring.ring.completion().map(|e| (e.user_data(), e.result())).collect();
            assert_eq!(ended, [(token, -libc::EACCES)]);
        }
    }

    #[test]
    fn refused_entries_are_submitted_again_during_wait() {
        let test = "refused_entries_are_submitted_again_during_wait";
        let Some((mut uring, _file)) = uring(test) else { return };
        let memory = Memory::new(16 << 20, &Default::default()).unwrap();
        let whole = Buffers::one(GuestAddress(0), 4096);
        for token in 0..3 {
            uring.refusals_left = 5;
            let work = DiskWork::Read { offset: 0, to: whole.clone() };
            uring.submit(DiskOperation { token, work, durable: false }, memory.ram()).unwrap();
        }
        assert!(uring.refusals_left > 0, "the kernel has taken none of them");
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut ended = Vec::new();
        while ended.len() < 3 {
            assert!(uring.wait(Some(deadline)), "{} of 3 ended", ended.len());
            ended.extend(uring.completions(memory.ram()).into_iter().map(|(token, _)| token));
        }
        ended.sort_unstable();
        assert_eq!(ended, [0, 1, 2]);
        let nothing = Instant::now() + Duration::from_millis(20);
        assert!(!uring.wait(Some(nothing)), "nothing is in flight");
    }
}
