//! Repeated restores, each from a checkpoint of the previously restored guest. Every other restore
//! is lazy.

use std::os::unix::fs::FileExt;

use tests::{Driftline, GuestLoad, SOON, ScratchDir, json_of, repeats, wait_for};

/// Takes a checkpoint, kills the process and restores in a new process, `times` times.
fn in_a_row(load: GuestLoad, times: usize) {
    let scratch = ScratchDir::new();
    let mut vm = load.start(&scratch, "life0");
    for life in 1..=times {
        let store = scratch.path(&format!("store{life}"));
        let store = store.to_str().expect("UTF-8");
        // A full epoch and two incremental ones.
        let args = ["--store", store, "--every", "20ms", "--count", "3"];
        let taken = vm.cli("checkpoint", &args);
        let stderr = String::from_utf8_lossy(&taken.stderr);
        assert_eq!(taken.status.code(), Some(0), "life {life}: {stderr}");
        vm.console().assert_clean();
        vm.kill();
        let name = format!("life{life}");
        let args = ["restore", "--store", store, "--lazy"];
        vm = Driftline::start(&scratch, &name, if life % 2 == 0 { &args } else { &args[..3] });
        vm.wait_state("running");
        if life % 2 == 0 {
            // Logged shortly after the guest starts to run.
            wait_for("the pages that follow", SOON, || {
                vm.log().contains(" pages follow on demand").then_some(())
            });
        }
        vm.console().wait_reports(2, 1, SOON);
        if life > 1 {
            let old = scratch.path(&format!("store{}", life - 1));
            std::fs::remove_dir_all(old).expect("the previous store is ours");
        }
    }
    vm.console().wait_pass(2, SOON);
}

// Restored from a guest that was booted, from one that was restored, and from a lazy one.
tests::under_each_load!(in_a_row, 3, 50);

/// Creates a store with one checkpoint of a guest that writes to 32 MiB as fast as it can, and
/// kills the guest.
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
    // A byte of every hundredth page slot: some of them hold pages of the payload's 32 MiB.
    let slots = pages.metadata().expect("its length").len() / 4096;
    for slot in (50..slots).step_by(100) {
        let mut byte = [0];
        pages.read_exact_at(&mut byte, slot * 4096 + 9).expect("a byte");
        pages.write_all_at(&[byte[0] ^ 1], slot * 4096 + 9).expect("a byte");
    }
    let mut vm = Driftline::start(&scratch, "after", &["restore", "--store", &store, "--lazy"]);
    assert_eq!(vm.wait_exit(SOON), 1, "{}", vm.log());
    let log = vm.log();
    let last = log.lines().last().unwrap_or_default();
    assert!(last.contains("cannot be restored: ") && last.contains("pages-1, byte "), "{log}");
}

/// Damages one slot of the page file, verifies the store, and restores its latest checkpoint
/// lazily. The restore must end with an error that names the page. Returns whether the checkpoint
/// has a page in the slot.
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
    let log = vm.log();
    assert_eq!(code, 1, "slot {slot}: {log}");
    let names = |line: &str| {
        line.contains("page 0x") && line.contains("checkpoint 2 ") && line.contains(damage)
    };
    assert!(log.lines().any(names), "slot {slot}: {log}; verified: {damage}");
    assert!(!std::path::Path::new(vm.socket()).exists(), "slot {slot}: its socket is left");
    true
}

/// Creates a store with two checkpoints of a guest of 2 vCPUs with little memory, and kills the
/// guest.
fn two_small_checkpoints(scratch: &ScratchDir) -> String {
    let args = ["--vcpus", "2", "--mem", "32M"];
    let mut vm = Driftline::run(scratch, "before", "payload,ws=1M,rate=1M,burst=8", &args);
    vm.console().wait_pass(2, SOON);
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
    let scratch = ScratchDir::new();
    let store = two_small_checkpoints(&scratch);
    let pages = std::fs::metadata(scratch.path("store").join("pages-1")).expect("a page file");
    // The short form damages every eighth page.
    let step = repeats(8, 1);
    let slots = (1..pages.len() / 4096).step_by(step);
    let tried = slots.filter(|slot| ends_at_damage(&scratch, &store, *slot)).count();
    println!("{tried} pages were damaged in turn");
    assert!(tried > 256 / step, "only {tried} pages were damaged");
}

