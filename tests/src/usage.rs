//! Growth of what the processes of one guest use, one after the other.

use driftline_machine::testing::ProcessUsage;

/// Bound of the growth of resident memory, in KiB. A guest touches more of its memory over time.
const GROWTH_KIB: u64 = 4096;

/// Bound of the growth of threads and of open files. A connection that is being closed while they
/// are counted has one of each; what each process left to the next one would be more over the
/// processes between the first and the last ones.
const PASSING: usize = 2;

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
    assert!(last.files <= first.files + PASSING, "{first:?}, {last:?}");
    assert!(last.threads <= first.threads + PASSING, "{first:?}, {last:?}");
    assert!(last.resident_kib <= first.resident_kib + GROWTH_KIB, "{first:?}, {last:?}");
    assert!(last.anonymous_kib <= first.anonymous_kib + GROWTH_KIB, "{first:?}, {last:?}");
}
