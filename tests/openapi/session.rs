//! Processes that answer the API, and requests to them that are held to the document.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use driftline_machine::testing::Elf;
use serde_json::Value;
use tests::{ApiDocument, DocumentedOperation, SOON, ScratchDir, driftline, wait_for};

/// The directory of the document's examples.
const EXAMPLE_DIR: &str = "/srv/vm1";
/// The tap of the document's examples.
const EXAMPLE_TAP: &str = "tap0";

/// A reply.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ApiReply {
    pub status: u16,
    pub body: String,
}

/// What the document's examples name: a directory with the files of a guest, and a tap.
pub struct ExampleHost {
    pub scratch: ScratchDir,
    tap: String,
}

impl ExampleHost {
    pub fn new(tap: &str) -> Self {
        let scratch = ScratchDir::new();
        // hlt; jmp $-1
        fs::write(scratch.path("vmlinux"), Elf::new(&[0xf4, 0xeb, 0xfd]).bytes()).expect("a file");
        for name in ["initrd", "root.img", "disk.img"] {
            let file = File::create(scratch.path(name)).expect("a file");
            file.set_len(1 << 20).expect("room");
        }
        fs::write(scratch.path("serial.log"), "").expect("a file");
        Self { scratch, tap: tap.to_owned() }
    }

    /// Returns an example with the paths and the tap of this host.
    pub fn example(&self, example: &Value) -> Value {
        let dir = self.scratch.path("");
        let dir = dir.to_str().expect("UTF-8").trim_end_matches('/');
        let tap = |text: &str| format!("\"{text}\"");
        let text = example.to_string().replace(EXAMPLE_DIR, dir);
        let text = text.replace(&tap(EXAMPLE_TAP), &tap(&self.tap));
        serde_json::from_str(&text).expect("JSON")
    }
}

/// Connects to an API's socket for each request.
pub struct HttpClient {
    pub socket: PathBuf,
    /// Whether the server keeps a connection whatever a client asks for, as Firecracker's does.
    pub is_firecracker: bool,
}

impl HttpClient {
    /// Sends a request as it is.
    pub fn ask(&self, method: &str, path: &str, body: &str) -> ApiReply {
        let length = body.len();
        let head = format!("{method} {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n");
        let request = format!("{head}Content-Length: {length}\r\n\r\n{body}");
        let stream = self.begin(&request).expect("it reads");
        if self.is_firecracker {
            stream.shutdown(Shutdown::Write).expect("it is connected");
        }
        Self::reply(stream)
    }

    /// Connects, and sends bytes.
    pub fn begin(&self, bytes: &str) -> io::Result<UnixStream> {
        let mut stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(SOON))?;
        stream.write_all(bytes.as_bytes())?;
        Ok(stream)
    }

    /// Reads a reply that ends with its connection.
    pub fn reply(mut stream: UnixStream) -> ApiReply {
        let mut answer = Vec::new();
        match stream.read_to_end(&mut answer) {
            // The server refuses a body without reading it.
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => {}
            read => _ = read.expect("an answer"),
        }
        let answer = String::from_utf8(answer).expect("UTF-8");
        let (head, body) = answer.split_once("\r\n\r\n").expect("an answer");
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        ApiReply { status: status.expect("a status"), body: body.to_owned() }
    }
}

/// A process that answers the API. Dropping it kills the process.
pub struct ServedApi {
    child: Child,
    client: HttpClient,
    /// The tags of the operations that the process answers, the first for what has two.
    tags: [&'static str; 2],
    /// The operations that were done, with the statuses.
    pub seen: BTreeSet<(String, u16)>,
}

impl Drop for ServedApi {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl ServedApi {
    /// Starts a process that answers as Firecracker does.
    pub fn firecracker(scratch: &ScratchDir, name: &str, args: &[&str]) -> Self {
        Self::start(scratch, name, args, ["firecracker", "driftline"])
    }

