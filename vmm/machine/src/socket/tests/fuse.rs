//! Sockets on a file system without `RENAME_NOREPLACE`, with hard links and without.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::sync::{Arc, Mutex};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, Generation, INodeNo, RenameFlags,
    ReplyAttr, ReplyEmpty, ReplyEntry, Request,
};

use super::*;

/// The names in the directory.
type FileNames = Arc<Mutex<BTreeMap<OsString, INodeNo>>>;

/// A file system with one directory of sockets.
struct SocketFs {
    names: FileNames,
    next: Mutex<u64>,
    has_links: bool,
    /// A name that another process always removes first.
    removed_first: Option<&'static str>,
}

fn attributes(ino: INodeNo) -> FileAttr {
    let at = UNIX_EPOCH;
    FileAttr {
        ino,
        size: 0,
        blocks: 0,
        atime: at,
        mtime: at,
        ctime: at,
        crtime: at,
        kind: if ino == INodeNo::ROOT { FileType::Directory } else { FileType::Socket },
        perm: 0o700,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

fn entry(ino: INodeNo, reply: ReplyEntry) {
    reply.entry(&Duration::ZERO, &attributes(ino), Generation(0));
}

impl Filesystem for SocketFs {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = self.names.lock().unwrap().get(name).copied();
        match found {
            Some(ino) => entry(ino, reply),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&Duration::ZERO, &attributes(ino));
    }

    fn mknod(
        &self,
        _: &Request,
        _: INodeNo,
        name: &OsStr,
        _: u32,
        _: u32,
        _: u32,
        reply: ReplyEntry,
    ) {
        let mut next = self.next.lock().unwrap();
        *next += 1;
        self.names.lock().unwrap().insert(name.to_owned(), INodeNo(*next));
        entry(INodeNo(*next), reply);
    }

    fn unlink(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.names.lock().unwrap().remove(name);
        match self.removed_first {
            Some(first) if name == first => reply.error(Errno::ENOENT),
            _ => reply.ok(),
        }
    }

    fn rename(
        &self,
        _: &Request,
        _: INodeNo,
        name: &OsStr,
        _: INodeNo,
        new: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        if !flags.is_empty() {
            return reply.error(Errno::EINVAL);
        }
        let mut names = self.names.lock().unwrap();
        let ino = names.remove(name).unwrap();
        names.insert(new.to_owned(), ino);
        reply.ok();
    }

    fn link(&self, _: &Request, ino: INodeNo, _: INodeNo, new: &OsStr, reply: ReplyEntry) {
        if !self.has_links {
            return reply.error(Errno::EPERM);
        }
        self.names.lock().unwrap().insert(new.to_owned(), ino);
        entry(ino, reply);
    }
}

/// Mounts `files` at `dir` for `test`, which is skipped where FUSE cannot be mounted.
fn mount(test: &str, files: SocketFs, dir: &Path) -> Option<fuser::BackgroundSession> {
    let session = fuser::spawn_mount(files, dir, &Config::default());
    let why = |e: &_| skip(test, &format!("no FUSE file system can be mounted: {e}"));
    session.inspect_err(why).ok()
}

/// Unmounts `dir` and waits for the end of the session. The file system may be busy for a moment: a
/// process that another test starts has copies of all descriptors until it executes its program.
fn unmount(session: fuser::BackgroundSession, dir: &Path) {
    rustix::mount::unmount(dir, rustix::mount::UnmountFlags::DETACH).unwrap();
    session.join().unwrap();
}

#[test]
fn stale_socket_removed_meanwhile_is_replaced() {
    let names = FileNames::default();
    let dir = tempfile::tempdir().unwrap();
    let next = Mutex::new(1);
    let files =
        SocketFs { names: names.clone(), next, has_links: true, removed_first: Some("api") };
    let Some(session) = mount("stale_socket_removed_meanwhile_is_replaced", files, dir.path())
    else {
        return;
    };
    let path = dir.path().join("api");
    leave_stale(&path);
    let socket = bind_after_kill(&path);
    assert!(names.lock().unwrap().keys().eq(["api"]));
    drop(socket);
    assert!(names.lock().unwrap().is_empty());
    unmount(session, dir.path());
}

#[test]
fn file_system_without_noreplace_has_sockets() {
    for has_links in [true, false] {
        let names = FileNames::default();
        let dir = tempfile::tempdir().unwrap();
        let next = Mutex::new(1);
        let files = SocketFs { names: names.clone(), next, has_links, removed_first: None };
        let Some(session) = mount("file_system_without_noreplace_has_sockets", files, dir.path())
        else {
            return;
        };
        let path = dir.path().join("api");
        let is = |expected: &[&str]| assert!(names.lock().unwrap().keys().eq(expected));
        let socket = ListeningSocket::bind(&path).unwrap();
        is(&["api"]);
        let e = ListeningSocket::bind(&path).unwrap_err();
        assert!(matches!(e, SocketError::InUse(_)), "{e}");
        kill(socket);
        is(&["api"]);
        let socket = bind_after_kill(&path);
        UnixStream::connect(&path).unwrap();
        is(&["api"]);
        drop(socket);
        is(&[]);
        unmount(session, dir.path());
    }
}
