//! What a client sees while the API moves, or stays.

use std::sync::mpsc;

use driftline_machine::config::{BackendKind, HostConfig, SerialSink};
use driftline_machine::sandbox::{self, SandboxOptions};
use driftline_machine::testing::payload_config;
use driftline_machine::vm::Vm;

use super::*;
use crate::firecracker::Answer;
use crate::jobs::Jobs;

#[test]
fn idle_connection_moves() {
    let (dir, first) = start("first");
    let mut client = KeptClient::connect(&dir);
    for name in ["first", "first"] {
        client.send(ASK);
        client.assert_answered_by(name);
    }
    first.app.relay().hold();
    let _second = first.upgrade(waiting("second"));
    drop(first);
    for name in ["second", "second"] {
        client.send(ASK);
        client.assert_answered_by(name);
    }
}

#[test]
fn held_request_is_answered_after_the_move() {
    let (dir, first) = start("first");
    let mut clients: Vec<_> = (0..20).map(|_| KeptClient::connect(&dir)).collect();
    first.app.relay().hold();
    clients.iter_mut().for_each(|client| client.send(ASK));
    first.run_ready_tasks();
    clients.iter_mut().for_each(KeptClient::assert_waits);
    let _second = first.upgrade(waiting("second"));
    clients.iter_mut().for_each(|client| client.assert_answered_by("second"));
    drop(first);
    for client in &mut clients {
        client.send(ASK);
        client.assert_answered_by("second");
    }
}

#[test]
fn held_request_is_answered_after_the_release() {
    let (dir, first) = start("first");
    let (mut idle, mut half) = (KeptClient::connect(&dir), KeptClient::connect(&dir));
    let mut whole = KeptClient::connect(&dir);
    half.send(&ASK[..9]);
    for _ in 0..3 {
        first.app.relay().hold();
        whole.send(ASK);
        let mut new = KeptClient::connect(&dir);
        new.send(ASK);
        first.run_ready_tasks();
        whole.assert_waits();
        new.assert_waits();
        first.app.relay().release();
        whole.assert_answered_by("first");
        new.assert_answered_by("first");
    }
    half.send(&ASK[9..]);
    half.assert_answered_by("first");
    idle.send(ASK);
    idle.assert_answered_by("first");
}

#[test]
fn new_connection_waits_for_the_new_process() {
    let (dir, first) = start("first");
    first.app.relay().hold();
    let mut clients: Vec<_> = (0..100).map(|_| KeptClient::connect(&dir)).collect();
    clients.iter_mut().for_each(|client| client.send(ASK));
    first.run_ready_tasks();
    clients.iter_mut().for_each(KeptClient::assert_waits);
    let _second = first.upgrade(waiting("second"));
    clients.iter_mut().for_each(|client| client.assert_answered_by("second"));
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let (dir, first) = start("first");
    let mut client = KeptClient::connect(&dir);
    first.app.relay().hold();
    let requests: String = (0..50).map(|n| format!("GET /{n} HTTP/1.1\r\n\r\n")).collect();
    client.send(requests + ASK + &ASK[..9]);
    first.run_ready_tasks();
    client.assert_waits();
    let _second = first.upgrade(waiting("second"));
    for n in 0..50 {
        let reply = client.reply();
        assert!(reply.ends_with(&format!("there is no request GET /{n}\"}}")), "{n}: {reply}");
    }
    client.assert_answered_by("second");
    client.send(&ASK[9..]);
    client.assert_answered_by("second");
}

/// Returns a socket's directory, its first process, and the guest.
fn start_with_guest() -> (TempDir, Process, Arc<dyn Vm>) {
    let config = payload_config(BackendKind::Threads);
    let host = HostConfig { serial: SerialSink::Null, ..Default::default() };
    let vm = driftline_backends::launch(config, &host).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let jobs = Jobs::new(vm.clone(), dir.path().to_owned());
    let socket = ListeningSocket::bind(&dir.path().join("api")).unwrap();
    let process = Process::serve(App::new(jobs), socket, None);
    (dir, process, vm)
}

