//! `driftline serve` processes, and a client of their API.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use crate::{GuestConsole, RawConnection, SOON, ScratchDir, driftline, wait_for};

/// A process that serves Firecracker's API. Dropping it kills the process.
pub struct ServingProcess {
    child: Child,
    socket: PathBuf,
    console: PathBuf,
    log: PathBuf,
}

impl ServingProcess {
    /// Starts `driftline serve`, and makes a file the console of its guest. `name` is the stem of
    /// its files in `scratch`.
    pub fn start(scratch: &ScratchDir, name: &str) -> Self {
        let file = |of: &str| scratch.path(&format!("{name}.{of}"));
        let (socket, console, log) = (file("sock"), file("console"), file("log"));
        let child = Command::new(driftline())
            .args(["serve", "--id", name, "--api-sock"])
            .arg(&socket)
            .env("RUST_LOG", "info")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log).expect("a log file"))
            .spawn()
            .expect("driftline starts");
        let process = Self { child, socket, console, log };
        wait_for("API socket", SOON, || RawConnection::open(&process.socket).ok());
        process.done("PUT", "/serial", &json!({ "serial_out_path": process.console }));
        process
    }

    /// Sends a request. Returns the status and the body, `null` if there is none. Returns an error
    /// if the process ends before it answers.
    ///
    /// # Errors
    ///
    /// See there.
    pub fn ask(&self, method: &str, path: &str, body: &Value) -> std::io::Result<(u16, Value)> {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let request =
            format!("{method} {path} HTTP/1.1\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        let mut connection = RawConnection::open(&self.socket)?;
        connection.send(request.as_bytes())?;
        let reply = connection.reply()?;
        let page = reply.body.map_or(Ok(Value::Null), |body| serde_json::from_slice(&body));
        Ok((reply.status, page?))
    }

    /// Sends a request that must succeed without a body.
    pub fn done(&self, method: &str, path: &str, body: &Value) {
        let (status, page) = self.ask(method, path, body).expect("an answer");
        assert_eq!((status, &page), (204, &Value::Null), "{method} {path} {body}");
    }

    /// Sends a request that must be refused. Returns why.
    pub fn refusal(&self, method: &str, path: &str, body: &Value) -> String {
        let (status, page) = self.ask(method, path, body).expect("an answer");
        assert_eq!(status, 400, "{method} {path} {body}: {page}");
        page["fault_message"].as_str().expect("a text").to_owned()
    }

    /// Returns a page.
    pub fn page(&self, path: &str) -> Value {
        let (status, page) = self.ask("GET", path, &Value::Null).expect("an answer");
        assert_eq!(status, 200, "GET {path}: {page}");
        page
    }

    /// Pauses the guest.
    pub fn pause(&self) {
        self.done("PATCH", "/vm", &json!({ "state": "Paused" }));
    }

    /// Resumes the guest.
    pub fn resume(&self) {
        self.done("PATCH", "/vm", &json!({ "state": "Resumed" }));
    }

    /// Returns the path of the API socket.
    pub fn socket(&self) -> &str {
        self.socket.to_str().expect("a path in UTF-8")
    }

    /// Returns the guest's console.
    pub fn console(&self) -> GuestConsole {
        GuestConsole::at(&self.console)
    }

    /// Returns the output on stderr so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Fails the test if the process has ended.
    pub fn must_live(&mut self) {
        let ended = self.child.try_wait().expect("a child of ours");
        assert!(ended.is_none(), "{} has ended: {ended:?}", self.log.display());
    }

    /// Waits for the end of the process and returns the exit code, -1 after a signal.
    pub fn wait_exit(&mut self, limit: Duration) -> i32 {
        wait_for(&format!("end of the process with {}", self.log.display()), limit, || {
            let ended = self.child.try_wait().expect("a child of ours");
            ended.map(|status| status.code().unwrap_or(-1))
        })
    }
}

impl Drop for ServingProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- {}\n{}", self.log.display(), self.log());
        }
    }
}
