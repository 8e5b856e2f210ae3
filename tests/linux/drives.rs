//! Disks of Linux guests in checkpoints. A restored checkpoint has the disk of its moment, also if
//! the disk is busy and if the guest is migrated meanwhile.

use std::process::Output;
use std::thread;

use driftline_store::Store;
use serde_json::Value;
use tests::{CheckerProgress, Driftline, SOON, ScratchDir, repeats};

use super::{CHECKERS, CheckedGuest, linux_and_network, text};

/// As `CHECKERS`, with a disk checker that writes without a pause and waits only for its flushes.
const BUSY: &str = "driftline.check=mem,disk,tcp,clock driftline.mem=every=2s \
     driftline.disk=path=/dev/vda,pause=0ms,every=2s driftline.tcp=every=2s \
     driftline.clock=every=2s";

/// Returns the epochs in the output of `checkpoint --json`.
fn epochs_of(taken: &Output) -> Vec<Value> {
    let lines = String::from_utf8_lossy(&taken.stdout).into_owned();
    let lines = lines.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter(|line| line["checkpoint"].is_u64()).collect()
}

/// Takes checkpoints every 20 ms while the checkers write to memory and disk. In a guest restored
/// from any of them, after the original has continued, the disk agrees with the checker's memory.
fn restored_disk_matches_memory(test: &str, checkers: &str, restored: usize) {
    const RETAINED: usize = 40;
    let _alone = tests::one_at_a_time();
    let Some((linux, network)) = linux_and_network(test) else { return };
    let scratch = ScratchDir::new();
    let mut guest = CheckedGuest::boot_with(checkers, &linux, &network, &scratch, "dirty-ring");
    let store = scratch.path("store");
    let args = ["--every", "20ms", "--count", "100", "--keep", "40", "--json"];
    let taken = guest.process.cli("checkpoint", &[&["--store", text(&store)], &args[..]].concat());
    assert_eq!(taken.status.code(), Some(0), "{}", String::from_utf8_lossy(&taken.stderr));
    let epochs = epochs_of(&taken);
    let blocks = |epoch: &Value| epoch["disk_blocks"].as_u64().unwrap_or(0);
    let with_blocks = epochs[1..].iter().filter(|epoch| blocks(epoch) > 0).count();
    eprintln!(
        "{with_blocks} epochs have {} blocks of the disk",
        epochs[1..].iter().map(blocks).sum::<u64>()
    );
    assert!(epochs.len() == 100 && with_blocks > 2, "{with_blocks}: {epochs:?}");
    let flushed = CheckerProgress::on(&guest.process.console()).map_or(0, |now| now.flushed);
    CheckerProgress::wait_flushed(&guest.process, flushed);
    let retained = &epochs[epochs.len() - RETAINED..];
    // The newest first, because each guest leaves a newer disk than the next checkpoint has. A disk
    // that is newer than memory is as wrong as an older one.
    for epoch in retained.iter().rev().step_by(RETAINED / restored) {
        tests::assert_clean(&guest.process.console());
        guest.process.kill();
        let (name, number) = (guest.next_name(), epoch["checkpoint"].to_string());
        let disk = format!("path={}", text(&guest.disk));
        let from = ["restore", "--same-id", "--store", text(&store), "--checkpoint", &number];
        let args = [&from[..], &["--disk", &disk, "--net", "tap=tap0"]].concat();
        guest.process = Driftline::start_at(&network.hosts[0], &scratch, &name, &args);
        guest.process.wait_state("running");
        let progress = CheckerProgress::wait(&mut guest.process, false);
        eprintln!("{name}: from epoch {number}; {progress:?}");
    }
    // The same from an archive outside the store.
    let (archive, number) =
        (scratch.path("archive"), retained[RETAINED / 2]["checkpoint"].to_string());
    let args = ["--format", "driftline-zstd", "--checkpoint", &number, "--output", text(&archive)];
    let packed = tests::run_cli(&[&["store", "export", text(&store)], &args[..]].concat());
    assert_eq!(packed.status.code(), Some(0), "{}", String::from_utf8_lossy(&packed.stderr));
    std::fs::remove_dir_all(&store).expect("the store is ours");
    guest.process.kill();
    let (name, disk) = (guest.next_name(), format!("path={}", text(&guest.disk)));
    let from = ["restore", "--same-id", "--store", text(&archive)];
    let from = [&from[..], &["--disk", &disk, "--net", "tap=tap0"]].concat();
    guest.process = Driftline::start_at(&network.hosts[0], &scratch, &name, &from);
    guest.process.wait_state("running");
    let progress = CheckerProgress::wait(&mut guest.process, false);
    eprintln!("{name}: from an archive of epoch {number}; {progress:?}");
    guest.end();
}

#[test]
fn restored_disk_matches_restored_memory() {
    let test = "restored_disk_matches_restored_memory";
    restored_disk_matches_memory(test, CHECKERS, repeats(4, 20));
}

#[test]
fn restored_busy_disk_matches_restored_memory() {
    restored_disk_matches_memory(
        "restored_busy_disk_matches_restored_memory",
        BUSY,
        repeats(2, 20),
    );
}

/// A guest with a busy disk is checkpointed every 20 ms and migrated meanwhile with its disk. It
/// runs only at the destination and loses nothing. The newest durable epoch restores, too, with all
/// blocks that were flushed by then.
#[test]
fn checkpointed_guest_moves_without_loss() {
    let _alone = tests::one_at_a_time();
    let test = "checkpointed_guest_moves_without_loss";
    let Some((linux, network)) = linux_and_network(test) else { return };
    for round in 0..repeats(1, 10) {
        let scratch = ScratchDir::new();
        let mut guest = CheckedGuest::boot_with(BUSY, &linux, &network, &scratch, "dirty-ring");
        let store = scratch.path("store");
        let (to, socket) = (text(&store).to_owned(), guest.process.socket().to_owned());
        let checkpoints = thread::spawn(move || {
            let args = ["--every", "20ms", "--keep", "10", "--json", "--api-sock", &socket];
            tests::run_cli(&[&["checkpoint", "--store", &to], &args[..]].concat())
        });
        let newest = || Some(Store::open(&store).ok()?.epochs().ok()?.last()?.epoch);
        tests::wait_for("epochs", SOON, || newest().filter(|epoch| *epoch > 10));
        let mut echo = guest.echo();
        let at_start = tests::wait_for("an epoch", SOON, newest);
        let (_, old) = guest.migrate_copying_disk(&mut echo);
        let taken = checkpoints.join().expect("the command ran");
        let stderr = String::from_utf8_lossy(&taken.stderr);
        let last = tests::wait_for("the last epoch", SOON, newest);
        eprintln!(
            "{round}: epoch {at_start:?} at the start of the migration, {last:?} the last, of {}",
            epochs_of(&taken).len()
        );
        assert!(last > at_start, "{at_start:?}, {last:?}: {stderr}");
        assert!(epochs_of(&taken).iter().all(|epoch| epoch["durable"] == true));
        // The guest runs at the destination, and its peer has lost nothing.
        assert_eq!(guest.process.state().as_deref(), Some("running"));
        let (messages, _) = echo.finish();
        let progress = CheckerProgress::wait(&mut guest.process, false);
        tests::assert_clean(&guest.process.console());
        assert!(messages > 0, "{progress:?}");
        guest.process.kill();
        linux.verify_disk(&guest.disk, progress.flushed);
        // The old disk is of the moment of the switch-over, later than the epoch.
        (guest.host, guest.disk) = (0, old);
        guest.restore(&store, false);
        guest.end();
    }
}