    /// Starts a process that answers only Driftline's own API.
    pub fn own(scratch: &ScratchDir, name: &str, args: &[&str]) -> Self {
        let state = scratch.path(&format!("{name}.state"));
        let args = [args, &["--state-dir", state.to_str().expect("UTF-8")]].concat();
        Self::start(scratch, name, &args, ["run", "driftline"])
    }

    fn start(scratch: &ScratchDir, name: &str, args: &[&str], tags: [&'static str; 2]) -> Self {
        let socket = scratch.path(&format!("{name}.api"));
        let log = scratch.path(&format!("{name}.log"));
        let child = Command::new(driftline())
            .args(args)
            .arg("--api-sock")
            .arg(&socket)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log).expect("a file"))
            .spawn()
            .expect("driftline starts");
        let client = HttpClient { socket, is_firecracker: tags[0] == "firecracker" };
        let mut session = Self { child, client, tags, seen: BTreeSet::new() };
        wait_for("API socket", SOON, || {
            let ended = session.child.try_wait().expect("a child of ours");
            let log = || fs::read_to_string(&log).unwrap_or_default();
            assert!(ended.is_none(), "{args:?}: {ended:?}: {}", log());
            UnixStream::connect(&session.client.socket).ok()
        });
        session
    }

    /// Returns the operations that the process answers, with the tag of each.
    pub fn operations(&self) -> impl Iterator<Item = (DocumentedOperation<'static>, &'static str)> {
        let tags = self.tags;
        ApiDocument::read().operations().filter_map(move |operation| {
            Some((operation, tags.into_iter().find(|tag| operation.has_tag(tag))?))
        })
    }

    /// Returns a client of the process.
    pub fn client(&self) -> &HttpClient {
        &self.client
    }

    /// Sends a request as it is.
    pub fn ask(&self, method: &str, path: &str, body: &str) -> ApiReply {
        self.client.ask(method, path, body)
    }

    /// Sends a request of a documented operation, and checks that its reply is documented.
    pub fn checked(&self, method: &str, path: &str, body: &str) -> ApiReply {
        let reply = self.ask(method, path, body);
        let operation = ApiDocument::read().find(&self.tags, method, path);
        let operation = operation.unwrap_or_else(|| panic!("{method} {path} is not documented"));
        let tag = self.tags.into_iter().find(|tag| operation.has_tag(tag)).expect("a tag");
        let violation = operation.violation(tag, reply.status, Some(&reply.body));
        assert_eq!(violation, None);
        assert!(operation.statuses().contains(&reply.status), "{method} {path}: {reply:?}");
        reply
    }

    /// Does what must be done. Returns the answer, or null.
    pub fn done(&mut self, method: &str, path: &str, body: Option<&Value>) -> Value {
        let reply = self.checked(method, path, &body.map(Value::to_string).unwrap_or_default());
        assert!(reply.status < 300, "{method} {path}: {reply:?}");
        let operation = ApiDocument::read().find(&self.tags, method, path).expect("documented");
        self.seen.insert((operation.name(), reply.status));
        serde_json::from_str(&reply.body).unwrap_or_default()
    }

    /// Does an operation with each example of its body, or without one.
    pub fn do_examples(&mut self, host: &ExampleHost, name: &str) {
        let (method, path) = name.split_once(' ').expect("method and path");
        let operation = self.operations().find(|(operation, _)| operation.name() == name);
        let (operation, _) = operation.unwrap_or_else(|| panic!("{name} is not documented"));
        let examples = operation.request_examples();
        for example in &examples {
            let body = host.example(example);
            self.done(method, &with_id(path, &body), Some(&body));
        }
        if examples.is_empty() {
            self.done(method, path, None);
        }
    }
}

/// Starts a process that waits for a guest: it reads bodies, and then has no guest.
pub fn waiting(host: &ExampleHost, name: &str) -> ServedApi {
    ServedApi::own(&host.scratch, name, &["receive-migration", "tcp:127.0.0.1:0"])
}

/// Returns a path with the name of the device in the body.
pub fn with_id(path: &str, body: &Value) -> String {
    let id = ["drive_id", "iface_id", "id"].iter().find_map(|field| body[field].as_str());
    path.replace("{id}", id.unwrap_or("none"))
}
