//! The console of a guest, and the payload's reports on it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use driftline_images::{PayloadMessage, PayloadReport};

use crate::wait_for;

/// The file to which a process writes its guest's COM1.
#[derive(Clone, Debug)]
pub struct GuestConsole {
    path: PathBuf,
}

impl GuestConsole {
    /// Returns the console in the file `path`.
    pub fn at(path: impl AsRef<Path>) -> Self {
        Self { path: path.as_ref().to_owned() }
    }

    /// Returns the whole output so far.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.path).unwrap_or_default()).into_owned()
    }

    /// Returns the complete lines so far.
    pub fn lines(&self) -> Vec<String> {
        let text = self.text();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.lines().map(str::to_owned).collect()
    }

    /// Returns the payload's messages so far.
    pub fn messages(&self) -> Vec<PayloadMessage> {
        self.lines().iter().filter_map(|l| PayloadMessage::parse(l)).collect()
    }

    /// Returns the payload's reports so far, oldest first.
    pub fn reports(&self) -> Vec<PayloadReport> {
        let reports = self.messages().into_iter().filter_map(|m| match m {
            PayloadMessage::Report(r) => Some(r),
            _ => None,
        });
        reports.collect()
    }

    /// Returns the last report of each of `vcpus` vCPUs; `None` until all have reported.
    pub fn last_reports(&self, vcpus: u32) -> Option<Vec<PayloadReport>> {
        let all = self.reports();
        (0..vcpus).map(|v| all.iter().rev().find(|r| r.vcpu == v).copied()).collect()
    }

    /// Fails the test if the guest has reported an error, a fault or that it cannot continue.
    pub fn assert_clean(&self) {
        for m in self.messages() {
            match m {
                PayloadMessage::Report(r) => {
                    assert_eq!(r.errors, 0, "{}: {r:?}", self.path.display())
                }
                PayloadMessage::Ready { .. } => {}
                bad => panic!("{}: the guest reports {bad:?}", self.path.display()),
            }
        }
    }

    /// Waits until every vCPU has reported `more` times from now on without an error. Returns the
    /// last report of each vCPU.
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

    /// Waits until every vCPU has reported a pass over its part of the working set, without an
    /// error.
    pub fn wait_first_pass(&self, vcpus: u32, limit: Duration) {
        let what = format!("a first pass of {vcpus} vCPUs on {}", self.path.display());
        wait_for(&what, limit, || {
            self.assert_clean();
            self.last_reports(vcpus)?.iter().all(|r| r.passes > 0).then_some(())
        });
    }

    /// Waits until every vCPU has visited, and so checked, all its pages since its first report on
    /// this console, and none has found an error. With a random pattern it has made as many visits
    /// as it has pages, and has swept a part in order. The pass of the first report does not count,
    /// because a part of it may precede this console.
    pub fn wait_pass(&self, vcpus: u32, limit: Duration) {
        let what = format!("a pass of {vcpus} vCPUs on {}", self.path.display());
        wait_for(&what, limit, || {
            self.assert_clean();
            let (all, last) = (self.reports(), self.last_reports(vcpus)?);
            let passed = |r: &PayloadReport| {
                let first = all.iter().find(|first| first.vcpu == r.vcpu);
                first.is_some_and(|first| r.passes >= first.passes + 2)
            };
            last.iter().all(passed).then_some(())
        });
    }
}
