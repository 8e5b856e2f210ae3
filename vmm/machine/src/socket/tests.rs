//! Starters of every kind at one name: several at a time, killed ones, and strangers.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex, mpsc};

use super::*;
use crate::testing::skip;

mod fuse;

/// Leaves a socket at `path`, as a killed process does, and returns its inode number.
fn leave_stale(path: &Path) -> u64 {
    drop(UnixListener::bind(path).unwrap());
    fs::symlink_metadata(path).unwrap().ino()
}

/// Returns the names in the directory of `path`.
fn beside(path: &Path) -> Vec<OsString> {
    let entries = fs::read_dir(path.parent().unwrap()).unwrap();
    entries.map(|entry| entry.unwrap().file_name()).collect()
}

fn claim_to(path: &Path, ino: u64) -> PathBuf {
    path.with_file_name(format!(".replacing-{ino}"))
}

/// Returns whether the error is that of a starter that lost to another one.
fn is_late(e: &SocketError) -> bool {
    matches!(e, SocketError::InUse(_) | SocketError::Contended(_))
}

/// Drops `socket` without removing its file, as a kill does.
fn kill(mut socket: ListeningSocket) {
    let file = socket.file.get_mut().take().unwrap();
    exit::forget(&file);
}

/// Binds at a path whose listener is killed. A process that another test forks meanwhile keeps the
/// listener open until it starts its program.
fn bind_after_kill(path: &Path) -> ListeningSocket {
    let limit = crate::testing::soon();
    loop {
        match ListeningSocket::bind(path) {
            Err(SocketError::InUse(_)) if std::time::Instant::now() < limit => {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            bound => return bound.unwrap(),
        }
    }
}

#[test]
fn adopted_listener_owns_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("api");
    let first = ListeningSocket::bind(&path).unwrap();
    let file = first.file();
    assert_eq!(file.as_ref().map(|file| file.path.as_path()), Some(&*path));
    let waiting = UnixStream::connect(&path).unwrap();
    let second = ListeningSocket::adopt(first.listener().unwrap().into(), file).unwrap();
    first.keep_file();
    assert_eq!(first.file(), None);
    drop(first);
    drop(UnixStream::connect(&path).unwrap());
    second.listener().unwrap().accept().unwrap();
    drop((second, waiting));
    assert!(!path.exists());
}

#[test]
fn adopted_listener_leaves_the_file_of_another() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("api");
    let first = ListeningSocket::bind(&path).unwrap();
    let adopted = ListeningSocket::adopt(first.listener().unwrap().into(), first.file()).unwrap();
    drop(first);
    let _other = ListeningSocket::bind(&path).unwrap();
    drop(adopted);
    assert!(path.exists());
}

#[test]
fn only_a_unix_listener_is_adopted() {
    let (stream, _other) = UnixStream::pair().unwrap();
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    for wrong in [stream.into(), tcp.into(), tempfile::tempfile().unwrap().into()] {
        let adopted = ListeningSocket::adopt(wrong, None);
        assert!(matches!(adopted, Err(SocketError::NotAListener(_))), "{adopted:?}");
    }
}

#[test]
fn socket_file_is_private_and_removed_on_drop() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("api");
    let socket = ListeningSocket::bind(&path).unwrap();
    let mode = fs::symlink_metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(beside(&path), ["api"]);
    drop(socket);
    assert!(!path.exists());
}

#[test]
fn live_socket_is_refused_stale_one_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("api");
    let first = ListeningSocket::bind(&path).unwrap();
    let e = ListeningSocket::bind(&path).unwrap_err();
    assert!(matches!(e, SocketError::InUse(_)), "{e}");
    drop(first);
    leave_stale(&path);
    let second = ListeningSocket::bind(&path).unwrap();
    drop(second);
    fs::write(&path, "precious").unwrap();
    let e = ListeningSocket::bind(&path).unwrap_err();
    assert!(matches!(e, SocketError::NotASocket(_)), "{e}");
    assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    assert_eq!(beside(&path), ["api"]);
}

#[test]
fn new_socket_replaces_nothing_and_stays() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("api");
    let refused = || {
        let e = ListeningSocket::bind_new(&path).unwrap_err();
        assert!(matches!(e, SocketError::Exists(_)), "{e}");
        assert_eq!(beside(&path), ["api"]);
    };
    let socket = ListeningSocket::bind_new(&path).unwrap();
    let mode = fs::symlink_metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    refused();
    UnixStream::connect(&path).unwrap();
    drop(socket);
    refused();
    let e = UnixStream::connect(&path).unwrap_err();
    assert_eq!(e.kind(), io::ErrorKind::ConnectionRefused);
    fs::remove_file(&path).unwrap();
    fs::write(&path, "precious").unwrap();
    refused();
    assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
}

