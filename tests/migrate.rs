//! Migrations in a row, from process to process, of a guest that checks itself.
#![allow(clippy::expect_used, reason = "a test fails by saying what it expected")]

use std::time::Duration;

use driftline_machine::testing::kvm_or_skip;
use tests::{Driftline, GuestLoad, SOON, ScratchDir, json_of};

/// Sends one guest through `hops` processes; each one's guest must go on writing without an error.
fn in_a_row(load: GuestLoad, hops: usize) {
    let scratch = ScratchDir::new();
    let mut here = load.start(&scratch, "hop0");
    let mut pages = here.console().wait_reports(2, 1, SOON).iter().map(|r| r.pages).sum::<u64>();
    for hop in 1..=hops {
        let (there, address) = Driftline::receive(&scratch, &format!("hop{hop}"));
        let sent = here.cli("send-migration", &[&address, "--json"]);
        let said = String::from_utf8_lossy(&sent.stderr);
        assert_eq!(sent.status.code(), Some(0), "hop {hop}: {said}\n{}", there.log());
        let report = json_of(&sent);
        assert_eq!(report["status"], "completed", "hop {hop}: {report}");
        assert_eq!(here.wait_exit(SOON), 0, "hop {hop}: the source ends once its guest has moved");
        // A report of each vCPU on the new host: it has verified pages and written more of them.
        let now = there.console().wait_reports(2, 1, SOON).iter().map(|r| r.pages).sum::<u64>();
        assert!(now > pages, "hop {hop}: {now} pages written, {pages} before it");
        pages = now;
        there.console().assert_clean();
        here = there;
    }
    here.console().wait_reports(2, 2, Duration::from_secs(60));
    let stopped = here.cli("stop", &[]);
    assert!(stopped.status.success());
    assert_eq!(here.wait_exit(SOON), 0);
    here.console().assert_clean();
}

tests::under_each_load!(in_a_row, 3, 20);

#[test]
fn guest_arrives_whole_with_every_send_option() {
    if !kvm_or_skip("guest_arrives_whole_with_every_send_option") {
        return;
    }
    let ways: [&[&str]; 5] = [
        &["--verify"],
        &["--connections", "3", "--verify"],
        &["--compress", "lz4"],
        &["--compress", "zstd", "--connections", "2", "--verify"],
        &["--max-bandwidth", "200M", "--connections", "2"],
    ];
    let scratch = ScratchDir::new();
    let machine = ["--mem", "256M", "--vcpus", "2"];
    let mut here = Driftline::run(&scratch, "hop0", "payload,ws=32M,rate=100M", &machine);
    here.console().wait_reports(2, 1, SOON);
    for (hop, way) in ways.iter().enumerate() {
        let (there, address) = Driftline::receive(&scratch, &format!("hop{}", hop + 1));
        let mut args = vec![address.as_str(), "--json"];
        args.extend_from_slice(way);
        let sent = here.cli("send-migration", &args);
        let said = String::from_utf8_lossy(&sent.stderr);
        assert_eq!(sent.status.code(), Some(0), "{way:?}: {said}\n{}", there.log());
        let report = json_of(&sent);
        let of = |name: &str| report[name].as_u64().expect("a figure");
        // The payload's pages are numbers that repeat.
        if way.contains(&"--compress") {
            let content = of("normal_frames") * 4096;
            assert!(of("transferred_bytes") < content / 2, "{way:?}: {report}");
        }
        assert_eq!(here.wait_exit(SOON), 0, "{way:?}");
        there.console().wait_reports(2, 1, SOON);
        there.console().assert_clean();
        here = there;
    }
    here.console().wait_reports(2, 2, SOON);
    here.console().assert_clean();
}
