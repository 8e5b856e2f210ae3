//! Two servers in one process, and a guest's API that moves from one to the other.

mod channels;
mod metrics;
mod moves;

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use driftline_machine::socket::ListeningSocket;
use tempfile::TempDir;

use crate::api::{ApiEvent, App, Arriving, Listeners, Server};
use crate::firecracker::InstanceName;

/// Time after which a test gives up.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The largest body of Firecracker's dialect, in bytes.
const PAYLOAD_LIMIT: usize = 51_200;

/// A process with an API.
struct Process {
    app: Arc<App>,
    server: Server,
}

impl Process {
    /// Listens on `path`. The reason why there is no guest is `name`.
    fn first(path: &Path, name: &'static str) -> Self {
        Self::serve(waiting(name), ListeningSocket::bind(path).unwrap(), None)
    }

    fn serve(app: Arc<App>, api: ListeningSocket, adopted: Option<UnixStream>) -> Self {
        let listeners = Listeners { api: Some(api), adopted, ..Listeners::default() };
        Self { server: Server::start(listeners, app.clone()).unwrap(), app }
    }

    /// Moves the API to a new process, which serves `app`.
    fn upgrade(&self, app: Arc<App>) -> Self {
        let (channel, adopted) = UnixStream::pair().unwrap();
        let socket = self.app.relay().socket().unwrap();
        let listener = socket.listener().unwrap().into();
        let socket = ListeningSocket::adopt(listener, socket.file()).unwrap();
        let next = Self::serve(app, socket, Some(adopted));
        self.app.relay().move_to(channel);
        next
    }

    /// Lets the control thread do what is ready.
    fn run_ready_tasks(&self) {
        for _ in 0..10 {
            self.server.control_thread().run(|| ()).unwrap();
        }
    }
}

/// Returns a socket's directory and its first process.
fn start(name: &'static str) -> (TempDir, Process) {
    let dir = tempfile::tempdir().unwrap();
    let first = Process::first(&dir.path().join("api"), name);
    (dir, first)
}

/// Returns an app whose guest has not arrived, for the reason `name`.
fn waiting(name: &'static str) -> Arc<App> {
    let arriving = move || Arriving { reason: name.to_owned(), ..Arriving::default() };
    App::waiting(arriving, |_| true)
}

/// Returns an app of Firecracker's dialect, and the requests to it.
fn firecracker() -> (Arc<App>, Receiver<ApiEvent>) {
    let name = InstanceName { id: "test".to_owned(), app_name: "Driftline" };
    App::configuring(name, PAYLOAD_LIMIT)
}

/// A client that keeps its connection.
struct KeptClient(UnixStream);

impl KeptClient {
    fn connect(dir: &TempDir) -> Self {
        Self::of(UnixStream::connect(dir.path().join("api")).unwrap())
    }

    /// Takes a connection of any kind of stream socket. Reads, writes and timeouts are the same.
    fn of(stream: impl Into<OwnedFd>) -> Self {
        let stream = UnixStream::from(stream.into());
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        Self(stream)
    }

    fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.0.write_all(bytes.as_ref()).unwrap();
    }

    /// Reads one reply: its head and its body.
    fn reply(&mut self) -> String {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            self.0.read_exact(&mut byte).unwrap();
            head.push(byte[0]);
        }
        let mut reply = String::from_utf8(head).unwrap();
        let lower = reply.to_ascii_lowercase();
        let length = lower.split("content-length: ").nth(1).and_then(|rest| rest.lines().next());
        let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
        self.0.read_exact(&mut body).unwrap();
        reply.push_str(std::str::from_utf8(&body).unwrap());
        reply
    }

    fn ask(&mut self, request: impl AsRef<[u8]>) -> String {
        self.send(request);
        self.reply()
    }

    /// Asserts that the process whose reason is `name` answers.
    #[track_caller]
    fn assert_answered_by(&mut self, name: &str) {
        let reply = self.reply();
        assert!(reply.ends_with(&format!("there is no guest yet: {name}\"}}")), "{reply}");
    }

    /// Asserts that nothing was answered so far.
    #[track_caller]
    fn assert_waits(&mut self) {
        self.0.set_nonblocking(true).unwrap();
        let read = self.0.read(&mut [0]).map_err(|e| e.kind());
        self.0.set_nonblocking(false).unwrap();
        assert_eq!(read, Err(std::io::ErrorKind::WouldBlock));
    }

    /// Asserts that the connection ends, however it does.
    #[track_caller]
    fn assert_ends(&mut self) {
        let read = self.0.read(&mut [0]);
        let reset = std::io::ErrorKind::ConnectionReset;
        let ended = read.as_ref().map_or_else(|e| e.kind() == reset, |bytes| *bytes == 0);
        assert!(ended, "{read:?}");
    }
}

/// A request that is refused for the reason why there is no guest.
const ASK: &str = "GET /v1/migration HTTP/1.1\r\n\r\n";
