//! Restores in a row, each from a checkpoint of the guest that the one before brought back, every
//! other one lazily.
#![allow(clippy::expect_used, reason = "a test fails by saying what it expected")]

use std::os::unix::fs::FileExt;
use tests::{Driftline, GuestLoad, SOON, ScratchDir, json_of, wait_for};

/// Checkpoints, kills the process hard, restores in a new one, and does that `times` times.
fn in_a_row(load: GuestLoad, times: usize) {
    let scratch = ScratchDir::new();
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
        let args = ["restore", "--store", store, "--lazy"];
        here = Driftline::start(&scratch, &name, if life % 2 == 0 { &args } else { &args[..3] });
        here.wait_state("running");
        if life % 2 == 0 {
            // Said a moment after the guest runs.
            wait_for("the pages that follow", SOON, || {
                here.log().contains(" pages follow on demand").then_some(())
            });
        }
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

/// A store with a checkpoint of a guest that writes into 64 MiB as fast as it can; the guest is
/// killed.
fn one_checkpoint(scratch: &ScratchDir) -> String {
    let mut vm = GuestLoad::fastest("dirty-ring").start(scratch, "before");
    let store = scratch.path("store").to_str().expect("UTF-8").to_owned();
    assert_eq!(vm.cli("checkpoint", &["--store", &store]).status.code(), Some(0));
    vm.kill();
    store
}

#[test]
fn lazy_guest_ends_at_a_damaged_page() {
    if !driftline_machine::testing::kvm_or_skip("lazy_guest_ends_at_a_damaged_page") {
        return;
    }
    let _alone = tests::one_at_a_time();
    let scratch = ScratchDir::new();
    let store = one_checkpoint(&scratch);
    let path = scratch.path("store").join("pages-1");
    let pages = std::fs::File::options().read(true).write(true).open(path).expect("a page file");
    // A byte of every hundredth slot: some of those are the payload's 64 MiB.
    let slots = pages.metadata().expect("its length").len() / 4096;
    for slot in (50..slots).step_by(100) {
        let mut byte = [0];
        pages.read_exact_at(&mut byte, slot * 4096 + 9).expect("a byte");
        pages.write_all_at(&[byte[0] ^ 1], slot * 4096 + 9).expect("a byte");
    }
    let mut vm = Driftline::start(&scratch, "after", &["restore", "--store", &store, "--lazy"]);
    assert_eq!(vm.wait_exit(SOON), 1, "{}", vm.log());
    let said = vm.log();
    let last = said.lines().last().unwrap_or_default();
    assert!(last.contains("cannot be restored: ") && last.contains("pages-1, byte "), "{said}");
}

/// Damages one slot of the page file, verifies the store, and restores its latest checkpoint
/// lazily: that has to end as it should. Whether the checkpoint has a page there.
fn ends_at_damage(scratch: &ScratchDir, store: &str, slot: u64) -> bool {
    let pages = scratch.path("store").join("pages-1");
    let pages = std::fs::File::options().read(true).write(true).open(pages).expect("a page file");
    let flip = || {
        let mut byte = [0];
        pages.read_exact_at(&mut byte, slot * 4096 + 9).expect("a byte");
        pages.write_all_at(&[byte[0] ^ 1], slot * 4096 + 9).expect("a byte");
    };
    flip();
    let verified = tests::run_cli(&["store", "verify", store]);
    let verified = String::from_utf8_lossy(&verified.stderr).into_owned();
    let damage = verified.lines().find_map(|line| line.split_once("checkpoint 2 is damaged: "));
    let Some((_, damage)) = damage else {
        flip();
        return false;
    };
    let mut vm = Driftline::start(scratch, "after", &["restore", "--store", store, "--lazy"]);
    let code = vm.wait_exit(SOON);
    flip();
    let said = vm.log();
    assert_eq!(code, 1, "slot {slot}: {said}");
    let names = |line: &str| {
        line.contains("page 0x") && line.contains("checkpoint 2 ") && line.contains(damage)
    };
    assert!(said.lines().any(names), "slot {slot}: {said}; verified: {damage}");
    assert!(!std::path::Path::new(vm.socket()).exists(), "slot {slot}: its socket is left");
    true
}

/// A store with two checkpoints of a guest of 2 vCPUs with little memory; the guest is killed.
fn two_small_checkpoints(scratch: &ScratchDir) -> String {
    let args = ["--vcpus", "2", "--mem", "32M"];
    let mut vm = Driftline::run(scratch, "before", "payload,ws=1M,rate=1M", &args);
    vm.console().wait_reports(2, 1, SOON);
    let store = scratch.path("store").to_str().expect("UTF-8").to_owned();
    let taken = vm.cli("checkpoint", &["--store", &store, "--every", "20ms", "--count", "2"]);
    assert_eq!(taken.status.code(), Some(0), "{}", String::from_utf8_lossy(&taken.stderr));
    vm.kill();
    store
}

#[test]
fn lazy_restore_ends_whichever_page_is_damaged() {
    if !driftline_machine::testing::kvm_or_skip("lazy_restore_ends_whichever_page_is_damaged") {
        return;
    }
    let _alone = tests::one_at_a_time();
    let scratch = ScratchDir::new();
    let store = two_small_checkpoints(&scratch);
    let pages = std::fs::metadata(scratch.path("store").join("pages-1")).expect("a page file");
    let slots = 1..pages.len() / 4096;
    let tried = slots.filter(|slot| ends_at_damage(&scratch, &store, *slot)).count();
    println!("{tried} pages were damaged in turn");
    assert!(tried > 256, "{tried} pages are not all of the guest's");
}

#[test]
fn lazy_guest_moves_before_all_memory_arrived() {
    if !driftline_machine::testing::kvm_or_skip("lazy_guest_moves_before_all_memory_arrived") {
        return;
    }
    let _alone = tests::one_at_a_time();
    let scratch = ScratchDir::new();
    let store = one_checkpoint(&scratch);
    let (there, address) = Driftline::receive(&scratch, "there");
    let mut here = Driftline::start(&scratch, "here", &["restore", "--store", &store, "--lazy"]);
    here.wait_state("running");
    // How much of its 64 MiB it had written to by its checkpoint is for the host to say.
    let to_come = wait_for("the pages that follow", SOON, || {
        let log = here.log();
        let (before, _) = log.split_once(" pages follow on demand")?;
        before.rsplit(' ').next()?.parse::<u64>().ok()
    });
    let sent = here.cli("send-migration", &[&address, "--json"]);
    assert_eq!(sent.status.code(), Some(0), "{}", String::from_utf8_lossy(&sent.stderr));
    let frames = json_of(&sent)["normal_frames"].as_u64().expect("frames");
    assert!(
        frames >= to_come && to_come > 1 << 8,
        "{frames} went along of {to_come} that were to come"
    );
    assert_eq!(here.wait_exit(SOON), 0, "{}", here.log());
    there.console().wait_reports(2, 2, SOON);
    there.console().assert_clean();
}

#[test]
fn working_set_is_prefetched_at_the_next_restore() {
    if !driftline_machine::testing::kvm_or_skip("working_set_is_prefetched_at_the_next_restore") {
        return;
    }
    let _alone = tests::one_at_a_time();
    let scratch = ScratchDir::new();
    // It touches some hundred of 16,384 frames, here and there, while they come.
    let spec = "payload,ws=64M,rate=80M,pattern=random";
    let mut vm = Driftline::run(&scratch, "before", spec, &["--vcpus", "2", "--mem", "1G"]);
    vm.console().wait_reports(2, 1, SOON);
    let store = scratch.path("store");
    let path = store.to_str().expect("UTF-8");
    assert_eq!(vm.cli("checkpoint", &["--store", path]).status.code(), Some(0));
    vm.kill();
    let restored = |name: &str, more: &[&str]| {
        let args = [&["restore", "--store", path, "--lazy"], more].concat();
        let vm = Driftline::start_logging(&scratch, name, &args);
        tests::wait_for("all frames", SOON, || {
            vm.log().contains("all frames have come").then_some(())
        });
        vm.console().wait_reports(2, 1, SOON);
        vm.console().assert_clean();
        ["waits=", "foreseen="].map(|figure| vm.figure(figure).expect("a figure") as u64)
    };
    let noted = store.join("touched");
    // Where the store is for reading only nothing is noted, and nothing is said of it.
    let elsewhere = scratch.path("elsewhere");
    std::fs::create_dir(&elsewhere).expect("a directory");
    let elsewhere = elsewhere.to_str().expect("UTF-8");
    assert_eq!(restored("aside", &["--allow-path", elsewhere])[1], 0);
    assert!(!noted.exists());

    let [waits, foreseen] = restored("first", &[]);
    assert!(waits > 10 && foreseen == 0, "{waits} waits, {foreseen} foreseen");
    tests::wait_for("the note", SOON, || noted.exists().then_some(()));
    // What else it touches before all has come is chance, and how busy the host is.
    let fewer = ["second", "third", "fourth"].iter().any(|name| {
        let [again, foreseen] = restored(name, &[]);
        println!("{waits} waits the first time, {again} the {name}");
        assert!(foreseen >= waits, "{foreseen} foreseen of {waits}");
        again < waits
    });
    assert!(fewer, "{waits} waits the first time, and no fewer after");

    let mut bent = std::fs::read(&noted).expect("readable");
    *bent.last_mut().expect("bytes") ^= 1;
    std::fs::write(&noted, bent).expect("writable");
    assert_eq!(restored("last", &[])[1], 0, "what is damaged is not used");
}
