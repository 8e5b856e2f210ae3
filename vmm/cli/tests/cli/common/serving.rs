//! A process that serves Firecracker's API, and a client of it.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::{TIMEOUT, TestDir, driftline, text, wait_for};

/// A process that serves the API. Killed when dropped.
pub struct ServeProcess {
    pub socket: String,
    child: Child,
}

impl ServeProcess {
    /// Starts `driftline serve`.
    pub fn start(tmp: &TestDir, args: &[&str]) -> Self {
        let socket = tmp.text("serve.sock");
        let command = driftline(&[&["serve", "--api-sock", &socket], args].concat());
        Self::spawn(command, socket)
    }

    /// Starts a command that serves the API on `socket`.
    pub fn spawn(mut command: Command, socket: String) -> Self {
        let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        Self::adopt(child, socket)
    }

    /// Waits until a process, whose stderr is a pipe, serves the API on `socket`.
    pub fn adopt(child: Child, socket: String) -> Self {
        wait_for("the socket", || UnixStream::connect(&socket).ok());
        Self { socket, child }
    }

    /// Sends a request. Returns the status, the lines of the head, and the body.
    pub fn answer(&self, method: &str, path: &str, body: &str) -> (u16, String, String) {
        let length = body.len();
        let answer = self.exchange(&format!(
            "{method} {path} HTTP/1.1\r\nContent-Length: {length}\r\n\r\n{body}"
        ));
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, head.to_ascii_lowercase(), body.to_owned())
    }

    /// Sends `bytes` and nothing after them. Returns what is answered.
    pub fn exchange(&self, bytes: &str) -> String {
        let mut stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.write_all(bytes.as_bytes()).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        text(&answer)
    }

    pub fn get(&self, path: &str) -> Value {
        let (status, head, body) = self.answer("GET", path, "");
        assert_eq!(status, 200, "GET {path}: {body}");
        assert!(head.contains("content-type: application/json"), "{head}");
        serde_json::from_str(&body).unwrap()
    }

    pub fn done(&self, method: &str, path: &str, body: &str) {
        let (status, _, answer) = self.answer(method, path, body);
        assert_eq!((status, answer.as_str()), (204, ""), "{method} {path} {body}");
    }

    pub fn refusal(&self, method: &str, path: &str, body: &str) -> String {
        let (status, _, answer) = self.answer(method, path, body);
        assert_eq!(status, 400, "{method} {path} {body}: {answer}");
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(answer.as_object().unwrap().len(), 1, "{answer}");
        answer["fault_message"].as_str().unwrap().to_owned()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.child.id() as i32).unwrap(), signal).unwrap();
    }

    /// Waits until the process ends. Returns its exit code and what it said.
    pub fn wait(&mut self) -> (Option<i32>, String) {
        let (status, stderr) = self.wait_status();
        (status.code(), stderr)
    }

    /// Waits until the process ends. Returns how it ended and what it said.
    pub fn wait_status(&mut self) -> (ExitStatus, String) {
        let status = wait_for("the process to end", || self.child.try_wait().unwrap());
        let mut stderr = Vec::new();
        self.child.stderr.take().unwrap().read_to_end(&mut stderr).unwrap();
        (status, text(&stderr))
    }
}

impl Drop for ServeProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
