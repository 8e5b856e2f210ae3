//! Each status with which the HTTP server itself answers, whatever the operation, is documented,
//! and is seen here.

use std::collections::BTreeSet;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use driftline_control::api::{ApiEvent, App, Arriving, Listeners, Server};
use driftline_control::firecracker::InstanceName;
use driftline_machine::socket::ListeningSocket;
use parking_lot::Mutex;
use tests::{ApiDocument, SOON, ScratchDir};

use super::session::{ApiReply, ExampleHost, HttpClient, ServedApi, waiting};

/// The name of the answer in the document.
const COMPONENT: &str = "HttpRefused";
/// The longest limit of the server for a client that has begun a request, and some more.
const CLIENT_LIMIT: Duration = Duration::from_secs(60);
/// The largest number of requests that are answered at a time, of those that end the guest.
const MAX_STOPS: usize = 16;
/// The largest number of other requests that are answered at a time.
const MAX_REQUESTS: usize = 64;

/// A reply of a server that was asked for `method` and `path`.
struct SeenReply {
    /// The status that the reply must have.
    expected: u16,
    tag: &'static str,
    method: &'static str,
    path: &'static str,
    reply: ApiReply,
}

/// A server in this process.
struct LocalServer {
    _server: Server,
    client: HttpClient,
}

impl LocalServer {
    fn start(scratch: &ScratchDir, name: &str, app: Arc<App>) -> Self {
        let socket = scratch.path(name);
        let api = Some(ListeningSocket::bind(&socket).expect("a socket"));
        let listeners = Listeners { api, ..Listeners::default() };
        let is_firecracker = name == "firecracker";
        let server = Server::start(listeners, app).expect("a server");
        Self { _server: server, client: HttpClient { socket, is_firecracker } }
    }
}

/// Returns the replies to requests that are refused for their bytes.
fn refused_bytes(server: &ServedApi) -> Vec<SeenReply> {
    let long = format!("/v1/info HTTP/1.1\r\nA: {}\r\nB:", "a".repeat(9000));
    let coded = "/v1/stop HTTP/1.1\r\nTransfer-Encoding: chunked\r\nB:";
    let seen = |expected, method, path, reply| SeenReply {
        expected,
        tag: "driftline",
        method,
        path,
        reply,
    };
    vec![
        seen(431, "GET", "/v1/info", server.ask("GET", &long, "")),
        seen(411, "POST", "/v1/stop", server.ask("POST", coded, "")),
        seen(413, "POST", "/v1/stop", server.ask("POST", "/v1/stop", &"x".repeat(51_201))),
    ]
}

/// Sends the beginning of a request, and waits until the server refuses it.
fn late(client: &HttpClient, beginning: &str) -> ApiReply {
    let stream = client.begin(beginning).expect("it listens");
    stream.set_read_timeout(Some(CLIENT_LIMIT)).expect("a socket");
    HttpClient::reply(stream)
}

/// A server, the tag of the operation in the document, its method and path, and the bytes to send.
type LateRequest<'s> = (&'s ServedApi, &'static str, &'static str, &'static str, &'static str);

/// Returns the replies to requests that do not arrive whole in time.
fn late_requests(own: &ServedApi, theirs: &ServedApi) -> Vec<SeenReply> {
    let half_head = "GET /v1/info HTT";
    let half_body = "PUT /actions HTTP/1.1\r\nContent-Length: 10\r\n\r\n{";
    let mut requests = vec![
        (own, "run", "PUT", "/actions", half_body),
        (theirs, "firecracker", "PUT", "/actions", half_body),
    ];
    // A head may take three times as long as a body.
    if driftline_machine::testing::full() {
        requests.push((own, "driftline", "GET", "/v1/info", half_head));
        requests.push((theirs, "driftline", "GET", "/v1/info", half_head));
    }
    thread::scope(|scope| {
        let ask = |(server, tag, method, path, beginning): LateRequest<'_>| {
            let expected = if server.client().is_firecracker { 400 } else { 408 };
            let reply = late(server.client(), beginning);
            SeenReply { expected, tag, method, path, reply }
        };
        let replies: Vec<_> =
            requests.into_iter().map(|request| scope.spawn(move || ask(request))).collect();
        replies.into_iter().map(|reply| reply.join().expect("no panic")).collect()
    })
}

