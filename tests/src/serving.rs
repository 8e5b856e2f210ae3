//! `driftline serve` processes, and a client of their API.

use std::ops::{Deref, DerefMut};

use serde_json::{Value, json};

use crate::{Driftline, RawConnection, SOON, ScratchDir, wait_for};

/// A process that serves Firecracker's API. Its stdout is the console of its guest.
pub struct ServingProcess(Driftline);

impl ServingProcess {
    /// Starts `driftline serve`. `name` is the stem of its files in `scratch`.
    pub fn start(scratch: &ScratchDir, name: &str) -> Self {
        let process = Driftline::serve(scratch, name);
        wait_for("API socket", SOON, || RawConnection::open(process.socket().as_ref()).ok());
        Self(process)
    }

    /// Sends a request. Returns the status and the body, `null` if there is none.
    ///
    /// # Errors
    ///
    /// The process ends before it answers.
    pub fn ask(&self, method: &str, path: &str, body: &Value) -> std::io::Result<(u16, Value)> {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let request =
            format!("{method} {path} HTTP/1.1\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        let mut connection = RawConnection::open(self.socket().as_ref())?;
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
}

impl Deref for ServingProcess {
    type Target = Driftline;

    fn deref(&self) -> &Driftline {
        &self.0
    }
}

impl DerefMut for ServingProcess {
    fn deref_mut(&mut self) -> &mut Driftline {
        &mut self.0
    }
}
