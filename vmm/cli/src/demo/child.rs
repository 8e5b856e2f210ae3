//! Owns the demo's VMM processes. Each runs this binary with its own socket, serial file and stderr
//! file, and ends with the demo, however the demo ends.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use driftline_control::api::Client;
use driftline_control::model::{GuestState, Info};
use driftline_images::{PayloadMessage, PayloadReport};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::runtime::{Builder, Runtime};

use super::error::StepError;

/// Limit for any single operation. 15 s, chosen: a busy host may need seconds.
pub(super) const TIMEOUT: Duration = Duration::from_secs(15);
/// Interval of the checks. 2 ms, chosen: the demo prints durations in milliseconds, and must not
/// add many to them.
const POLL: Duration = Duration::from_millis(2);

/// A process of this binary that has, or will have, the guest.
pub(super) struct DemoVmm {
    child: Child,
    client: Client,
    runtime: Runtime,
    serial: PathBuf,
    stderr: PathBuf,
}

impl DemoVmm {
    /// Starts a process with `args`, whose files in `dir` begin with `name`. The caller's thread
    /// must live as long as the demo: the process is killed when that thread ends.
    pub(super) fn start(dir: &Path, name: &str, args: &[&str]) -> Result<Self, StepError> {
        let file = |end: &str| dir.join(format!("{name}.{end}"));
        let (socket, serial, stderr) = (file("sock"), file("serial"), file("stderr"));
        let stderr_file = File::create(&stderr)?;
        let program = std::env::current_exe()?;
        let child = Command::new(program)
            .args(args)
            .arg("--die-with-parent")
            .arg("--api-sock")
            .arg(&socket)
            .arg(format!("--serial=file:{}", serial.display()))
            .arg("--state-dir")
            .arg(dir.join("state"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(stderr_file)
            .spawn()
            .map_err(StepError::Start)?;
        let runtime = Builder::new_current_thread().enable_all().build()?;
        Ok(Self { child, client: Client::new(socket), runtime, serial, stderr })
    }

    /// Returns the process's stderr so far.
    pub(super) fn stderr(&self) -> String {
        fs::read_to_string(&self.stderr).unwrap_or_default()
    }

    /// Sends one API request.
    pub(super) fn call<T: DeserializeOwned>(
        &self,
        method: hyper::Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, StepError> {
        Ok(self.runtime.block_on(self.client.call(method, path, body))?)
    }

    /// Sends `GET path`.
    pub(super) fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, StepError> {
        self.call(hyper::Method::GET, path, None::<&()>)
    }

    /// Waits until the guest runs in this process.
    pub(super) fn await_running(&mut self) -> Result<(), StepError> {
        self.wait("the guest to run", |vmm| {
            let info: Result<Info, _> = vmm.get("/v1/info");
            Ok(info.is_ok_and(|i| i.state == GuestState::Running).then_some(()))
        })
    }

    /// Waits until `check` returns a value, while the process runs.
    pub(super) fn wait<T>(
        &mut self,
        what: &'static str,
        mut check: impl FnMut(&Self) -> Result<Option<T>, StepError>,
    ) -> Result<T, StepError> {
        let end = Instant::now() + TIMEOUT;
        loop {
            if let Some(found) = check(self)? {
                return Ok(found);
            }
            if let Some(status) = self.child.try_wait()? {
                return Err(StepError::EndedBefore { what, status, stderr: self.stderr() });
            }
            if Instant::now() > end {
                return Err(StepError::TimedOut { what, limit: TIMEOUT });
            }
            std::thread::sleep(POLL);
        }
    }

    /// Kills the process with SIGKILL, as a host's failure would.
    pub(super) fn kill(&mut self) -> Result<(), StepError> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Waits until the process ends cleanly by itself.
    pub(super) fn await_exit(&mut self) -> Result<(), StepError> {
        let end = Instant::now() + TIMEOUT;
        let status: ExitStatus = loop {
            match self.child.try_wait()? {
                Some(status) => break status,
                None if Instant::now() > end => return Err(StepError::Runs),
                None => std::thread::sleep(POLL),
            }
        };
        if status.success() {
            return Ok(());
        }
        Err(StepError::Ended { status, stderr: self.stderr() })
    }

    /// Returns the last report of each vCPU in this process, ordered by vCPU, or an error if the
    /// guest reports one.
    pub(super) fn reports(&self) -> Result<Vec<PayloadReport>, StepError> {
        let log = fs::read_to_string(&self.serial).unwrap_or_default();
        last_reports(&log)
    }

    /// Waits until each of `vcpus` vCPUs has reported more pages than in `than`.
    pub(super) fn await_progress(
        &mut self,
        vcpus: usize,
        than: &[PayloadReport],
    ) -> Result<Vec<PayloadReport>, StepError> {
        let before = |vcpu| than.iter().find(|r| r.vcpu == vcpu).map_or(0, |r| r.pages);
        self.wait("every vCPU to write more pages", |vmm| {
            let now = vmm.reports()?;
            let all = now.len() == vcpus && now.iter().all(|r| r.pages > before(r.vcpu));
            Ok(all.then_some(now))
        })
    }
}

impl Drop for DemoVmm {
    fn drop(&mut self) {
        // The process may already have ended. No process may outlive the demo.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn last_reports(log: &str) -> Result<Vec<PayloadReport>, StepError> {
    let mut last: Vec<PayloadReport> = Vec::new();
    for line in log.split_inclusive('\n').filter(|l| l.ends_with('\n')) {
        match PayloadMessage::parse(line) {
            Some(PayloadMessage::Report(r)) if r.errors > 0 => {
                return Err(StepError::GuestErrors { errors: r.errors, line: line.to_owned() });
            }
            Some(PayloadMessage::Report(r)) => {
                last.retain(|l| l.vcpu != r.vcpu);
                last.push(r);
            }
            Some(PayloadMessage::Ready { .. } | PayloadMessage::Io(_)) | None => {}
            Some(
                PayloadMessage::Error { .. } | PayloadMessage::Fault(_) | PayloadMessage::Fatal(_),
            ) => {
                return Err(StepError::GuestFailed { line: line.to_owned() });
            }
        }
    }
    last.sort_by_key(|r| r.vcpu);
    Ok(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_whole_line_of_each_vcpu_counts() {
        let line = |vcpu, pages, errors| {
            format!(
                "payload vcpu={vcpu} t_ms=1 passes=1 pages={pages} errors={errors} max_gap_us=5 \
                 gap_us=5\n"
            )
        };
        let log = [line(1, 5, 0), line(0, 7, 0), line(1, 9, 0)].concat() + "payload vcpu=0 t_";
        let pages: Vec<u64> = last_reports(&log).unwrap().iter().map(|r| r.pages).collect();
        assert_eq!(pages, [7, 9]);
        let e = last_reports(&line(0, 7, 2)).unwrap_err().to_string();
        assert!(e.starts_with("the guest found 2 errors"), "{e}");
    }
}
