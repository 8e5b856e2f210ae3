//! What a guest says about itself on its console.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use driftline_images::{PayloadMessage, PayloadReport};

use crate::wait_for;

/// The file that a process's COM1 goes to.
#[derive(Clone, Debug)]
pub struct GuestConsole {
    path: PathBuf,
}

impl GuestConsole {
    /// The console kept in `path`.
    pub fn at(path: impl AsRef<Path>) -> Self {
        Self { path: path.as_ref().to_owned() }
    }

    /// Everything so far.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.path).unwrap_or_default()).into_owned()
    }

    /// All whole lines so far.
    pub fn lines(&self) -> Vec<String> {
        let text = self.text();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.lines().map(str::to_owned).collect()
    }

    /// All whole lines that are the payload's own.
    pub fn messages(&self) -> Vec<PayloadMessage> {
        self.lines().iter().filter_map(|l| PayloadMessage::parse(l)).collect()
    }

    /// Reports so far, oldest first.
    pub fn reports(&self) -> Vec<PayloadReport> {
        let reports = self.messages().into_iter().filter_map(|m| match m {
            PayloadMessage::Report(r) => Some(r),
            _ => None,
        });
        reports.collect()
    }

    /// The last report of each of `vcpus` vCPUs, once every one has reported.
    pub fn last_reports(&self, vcpus: u32) -> Option<Vec<PayloadReport>> {
        let all = self.reports();
        (0..vcpus).map(|v| all.iter().rev().find(|r| r.vcpu == v).copied()).collect()
    }

    /// Fails the test if the guest has found an error, faulted or given up.
    pub fn assert_clean(&self) {
        for m in self.messages() {
            match m {
                PayloadMessage::Report(r) => {
                    assert_eq!(r.errors, 0, "{}: {r:?}", self.path.display())
                }
                PayloadMessage::Ready { .. } => {}
                bad => panic!("{}: the guest says {bad:?}", self.path.display()),
            }
        }
    }

    /// Waits until every vCPU has reported `more` times from now on, having written pages in
    /// between, and has found no error. Returns each one's last report.
    pub fn wait_reports(&self, vcpus: u32, more: usize, limit: Duration) -> Vec<PayloadReport> {
        let count = |v: u32| self.reports().iter().filter(|r| r.vcpu == v).count();
        let before: Vec<usize> = (0..vcpus).map(count).collect();
        let what = format!("{more} more reports of {vcpus} vCPUs on {}", self.path.display());
        wait_for(&what, limit, || {
            self.assert_clean();
            (0..vcpus).all(|v| count(v) >= before[v as usize] + more).then_some(())
        });
        self.last_reports(vcpus).unwrap_or_default()
    }
}
