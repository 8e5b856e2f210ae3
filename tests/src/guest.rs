//! The console of a guest, and the payload's reports on it.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

use driftline_images::{PayloadIo, PayloadMessage, PayloadReport};

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
        let text = self.whole_lines(0);
        String::from_utf8_lossy(&text).lines().map(str::to_owned).collect()
    }

    /// Returns the complete lines from byte `start` on.
    fn whole_lines(&self, start: u64) -> Vec<u8> {
        let mut text = Vec::new();
        let Ok(mut file) = File::open(&self.path) else { return text };
        file.seek(SeekFrom::Start(start)).expect("a file");
        file.read_to_end(&mut text).expect("a file");
        text.truncate(text.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1));
        text
    }

    /// Returns the payload's reports so far, oldest first.
    pub fn reports(&self) -> Vec<PayloadReport> {
        let messages = self.lines().into_iter().filter_map(|l| PayloadMessage::parse(&l));
        let reports = messages.filter_map(|m| match m {
            PayloadMessage::Report(r) => Some(r),
            _ => None,
        });
        reports.collect()
    }

    /// Returns what the payload has last reported of its devices.
    pub fn io(&self) -> Option<PayloadIo> {
        self.lines().iter().rev().find_map(|line| match PayloadMessage::parse(line) {
            Some(PayloadMessage::Io(io)) => Some(io),
            _ => None,
        })
    }

    /// Waits until the payload has used its disk and its interface again.
    pub fn wait_io(&self, limit: Duration) {
        let before = self.io();
        wait_for("more blocks and frames", limit, || {
            let (before, now) = (before?, self.io()?);
            (now.blocks > before.blocks && now.frames > before.frames).then_some(())
        });
    }

    /// Returns the last report of each of `vcpus` vCPUs; `None` until all have reported.
    pub fn last_reports(&self, vcpus: u32) -> Option<Vec<PayloadReport>> {
        last_of_each(&self.reports(), vcpus)
    }

    /// Fails the test if the guest has reported an error, a fault or that it cannot continue.
    pub fn assert_clean(&self) {
        CleanReports::of(self).update();
    }

    /// Waits until every vCPU has reported `more` times from now on without an error. Returns the
    /// last report of each vCPU.
    pub fn wait_reports(&self, vcpus: u32, more: usize, limit: Duration) -> Vec<PayloadReport> {
        let what = format!("{more} more reports of {vcpus} vCPUs on {}", self.path.display());
        let mut reports = CleanReports::of(self);
        let before = reports.update().len();
        wait_for(&what, limit, || {
            let since = &reports.update()[before..];
            let has = |v: u32| since.iter().filter(|r| r.vcpu == v).count() >= more;
            (0..vcpus).all(has).then_some(())
        });
        last_of_each(&reports.all, vcpus).unwrap_or_default()
    }

    /// Waits until every vCPU has reported a pass over its part of the working set, without an
    /// error.
    pub fn wait_first_pass(&self, vcpus: u32, limit: Duration) {
        let what = format!("a first pass of {vcpus} vCPUs on {}", self.path.display());
        let mut reports = CleanReports::of(self);
        wait_for(&what, limit, || {
            let last = last_of_each(reports.update(), vcpus)?;
            last.iter().all(|r| r.passes > 0).then_some(())
        });
    }

    /// Waits until every vCPU has visited, and so checked, all its pages since its first report on
    /// this console, and none has found an error. With a random pattern it has made as many visits
    /// as it has pages, and has swept a part in order. The pass of the first report does not count,
    /// because a part of it may precede this console.
    pub fn wait_pass(&self, vcpus: u32, limit: Duration) {
        let what = format!("a pass of {vcpus} vCPUs on {}", self.path.display());
        let mut reports = CleanReports::of(self);
        wait_for(&what, limit, || {
            let all = reports.update();
            let last = last_of_each(all, vcpus)?;
            let passed = |r: &PayloadReport| {
                let first = all.iter().find(|first| first.vcpu == r.vcpu);
                first.is_some_and(|first| r.passes >= first.passes + 2)
            };
            last.iter().all(passed).then_some(())
        });
    }
}

/// The reports on a console, none of which may have an error. Each part of the console is read
/// once, so that a wait takes little processor time.
struct CleanReports<'c> {
    console: &'c GuestConsole,
    read: u64,
    all: Vec<PayloadReport>,
}

impl<'c> CleanReports<'c> {
    fn of(console: &'c GuestConsole) -> Self {
        Self { console, read: 0, all: Vec::new() }
    }

    /// Reads the lines that are new, and returns all reports. Fails the test if the guest has
    /// reported an error, a fault or that it cannot continue.
    fn update(&mut self) -> &[PayloadReport] {
        let path = self.console.path.display();
        let new = self.console.whole_lines(self.read);
        self.read += new.len() as u64;
        for line in String::from_utf8_lossy(&new).lines() {
            match PayloadMessage::parse(line) {
                Some(PayloadMessage::Report(r)) => {
                    assert_eq!(r.errors, 0, "{path}: {r:?}");
                    self.all.push(r);
                }
                Some(PayloadMessage::Ready { .. } | PayloadMessage::Io(_)) | None => {}
                Some(bad) => panic!("{path}: the guest reports {bad:?}"),
            }
        }
        &self.all
    }
}

/// Returns the last report of each vCPU; `None` until all have reported.
fn last_of_each(reports: &[PayloadReport], vcpus: u32) -> Option<Vec<PayloadReport>> {
    (0..vcpus).map(|v| reports.iter().rev().find(|r| r.vcpu == v).copied()).collect()
}