#[test]
fn listener_with_full_backlog_is_in_use() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("api");
    let _socket = ListeningSocket::bind(&path).unwrap();
    let address = SocketAddrUnix::new(&path).unwrap();
    let mut waiting = Vec::new();
    loop {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let fd = fd.unwrap();
        match rustix::net::connect(&fd, &address) {
            Ok(()) => waiting.push(fd),
            Err(e) => break assert_eq!(e, Errno::AGAIN),
        }
    }
    let (to, bound) = mpsc::channel();
    std::thread::spawn(move || to.send(ListeningSocket::bind(&path)));
    let bound = bound.recv_timeout(Duration::from_secs(60)).expect("bind hangs");
    let e = bound.unwrap_err();
    assert!(matches!(e, SocketError::InUse(_)), "{e}");
    assert!(e.to_string().ends_with("; stop that one, or name another path"), "{e}");
}

/// In each round, `starters` threads start at the same time while a dead process's socket exists.
fn start_together(path: &Path, starters: usize, rounds: u32) {
    for round in 0..rounds {
        leave_stale(path);
        let all = Barrier::new(starters);
        let bound: Vec<_> = std::thread::scope(|scope| {
            let start = || {
                all.wait();
                ListeningSocket::bind(path)
            };
            let starters: Vec<_> = (0..starters).map(|_| scope.spawn(start)).collect();
            starters.into_iter().map(|starter| starter.join().unwrap()).collect()
        });
        let (mut owners, refused): (Vec<_>, Vec<_>) = bound.into_iter().partition(Result::is_ok);
        assert_eq!(owners.len(), 1, "round {round}: {owners:?} {refused:?}");
        for e in refused.into_iter().map(Result::unwrap_err) {
            assert!(is_late(&e), "round {round}: {e}");
        }
        let owner = owners.pop().unwrap().unwrap();
        let listener = owner.listener().unwrap();
        // Accepts the connections of starters that checked whether the socket is live.
        while listener.accept().is_ok() {}
        let _stream = UnixStream::connect(path).unwrap();
        listener.accept().unwrap();
        assert_eq!(beside(path), [path.file_name().unwrap()], "round {round}");
        drop(owner);
        assert!(beside(path).is_empty(), "round {round}");
    }
}

#[test]
fn of_simultaneous_starters_one_gets_the_socket() {
    let dir = tempfile::tempdir().unwrap();
    start_together(&dir.path().join("api"), 8, 200);
}

#[test]
fn owner_keeps_its_name_among_starters_and_kills() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("api");
    std::thread::scope(|scope| {
        for starter in 0..4 {
            let path = &path;
            scope.spawn(move || {
                for round in 0..500 {
                    match ListeningSocket::bind(path) {
                        Ok(socket) => {
                            // Gives other starters time to check, and to remove or replace what
                            // they must not.
                            std::thread::yield_now();
                            let found = fs::symlink_metadata(path).map(|m| (m.dev(), m.ino()));
                            assert_eq!(
                                found.unwrap(),
                                socket.file().unwrap().identity,
                                "{starter} {round}"
                            );
                            if round % 3 == 0 { drop(socket) } else { kill(socket) }
                        }
                        Err(e) => assert!(is_late(&e), "{starter} {round}: {e}"),
                    }
                }
            });
        }
    });
    let _ = fs::remove_file(&path);
    assert!(beside(&path).is_empty(), "{:?}", beside(&path));
}

#[test]
fn socket_has_its_name_only_when_it_listens() {
    let dir = tempfile::tempdir().unwrap();
    let paths: Vec<_> = (0..300).map(|i| dir.path().join(format!("api{i}"))).collect();
    let all = Barrier::new(2);
    let refusals = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for path in &paths {
                let address = SocketAddrUnix::new(path).unwrap();
                let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
                let fd = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None);
                let fd = fd.unwrap();
                all.wait();
                loop {
                    match rustix::net::connect(&fd, &address) {
                        Ok(()) => break,
                        Err(Errno::NOENT) => {}
                        Err(e) => break refusals.lock().unwrap().push((path, e)),
                    }
                }
                all.wait();
            }
        });
        for path in &paths {
            all.wait();
            let _socket = ListeningSocket::bind(path).unwrap();
            all.wait();
        }
    });
    let refusals = refusals.into_inner().unwrap();
    assert!(refusals.is_empty(), "{refusals:?}");
}

#[test]
fn claimed_socket_is_left_to_the_claimant() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("api");
    let ino = leave_stale(&path);
    let claim = ListeningSocket::bind(&claim_to(&path, ino)).unwrap();
    let e = ListeningSocket::bind(&path).unwrap_err();
    assert!(matches!(e, SocketError::Contended(_)), "{e}");
    assert_eq!(fs::symlink_metadata(&path).unwrap().ino(), ino, "another may have its name");
    drop(claim);
    let _socket = ListeningSocket::bind(&path).unwrap();
    assert_eq!(beside(&path), ["api"]);
}

