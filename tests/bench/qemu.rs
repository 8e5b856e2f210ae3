//! QEMU's side of the comparison: a microvm with the payload, which QMP commands migrate.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tests::{GuestConsole, SOON, ScratchDir, wait_for};

const QEMU: &str = "qemu-system-x86_64";

/// Returns QEMU's version line; `None` if QEMU is not installed.
pub fn version() -> Option<String> {
    let out = Command::new(QEMU).arg("--version").output().ok()?;
    Some(String::from_utf8_lossy(&out.stdout).lines().next()?.to_owned())
}

/// A QEMU process. Dropping it kills it.
pub struct QemuProcess {
    child: Child,
    qmp: BufReader<UnixStream>,
    console: GuestConsole,
    /// Names and times in microseconds since 1970, in order.
    events: Vec<(String, f64)>,
}

impl QemuProcess {
    /// Starts a process that boots `kernel`, or waits for a guest at `incoming`.
    pub fn start(
        scratch: &ScratchDir,
        name: &str,
        kernel: &Path,
        cmdline: &str,
        (mem, vcpus): (&str, u32),
        incoming: Option<&str>,
    ) -> Self {
        let console = scratch.path(&format!("{name}.console"));
        let socket = scratch.path(&format!("{name}.qmp"));
        let text = |path: &Path| path.to_str().expect("a path in UTF-8").to_owned();
        let mut command = Command::new(QEMU);
        command
            .args(["-M", "microvm,x-option-roms=off", "-accel", "kvm"])
            .args(["-cpu", "host,-arch-capabilities,-cx16"])
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
            .args(["-m", mem, "-smp", &vcpus.to_string()])
            .args(["-kernel", &text(kernel), "-append", cmdline])
            .args(["-serial", &format!("file:{}", text(&console))])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", text(&socket))]);
        command.args(incoming.iter().flat_map(|address| ["-incoming", address]));
        let child = command.stdin(Stdio::null()).spawn().expect("QEMU starts");
        let qmp = wait_for("QMP of QEMU", SOON, || UnixStream::connect(&socket).ok());
        let (qmp, console) = (BufReader::new(qmp), GuestConsole::at(console));
        let mut qemu = Self { child, qmp, console, events: Vec::new() };
        let hello = qemu.line();
        assert!(hello.get("QMP").is_some(), "{hello}");
        qemu.execute("qmp_capabilities", json!({}));
        qemu
    }

    pub fn console(&self) -> &GuestConsole {
        &self.console
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    fn line(&mut self) -> Value {
        let mut line = String::new();
        self.qmp.read_line(&mut line).expect("QEMU answers");
        serde_json::from_str(&line).unwrap_or_else(|e| panic!("no JSON ({e}): {line}"))
    }

    fn execute(&mut self, command: &str, arguments: Value) -> Value {
        let request = json!({"execute": command, "arguments": arguments});
        writeln!(self.qmp.get_mut(), "{request}").expect("QEMU listens");
        loop {
            let answer = self.line();
            assert!(answer.get("error").is_none(), "{command}: {answer}");
            // Events may precede the answer.
            if let Some(result) = answer.get("return") {
                return result.clone();
            }
            if let Some(name) = answer["event"].as_str() {
                let part = |of: &str| answer["timestamp"][of].as_f64().expect("an event's time");
                self.events.push((name.to_owned(), part("seconds") * 1e6 + part("microseconds")));
            }
        }
    }

    /// Waits for the first event called `name`. Returns its time in microseconds since 1970.
    pub fn event_us(&mut self, name: &str) -> f64 {
        wait_for("an event of QEMU", SOON, || {
            self.execute("query-status", json!({}));
            self.events.iter().find(|(event, _)| event == name).map(|(_, us)| *us)
        })
    }

    /// Uses TLS with the certificates in `dir`, as `client` or `server`, and two channels.
    #[allow(dead_code, reason = "only one bench compares TLS")]
    pub fn use_tls(&mut self, dir: &Path, endpoint: &str) {
        let dir = dir.to_str().expect("a path in UTF-8");
        let credentials = json!({
            "qom-type": "tls-creds-x509", "id": "tls0", "endpoint": endpoint, "dir": dir,
            "verify-peer": true
        });
        self.execute("object-add", credentials);
        let multifd = json!([{"capability": "multifd", "state": true}]);
        self.execute("migrate-set-capabilities", json!({"capabilities": multifd}));
        let parameters = json!({"tls-creds": "tls0", "multifd-channels": 2});
        self.execute("migrate-set-parameters", parameters);
    }

    /// Waits for a guest at `address`, in a process that was started with `defer`.
    #[allow(dead_code, reason = "only one bench compares TLS")]
    pub fn listen(&mut self, address: &str) {
        self.execute("migrate-incoming", json!({"uri": address}));
    }

    /// Migrates to `address`. Returns the result of `query-migrate` at the end.
    pub fn migrate(&mut self, address: &str, downtime_ms: u64) -> Value {
        let limits = json!({"downtime-limit": downtime_ms, "max-bandwidth": 1u64 << 40});
        self.execute("migrate-set-parameters", limits);
        self.execute("migrate", json!({"uri": address}));
        wait_for("end of QEMU's migration", Duration::from_secs(120), || {
            let status = self.execute("query-migrate", json!({}));
            assert_ne!(status["status"], "failed", "{status}");
            (status["status"] == "completed").then_some(status)
        })
    }
}

impl Drop for QemuProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns a free address on the loopback interface.
pub fn free_address() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    format!("tcp:{}", listener.local_addr().expect("an address"))
}