/// Returns the reply of a server that is ending its guest for as many clients as it can.
fn too_many_stops(scratch: &ScratchDir) -> SeenReply {
    let (begin, begun) = mpsc::channel();
    let (end, ended) = mpsc::channel::<()>();
    let ended = Mutex::new(ended);
    let app = App::waiting(Arriving::default, move |_| {
        begin.send(()).expect("the test waits");
        // Until the test ends.
        let _ = ended.lock().recv();
        true
    });
    let server = LocalServer::start(scratch, "stops", app);
    let stop = || server.client.begin("POST /v1/stop HTTP/1.1\r\n\r\n").expect("it listens");
    let stops: Vec<_> = (0..MAX_STOPS).map(|_| stop()).collect();
    (0..MAX_STOPS).for_each(|_| begun.recv_timeout(SOON).expect("a stop"));
    let reply = server.client.ask("POST", "/v1/stop", "");
    drop((end, stops));
    SeenReply { expected: 503, tag: "driftline", method: "POST", path: "/v1/stop", reply }
}

/// Returns the reply of a server that is answering as many of Firecracker's requests as it can.
fn too_many_requests(scratch: &ScratchDir) -> SeenReply {
    let name = InstanceName { id: "test".to_owned(), app_name: "Driftline" };
    let (app, events) = App::configuring(name, 51_200);
    let server = LocalServer::start(scratch, "firecracker", app);
    let call = || server.client.begin("GET /version HTTP/1.1\r\n\r\n").expect("it listens");
    let calls: Vec<UnixStream> = (0..MAX_REQUESTS).map(|_| call()).collect();
    let held: Vec<ApiEvent> =
        calls.iter().map(|_| events.recv_timeout(SOON).expect("a call")).collect();
    let reply = server.client.ask("GET", "/version", "");
    drop(held);
    SeenReply { expected: 503, tag: "firecracker", method: "GET", path: "/version", reply }
}

/// Returns the replies of a server a part of which panics.
fn failures(scratch: &ScratchDir) -> Vec<SeenReply> {
    let app = App::waiting(|| panic!("the failure of a part, by this test"), |_| true);
    let server = LocalServer::start(scratch, "failing", app);
    [("driftline", "/v1/info"), ("driftline", "/metrics"), ("run", "/vm/config")]
        .into_iter()
        .map(|(tag, path)| {
            let reply = server.client.ask("GET", path, "");
            SeenReply { expected: 500, tag, method: "GET", path, reply }
        })
        .collect()
}

/// Returns the numbers of three digits in a text.
fn statuses(text: &str) -> BTreeSet<u16> {
    let numbers = text.split(|c: char| !c.is_ascii_digit()).filter(|number| number.len() == 3);
    numbers.map(|number| number.parse().expect("a number")).collect()
}

#[test]
fn statuses_of_the_server_are_those_documented() {
    let host = ExampleHost::new("tap0");
    let own = waiting(&host, "own");
    let theirs = ServedApi::firecracker(&host.scratch, "theirs", &["serve"]);
    let mut replies = refused_bytes(&own);
    replies.extend(late_requests(&own, &theirs));
    replies.push(too_many_stops(&host.scratch));
    replies.push(too_many_requests(&host.scratch));
    replies.extend(failures(&host.scratch));
    let document = ApiDocument::read();
    let component = &document.root()["components"]["responses"][COMPONENT];
    let text = component["description"].as_str().expect("a text");
    let mut seen = BTreeSet::new();
    for SeenReply { expected, tag, method, path, reply: ApiReply { status, body } } in replies {
        assert_eq!(status, expected, "{tag}: {method} {path}: {body}");
        seen.insert(status);
        let operation = document.find(&[tag], method, path).expect("an operation");
        match status {
            // Not JSON, as the document says.
            400 => {
                let begins = "{ \"error\": \"The ";
                assert!(body.starts_with(begins) && body.contains(" of the request did not come"));
            }
            _ => {
                assert_eq!(operation.response(status), component, "{method} {path}: {status}");
                assert_eq!(operation.violation(tag, status, Some(&body)), None);
            }
        }
    }
    assert_eq!(seen, statuses(text), "{text}");
}
