//! Hand-overs on one host: the guest's memory, its disk, its tap and its vsock change hands as they
//! are.

use tests::{
    CheckerProgress, Driftline, EchoClient, SOON, ScratchDir, StopsLatest, assert_no_growth,
    json_of, lasting_usage, repeats, wait_for,
};

use super::{CHECKERS, CheckedGuest, linux_and_network, text};

/// The next processes are given no file of a device: the open ones move with the guest. Every third
/// process is started by hand, the others by `driftline upgrade`.
#[test]
fn linux_outlives_its_processes() {
    let _alone = tests::one_at_a_time();
    let test = "linux_outlives_its_processes";
    let Some((linux, network)) = linux_and_network(test) else { return };
    let scratch = ScratchDir::new();
    let uds = text(&scratch.path("vsock")).to_owned();
    let vsock = format!("cid=5,uds={uds}");
    let files = ["--memory-backing", "memfd", "--vsock", &vsock];
    let mut guest =
        CheckedGuest::boot_by(CHECKERS, &linux, &network, &scratch, "dirty-ring", &files);
    // Its name leads nowhere, so only its open file can be used.
    let hidden = scratch.path("hidden");
    std::fs::rename(&guest.disk, &hidden).expect("the disk is ours");
    let mut echo = guest.echo();
    // One connection through the vsock for the whole test, which each change of process would end
    // if the next process did not receive it.
    let through = format!("vsock={uds}");
    let options = ["interval=50ms", "window=8", &through];
    let mut local = EchoClient::start_with(&options, &linux, &network.peer, &scratch, "over-vsock");
    let mut latest = StopsLatest(guest.process.socket().to_owned());
    let (mut silences, mut downtimes, mut usage) = (Vec::new(), Vec::new(), Vec::new());
    // Of 151 hand-overs, 100 are upgrades. The last one is to a process that this test has started:
    // below, it must live.
    for i in 0..repeats(7, 151) {
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
            latest = StopsLatest(next.socket().to_owned());
            guest.process = next;
        }
        echo.wait_answers(20);
        silences.push(echo.silence_since(mark));
        local.wait_answers(5);
        let pid = guest.process.info().and_then(|info| info["pid"].as_u64());
        usage.extend(pid.and_then(|pid| lasting_usage(pid as u32)));
    }
    assert_eq!(usage.len(), downtimes.len());
    assert_no_growth(&usage);
    eprintln!("downtimes {downtimes:?}, longest silences {silences:?}, in ms");
    let progress = CheckerProgress::wait(&mut guest.process, true);
    let (messages, _) = echo.finish();
    let (over_vsock, _) = local.finish();
    assert!(messages > 0 && over_vsock > 0);
    // A new connection finds the latest process's device at the same socket.
    let mut new = EchoClient::start_with(&options, &linux, &network.peer, &scratch, "new");
    new.wait_answers(5);
    new.finish();
    drop(latest);
    let socket = guest.process.socket().to_owned();
    for socket in [&socket, &uds] {
        wait_for("the socket's end", SOON, || (!std::fs::exists(socket).ok()?).then_some(()));
    }
    linux.verify_disk(&hidden, progress.flushed);
    tests::assert_clean(&guest.process.console());
}
