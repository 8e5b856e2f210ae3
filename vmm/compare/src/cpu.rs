//! Measures the processor time of this process's threads, grouped by their names.

use std::fs;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Processor time of threads since they were started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CpuTime {
    /// Sum over all vCPU threads, including the guest's own work.
    pub(super) vcpus: Duration,
    /// The collector thread's time.
    pub(super) collector: Duration,
}

impl CpuTime {
    /// Returns the time of all existing threads. Reads two small files per thread.
    pub(super) fn now() -> Self {
        Self::with("vcpu")
    }

    /// Does the same as [`now`](Self::now) for vCPU threads whose names begin with `vcpu`.
    fn with(vcpu: &str) -> Self {
        let mut sum = Self::default();
        for task in fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
            // A thread may end during the loop. Such a thread does not matter here.
            let read = |name: &str| fs::read_to_string(task.path().join(name)).unwrap_or_default();
            let ran = ran(&read("schedstat"));
            match read("comm").trim() {
                "collector" => sum.collector += ran,
                name if name.starts_with(vcpu) => sum.vcpus += ran,
                _ => {}
            }
        }
        sum
    }

    /// Returns the time used since `earlier`.
    pub(super) fn since(self, earlier: Self) -> Self {
        Self {
            vcpus: self.vcpus.saturating_sub(earlier.vcpus),
            collector: self.collector.saturating_sub(earlier.collector),
        }
    }
}

/// Returns the time on a processor from the text of `schedstat`.
fn ran(schedstat: &str) -> Duration {
    let ns = schedstat.split_ascii_whitespace().next().and_then(|ns| ns.parse().ok());
    Duration::from_nanos(ns.unwrap_or(0))
}

/// Returns the processor time of the calling thread.
pub(super) fn this_thread() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Instant;

    use super::*;

    #[test]
    fn cpu_time_is_found_by_thread_name() {
        assert_eq!(ran("12345 678 9\n"), Duration::from_nanos(12345));
        assert_eq!(ran(""), Duration::ZERO);
        let (done, wait) = mpsc::channel::<()>();
        let (worked, is_ready) = mpsc::channel();
        let work = move || {
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_millis(20) {}
            worked.send(this_thread()).unwrap();
            let _ = wait.recv();
        };
        // No other test uses this thread name. vCPU threads of other tests start and end at any
        // time.
        const NAME: &str = "works-for-cpu";
        let before = CpuTime::with(NAME);
        assert_eq!(before.vcpus, Duration::ZERO);
        let thread = std::thread::Builder::new().name(format!("{NAME}7")).spawn(work).unwrap();
        let own = is_ready.recv().unwrap();
        assert!(own > Duration::ZERO);
        // The kernel counts the last few ms once the thread waits.
        let end = Instant::now() + Duration::from_secs(60);
        while CpuTime::with(NAME).since(before).vcpus < own {
            assert!(Instant::now() < end, "{:?} of {own:?}", CpuTime::with(NAME));
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(done);
        thread.join().unwrap();
    }
}