#[test]
fn held_requests_exceed_the_limit_of_their_class() {
    let (dir, process, vm) = start_with_guest();
    let mut clients: Vec<_> = (0..50).map(|_| KeptClient::connect(&dir)).collect();
    let hold = |process: &Process, clients: &mut [KeptClient]| {
        process.app.relay().hold();
        clients.iter_mut().for_each(|client| client.send("GET /v1/info HTTP/1.1\r\n\r\n"));
        process.run_ready_tasks();
    };
    let expect_answers = |clients: &mut [KeptClient]| {
        for client in clients {
            let reply = client.reply();
            assert!(reply.starts_with("HTTP/1.1 200 OK\r\n"), "{reply}");
        }
    };
    hold(&process, &mut clients);
    process.app.relay().release();
    expect_answers(&mut clients);
    hold(&process, &mut clients);
    let second = process.upgrade(App::new(Jobs::new(vm.clone(), dir.path().to_owned())));
    expect_answers(&mut clients);
    drop((process, second));
    vm.stop("the test is over");
}

#[test]
fn request_that_waits_for_news_moves() {
    let (dir, first, vm) = start_with_guest();
    let mut client = KeptClient::connect(&dir);
    let begin = "POST /v1/dirty/watch HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}";
    let begun = client.ask(begin);
    assert!(begun.ends_with("{\"watch\":1}"), "{begun}");
    client.send("GET /v1/dirty/watch?watch=1&wait_ms=60000 HTTP/1.1\r\n\r\n");
    first.run_ready_tasks();
    first.app.relay().hold();
    first.run_ready_tasks();
    client.assert_waits();
    let _second = first.upgrade(waiting("second"));
    client.assert_answered_by("second");
    client.send(ASK);
    client.assert_answered_by("second");
    drop(first);
    vm.stop("the test is over");
}

/// Returns the caller of the next request.
fn next_caller(events: &Receiver<ApiEvent>) -> crate::api::Caller {
    match events.recv_timeout(TIMEOUT).unwrap() {
        ApiEvent::Call(caller, _) => caller,
        other => panic!("{other:?}"),
    }
}

#[test]
fn request_under_way_is_answered_here() {
    let (app, events) = firecracker();
    let dir = tempfile::tempdir().unwrap();
    let socket = ListeningSocket::bind(&dir.path().join("api")).unwrap();
    let first = Process::serve(app, socket, None);
    let (mut busy, mut held) = (KeptClient::connect(&dir), KeptClient::connect(&dir));
    let put = "PUT /entropy HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}";
    busy.send(put.repeat(2));
    let caller = next_caller(&events);
    first.app.relay().hold();
    held.send(put);
    first.run_ready_tasks();
    let (app, second_events) = firecracker();
    let second = first.upgrade(app);
    next_caller(&second_events).answer(Answer::Done);
    assert!(held.reply().starts_with("HTTP/1.1 204 "));
    busy.assert_waits();
    // The first process may end meanwhile.
    let end = std::thread::spawn(|| drop(first));
    caller.answer(Answer::Done);
    assert!(busy.reply().contains("\r\nConnection: keep-alive\r\n"));
    end.join().unwrap();
    assert!(events.try_recv().is_err(), "the first process has begun a request");
    next_caller(&second_events).answer(Answer::Done);
    assert!(busy.reply().starts_with("HTTP/1.1 204 "));
    drop(second);
}

#[test]
fn connection_closes_if_its_client_asks() {
    let (begin, begun) = mpsc::channel();
    let (finish, finished) = mpsc::channel::<()>();
    let finished = parking_lot::Mutex::new(finished);
    let app = App::waiting(Arriving::default, move |_| {
        let _ = begin.send(());
        finished.lock().recv_timeout(TIMEOUT).is_ok()
    });
    let dir = tempfile::tempdir().unwrap();
    let socket = ListeningSocket::bind(&dir.path().join("api")).unwrap();
    let first = Process::serve(app, socket, None);
    let mut client = KeptClient::connect(&dir);
    client.send("POST /v1/stop HTTP/1.1\r\nConnection: close\r\n\r\n");
    begun.recv_timeout(TIMEOUT).unwrap();
    let _second = first.upgrade(waiting("second"));
    finish.send(()).unwrap();
    let reply = client.reply();
    assert!(reply.starts_with("HTTP/1.1 204 ") && reply.contains("connection: close"), "{reply}");
    client.assert_ends();
}