#[test]
fn claim_of_a_killed_starter_forbids_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("api");
    let ino = leave_stale(&path);
    let claimed = leave_stale(&claim_to(&path, ino));
    leave_stale(&claim_to(&path, claimed));
    let _socket = ListeningSocket::bind(&path).unwrap();
    assert_eq!(beside(&path), ["api"]);
}

#[test]
fn waits_for_claims_do_not_multiply() {
    for depth in 2..=CLAIMS {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        let mut ino = leave_stale(&path);
        for _ in 1..depth {
            ino = leave_stale(&claim_to(&path, ino));
        }
        let claim = UnixListener::bind(claim_to(&path, ino)).unwrap();
        claim.set_nonblocking(true).unwrap();
        let e = ListeningSocket::bind(&path).unwrap_err();
        assert!(matches!(&e, SocketError::Contended(at) if *at == path), "{e}");
        // Each try checks once whether the last claim of the chain is live.
        let tries = std::iter::from_fn(|| claim.accept().ok()).count();
        assert_eq!(tries, TRIES as usize, "a chain of {depth} claims");
    }
}

#[test]
fn claim_of_a_stranger_forbids_nothing() {
    if !rustix::process::geteuid().is_root() {
        return skip("claim_of_a_stranger_forbids_nothing", "only root makes files of other users");
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("api");
    for mode in [0o777, 0o1777] {
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).unwrap();
        let ino = leave_stale(&path);
        let claim = claim_to(&path, ino);
        let _stranger = UnixListener::bind(&claim).unwrap();
        chown(&claim, Some(65534), None).unwrap();
        let bound = ListeningSocket::bind(&path);
        // Without the sticky bit, that user may remove any file there.
        assert_eq!(bound.is_ok(), mode == 0o1777, "{bound:?}");
        fs::remove_file(&claim).unwrap();
        let _ = fs::remove_file(&path);
    }
}

#[test]
fn socket_that_its_owner_removes_is_stale() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("api");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // The socket of another program, which binds, listens and ends again and again.
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                if let Ok(listener) = UnixListener::bind(&path) {
                    drop(listener);
                    // A starter may have removed it already.
                    let _ = fs::remove_file(&path);
                }
            }
        });
        let bound: Vec<_> = (0..2000).map(|_| ListeningSocket::bind(&path).map(drop)).collect();
        stop.store(true, Ordering::Relaxed);
        for e in bound.into_iter().filter_map(Result::err) {
            assert!(is_late(&e), "{e}");
        }
    });
}

#[test]
fn socket_of_a_successor_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("api");
    let first = ListeningSocket::bind(&path).unwrap();
    fs::remove_file(&path).unwrap();
    let second = ListeningSocket::bind(&path).unwrap();
    drop(first);
    UnixStream::connect(&path).unwrap();
    drop(second);
    assert!(!path.exists());
}

#[test]
fn socket_path_of_any_length_works() {
    // Room for 107 bytes and a zero; rustix uses both.
    let room = 107 - std::env::temp_dir().as_os_str().len() - "/.tmpXXXXXX/d/".len();
    for (length, name) in [(107, 1), (107, room / 2), (107, room), (108, 1)] {
        let dir = tempfile::tempdir().unwrap();
        let middle = length - dir.path().as_os_str().len() - name - 2;
        let path = dir.path().join("d".repeat(middle)).join("n".repeat(name));
        assert_eq!(path.as_os_str().len(), length);
        fs::create_dir(path.parent().unwrap()).unwrap();
        let socket = ListeningSocket::bind(&path).unwrap();
        let e = ListeningSocket::bind(&path).unwrap_err();
        assert!(matches!(e, SocketError::InUse(_)), "{e}");
        kill(socket);
        let socket = bind_after_kill(&path);
        assert_eq!(beside(&path), [path.file_name().unwrap()]);
        drop(socket);
        if length < 108 {
            start_together(&path, 4, 50);
        }
    }
}

#[test]
fn too_long_path_is_refused() {
    let e = ListeningSocket::bind(&PathBuf::from("x".repeat(300))).unwrap_err();
    assert!(e.to_string().starts_with("cannot listen on xxx"), "{e}");
}

#[test]
fn private_names_are_distinct() {
    let dir = Dir::of(Path::new("api")).unwrap();
    let names: HashSet<_> =
        (0..1000).map(|_| dir.private_name(OsStr::new("api")).unwrap()).collect();
    assert_eq!(names.len(), 1000);
    assert!(names.iter().all(|name| name.len() == "api.".len() + 16), "{names:?}");
}
