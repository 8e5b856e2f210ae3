//! A process whose address space is limited. It has its own binary, since the limit applies to the
//! entire process.
#![cfg(not(any(driftline_loom, driftline_shuttle, miri)))]
#![allow(clippy::unwrap_used, reason = "tests")]

mod skip;

use std::sync::Arc;

use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tracker, Tree};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn tree_without_address_space_is_an_error() {
    const LIMIT: Option<u64> = Some(8 << 30);
    setrlimit(Resource::As, Rlimit { current: LIMIT, ..getrlimit(Resource::As) }).unwrap();
    if getrlimit(Resource::As).current != LIMIT {
        let test = "memory_limit::tree_without_address_space_is_an_error";
        let why = "the address space cannot be limited here (qemu-user ignores RLIMIT_AS)";
        skip::skipped(test, why);
        return;
    }
    // The largest guest: its dirty bits take 128 GiB.
    let layout = |frames| Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames }]).unwrap();
    let (small, large) = (layout(1000), layout(1 << 40));
    let error = Tree::new(large.clone()).unwrap_err();
    assert_eq!(error.frames, 1 << 40);
    assert!(error.bytes >= 1 << 37, "{error}");
    assert!(error.to_string().contains("ulimit -v"), "{error}");

    let tracker = Arc::new(Tracker::new(large));
    assert_eq!(tracker.subscribe("migration").unwrap_err(), error);
    assert_eq!((tracker.subscribers(), tracker.stats().tree_bytes), (0, 0));
    tracker.mark(FrameRun { start: Gfn(5), count: 1 }).unwrap();

    let tracker = Arc::new(Tracker::new(small));
    assert!(tracker.subscribe("migration").is_ok(), "a smaller guest's tree fits");
}
