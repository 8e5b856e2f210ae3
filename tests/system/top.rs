//! Compares the output of `driftline top` with the writes that a KVM guest reports, and checks that
//! watching a guest loses no write.

use std::fs::{self, File};
use std::ops::RangeInclusive;
use std::process::{Command, Stdio};
use std::time::Duration;

use driftline_machine::testing::kvm_or_skip;
use serde_json::Value;
use tests::{Driftline, SOON, ScratchDir, driftline, json_of, one_at_a_time, run_cli, wait_for};

/// The tracking modes that every host with KVM has.
const MODES: [&str; 3] = ["dirty-ring", "dirty-bitmap", "dirty-bitmap-manual"];
/// A paced guest that writes half of its working set in a second.
const GUEST: &str = "payload,ws=32M,rate=16M";

fn number(value: &Value) -> u64 {
    value.as_u64().expect("a number")
}

/// Returns the bins with dirty frames, as `(guest physical address, frames)`.
fn written(page: &Value) -> Vec<(u64, u64)> {
    let bin = number(&page["bin_bytes"]);
    let bins = page["bin_frames"].as_array().expect("bins");
    let all = (0u64..).zip(bins).map(|(at, frames)| (at * bin, number(frames)));
    all.filter(|(_, frames)| *frames > 0).collect()
}

/// Returns the page writes of the only vCPU so far and the guest's time of that report, ms.
fn progress(vm: &Driftline) -> (u64, u64) {
    let last = vm.console().wait_reports(1, 1, SOON)[0];
    (last.pages, last.t_ms)
}

#[test]
fn top_shows_hot_range_and_write_rate() {
    if !kvm_or_skip("top_shows_hot_range_and_write_rate") {
        return;
    }
    // A guest waits for most of the time.
    std::thread::scope(|scope| {
        for mode in MODES {
            scope.spawn(move || shows_hot_range_and_write_rate(mode));
        }
    });
}

fn shows_hot_range_and_write_rate(mode: &str) {
    let scratch = ScratchDir::new();
    let vm = Driftline::run(&scratch, "guest", GUEST, &["--mem", "256M", "--tracking", mode]);
    vm.console().wait_first_pass(1, SOON * 2);
    let before = progress(&vm);
    let out = vm.cli("top", &["--once", "--json", "--interval", "1s"]);
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(0), "{mode}: {stderr}");
    let after = progress(&vm);
    let page = json_of(&out);
    assert_eq!(page["info"]["tracking"], mode);

    // The payload's working set begins at 16 MiB. Below lie its stacks, clocks and tables, to
    // which it writes little.
    let hot = 16 << 20..48 << 20;
    let written = written(&page);
    let inside = |all: &[(u64, u64)]| -> u64 {
        all.iter().filter(|(at, _)| hot.contains(at)).map(|(_, frames)| frames).sum()
    };
    let frames = number(&page["frames"]);
    let (hot_frames, above) =
        (inside(&written), written.iter().filter(|(at, _)| *at >= hot.end).count());
    assert!(
        hot_frames * 100 >= frames * 98 && above == 0,
        "{mode}: {hot_frames} of {frames}: {written:?}"
    );
    // The guest writes pages in order, so most dirty bins are entirely dirty.
    let whole = number(&page["bin_bytes"]) / 4096;
    let full = written.iter().filter(|(_, frames)| *frames == whole).count() as u64;
    assert!(full * whole * 10 >= frames * 9, "{mode}: {full} of {written:?}");

    // Compares with the guest's own count over about the same time. The host may have delayed
    // either side.
    let guest = (after.0 - before.0) as f64 / (after.1 - before.1).max(1) as f64;
    let shown = frames as f64 / page["window_ms"].as_f64().expect("a length");
    assert!(shown <= guest * 2.0 && guest <= shown * 2.0, "{mode}: {shown} and {guest} pages a ms");
    let rate = number(&page["dirty_rate_bytes_per_s"]) as f64;
    assert!((rate / 4096.0 / 1000.0 / shown - 1.0).abs() < 0.01, "{mode}: {rate} and {shown}");

    check_vcpu(&page, mode, hot_frames..=frames);
    vm.console().assert_clean();
    // `top` has ended, so the guest is no longer tracked.
    wait_for("the watch's end", SOON, || (vm.info()?["dirty"]["subscribers"] == 0).then_some(()));
}

