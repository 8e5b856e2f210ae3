//! Clones of a Linux guest: guests restored together from one checkpoint have randomness of their
//! own, and each answers on its own network.

use std::time::{Duration, Instant};

use tests::{Driftline, EchoClient, LinuxImage, Namespace, PEER, SOON, ScratchDir, repeats};

use super::{ms, text};

/// Boots `kernel` with a network, takes a checkpoint, and restores clones, each on its own host
/// with its own tap. Each clone prints randomness between `<` and `>`, by `command` or by a
/// checker. No two may print the same.
fn clones_differ(test: &str, kernel: &str, checkers: &str, command: Option<&str>) {
    let _alone = tests::one_at_a_time();
    let Some(linux) = LinuxImage::or_skip(test) else { return };
    if !linux.file(kernel).exists() {
        let why = format!("the image has no {kernel}; images/linux/build.sh --kernel all makes it");
        return driftline_machine::testing::skip(test, &why);
    }
    let hosts = match hosts() {
        Ok(hosts) => hosts,
        Err(why) => return driftline_machine::testing::skip(test, &why),
    };
    let scratch = ScratchDir::new();
    let store = scratch.path("store");
    let boot = |checkers: &str| {
        let args = ["--mem", "128M", "--net", "tap=tap0"];
        linux.boot(kernel, &hosts[0], &scratch, "first", checkers, &args)
    };
    // Lines of a checker take time from many guests on one machine.
    let first = boot(&format!("driftline.check={checkers} driftline.tcp=every=60s"));
    // Waits until the server listens.
    EchoClient::start(&linux, &hosts[0], &scratch, "first").finish();
    checkpoint_and_kill(first, checkers, text(&store));

    let begun = Instant::now();
    let restore = |i: usize| {
        let net = format!("tap=tap{i}");
        let args = ["restore", "--store", text(&store), "--net", &net];
        let mut clone = Driftline::start_typed_to(&hosts[i], &scratch, &format!("clone{i}"), &args);
        // Typed before the guest runs. The shell waits for input, so it is among the first programs
        // to run.
        command.iter().for_each(|line| clone.type_line(line));
        clone
    };
    let mut clones: Vec<Driftline> = (1..hosts.len()).map(restore).collect();
    for clone in &clones {
        clone.wait_state("running");
    }
    eprintln!("{} guests run after {:.0} ms", clones.len(), ms(begun.elapsed()));
    let mut answers: Vec<String> = clones.iter_mut().map(printed_randomness).collect();
    eprintln!("all guests have answered after {:.0} ms: {answers:?}", ms(begun.elapsed()));
    answers.sort_unstable();
    answers.dedup();
    assert_eq!(answers.len(), clones.len(), "{answers:?}");
    all_answer(&linux, &hosts, &scratch);
    for clone in &mut clones {
        clone.must_live();
        tests::assert_clean(&clone.console());
    }
}

/// Returns a host for the first guest and for each of four clones, or of ten in the long form, each
/// with its tap.
fn hosts() -> Result<Vec<Namespace>, String> {
    let host = |i: usize| {
        let host = Namespace::new(PEER)?;
        host.add_tap(&format!("tap{i}"))?;
        Ok(host)
    };
    (0..=repeats(4, 10)).map(host).collect()
}

/// Takes a checkpoint of `guest` once its checkers are ready, and kills it.
fn checkpoint_and_kill(mut guest: Driftline, checkers: &str, store: &str) {
    for checker in checkers.split(',') {
        let ready = format!("check {checker}: ready");
        tests::wait_for("checkers", SOON, || guest.console().text().contains(&ready).then_some(()));
    }
    let taken = guest.cli("checkpoint", &["--store", store]);
    assert_eq!(taken.status.code(), Some(0), "{}", guest.log());
    tests::assert_clean(&guest.console());
    guest.kill();
}

/// Checks that all clones answer at the same time, each on its own tap.
fn all_answer(linux: &LinuxImage, hosts: &[Namespace], scratch: &ScratchDir) {
    let echo = |i: usize| {
        let name = format!("clone{i}");
        EchoClient::start_with(&["interval=500ms", "window=2"], linux, &hosts[i], scratch, &name)
    };
    let mut echoes: Vec<EchoClient> = (1..hosts.len()).map(echo).collect();
    echoes.iter_mut().for_each(|echo| echo.wait_answers(5));
    for echo in echoes {
        let (messages, _) = echo.finish();
        assert!(messages > 5);
    }
}

/// Returns the randomness that a clone has printed.
fn printed_randomness(clone: &mut Driftline) -> String {
    let console = clone.console();
    tests::wait_for("randomness of a guest", Duration::from_secs(600), || {
        clone.must_live();
        let lines = console.lines();
        // The console echoes the typed line, too.
        let answers = lines.iter().filter_map(|line| line.split_once('<')?.1.split_once('>'));
        let random = |text: &str| {
            text.len() >= 12
                && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-+/".contains(&b))
        };
        answers.map(|(answer, _)| answer).find(|answer| random(answer)).map(str::to_owned)
    })
}

/// Without ACPI the kernel is not notified of a restore. A program that needs fresh randomness
/// reads the host's, after the bytes that the driver may have fetched before the checkpoint.
#[test]
fn clones_read_fresh_randomness_from_hwrng() {
    let test = "clones_read_fresh_randomness_from_hwrng";
    clones_differ(
        test,
        "vmlinux",
        "tcp",
        Some("echo \"<$(head -c137 /dev/hwrng|tail -c9|base64)>\""),
    );
}

/// The generation ID notifies a kernel with ACPI some milliseconds after a restore. A program that
/// waits for the notification reads randomness afterwards.
#[test]
fn clones_are_reseeded_by_the_generation_id() {
    let test = "clones_are_reseeded_by_the_generation_id";
    clones_differ(test, "vmlinux-acpi", "tcp,fork", None);
}
