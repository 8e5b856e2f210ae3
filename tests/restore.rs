//! Restores in a row, each from a checkpoint of the guest that the one before brought back.
#![allow(clippy::expect_used, reason = "a test fails by saying what it expected")]

use tests::{Driftline, SOON, Scratch, one_at_a_time, repeats};
use vmm::testing::kvm_or_skip;

/// Checkpoints, kills the process hard, restores in a new one, and does that `times` times.
fn in_a_row(name: &str, tracking: &str, load: &str, times: usize) {
    if !kvm_or_skip(name) {
        return;
    }
    let _alone = one_at_a_time();
    let scratch = Scratch::new();
    let spec = format!("payload,ws=64M,{load}");
    let args = ["--vcpus", "2", "--mem", "1G", "--tracking", tracking];
    let mut here = Driftline::run(&scratch, "life0", &spec, &args);
    here.console().wait_reports(2, 1, SOON);
    for life in 1..=times {
        let store = scratch.path(&format!("store{life}"));
        let store = store.to_str().expect("UTF-8");
        // A full epoch and two incremental ones.
        let args = ["--store", store, "--every", "20ms", "--count", "3"];
        let taken = here.cli("checkpoint", &args);
        let said = String::from_utf8_lossy(&taken.stderr);
        assert_eq!(taken.status.code(), Some(0), "life {life}: {said}");
        here.console().assert_clean();
        here.kill();
        let name = format!("life{life}");
        here = Driftline::start(&scratch, &name, &["restore", "--store", store]);
        here.console().wait_reports(2, 1, SOON);
        if life > 1 {
            let old = scratch.path(&format!("store{}", life - 1));
            std::fs::remove_dir_all(old).expect("the store before is ours");
        }
    }
    here.console().wait_reports(2, 2, SOON);
    here.console().assert_clean();
}

#[test]
fn ring_as_fast_as_it_can() {
    in_a_row("ring_as_fast_as_it_can", "dirty-ring", "rate=max,pattern=random", repeats(4, 50));
}

#[test]
fn ring_at_320_megabytes() {
    in_a_row("ring_at_320_megabytes", "dirty-ring", "rate=320M", repeats(4, 50));
}

#[test]
fn bitmap_as_fast_as_it_can() {
    let times = repeats(4, 50);
    in_a_row("bitmap_as_fast_as_it_can", "dirty-bitmap", "rate=max,pattern=random", times);
}

#[test]
fn bitmap_at_320_megabytes() {
    in_a_row("bitmap_at_320_megabytes", "dirty-bitmap", "rate=320M", repeats(4, 50));
}
