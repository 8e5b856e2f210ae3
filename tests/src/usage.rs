//! Growth of what the processes of one guest use, one after the other.

use std::thread::sleep;
use std::time::Duration;

use driftline_machine::testing::ProcessUsage;

/// Bound of the growth of resident memory, in KiB. A guest touches more of its memory over time.
const GROWTH_KIB: u64 = 4096;

/// Number of times that a process's usage is read.
const READS: u32 = 5;
/// Interval between two of them. A connection that is being closed ends meanwhile.
const READ_INTERVAL: Duration = Duration::from_millis(20);

/// Returns what a process uses without what passes: a connection that is being closed has a thread
/// and a file. `None` once it has ended.
pub fn lasting_usage(pid: u32) -> Option<ProcessUsage> {
    let mut least = ProcessUsage::of(pid)?;
    for _ in 1..READS {
        sleep(READ_INTERVAL);
        let now = ProcessUsage::of(pid)?;
        least.threads = least.threads.min(now.threads);
        least.files = least.files.min(now.files);
    }
    Some(least)
}

/// Returns the median of a figure.
fn median<T: Copy + Ord>(usage: &[ProcessUsage], figure: impl Fn(&ProcessUsage) -> T) -> T {
    let mut sorted: Vec<T> = usage.iter().map(figure).collect();
    sorted.sort_unstable();
    sorted[sorted.len() / 2]
}

/// Fails the test unless the last of a guest's processes use what the first ones did: the medians
/// of the first and of the last tenth, at least three processes each.
pub fn assert_no_growth(usage: &[ProcessUsage]) {
    let few = (usage.len() / 10).max(3);
    let of = |usage: &[ProcessUsage]| ProcessUsage {
        threads: median(usage, |usage| usage.threads),
        files: median(usage, |usage| usage.files),
        resident_kib: median(usage, |usage| usage.resident_kib),
        anonymous_kib: median(usage, |usage| usage.anonymous_kib),
    };
    let (first, last) = (of(&usage[..few]), of(&usage[usage.len() - few..]));
    eprintln!("of {} processes the first use {first:?}, the last {last:?}", usage.len());
    assert!(last.files <= first.files && last.threads <= first.threads, "{first:?}, {last:?}");
    assert!(last.resident_kib <= first.resident_kib + GROWTH_KIB, "{first:?}, {last:?}");
    assert!(last.anonymous_kib <= first.anonymous_kib + GROWTH_KIB, "{first:?}, {last:?}");
}
