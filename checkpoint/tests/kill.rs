//! Real processes and real disks: killed at any moment, full, read-only.
//!
//! The tests start this test program again as a child that runs one of the ignored tests below.
//! They have a binary of their own, because for a moment a child holds all open stores' locks.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use driftline_checkpoint::{Cadence, Checkpointer, restore};
use driftline_guest::testing::{MemoryConfig, MemoryGuest, MemoryGuestFactory, repeats};
use driftline_guest::{Clock, HandOver, Lifecycle, RunState};
use driftline_store::Store;

const DIR: &str = "DRIFTLINE_TEST_STORE";
/// Epochs that the child keeps.
const KEEP: u64 = 4;

fn child_dir() -> Option<PathBuf> {
    std::env::var_os(DIR).map(PathBuf::from)
}

/// Arguments with which this program runs only the ignored test `name`.
fn child_args(name: &str) -> [String; 5] {
    let exe = std::env::current_exe().unwrap().to_str().unwrap().to_owned();
    [exe, "--exact".into(), name.into(), "--ignored".into(), "--nocapture".into()]
}

/// Prints past the test harness, which would capture it.
fn skipped(why: &str) {
    let mut err = std::io::stderr().lock();
    writeln!(err, "SKIPPED: {why}").unwrap();
}

fn scrambled(n: u64) -> u64 {
    (n ^ 0xd1f7).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32
}

