//! The example runs on the real /dev/kvm, where there is one.
#![cfg(all(
    feature = "vm-memory",
    target_arch = "x86_64",
    not(any(driftline_loom, driftline_shuttle, miri))
))]
#![allow(clippy::unwrap_used, reason = "tests")]

use driftline_dirty_tracker::{FrameRun, Gfn};

#[path = "../examples/dirty_pages.rs"]
mod dirty_pages;
mod skip;

#[test]
fn example_shows_exactly_the_written_pages() {
    if std::fs::File::options().read(true).write(true).open("/dev/kvm").is_err() {
        let test = "example::example_shows_exactly_the_written_pages";
        skip::skipped(test, "there is no /dev/kvm");
        return;
    }
    let run = |start, count| FrameRun { start: Gfn(start), count };
    let guest = vec![run(0x20, 1), run(0x23, 1), run(0x70, 2)];
    assert_eq!(dirty_pages::track().unwrap(), [vec![run(1, 1)], guest.clone(), guest]);
}
