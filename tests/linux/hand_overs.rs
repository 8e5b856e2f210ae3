//! Hand-overs on one host: the guest's memory, its disk and its tap change hands as they are.

use tests::{CheckerProgress, Driftline, ScratchDir, json_of, repeats};

use super::{CHECKERS, CheckedGuest, linux_and_network};

/// The next processes are given no file of a device: those that are open come along.
#[test]
fn checkers_find_nothing_over_hand_overs_on_one_host() {
    let _alone = tests::one_at_a_time();
    let test = "checkers_find_nothing_over_hand_overs_on_one_host";
    let Some((linux, network)) = linux_and_network(test) else { return };
    let scratch = ScratchDir::new();
    let files = ["--memory-backing", "memfd"];
    let mut guest =
        CheckedGuest::boot_by(CHECKERS, &linux, &network, &scratch, "dirty-ring", &files);
    // Its name leads nowhere, so only its open file can be used.
    let hidden = scratch.path("hidden");
    std::fs::rename(&guest.disk, &hidden).expect("the disk is ours");
    let mut echo = guest.echo();
    let mut silences = Vec::new();
    for _ in 0..repeats(5, 100) {
        let mark = echo.mark();
        let name = guest.next_name();
        let (next, address) = Driftline::receive_locally(&network.hosts[0], &scratch, &name);
        let sent = guest.process.cli("send-migration", &[&address, "--local", "--json"]);
        let stderr = String::from_utf8_lossy(&sent.stderr);
        assert_eq!(sent.status.code(), Some(0), "{name}: {stderr}\n{}", next.log());
        let report = json_of(&sent);
        assert_eq!(guest.process.wait_exit(tests::SOON), 0, "{name}");
        tests::assert_clean(&guest.process.console());
        guest.process = next;
        echo.wait_answers(20);
        silences.push(echo.silence_since(mark));
        eprintln!("{name}: downtime {} ms", report["downtime_ms"]);
    }
    eprintln!("longest silences, in ms: {silences:?}");
    CheckerProgress::wait(&mut guest.process, true);
    let (messages, _) = echo.finish();
    assert!(messages > 0);
    std::fs::rename(&hidden, &guest.disk).expect("the disk is ours");
    guest.end();
}
