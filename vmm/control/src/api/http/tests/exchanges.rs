//! Tests with connections to a real socket.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::routing::get;
use axum::{Router, middleware};
use driftline_machine::config::{BackendKind, HostConfig, SerialSink};
use driftline_machine::testing::payload_config;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tempfile::TempDir;
use tokio::sync::watch;

use super::super::serve::{ServedSocket, ServedSockets, serve};
use super::super::session::{ApiService, ClientLimits};
use crate::api::connections::{self, BoundedListener};
use crate::api::transport::ServerSocket;
use crate::api::{ApiEvent, App, Arriving, Caller};
use crate::firecracker::{Answer, ApiFault, InstanceName, MicroVm, MicroVmAction, MicroVmEvent};
use crate::jobs::Jobs;

/// Time after which a test gives up.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Length of the page `/long`: more than a socket's buffers take.
const LONG: usize = 16 << 20;
/// The largest body, in bytes.
const PAYLOAD_LIMIT: usize = 51_200;

fn name() -> InstanceName {
    InstanceName { id: "test".to_owned(), app_name: "Driftline" }
}

/// A server on a socket of its own.
struct TestApi {
    dir: TempDir,
    over: Option<watch::Sender<()>>,
    /// Threads that end once the sender is dropped, in the order of their ends.
    threads: Vec<JoinHandle<()>>,
}

impl TestApi {
    fn start(app: Arc<App>, limits: ClientLimits) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("api")).unwrap();
        listener.set_nonblocking(true).unwrap();
        let (over, is_over) = watch::channel(());
        let relay = app.relay().gate();
        let routes = Router::new()
            .route("/v1/info", get(async || "hello"))
            .route("/long", get(async || "x".repeat(LONG)))
            .layer(middleware::from_fn(connections::admit));
        let mut service = ApiService::new(routes, app.clone());
        service.limits = limits;
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async {
                let listener = tokio::net::UnixListener::from_std(listener).unwrap();
                let listener = BoundedListener::new(ServerSocket::Unix(listener), None, relay);
                let api = Some(ServedSocket { listener, service });
                let sockets = ServedSockets { api, ..ServedSockets::default() };
                serve(sockets, None, app, is_over, TIMEOUT).await;
            });
        });
        Self { dir, over: Some(over), threads: vec![thread] }
    }

    /// Starts a server for a guest that is configured over the API.
    fn firecracker() -> Self {
        let (app, events) = App::configuring(name(), PAYLOAD_LIMIT);
        let mut api = Self::start(app, ClientLimits::default());
        api.threads.push(std::thread::spawn(|| configure(events)));
        api
    }

    fn driftline() -> Self {
        Self::start(waiting(), ClientLimits::default())
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.dir.path().join("api")).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream
    }

    /// Sends `bytes` on a new connection. Returns what is answered until the server closes it.
    fn exchange(&self, bytes: &str) -> String {
        let mut stream = self.connect();
        stream.write_all(bytes.as_bytes()).unwrap();
        rest(&mut stream)
    }
}

impl Drop for TestApi {
    fn drop(&mut self) {
        drop(self.over.take());
        for thread in self.threads.drain(..) {
            let ended = thread.join();
            assert!(std::thread::panicking() || ended.is_ok());
        }
    }
}

/// Returns an app that is not configured over the API.
fn waiting() -> Arc<App> {
    App::waiting(Arriving::default, |_| true)
}

/// Answers requests until the app is dropped.
fn configure(events: Receiver<ApiEvent>) {
    let mut vm = MicroVm::<Caller>::new("test".to_owned(), "Driftline", PAYLOAD_LIMIT);
    for event in events {
        let ApiEvent::Call(caller, operation) = event else { panic!("{event:?}") };
        for action in vm.step(MicroVmEvent::Request(caller, operation)) {
            match action {
                MicroVmAction::Reply(caller, answer) => caller.answer(answer),
                other => panic!("{other:?}"),
            }
        }
    }
}

/// Returns the end of the reply to a GET of a path that does not exist.
fn unknown(name: &str) -> String {
    format!("Invalid request method and/or path: GET {name}.\"}}")
}

