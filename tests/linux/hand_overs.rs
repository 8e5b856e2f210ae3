//! Hand-overs on one host: the guest's memory, its disk and its tap change hands as they are.

use tests::{CheckerProgress, Driftline, SOON, ScratchDir, json_of, repeats, run_cli, wait_for};

use super::{CHECKERS, CheckedGuest, linux_and_network};

/// Ends the latest process of a guest, which is not a child of the test.
struct EndsLatest(String);

impl Drop for EndsLatest {
    fn drop(&mut self) {
        run_cli(&["stop", "--api-sock", &self.0]);
    }
}

/// The next processes are given no file of a device: those that are open come along. Every third
/// one is started by hand, the others by `driftline upgrade`.
#[test]
fn linux_outlives_its_processes() {
    let _alone = tests::one_at_a_time();
    let test = "linux_outlives_its_processes";
    let Some((linux, network)) = linux_and_network(test) else { return };
    let scratch = ScratchDir::new();
    let files = ["--memory-backing", "memfd"];
    let mut guest =
        CheckedGuest::boot_by(CHECKERS, &linux, &network, &scratch, "dirty-ring", &files);
    // Its name leads nowhere, so only its open file can be used.
    let hidden = scratch.path("hidden");
    std::fs::rename(&guest.disk, &hidden).expect("the disk is ours");
    let mut echo = guest.echo();
    let mut latest = EndsLatest(guest.process.socket().to_owned());
    let (mut silences, mut downtimes) = (Vec::new(), Vec::new());
    for i in 0..repeats(7, 100) {
        let mark = echo.mark();
        let (next, args) = match i % 3 {
            0 => {
                let name = guest.next_name();
                let host = &network.hosts[0];
                let (next, address) = Driftline::receive_locally(host, &scratch, &name);
                (Some(next), vec!["send-migration".to_owned(), address, "--local".to_owned()])
            }
            _ => (None, vec!["upgrade".to_owned()]),
        };
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let sent = guest.process.cli(args[0], &[&args[1..], &["--json"]].concat());
        let stderr = String::from_utf8_lossy(&sent.stderr);
        assert_eq!(sent.status.code(), Some(0), "{args:?}: {stderr}");
        let report = json_of(&sent);
        downtimes.push(report["downtime_ms"].as_f64());
        tests::assert_clean(&guest.process.console());
        if let Some(next) = next {
            latest = EndsLatest(next.socket().to_owned());
            guest.process = next;
        }
        echo.wait_answers(20);
        silences.push(echo.silence_since(mark));
    }
    eprintln!("downtimes {downtimes:?}, longest silences {silences:?}, in ms");
    let progress = CheckerProgress::wait(&mut guest.process, true);
    let (messages, _) = echo.finish();
    assert!(messages > 0);
    drop(latest);
    let socket = guest.process.socket().to_owned();
    wait_for("the end", SOON, || (!std::fs::exists(&socket).ok()?).then_some(()));
    linux.verify_disk(&hidden, progress.flushed);
    tests::assert_clean(&guest.process.console());
}