/// Checks the figures of the only vCPU. Only dirty rings tell which vCPU writes and how full rings
/// are.
fn check_vcpu(page: &Value, mode: &str, expected_frames: RangeInclusive<u64>) {
    let vcpu = &page["vcpu"][0];
    if mode != "dirty-ring" {
        assert_eq!(vcpu["dirtied_frames"], Value::Null);
        assert_eq!(page["ring_entries"], Value::Null);
        return;
    }
    assert!(
        expected_frames.contains(&number(&vcpu["dirtied_frames"])),
        "{vcpu}: {expected_frames:?} expected"
    );
    let (peak, entries) = (number(&vcpu["ring_peak_entries"]), number(&page["ring_entries"]));
    assert!(peak > 0 && peak <= entries, "{peak} of {entries}");
}

#[test]
fn checkpoints_are_complete_while_top_watches() {
    if !kvm_or_skip("checkpoints_are_complete_while_top_watches") {
        return;
    }
    let _alone = one_at_a_time();
    let scratch = ScratchDir::new();
    let spec = "payload,ws=32M,rate=max,pattern=random";
    let vm = Driftline::run(&scratch, "guest", spec, &["--mem", "256M", "--vcpus", "2"]);
    let watches: Vec<_> = ["100ms", "150ms"]
        .into_iter()
        .map(|interval| {
            let output = scratch.path(interval);
            let top = Command::new(driftline())
                .args(["top", "--json", "--interval", interval, "--api-sock", vm.socket()])
                .stdin(Stdio::null())
                .stdout(File::create(&output).expect("a file"))
                .spawn()
                .expect("top starts");
            (top, output)
        })
        .collect();
    wait_for("two watches", SOON, || (vm.info()?["dirty"]["subscribers"] == 2).then_some(()));
    let store = scratch.path("store");
    let store = store.to_str().expect("UTF-8");
    let taken = vm.cli("checkpoint", &["--store", store, "--every", "200ms", "--count", "8"]);
    assert_eq!(taken.status.code(), Some(0), "{}", String::from_utf8_lossy(&taken.stderr));
    // Waits until each watch has shown the end of the checkpoint run.
    let of_run = |page: &Value| page["checkpoints"]["achieved"]["taken"].as_u64();
    for (_, output) in &watches {
        wait_for("the end of the run in a watch", SOON, || {
            let text = fs::read_to_string(output).ok()?;
            let whole = text.rfind('\n').map_or("", |end| &text[..end]);
            let last: Value = serde_json::from_str(whole.lines().last()?).ok()?;
            (of_run(&last) == Some(8) && last["checkpoints"]["running"] == false).then_some(())
        });
    }
    vm.console().wait_reports(2, 1, SOON);
    assert_eq!(vm.cli("stop", &[]).status.code(), Some(0));
    for (mut top, output) in watches {
        let status =
            wait_for("top's end", Duration::from_secs(60), || top.try_wait().expect("a child"));
        assert_eq!(status.code(), Some(0));
        let text = fs::read_to_string(output).expect("what it printed");
        let pages: Vec<Value> =
            text.lines().map(|l| serde_json::from_str(l).expect("an object a line")).collect();
        // A window has at most all frames of the guest.
        assert!(pages.iter().any(|page| of_run(page).is_some_and(|n| (1..8).contains(&n))));
        assert!(pages.iter().all(|page| number(&page["frames"]) <= 65_536));
    }
    drop(vm);
    assert_eq!(run_cli(&["store", "verify", store]).status.code(), Some(0));
    for epoch in ["1", "4", "8"] {
        let name = format!("of{epoch}");
        let copy = Driftline::start(
            &scratch,
            &name,
            &["restore", "--store", store, "--checkpoint", epoch],
        );
        copy.console().wait_pass(2, SOON);
    }
}
