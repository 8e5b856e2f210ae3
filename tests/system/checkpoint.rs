//! Checkpoints of a guest that writes as fast as it can, and of a guest that is migrated meanwhile.
//! A guest restored from any of them finds its memory complete.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use driftline_machine::testing::kvm_or_skip;
use tests::{
    Driftline, GuestLoad, SOON, ScratchDir, driftline, json_of, repeats, run_cli, wait_for,
};

/// Restores `epoch`, or the latest, and lets the guest check all its memory.
fn restores_whole(scratch: &ScratchDir, store: &str, epoch: Option<u64>) {
    let number = epoch.map(|epoch| epoch.to_string());
    let mut args = vec!["restore", "--same-id", "--store", store];
    if let Some(number) = &number {
        args.extend(["--checkpoint", number]);
    }
    let name = format!("of{}", number.as_deref().unwrap_or("latest"));
    let copy = Driftline::start(scratch, &name, &args);
    copy.console().wait_pass(2, SOON);
}

/// Returns whether this host can copy frames before the guest overwrites them (userfaultfd).
fn has_copy_before_write() -> bool {
    driftline_machine::doctor::diagnose()
        .findings
        .iter()
        .any(|f| f.name == "userfaultfd" && f.present)
}

fn every_epoch_restores(load: GuestLoad, epochs: usize) {
    let scratch = ScratchDir::new();
    let source = load.start(&scratch, "guest");
    let store = scratch.path("store");
    let store = store.to_str().expect("UTF-8");
    let count = epochs.to_string();
    let args =
        ["--store", store, "--every", "100ms", "--max-pause", "50ms", "--count", &count, "--json"];
    let take = || {
        let taken = source.cli("checkpoint", &args);
        let stderr = String::from_utf8_lossy(&taken.stderr);
        assert_eq!(taken.status.code(), Some(0), "{stderr}");
        let text = String::from_utf8_lossy(&taken.stdout).into_owned();
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        assert_eq!(lines.len(), epochs + 1);
        let achieved = &lines[epochs]["achieved"];
        assert_eq!(achieved["taken"], epochs, "{achieved}");
        assert!(achieved["pause"]["p99_us"].as_u64() > Some(0), "{achieved}");
        let copied_after: u64 =
            lines[..epochs].iter().filter_map(|l| l["copied_after_frames"].as_u64()).sum();
        (lines, copied_after)
    };
    let copies_before_write = has_copy_before_write();
    // For a paced guest all frames may be copied before the pause. With it, this test does not
    // detect that copying after the pause is broken.
    let must_copy_after = copies_before_write && load.is_fastest();
    // A fast guest that gets little processor time may write so little that all frames are copied
    // in the pause: the test then tries again.
    let limit = SOON + Duration::from_millis(100) * epochs as u32 * 3;
    let lines = wait_for("frames copied after the pause", limit, || {
        let (lines, copied_after) = take();
        assert!(copied_after == 0 || copies_before_write, "{copied_after} frames");
        (copied_after > 0 || !must_copy_after).then_some(lines)
    });
    source.console().assert_clean();
    drop(source);
    for line in &lines[..epochs] {
        restores_whole(&scratch, store, line["checkpoint"].as_u64());
    }
    assert_eq!(run_cli(&["store", "verify", store]).status.code(), Some(0));
}

tests::under_each_load!(every_epoch_restores, 3, 100, both_fastest);

#[test]
fn checkpoints_during_a_migration_restore_whole() {
    if !kvm_or_skip("checkpoints_during_a_migration_restore_whole") {
        return;
    }
    let _alone = tests::one_at_a_time();
    for round in 0..repeats(1, 10) {
        let scratch = ScratchDir::new();
        let mut source = GuestLoad::paced("dirty-ring").start(&scratch, "source");
        let store = scratch.path("store");
        let store = store.to_str().expect("UTF-8");
        let mut checkpointing = Command::new(driftline())
            .args([
                "checkpoint",
                "--api-sock",
                source.socket(),
                "--store",
                store,
                "--every",
                "20ms",
                "--json",
            ])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("driftline starts");
        let (epochs, taken) = mpsc::channel();
        let out = BufReader::new(checkpointing.stdout.take().expect("its output"));
        let reader = thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                let line: serde_json::Value = serde_json::from_str(&line).expect("JSON");
                if let Some(epoch) = line["checkpoint"].as_u64() {
                    let _ = epochs.send(epoch);
                }
            }
        });
        for _ in 0..5 {
            taken.recv_timeout(SOON).expect("an epoch");
        }
        let (destination, address) = Driftline::receive(&scratch, "destination");
        let before = taken.try_iter().count();
        // Slow enough for many checkpoints during the migration.
        let args = [&address, "--json", "--max-bandwidth", "500M", "--verify"];
        let sent = source.cli("send-migration", &args);
        let stderr = String::from_utf8_lossy(&sent.stderr);
        assert_eq!(sent.status.code(), Some(0), "round {round}: {stderr}\n{}", destination.log());
        assert_eq!(json_of(&sent)["status"], "completed", "round {round}");
        assert_eq!(source.wait_exit(SOON), 0, "round {round}");
        destination.console().wait_reports(2, 1, SOON);
        destination.console().assert_clean();
        checkpointing.wait().expect("it ends with the guest");
        reader.join().expect("it printed JSON");
        let meanwhile: Vec<u64> = taken.try_iter().collect();
        assert!(meanwhile.len() > 2, "round {round}: {meanwhile:?} after {before}");
        // A checkpoint from the pre-copy phase, and the last durable one.
        restores_whole(&scratch, store, meanwhile.get(meanwhile.len() / 2).copied());
        restores_whole(&scratch, store, None);
        destination.console().wait_reports(2, 1, Duration::from_secs(60));
        destination.console().assert_clean();
    }
}
