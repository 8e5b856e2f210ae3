//! Restores in a row, each from a checkpoint of the guest that the one before brought back.
#![allow(clippy::expect_used, reason = "a test fails by saying what it expected")]

use tests::{Driftline, Load, SOON, Scratch};

/// Checkpoints, kills the process hard, restores in a new one, and does that `times` times.
fn in_a_row(load: Load, times: usize) {
    let scratch = Scratch::new();
    let mut here = load.start(&scratch, "life0");
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

tests::under_each_load!(in_a_row, 4, 50);