#[test]
fn lazy_guest_moves_before_all_memory_arrived() {
    if !driftline_machine::testing::kvm_or_skip("lazy_guest_moves_before_all_memory_arrived") {
        return;
    }
    let _alone = tests::one_at_a_time();
    let scratch = ScratchDir::new();
    let store = one_checkpoint(&scratch);
    let (destination, address) = Driftline::receive(&scratch, "there");
    let mut source = Driftline::start(&scratch, "here", &["restore", "--store", &store, "--lazy"]);
    source.wait_state("running");
    // The number of pages depends on how much the guest had written before the checkpoint.
    let missing = wait_for("the pages that follow", SOON, || {
        let log = source.log();
        let (before, _) = log.split_once(" pages follow on demand")?;
        before.rsplit(' ').next()?.parse::<u64>().ok()
    });
    let sent = source.cli("send-migration", &[&address, "--json"]);
    assert_eq!(sent.status.code(), Some(0), "{}", String::from_utf8_lossy(&sent.stderr));
    let frames = json_of(&sent)["normal_frames"].as_u64().expect("frames");
    assert!(
        frames >= missing && missing > 1 << 8,
        "{frames} pages were sent of {missing} that were missing"
    );
    assert_eq!(source.wait_exit(SOON), 0, "{}", source.log());
    destination.console().wait_reports(2, 2, SOON);
    destination.console().assert_clean();
}

#[test]
fn working_set_is_prefetched_at_the_next_restore() {
    if !driftline_machine::testing::kvm_or_skip("working_set_is_prefetched_at_the_next_restore") {
        return;
    }
    let _alone = tests::one_at_a_time();
    let scratch = ScratchDir::new();
    // The guest touches some hundred of 16,384 pages at random while they arrive. At a higher rate
    // it would touch more pages as soon as it waits for fewer, and hide the effect.
    let spec = "payload,ws=64M,rate=64M,pattern=random";
    let mut vm = Driftline::run(&scratch, "before", spec, &["--vcpus", "2", "--mem", "1G"]);
    // A page that the guest has not written before the checkpoint is zero, and is not fetched.
    vm.console().wait_first_pass(2, SOON);
    let store = scratch.path("store");
    let path = store.to_str().expect("UTF-8");
    assert_eq!(vm.cli("checkpoint", &["--store", path]).status.code(), Some(0));
    vm.kill();
    let restored = |name: &str, more: &[&str]| {
        let args = [&["restore", "--store", path, "--lazy"], more].concat();
        let vm = Driftline::start_logging(&scratch, name, &args);
        tests::wait_for("all frames", SOON, || {
            vm.log().contains("lazy restore complete").then_some(())
        });
        vm.console().wait_reports(2, 1, SOON);
        vm.console().assert_clean();
        ["waits=", "prefetched="].map(|figure| vm.figure(figure).expect("a figure") as u64)
    };
    let working_set = store.join("working-set");
    // With a read-only store no working set is recorded, without a message.
    let elsewhere = scratch.path("elsewhere");
    std::fs::create_dir(&elsewhere).expect("a directory");
    let elsewhere = elsewhere.to_str().expect("UTF-8");
    assert_eq!(restored("aside", &["--allow-path", elsewhere])[1], 0);
    assert!(!working_set.exists());

    let [waits, prefetched] = restored("first", &[]);
    assert!(waits > 10 && prefetched == 0, "{waits} waits, {prefetched} prefetched");
    tests::wait_for("the recorded working set", SOON, || working_set.exists().then_some(()));
    // Which other pages the guest touches before all have arrived depends on chance and on the
    // host, whose other load may also delay the prefetch: mostly 7 to 35 of some 150 waits are
    // left, and once three restores in a row had 150 of 187.
    let mut waits_again: Vec<u64> = (2..=10)
        .map(|number| {
            let [again, prefetched] = restored(&format!("restore-{number}"), &[]);
            println!("{waits} waits the first time, {again} in restore {number}");
            assert!(prefetched >= waits, "{prefetched} prefetched of {waits}");
            again
        })
        .collect();
    waits_again.sort_unstable();
    assert!(4 * waits_again[4] <= 3 * waits, "{waits} waits the first time, {waits_again:?} after");

    let mut damaged = std::fs::read(&working_set).expect("readable");
    *damaged.last_mut().expect("bytes") ^= 1;
    std::fs::write(&working_set, damaged).expect("writable");
    assert_eq!(restored("last", &[])[1], 0, "a damaged record is not used");
}
