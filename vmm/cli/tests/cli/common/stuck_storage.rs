//! A file system with one file, `disk`, that stops answering flushes, reads, writes or locks when
//! a test requests it.

use std::ffi::OsStr;
use std::io;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{
    BackgroundSession, BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem,
    Generation, INodeNo, InitFlags, KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData,
    ReplyEmpty, ReplyEntry, ReplyLock, ReplyLseek, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use tempfile::TempDir;

const DISK: INodeNo = INodeNo(2);
const TTL: Duration = Duration::from_secs(60);

/// Control of the requests of one kind.
struct ReplyGate<R> {
    /// Number of requests that will still be answered.
    answered: AtomicUsize,
    /// Requests that wait for an answer.
    stuck: Mutex<Vec<R>>,
}

impl<R> Default for ReplyGate<R> {
    fn default() -> Self {
        Self { answered: AtomicUsize::new(usize::MAX), stuck: Mutex::default() }
    }
}

impl<R> ReplyGate<R> {
    /// Returns the reply if the request is to be answered; otherwise keeps the reply.
    fn pass(&self, reply: R) -> Option<R> {
        let order = Ordering::SeqCst;
        match self.answered.fetch_update(order, order, |left| left.checked_sub(1)) {
            Ok(_) => Some(reply),
            Err(_) => {
                self.stuck.lock().unwrap().push(reply);
                None
            }
        }
    }

    fn answer_only(&self, requests: usize) {
        self.answered.store(requests, Ordering::SeqCst);
    }

    /// Answers all requests from now on. Returns the waiting ones.
    fn open(&self) -> Vec<R> {
        self.answer_only(usize::MAX);
        std::mem::take(&mut *self.stuck.lock().unwrap())
    }

    fn stuck(&self) -> usize {
        self.stuck.lock().unwrap().len()
    }
}

#[derive(Default)]
struct ReplyGates {
    flushes: ReplyGate<ReplyEmpty>,
    reads: ReplyGate<ReplyData>,
    writes: ReplyGate<ReplyWrite>,
    locks: ReplyGate<ReplyEmpty>,
}

struct OneFile {
    content: Mutex<Vec<u8>>,
    gates: Arc<ReplyGates>,
    /// Whether the file system receives and grants lock requests itself; otherwise the kernel
    /// manages locks.
    has_locks: bool,
}

/// The mounted file system. Dropping it answers all waiting requests and unmounts it, even if it is
/// in use.
pub struct StuckStorage {
    gates: Arc<ReplyGates>,
    session: Option<BackgroundSession>,
    dir: TempDir,
}

impl StuckStorage {
    /// Mounts a file system with a disk of `bytes`. Fails if the host has no FUSE, or forbids it.
    pub fn new(bytes: usize) -> Result<Self, String> {
        Self::mount(bytes, false)
    }

    /// Mounts a file system that answers no lock request.
    pub fn without_locks(bytes: usize) -> Result<Self, String> {
        let storage = Self::mount(bytes, true)?;
        storage.gates.locks.answer_only(0);
        Ok(storage)
    }

    fn mount(bytes: usize, has_locks: bool) -> Result<Self, String> {
        let (gates, dir) = (Arc::new(ReplyGates::default()), tempfile::tempdir().unwrap());
        let content = Mutex::new(vec![0; bytes]);
        let files = OneFile { content, gates: gates.clone(), has_locks };
        let session = fuser::spawn_mount(files, dir.path(), &Config::default());
        let session =
            Some(session.map_err(|e| format!("no FUSE file system can be mounted: {e}"))?);
        Ok(Self { gates, session, dir })
    }

    pub fn disk(&self) -> PathBuf {
        self.dir.path().join("disk")
    }

    /// Answers this many more flushes, then none.
    pub fn answer_only(&self, flushes: usize) {
        self.gates.flushes.answer_only(flushes);
    }

    /// Answers this many more reads, then none.
    pub fn answer_only_reads(&self, reads: usize) {
        self.gates.reads.answer_only(reads);
    }

    /// Answers the reads that wait with an error, and later reads as usual.
    pub fn fail_reads_that_wait(&self) {
        self.gates.reads.open().into_iter().for_each(|reply| reply.error(Errno::EIO));
    }

    /// Answers this many more writes, then none.
    pub fn answer_only_writes(&self, writes: usize) {
        self.gates.writes.answer_only(writes);
    }

    /// Returns the number of requests that wait for an answer.
    pub fn stuck(&self) -> usize {
        let ReplyGates { flushes, reads, writes, locks } = &*self.gates;
        flushes.stuck() + reads.stuck() + writes.stuck() + locks.stuck()
    }
}

impl Drop for StuckStorage {
    fn drop(&mut self) {
        self.gates.flushes.open().into_iter().for_each(ReplyEmpty::ok);
        self.gates.locks.open().into_iter().for_each(ReplyEmpty::ok);
        self.fail_reads_that_wait();
        self.gates.writes.open().into_iter().for_each(|reply| reply.error(Errno::EIO));
        // A lazy unmount: a process that a test has not ended yet may still have the disk open,
        // which prevents any other unmount.
        let unmounted = Command::new("umount").arg("--lazy").arg(self.dir.path()).status();
        drop(self.session.take());
        if !std::thread::panicking() {
            assert!(unmounted.unwrap().success(), "{} stays mounted", self.dir.path().display());
        }
    }
}

fn attributes(ino: INodeNo, kind: FileType, size: u64) -> FileAttr {
    let at = UNIX_EPOCH;
    FileAttr {
        ino,
        size,
        blocks: size / 512,
        atime: at,
        mtime: at,
        ctime: at,
        crtime: at,
        kind,
        perm: 0o777,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

impl OneFile {
    fn attributes(&self, ino: INodeNo) -> FileAttr {
        match ino {
            DISK => {
                attributes(DISK, FileType::RegularFile, self.content.lock().unwrap().len() as u64)
            }
            _ => attributes(INodeNo::ROOT, FileType::Directory, 0),
        }
    }
}

impl Filesystem for OneFile {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        if self.has_locks {
            let locks = InitFlags::FUSE_POSIX_LOCKS;
            config.add_capabilities(locks).map_err(|_| io::ErrorKind::Unsupported)?;
        }
        Ok(())
    }

    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name == "disk" {
            true => reply.entry(&TTL, &self.attributes(DISK), Generation(0)),
            false => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &self.attributes(ino));
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let Some(reply) = self.gates.reads.pass(reply) else { return };
        let content = self.content.lock().unwrap();
        let from = (offset as usize).min(content.len());
        let to = from.saturating_add(size as usize).min(content.len());
        reply.data(&content[from..to]);
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let Some(reply) = self.gates.writes.pass(reply) else { return };
        let mut content = self.content.lock().unwrap();
        content[offset as usize..][..data.len()].copy_from_slice(data);
        reply.written(data.len() as u32);
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        if let Some(reply) = self.gates.flushes.pass(reply) {
            reply.ok();
        }
    }

    fn getlk(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: LockOwner,
        _: u64,
        _: u64,
        _: i32,
        _: u32,
        reply: ReplyLock,
    ) {
        reply.locked(0, 0, libc::F_UNLCK, 0);
    }

    fn setlk(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: LockOwner,
        _: u64,
        _: u64,
        _: i32,
        _: u32,
        _: bool,
        reply: ReplyEmpty,
    ) {
        if let Some(reply) = self.gates.locks.pass(reply) {
            reply.ok();
        }
    }

    /// A file without data consists of one hole.
    fn lseek(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let content = self.content.lock().unwrap();
        match whence {
            libc::SEEK_DATA if content.iter().all(|byte| *byte == 0) => reply.error(Errno::ENXIO),
            libc::SEEK_DATA => reply.offset(offset),
            _ => reply.offset(content.len() as i64),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        if let Some(size) = size {
            self.content.lock().unwrap().resize(size as usize, 0);
        }
        reply.attr(&TTL, &self.attributes(ino));
    }
}