#[test]
fn durable_epochs_survive_a_kill() {
    let dir = tempfile::tempdir().unwrap();
    let mut durable_before = 0;
    // Each round begins where the one before left the store.
    let kills: u64 = repeats(30, 500);
    for round in 0..kills {
        let [exe, args @ ..] = child_args("child_checkpoints_until_killed");
        let mut child = Command::new(exe)
            .args(args)
            .env(DIR, dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        let (tell, told) = mpsc::channel();
        let reader = std::thread::spawn(move || {
            for line in lines.lines().map_while(Result::ok) {
                if let Some(epoch) = line.strip_prefix("durable ") {
                    tell.send(epoch.parse::<u64>().unwrap()).unwrap();
                }
            }
        });
        let mut said = durable_before;
        if round % 3 > 0 {
            // Past the start of the process and the full epoch.
            said = told.recv_timeout(Duration::from_secs(60)).unwrap();
        }
        std::thread::sleep(Duration::from_micros(scrambled(round) % 50_000));
        child.kill().unwrap();
        child.wait().unwrap();
        reader.join().unwrap();
        said = told.try_iter().last().unwrap_or(said);
        durable_before = said;

        let store = Store::open(dir.path()).unwrap();
        store.verify(|_, _| ()).unwrap();
        let kept: Vec<u64> = store.epochs().unwrap().iter().map(|e| e.epoch).collect();
        let latest = kept.last().copied().unwrap_or(0);
        assert!(latest >= said, "round {round}: {said} was durable, the latest is {latest}");
        // Epochs in flight may have become durable before the child could report it, and may have
        // taken the place of this one.
        let gone = said > 0 && kept.first().is_some_and(|first| said < *first);
        assert!(!gone || latest >= said + KEEP, "round {round}: {said} is not among {kept:?}");
        if said > 0 {
            let said = Some(said).filter(|_| !gone);
            let factory = MemoryGuestFactory::default();
            for epoch in [said, None] {
                let (guest, report) = restore(&store, epoch, &factory, Clock::Continue).unwrap();
                guest.verify().unwrap();
                assert_eq!(report.epoch, epoch.unwrap_or(latest));
            }
        }
    }
    println!("{kills} kills, {durable_before} epochs");
    assert!(durable_before >= kills / 2, "the child got hardly anything done: {durable_before}");
}

#[test]
#[ignore = "the child of durable_epochs_survive_a_kill"]
fn child_checkpoints_until_killed() {
    let Some(dir) = child_dir() else { return };
    let store = Store::create_or_open(&dir).unwrap();
    // The previous process's guest continues from its latest epoch, or the first guest starts.
    let guest = match store.epochs().unwrap().last() {
        Some(_) => {
            restore(&store, None, &MemoryGuestFactory::default(), Clock::Continue).unwrap().0
        }
        None => {
            let config = MemoryConfig { writes_per_s: 0, ..MemoryConfig::small() };
            MemoryGuest::new(driftline_guest::VmId::random(), config).unwrap()
        }
    };
    guest.acquire().unwrap();
    guest.resume().unwrap();
    let mut checkpointer = Checkpointer::new(guest, store).unwrap();
    // So that page slots are reused, and the log is rewritten, while the child is killed.
    checkpointer.keep(Some(KEEP));
    checkpointer.log_bound(32 << 10);
    let mut out = std::io::stdout();
    // Without an interval, with several in flight.
    let cadence = Cadence { every: Duration::ZERO, count: None, max_pause: None };
    checkpointer.run(&cadence, &AtomicBool::new(false), |taken| {
        writeln!(out, "durable {}", taken.outcome.unwrap().epoch).unwrap();
        out.flush().unwrap();
        ControlFlow::Continue(())
    });
}

#[test]
fn full_or_readonly_disk_costs_no_frame() {
    let dir = tempfile::tempdir().unwrap();
    let [exe, args @ ..] = child_args("child_fills_a_small_disk");
    // A mount namespace of its own, so that nothing stays mounted whatever happens.
    let script = format!("mount -t tmpfs -o size=4m tmpfs \"${DIR}\" && exec \"$0\" \"$@\"");
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", &script, &exe])
        .args(args)
        .env(DIR, dir.path())
        .output();
    let output = match output {
        Ok(output) if String::from_utf8_lossy(&output.stdout).contains("running 1 test") => output,
        Ok(output) => {
            let why = String::from_utf8_lossy(&output.stderr).into_owned();
            return skipped(&format!("mounting a small disk takes root: {why}"));
        }
        Err(e) => {
            return skipped(&format!("mounting a small disk takes unshare(1): {e}"));
        }
    };
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
}

fn latest_is_sound(dir: &Path) {
    let store = Store::open(dir).unwrap();
    store.verify(|_, _| ()).unwrap();
    let factory = MemoryGuestFactory::default();
    restore(&store, None, &factory, Clock::Continue).unwrap().0.verify().unwrap();
}

#[test]
#[ignore = "the child of full_or_readonly_disk_costs_no_frame"]
fn child_fills_a_small_disk() {
    let Some(dir) = child_dir() else { return };
    let config = MemoryConfig { working_set: 100, ..MemoryConfig::small() };
    let guest = MemoryGuest::start(config).unwrap();
    guest.wait_for_writes(400);
    let store = Store::create_or_open(&dir).unwrap();
    let mut checkpointer = Checkpointer::new(guest.clone(), store).unwrap();
    checkpointer.take().unwrap();
    latest_is_sound(&dir);

    // Full: the epochs that fit are sound, and the first that does not fit costs only itself.
    let filler = dir.join("filler");
    std::fs::write(&filler, vec![1; 2200 << 10]).unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    let e = loop {
        assert!(Instant::now() < until, "the disk never got full");
        match checkpointer.take() {
            Ok(_) => {}
            Err(e) => break e.to_string(),
        }
    };
    assert!(e.contains("No space left on device"), "{e}");
    assert!(
        e.contains("the guest is running, and what changed will be in the next checkpoint"),
        "{e}"
    );
    assert_eq!(guest.run_state(), RunState::Running);
    latest_is_sound(&dir);
    std::fs::remove_file(&filler).unwrap();
    checkpointer.take().unwrap();
    latest_is_sound(&dir);

    // Read-only: refused before the guest is paused; sound again afterwards.
    let remount = |how: &str| {
        let done = Command::new("mount").args(["-o", how]).arg(&dir).status().unwrap();
        assert!(done.success());
    };
    drop(checkpointer);
    remount("remount,ro");
    let e = Store::create_or_open(&dir).unwrap_err().to_string();
    assert!(e.contains("Read-only file system"), "{e}");
    latest_is_sound(&dir);
    remount("remount,rw");
    let store = Store::create_or_open(&dir).unwrap();
    let old = store.epochs().unwrap();
    let mut checkpointer = Checkpointer::new(guest.clone(), store).unwrap();
    let report = checkpointer.take().unwrap();
    assert_eq!(report.epoch, old.last().unwrap().epoch + 1);
    latest_is_sound(&dir);
}
