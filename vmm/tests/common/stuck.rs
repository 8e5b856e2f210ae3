//! A file system with one file, `disk`, whose flushes stop being answered when a test says so.
#![allow(clippy::unwrap_used)]

use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, Generation,
    INodeNo, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyWrite,
    Request, WriteFlags,
};
use tempfile::TempDir;

const DISK: INodeNo = INodeNo(2);
const TTL: Duration = Duration::from_secs(60);

#[derive(Default)]
struct Flushes {
    /// Flushes that are still answered.
    answered: AtomicUsize,
    /// Those that are not.
    stuck: Mutex<Vec<ReplyEmpty>>,
}

struct OneFile {
    content: Mutex<Vec<u8>>,
    flushes: Arc<Flushes>,
}

/// The mounted file system. Dropping it answers what is stuck and unmounts it.
pub struct StuckStorage {
    flushes: Arc<Flushes>,
    session: Option<BackgroundSession>,
    dir: TempDir,
}

impl StuckStorage {
    /// With a disk of `bytes`; the error is the host's that has no FUSE, or forbids it.
    pub fn new(bytes: usize) -> Result<Self, String> {
        let (flushes, dir) = (Arc::new(Flushes::default()), tempfile::tempdir().unwrap());
        flushes.answered.store(usize::MAX, Ordering::SeqCst);
        let files = OneFile { content: Mutex::new(vec![0; bytes]), flushes: flushes.clone() };
        let session = fuser::spawn_mount(files, dir.path(), &Config::default());
        let session =
            Some(session.map_err(|e| format!("no FUSE file system can be mounted: {e}"))?);
        Ok(Self { flushes, session, dir })
    }

    pub fn disk(&self) -> PathBuf {
        self.dir.path().join("disk")
    }

    /// From now on so many flushes are answered, and no more.
    pub fn answer_only(&self, flushes: usize) {
        self.flushes.answered.store(flushes, Ordering::SeqCst);
    }

    /// Flushes that wait for an answer.
    pub fn stuck(&self) -> usize {
        self.flushes.stuck.lock().unwrap().len()
    }
}

impl Drop for StuckStorage {
    fn drop(&mut self) {
        self.answer_only(usize::MAX);
        self.flushes.stuck.lock().unwrap().drain(..).for_each(ReplyEmpty::ok);
        drop(self.session.take());
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
        let mut content = self.content.lock().unwrap();
        content[offset as usize..][..data.len()].copy_from_slice(data);
        reply.written(data.len() as u32);
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let order = Ordering::SeqCst;
        let left = self.flushes.answered.fetch_update(order, order, |left| left.checked_sub(1));
        match left {
            Ok(_) => reply.ok(),
            Err(_) => self.flushes.stuck.lock().unwrap().push(reply),
        }
    }
}
