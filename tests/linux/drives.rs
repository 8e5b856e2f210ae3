//! Disks of Linux guests in epochs: whichever is restored has the disk of its instant, however busy
//! that is, and while the guest moves.

use std::process::Output;
use std::thread;

use driftline_store::Store;
use serde_json::Value;

use super::*;

/// As `CHECKERS`, with a disk that is written to all the time, as fast as a guest does it that
/// waits for each flush.
const BUSY: &str = "driftline.check=mem,disk,tcp,clock driftline.mem=every=2s \
     driftline.disk=path=/dev/vda,pause=0ms,every=2s driftline.tcp=every=2s driftline.clock=every=2s";

/// The epochs that a run of checkpoints has told of.
fn epochs_of(taken: &Output) -> Vec<Value> {
    let lines = String::from_utf8_lossy(&taken.stdout).into_owned();
    let lines = lines.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter(|line| line["epoch"].is_u64()).collect()
}

/// Checkpoints every 20 ms while the checkers write to memory and disk. Whichever is restored,
/// after the guest ran on, the disk's checker finds there what its memory says.
fn whichever_epoch(test: &str, checkers: &str, restored: usize) {
    const KEPT: usize = 40;
    let _alone = tests::one_at_a_time();
    let Some((linux, network)) = linux_and_network(test) else { return };
    let scratch = ScratchDir::new();
    let mut story = CheckedGuest::begin_with(checkers, &linux, &network, &scratch, "dirty-ring");
    let store = scratch.path("store");
    let how = ["--every", "20ms", "--count", "100", "--keep", "40", "--json"];
    let taken = story.here.cli("checkpoint", &[&["--store", text(&store)], &how[..]].concat());
    assert_eq!(taken.status.code(), Some(0), "{}", String::from_utf8_lossy(&taken.stderr));
    let epochs = epochs_of(&taken);
    let blocks = |epoch: &Value| epoch["disk_blocks"].as_u64().unwrap_or(0);
    let have = epochs[1..].iter().filter(|epoch| blocks(epoch) > 0).count();
    eprintln!(
        "{have} epochs have {} blocks of the disk",
        epochs[1..].iter().map(blocks).sum::<u64>()
    );
    assert!(epochs.len() == 100 && have > 2, "{have}: {epochs:?}");
    thread::sleep(Duration::from_millis(300));
    let kept = &epochs[epochs.len() - KEPT..];
    // The last first: a disk that is newer than memory would be as wrong as one that is older.
    for epoch in kept.iter().rev().step_by(KEPT / restored) {
        tests::assert_clean(&story.here.console());
        story.here.kill();
        let (name, number) = (story.next_name(), epoch["epoch"].to_string());
        let disk = format!("path={}", text(&story.disk));
        let from = ["restore", "--same-id", "--store", text(&store), "--epoch", &number];
        let args = [&from[..], &["--disk", &disk, "--net", "tap=tap0"]].concat();
        story.here = Driftline::start_at(&network.hosts[0], &scratch, &name, &args);
        story.here.wait_state("running");
        let progress = CheckerProgress::wait(&mut story.here, false);
        eprintln!("{name}: from epoch {number}; {progress:?}");
    }
    // And in one file, elsewhere than the store.
    let (archive, number) = (scratch.path("archive"), kept[KEPT / 2]["epoch"].to_string());
    let how = ["--format", "driftline-zstd", "--epoch", &number, "--output", text(&archive)];
    let packed = tests::run_cli(&[&["store", "export", text(&store)], &how[..]].concat());
    assert_eq!(packed.status.code(), Some(0), "{}", String::from_utf8_lossy(&packed.stderr));
    std::fs::remove_dir_all(&store).expect("the store is ours");
    story.here.kill();
    let (name, disk) = (story.next_name(), format!("path={}", text(&story.disk)));
    let from = ["restore", "--same-id", "--store", text(&archive)];
    let from = [&from[..], &["--disk", &disk, "--net", "tap=tap0"]].concat();
    story.here = Driftline::start_at(&network.hosts[0], &scratch, &name, &from);
    story.here.wait_state("running");
    let progress = CheckerProgress::wait(&mut story.here, false);
    eprintln!("{name}: from an archive of epoch {number}; {progress:?}");
    story.end();
}

#[test]
fn restored_disk_matches_restored_memory() {
    let test = "restored_disk_matches_restored_memory";
    whichever_epoch(test, CHECKERS, repeats(4, 20));
}

#[test]
fn restored_busy_disk_matches_restored_memory() {
    whichever_epoch("restored_busy_disk_matches_restored_memory", BUSY, repeats(2, 20));
}

/// A guest whose disk is busy is checkpointed every 20 ms, and moves meanwhile, with its disk. It
/// goes on there, alone, and loses nothing; the newest epoch that was durable before is whole, too:
/// what was flushed by then is in its disk.
#[test]
fn checkpointed_guest_moves_without_loss() {
    let _alone = tests::one_at_a_time();
    let test = "checkpointed_guest_moves_without_loss";
    let Some((linux, network)) = linux_and_network(test) else { return };
    for time in 0..repeats(1, 10) {
        let scratch = ScratchDir::new();
        let mut story = CheckedGuest::begin_with(BUSY, &linux, &network, &scratch, "dirty-ring");
        let store = scratch.path("store");
        let (to, socket) = (text(&store).to_owned(), story.here.socket().to_owned());
        let taking = thread::spawn(move || {
            let how = ["--every", "20ms", "--keep", "10", "--json", "--api-sock", &socket];
            tests::run_cli(&[&["checkpoint", "--store", &to], &how[..]].concat())
        });
        let newest = || Some(Store::open(&store).ok()?.epochs().ok()?.last()?.epoch);
        tests::wait_for("epochs", SOON, || newest().filter(|epoch| *epoch > 10));
        let mut echo = story.echo();
        let begun = tests::wait_for("an epoch", SOON, newest);
        let (_, old) = story.move_on_leaving_disk(&mut echo);
        let taken = taking.join().expect("the command ran");
        let said = String::from_utf8_lossy(&taken.stderr);
        let last = tests::wait_for("the last epoch", SOON, newest);
        eprintln!(
            "{time}: epoch {begun:?} when it was to move, {last:?} the last, of {}",
            epochs_of(&taken).len()
        );
        assert!(last > begun, "{begun:?}, {last:?}: {said}");
        assert!(epochs_of(&taken).iter().all(|epoch| epoch["durable"] == true));
        // It runs where it went, and its peer has missed nothing.
        assert_eq!(story.here.state().as_deref(), Some("running"));
        let (messages, _) = echo.finish();
        let progress = CheckerProgress::wait(&mut story.here, false);
        tests::assert_clean(&story.here.console());
        assert!(messages > 0, "{progress:?}");
        story.here.kill();
        linux.verify_disk(&story.disk, progress.flushed);
        // The disk that it left is of the moment in which it went, and later than the epoch.
        (story.at, story.disk) = (0, old);
        story.restore(&store, false);
        story.end();
    }
}