fn rest(stream: &mut UnixStream) -> String {
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// Reads a reply as firecracker-rs-sdk does, which stops at the first short read.
fn read_in_pieces(stream: &mut UnixStream) -> String {
    let mut reply = Vec::new();
    loop {
        let mut piece = [0; 64];
        let bytes = stream.read(&mut piece).unwrap();
        reply.extend_from_slice(&piece[..bytes]);
        if bytes < piece.len() {
            return String::from_utf8(reply).unwrap();
        }
    }
}

#[test]
fn connection_of_http_1_0_stays_open() {
    let api = TestApi::firecracker();
    let mut stream = api.connect();
    for _ in 0..3 {
        stream.write_all(b"PUT /entropy HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}").unwrap();
        let reply = read_in_pieces(&mut stream);
        assert!(reply.starts_with("HTTP/1.1 204 \r\n") && reply.len() == 66, "{reply}");
        for length in 0..64 {
            let name = format!("a{}", "x".repeat(length));
            write!(stream, "GET /{name} HTTP/1.0\r\nConnection: close\r\n\r\n").unwrap();
            let reply = read_in_pieces(&mut stream);
            assert!(reply.ends_with(&unknown(&name)), "{reply}");
        }
    }
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let api = TestApi::firecracker();
    let mut stream = api.connect();
    let requests: String = (0..100).map(|n| format!("GET /{n} HTTP/1.1\r\n\r\n")).collect();
    stream.write_all(requests.as_bytes()).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let replies = rest(&mut stream);
    let faults: Vec<&str> = replies.split("HTTP/1.1 400 \r\n").skip(1).collect();
    assert_eq!(faults.len(), 100);
    for (n, reply) in faults.iter().enumerate() {
        assert!(reply.ends_with(&unknown(&n.to_string())), "{n}: {reply}");
    }
}

#[test]
fn connection_survives_a_fault_of_firecrackers() {
    let api = TestApi::firecracker();
    let mut stream = api.connect();
    for bad in ["POST /vm HTTP/1.1\r\n\r\n", "nonsense\r\n", "\r\n", "PUT / HTTP/3\r\n\r\n{}"] {
        stream.write_all(bad.as_bytes()).unwrap();
        let reply = read_in_pieces(&mut stream);
        assert!(reply.starts_with("HTTP/1.1 400 \r\n"), "{bad:?}: {reply}");
        let end = "\nAll previous unanswered requests will be dropped.\" }";
        assert!(reply.contains("{ \"error\": \"Invalid ") && reply.ends_with(end), "{reply}");
        stream.write_all(b"GET /next HTTP/1.1\r\n\r\n").unwrap();
        assert!(read_in_pieces(&mut stream).ends_with(&unknown("next")));
    }
}

#[test]
fn request_of_unknown_end_closes_the_connection() {
    let api = TestApi::firecracker();
    let next = "GET /next HTTP/1.1\r\n\r\n";
    for headers in [
        "Transfer-Encoding: chunked\r\n".to_owned(),
        "Content-Length: 2\r\nContent-Length: 3\r\n".to_owned(),
        "Content-Length: 60000\r\nExpect: 100-continue\r\n".to_owned(),
        "A: b\r\n".repeat(129),
    ] {
        // One read takes all of it.
        let reply = api.exchange(&format!("PUT /mmds HTTP/1.1\r\n{headers}\r\n{next}"));
        assert!(reply.starts_with("HTTP/1.1 400 \r\n"), "{headers}: {reply}");
        assert!(reply.contains("\r\nConnection: close\r\n"), "{headers}: {reply}");
        assert_eq!(reply.matches("HTTP/1.1 ").count(), 1, "{headers}: {reply}");
    }
}

#[test]
fn own_requests_go_to_the_router() {
    let api = TestApi::firecracker();
    let ask = |request: &str| {
        let mut stream = api.connect();
        write!(stream, "{request} HTTP/1.1\r\n\r\n").unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        rest(&mut stream)
    };
    let head = "HTTP/1.1 200 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n\
                Content-Type: text/plain; charset=utf-8\r\nContent-Length: 5\r\n\r\n";
    assert_eq!(ask("GET /v1/info"), format!("{head}hello"));
    assert_eq!(ask("GET http://localhost/v1/info"), format!("{head}hello"));
    assert_eq!(ask("HEAD /v1/info"), head);
    assert!(ask("POST /v1/info").starts_with("HTTP/1.1 405 \r\n"));
    assert!(ask("GET /v1/info/none").starts_with("HTTP/1.1 404 \r\n"));
    assert!(ask("GET /other").ends_with(&unknown("other")));
}

#[test]
fn general_connection_ends_when_asked() {
    let api = TestApi::driftline();
    let reply = "HTTP/1.1 200 OK\r\ncontent-type: text/plain; charset=utf-8\r\n\
                 content-length: 5\r\nconnection: close\r\n\r\nhello";
    assert_eq!(api.exchange("GET /v1/info HTTP/1.1\r\nConnection: close\r\n\r\n"), reply);
    assert_eq!(api.exchange("GET /v1/info HTTP/1.0\r\n\r\n"), reply);
    // No body follows the head of a reply to HEAD.
    let refused = api.exchange("HEAD http://[ HTTP/1.1\r\nConnection: close\r\n\r\n");
    assert!(refused.starts_with("HTTP/1.1 400 Bad Request\r\n"), "{refused}");
    assert!(refused.ends_with("\r\n\r\n"), "{refused}");
    let refused = api.exchange("nonsense\r\n\r\nGET /v1/info HTTP/1.1\r\n\r\n");
    assert!(refused.starts_with("HTTP/1.1 400 Bad Request\r\n"), "{refused}");
    assert!(refused.ends_with(r#"{"fault_message":"Invalid request."}"#), "{refused}");
}

#[test]
fn client_learns_that_it_may_send() {
    let api = TestApi::driftline();
    let mut stream = api.connect();
    let head = "PUT /v1/info HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    let mut permission = [0; 25];
    stream.read_exact(&mut permission).unwrap();
    assert_eq!(&permission, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(b"{}").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    assert!(rest(&mut stream).starts_with("HTTP/1.1 405 Method Not Allowed\r\n"));
}

#[test]
fn late_requests_are_refused() {
    let short = Duration::from_millis(20);
    let limits = ClientLimits { head: short, body: short, reply: TIMEOUT };
    let api = TestApi::start(waiting(), limits);
    for part in ["GET /in", "PUT /v1/info HTTP/1.1\r\nContent-Length: 2\r\n\r\n{"] {
        let reply = api.exchange(part);
        assert!(reply.starts_with("HTTP/1.1 408 Request Timeout\r\n"), "{part}: {reply}");
    }
    let (app, _events) = App::configuring(name(), PAYLOAD_LIMIT);
    let api = TestApi::start(app, limits);
    let reply = api.exchange("PUT /vm HTTP/1.1\r\nContent-Length: 60000\r\n\r\n{");
    assert!(reply.contains("size 60000 is larger than the limit of 51200"), "{reply}");
    assert!(reply.contains("The body of the request did not come within 20ms."), "{reply}");
}

#[test]
fn connection_without_a_reader_ends() {
    let limits = ClientLimits { reply: Duration::from_millis(20), ..Default::default() };
    let api = TestApi::start(waiting(), limits);
    let mut stream = api.connect();
    stream.write_all(b"GET /long HTTP/1.1\r\n\r\n").unwrap();
    let mut polled = [PollFd::new(&stream, PollFlags::HUP)];
    let limit = Timespec { tv_sec: TIMEOUT.as_secs() as i64, tv_nsec: 0 };
    assert_eq!(poll(&mut polled, Some(&limit)).unwrap(), 1, "the connection is still open");
    assert!(rest(&mut stream).len() < LONG);
}

#[test]
fn long_reply_arrives_whole() {
    let api = TestApi::driftline();
    let reply = api.exchange("GET /long HTTP/1.1\r\nConnection: close\r\n\r\n");
    assert!(reply.ends_with("xx") && reply.len() > LONG);
}

#[test]
fn request_under_way_is_answered_at_the_end() {
    let (app, events) = App::configuring(name(), PAYLOAD_LIMIT);
    let mut api = TestApi::start(app, ClientLimits::default());
    let (mut idle, mut busy) = (api.connect(), api.connect());
    let body = r#"{"guest_cid": 3, "uds_path": "v", "vsock_id": "deprecated"}"#;
    let length = body.len();
    write!(busy, "PUT /vsock HTTP/1.1\r\nContent-Length: {length}\r\n\r\n{body}").unwrap();
    let event = events.recv_timeout(TIMEOUT).unwrap();
    let ApiEvent::Call(caller, _) = event else { panic!("{event:?}") };
    drop(api.over.take());
    assert_eq!(rest(&mut idle), "");
    caller.answer(Answer::Done);
    assert_eq!(
        rest(&mut busy),
        "HTTP/1.1 204 \r\nServer: Firecracker API\r\nConnection: close\r\nDeprecation: true\r\n\r\n"
    );
}

#[test]
fn dropped_call_is_refused() {
    let (app, events) = App::configuring(name(), PAYLOAD_LIMIT);
    drop(events);
    let api = TestApi::start(app, ClientLimits::default());
    let mut stream = api.connect();
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let reply = read_in_pieces(&mut stream);
    assert!(reply.starts_with("HTTP/1.1 400 \r\n") && reply.contains("fault_message"), "{reply}");
}

#[test]
fn started_instance_is_shown_whatever_is_under_way() {
    let config = payload_config(BackendKind::Threads);
    let host = HostConfig { serial: SerialSink::Null, ..Default::default() };
    let vm = driftline_backends::launch(config, &host).unwrap();
    // Nothing takes the events.
    let (app, events) = App::configuring(name(), PAYLOAD_LIMIT);
    let api = TestApi::start(app.clone(), ClientLimits::default());
    let mut waiting = api.connect();
    waiting.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let ApiEvent::Call(first, _) = events.recv_timeout(TIMEOUT).unwrap() else { panic!("a stop") };
    app.provide(Jobs::new(vm.clone(), std::env::temp_dir()));
    for (state, change) in [("Paused", None), ("Running", Some(()))] {
        if change.is_some() {
            vm.resume().unwrap();
        }
        let mut stream = api.connect();
        stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let reply = read_in_pieces(&mut stream);
        assert!(reply.contains(&format!(r#""state":"{state}""#)), "{reply}");
    }
    first.refuse(ApiFault::Ending);
    vm.stop("it has been shown");
}
