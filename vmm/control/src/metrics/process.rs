//! Metrics of the process, under the names that all Prometheus clients give them. All come from
//! `/proc`; rustix would look clocks up by a `prctl` that the sandbox forbids.

use std::fmt;
use std::fs;
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use driftline_dirty_tracker::PAGE_SIZE;

use super::page::{MetricsPage, bytes, number, seconds};

/// Unit of times in `/proc`: `USER_HZ`, which is part of the kernel's interface on x86-64.
const TICKS_PER_S: f64 = 100.0;

/// Figures of this process. Figures that cannot be read are skipped.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct ProcessFigures {
    cpu_s: Option<f64>,
    resident_bytes: Option<u64>,
    open_fds: Option<u64>,
    start_s: Option<f64>,
}

impl ProcessFigures {
    pub(super) fn read() -> Self {
        let stat = Stat::read();
        Self {
            cpu_s: stat.as_ref().map(|stat| stat.cpu_s),
            resident_bytes: resident_bytes(),
            open_fds: open_fds(),
            start_s: stat.and_then(|stat| stat.start_s()),
        }
    }

    pub(super) fn write(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        page.info(
            number("driftline_build", "The program."),
            &[("version", env!("CARGO_PKG_VERSION"))],
        )?;
        page.counter(seconds("process_cpu", "CPU time of all threads."), self.cpu_s)?;
        page.gauge(bytes("process_resident_memory", "Resident memory."), self.resident_bytes)?;
        page.gauge(number("process_open_fds", "Open file descriptors."), self.open_fds)?;
        let start = seconds("process_start_time", "When the process started, since 1970.");
        page.gauge(start, self.start_s)
    }
}

fn resident_bytes() -> Option<u64> {
    let statm = fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * PAGE_SIZE)
}

fn open_fds() -> Option<u64> {
    // One of them is the directory that is read.
    Some((fs::read_dir("/proc/self/fd").ok()?.count() as u64).saturating_sub(1))
}

/// The part of `/proc/self/stat` that is used here.
struct Stat {
    cpu_s: f64,
    /// From the host's boot to the process's start.
    start_after_boot_s: f64,
}

impl Stat {
    fn read() -> Option<Self> {
        let stat = fs::read_to_string("/proc/self/stat").ok()?;
        // The second field, the name in parentheses, may contain blanks. The third one follows.
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let seconds = |field: usize| -> Option<f64> {
            let ticks: u64 = fields.get(field - 3)?.parse().ok()?;
            Some(ticks as f64 / TICKS_PER_S)
        };
        Some(Self { cpu_s: seconds(14)? + seconds(15)?, start_after_boot_s: seconds(22)? })
    }

    /// Returns when this process started. The first call decides, so that the value is constant.
    fn start_s(&self) -> Option<f64> {
        static START_S: OnceLock<Option<f64>> = OnceLock::new();
        *START_S.get_or_init(|| {
            let uptime = fs::read_to_string("/proc/uptime").ok()?;
            let uptime_s: f64 = uptime.split_whitespace().next()?.parse().ok()?;
            let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_secs_f64();
            Some(now - (uptime_s - self.start_after_boot_s))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_has_all_figures() {
        let ProcessFigures { cpu_s, resident_bytes, open_fds, start_s } = ProcessFigures::read();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
        assert!((0.0..3600.0).contains(&cpu_s.unwrap()), "{cpu_s:?}");
        assert!((1 << 20..1 << 40).contains(&resident_bytes.unwrap()), "{resident_bytes:?}");
        assert!((3..10_000).contains(&open_fds.unwrap()), "{open_fds:?}");
        let age = now - start_s.unwrap();
        assert!((-1.0..3600.0).contains(&age), "{age}");
    }
}
