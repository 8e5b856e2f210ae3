//! A guest that moves a thousand times from process to process. What a move loses or leaks adds up.

use driftline_machine::testing::kvm_or_skip;
use tests::{Driftline, SOON, ScratchDir, assert_no_growth, json_of, lasting_usage, repeats};

const GUEST: &str = "payload,ws=16M,rate=100M,pattern=random";
const MACHINE: [&str; 4] = ["--vcpus", "2", "--mem", "256M"];

/// Eight moves, and a thousand with `DRIFTLINE_FULL=1`.
#[test]
fn repeated_migrations_leak_nothing() {
    if !kvm_or_skip("repeated_migrations_leak_nothing") {
        return;
    }
    let hops = repeats(8, 1000);
    let mut scratch = ScratchDir::new();
    let mut source = Driftline::run(&scratch, "hop0", GUEST, &MACHINE);
    source.console().wait_reports(2, 1, SOON);
    let mut usage = Vec::with_capacity(hops);
    let mut downtimes = Vec::with_capacity(hops);
    for hop in 1..=hops {
        // The output of earlier processes is removed with their directory.
        let new = ScratchDir::new();
        let (destination, address) = Driftline::receive(&new, &format!("hop{hop}"));
        let sent = source.cli("send-migration", &[&address, "--json"]);
        let stderr = String::from_utf8_lossy(&sent.stderr);
        assert_eq!(sent.status.code(), Some(0), "hop {hop}: {stderr}\n{}", destination.log());
        downtimes.push(json_of(&sent)["downtime_ms"].as_f64().unwrap_or(f64::NAN));
        assert_eq!(source.wait_exit(SOON), 0, "hop {hop}");
        // The guest has verified its earlier writes.
        destination.console().wait_reports(2, 1, SOON);
        destination.console().assert_clean();
        usage.push(lasting_usage(destination.pid()).expect("a running process"));
        source = destination;
        scratch = new;
    }
    downtimes.sort_by(f64::total_cmp);
    eprintln!(
        "{hops} moves, downtime {:.1} ms in the middle, {:.1} ms at most",
        downtimes[hops / 2],
        downtimes[hops - 1],
    );
    assert_no_growth(&usage);
    assert!(source.cli("stop", &[]).status.success());
    assert_eq!(source.wait_exit(SOON), 0);
    drop(scratch);
}
