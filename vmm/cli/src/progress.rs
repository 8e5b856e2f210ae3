//! Shows the progress of a migration to the user: one changing line on a terminal, otherwise a line
//! for each step.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::Duration;

use driftline_dirty_tracker::PAGE_SIZE;
use driftline_migrate::{Phase, Progress, ReceiveControl, VcpuThrottle};

use super::output::{self, print_message};
use super::status_line::StatusLine;

/// Interval at which a receiver updates its progress.
const UPDATE_INTERVAL: Duration = Duration::from_millis(200);

/// Shows progress on stderr.
pub(super) struct ProgressView {
    line: StatusLine,
    text: fn(&Progress) -> String,
    last: Option<(Phase, u32)>,
}

impl ProgressView {
    /// Creates the view; `text` formats the progress.
    pub(super) fn new(text: fn(&Progress) -> String) -> Self {
        Self { line: StatusLine::spinner(), text, last: None }
    }

    pub(super) fn show(&mut self, progress: &Progress) {
        if self.line.is_shown() {
            return self.line.show((self.text)(progress));
        }
        let now = (progress.phase, progress.pass);
        if self.last.replace(now) != Some(now) {
            print_message((self.text)(progress));
        }
    }
}

/// Formats a source's progress.
pub(super) fn progress_line(p: &Progress) -> String {
    let sent = output::bytes(p.sent_bytes);
    match p.phase {
        Phase::Precopy => {
            let left = output::bytes(p.remaining_frames.saturating_mul(PAGE_SIZE));
            let mut line = format!("pre-copy, pass {}: {sent} sent, {left} left", p.pass);
            if p.remaining_disk_bytes > 0 {
                line += &format!(" and {} of disks", output::bytes(p.remaining_disk_bytes));
            }
            // The rates are unknown until a pass is complete.
            if p.link_rate_bytes_per_s == 0 {
                return line;
            }
            format!(
                "{line}, guest writes {}, link carries {}, pause now about {:.1} ms{}",
                output::bytes_per_s(p.dirty_rate_bytes_per_s),
                output::bytes_per_s(p.link_rate_bytes_per_s),
                p.expected_downtime_ms,
                throttle_list(&p.throttle)
            )
        }
        Phase::InDoubt => format!(
            "in doubt: the guest is paused here and may run there; {}; resolve it with `driftline \
             resolve --run` or `--discard`",
            p.doubt.as_deref().unwrap_or("the destination is being asked")
        ),
        phase => format!("{phase}: {sent} sent"),
    }
}

/// Lists the throttled vCPUs, with their degree of throttling.
fn throttle_list(vcpus: &[VcpuThrottle]) -> String {
    let Some(most) = vcpus.iter().find_map(|v| v.most_bytes_per_s) else { return String::new() };
    let throttled =
        |v: &VcpuThrottle| format!("vCPU {} throttled {:.0} %", v.vcpu, v.throttled_percent);
    let throttled: Vec<String> =
        vcpus.iter().filter(|v| v.throttled_percent >= 0.5).map(throttled).collect();
    let all = [format!(", vCPUs throttled to {} each", output::bytes_per_s(most))];
    all.into_iter().chain(throttled).collect::<Vec<_>>().join(", ")
}

/// Formats a destination's progress as its current activity.
pub(super) fn receiving_line(p: &Progress) -> String {
    let received = output::bytes(p.sent_bytes);
    match p.phase {
        Phase::Waiting | Phase::Connect => "waiting for a migration".to_owned(),
        Phase::Setup => "building the machine of an arriving guest".to_owned(),
        Phase::Precopy => {
            let left = output::bytes(p.remaining_frames.saturating_mul(PAGE_SIZE));
            let line = format!(
                "receiving a guest: pass {}, {received} received, {left} left in this pass",
                p.pass
            );
            match p.link_rate_bytes_per_s {
                0 => line,
                rate => format!("{line}, link carries {}", output::bytes_per_s(rate)),
            }
        }
        phase => format!("receiving a guest, {phase}: {received} received"),
    }
}

/// Shows the arrival of a guest, from a separate thread, until it is dropped.
pub(super) struct ReceiveProgress {
    over: Option<Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl ReceiveProgress {
    pub(super) fn show(control: &Arc<ReceiveControl>) -> Self {
        let (over, is_over) = mpsc::channel();
        let control = control.clone();
        let show = move || {
            let mut view = ProgressView::new(receiving_line);
            while is_over.recv_timeout(UPDATE_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                let progress = control.progress();
                // The waiting has already been reported.
                if !matches!(progress.phase, Phase::Waiting | Phase::Finished) {
                    view.show(&progress);
                }
            }
        };
        let thread = std::thread::Builder::new().name("progress".into()).spawn(show);
        // Without the thread only the display is missing.
        Self { over: Some(over), thread: thread.ok() }
    }
}

impl Drop for ReceiveProgress {
    fn drop(&mut self) {
        drop(self.over.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