#[test]
fn connection_moves_after_its_refused_body() {
    let (app, events) = firecracker();
    let dir = tempfile::tempdir().unwrap();
    let socket = ListeningSocket::bind(&dir.path().join("api")).unwrap();
    let first = Process::serve(app, socket, None);
    let mut client = KeptClient::connect(&dir);
    let refused = client.ask("PUT /mmds HTTP/1.1\r\nContent-Length: 60000\r\n\r\n");
    assert!(refused.contains("larger than the limit"), "{refused}");
    let (app, second_events) = firecracker();
    let _second = first.upgrade(app);
    first.run_ready_tasks();
    client.send([b'x'; 60_000]);
    client.send("PUT /entropy HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}");
    next_caller(&second_events).answer(Answer::Done);
    assert!(client.reply().starts_with("HTTP/1.1 204 "));
    assert!(events.try_recv().is_err());
}

/// Moves a connection to a new process of `app` after each byte of its requests.
fn move_at_every_byte(app: impl Fn() -> Arc<App>) {
    let requests = "GET /v1/migration?wait_ms=10 HTTP/1.1\r\nHost: x\r\n\r\n\
                    PUT /v1/x HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\
                    Expect: 100-continue\r\n\r\nhello";
    let dir = tempfile::tempdir().unwrap();
    let socket = ListeningSocket::bind(&dir.path().join("api")).unwrap();
    let mut process = Process::serve(app(), socket, None);
    for cut in 0..=requests.len() {
        let mut client = KeptClient::connect(&dir);
        // The requests are held, or some of them are answered before the move.
        for holds in [true, false] {
            if holds {
                process.app.relay().hold();
            }
            client.send(&requests[..cut]);
            process.run_ready_tasks();
            process = process.upgrade(app());
            client.send(&requests[cut..]);
            let reply = client.reply();
            assert!(reply.contains("there is no guest yet"), "{cut}: {reply}");
            let permission = client.reply();
            assert!(permission.starts_with("HTTP/1.1 100 "), "{cut}: {permission}");
            let reply = client.reply();
            assert!(reply.ends_with("there is no request PUT /v1/x\"}"), "{cut}: {reply}");
        }
    }
}

/// Environment variable that makes a copy of this test binary enter the sandbox.
const SANDBOXED: &str = "DRIFTLINE_RELAY_SANDBOXED";

#[test]
fn connection_moves_at_every_byte() {
    if std::env::var_os(SANDBOXED).is_some() {
        // This thread, and those of the servers, which it starts.
        let options = SandboxOptions { seccomp: true, ..SandboxOptions::default() };
        sandbox::start(&options).unwrap();
    }
    move_at_every_byte(|| waiting("process"));
    move_at_every_byte(|| firecracker().0);
}

#[test]
fn connections_move_in_the_sandbox() {
    let mut copy = std::process::Command::new(std::env::current_exe().unwrap());
    let test = "api::relay::tests::moves::connection_moves_at_every_byte";
    let out = copy.args(["--exact", test]).env(SANDBOXED, "1").output().unwrap();
    let output = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success() && output.contains("1 passed"), "{}: {output}", out.status);
}

#[test]
fn file_of_the_socket_moves() {
    let (dir, first) = start("first");
    let path = dir.path().join("api");
    let second = first.upgrade(waiting("second"));
    drop(first);
    KeptClient::connect(&dir).ask(ASK);
    drop(second);
    assert!(!path.exists());
}

#[test]
fn connections_pass_through_a_process() {
    let (app, events) = firecracker();
    let dir = tempfile::tempdir().unwrap();
    let socket = ListeningSocket::bind(&dir.path().join("api")).unwrap();
    let first = Process::serve(app, socket, None);
    let mut busy = KeptClient::connect(&dir);
    busy.send("PUT /entropy HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}");
    let caller = next_caller(&events);
    let second = first.upgrade(waiting("second"));
    let _third = second.upgrade(waiting("third"));
    caller.answer(Answer::Done);
    assert!(busy.reply().starts_with("HTTP/1.1 204 "));
    busy.send(ASK);
    busy.assert_answered_by("third");
}
