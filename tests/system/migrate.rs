//! Repeated migrations of one self-checking guest from process to process.

use driftline_machine::testing::kvm_or_skip;
use tests::{Driftline, GuestLoad, SOON, ScratchDir, json_of};

/// Moves one guest through `hops` processes. It must continue to write without an error in each.
fn in_a_row(load: GuestLoad, hops: usize) {
    let scratch = ScratchDir::new();
    let mut source = load.start(&scratch, "hop0");
    let mut pages = source.console().wait_reports(2, 1, SOON).iter().map(|r| r.pages).sum::<u64>();
    for hop in 1..=hops {
        let (destination, address) = Driftline::receive(&scratch, &format!("hop{hop}"));
        let sent = source.cli("send-migration", &[&address, "--json"]);
        let stderr = String::from_utf8_lossy(&sent.stderr);
        assert_eq!(sent.status.code(), Some(0), "hop {hop}: {stderr}\n{}", destination.log());
        let report = json_of(&sent);
        assert_eq!(report["status"], "completed", "hop {hop}: {report}");
        assert_eq!(
            source.wait_exit(SOON),
            0,
            "hop {hop}: the source ends once its guest has moved"
        );
        // Each vCPU reports from the new process: it has verified pages and written more.
        let now =
            destination.console().wait_reports(2, 1, SOON).iter().map(|r| r.pages).sum::<u64>();
        assert!(now > pages, "hop {hop}: {now} pages written, {pages} before it");
        pages = now;
        destination.console().assert_clean();
        source = destination;
    }
    source.console().wait_pass(2, SOON);
    let stopped = source.cli("stop", &[]);
    assert!(stopped.status.success());
    assert_eq!(source.wait_exit(SOON), 0);
    source.console().assert_clean();
}

tests::under_each_load!(in_a_row, 2, 20);

#[test]
fn guest_arrives_whole_with_every_send_option() {
    if !kvm_or_skip("guest_arrives_whole_with_every_send_option") {
        return;
    }
    let options: [&[&str]; 5] = [
        &["--verify"],
        &["--connections", "3", "--verify"],
        &["--compress", "lz4"],
        &["--compress", "zstd", "--connections", "2", "--verify"],
        &["--max-bandwidth", "200M", "--connections", "2"],
    ];
    let scratch = ScratchDir::new();
    let machine = ["--mem", "256M", "--vcpus", "2"];
    let mut source = Driftline::run(&scratch, "hop0", "payload,ws=32M,rate=100M", &machine);
    source.console().wait_reports(2, 1, SOON);
    for (hop, options) in options.iter().enumerate() {
        let (destination, address) = Driftline::receive(&scratch, &format!("hop{}", hop + 1));
        let mut args = vec![address.as_str(), "--json"];
        args.extend_from_slice(options);
        let sent = source.cli("send-migration", &args);
        let stderr = String::from_utf8_lossy(&sent.stderr);
        assert_eq!(sent.status.code(), Some(0), "{options:?}: {stderr}\n{}", destination.log());
        let report = json_of(&sent);
        let of = |name: &str| report[name].as_u64().expect("a figure");
        // The payload's pages are compressible.
        if options.contains(&"--compress") {
            let content = of("normal_frames") * 4096;
            assert!(of("transferred_bytes") < content / 2, "{options:?}: {report}");
        }
        assert_eq!(source.wait_exit(SOON), 0, "{options:?}");
        destination.console().wait_reports(2, 1, SOON);
        destination.console().assert_clean();
        source = destination;
    }
    source.console().wait_pass(2, SOON);
    source.console().assert_clean();
}
