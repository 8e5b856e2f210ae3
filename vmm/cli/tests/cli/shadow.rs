//! `--shadow`: it reports nothing for a sound source of dirty frames, and names the frames that a
//! broken source loses.

use crate::common::{TestDir, driftline, fail, output, text};
use driftline_machine::testing::full;

const GUEST: &[&str] = &["run", "--mem", "64M", "--vcpus", "2", "--serial", "null", "--guest"];
const WORK: &str = "payload,ws=4M,rate=25M,pattern=random,seconds=1";
/// Writes each page at most once, so that a lost frame stays missing.
const WORK_ONCE: &str = "payload,ws=12M,rate=10M,seconds=1";
/// Writes each page at intervals longer than those between two checks, so that a lost frame is
/// missing at the next check.
const LONG_WORK: &str = "payload,ws=48M,rate=max,seconds=900";

/// Returns the exit code and the messages for a guest that works for a second with a shadow. If
/// `loses_one_in` is set, one in that many of its frames is lost.
fn shadowed(guest: &str, tracking: &str, shadow: &str, loses_one_in: Option<u32>) -> (i32, String) {
    let mut run = driftline(GUEST);
    run.args([guest, "--tracking", tracking, "--shadow", shadow]);
    if let Some(one_in) = loses_one_in {
        run.env("DRIFTLINE_LOSES_ONE_IN", one_in.to_string());
    }
    let out = run.output().unwrap();
    (out.status.code().unwrap(), text(&out.stderr))
}

/// Does the same as [`shadowed`], with a guest that works until the shadow has found a lost frame,
/// or for a quarter of an hour.
fn shadowed_until_found(tracking: &str, shadow: &str, one_in: u32) -> (i32, String) {
    let tmp = TestDir::new();
    let (socket, stderr) = (tmp.text("sock"), tmp.path("stderr"));
    let mut run = driftline(GUEST);
    run.args([LONG_WORK, "--tracking", tracking, "--shadow", shadow, "--api-sock", &socket]);
    run.env("DRIFTLINE_LOSES_ONE_IN", one_in.to_string());
    let mut child = run.stderr(std::fs::File::create(&stderr).unwrap()).spawn().unwrap();
    let end = loop {
        if let Some(end) = child.try_wait().unwrap() {
            break end;
        }
        if tmp.read("stderr").contains("changed unreported") {
            // The process may just have ended.
            let _ = output(&["stop", "--api-sock", &socket]);
            break child.wait().unwrap();
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    };
    (end.code().unwrap(), tmp.read("stderr"))
}

/// Every supported combination of tracking and shadow.
const PAIRS: [(&str, &str); 7] = [
    ("dirty-ring", "compare"),
    ("dirty-bitmap", "userfault-wp"),
    ("dirty-bitmap-manual", "compare"),
    ("userfault-wp", "compare"),
    ("dirty-ring", "userfault-wp"),
    ("dirty-bitmap", "compare"),
    ("dirty-bitmap-manual", "userfault-wp"),
];

/// Returns the pairs to try. The short form has each tracking mode and each shadow.
fn pairs() -> &'static [(&'static str, &'static str)] {
    &PAIRS[..if full() { 7 } else { 4 }]
}

fn can_have(test: &str, code: i32, stderr: &str) -> bool {
    if code == 3 {
        driftline_machine::testing::skip(test, stderr.trim());
    }
    code != 3
}

#[test]
fn sound_source_misses_nothing() {
    const TEST: &str = "sound_source_misses_nothing";
    if !driftline_machine::testing::kvm_or_skip(TEST) {
        return;
    }
    for &(tracking, shadow) in pairs() {
        let (code, stderr) = shadowed(WORK, tracking, shadow, None);
        if can_have(TEST, code, &stderr) {
            assert_eq!(code, 0, "{tracking}, {shadow}: {stderr}");
            assert!(stderr.contains("no page was missed: "), "{tracking}, {shadow}: {stderr}");
        }
    }
}

#[test]
fn lost_frames_are_named_with_exit_1() {
    const TEST: &str = "lost_frames_are_named_with_exit_1";
    if !cfg!(debug_assertions) {
        return driftline_machine::testing::skip(
            TEST,
            "a release build has no source that loses frames",
        );
    }
    if !driftline_machine::testing::kvm_or_skip(TEST) {
        return;
    }
    let one_in = if full() { 1_000_000 } else { 100 };
    for &(tracking, shadow) in pairs() {
        let begun = std::time::Instant::now();
        let (code, stderr) = match full() {
            true => shadowed_until_found(tracking, shadow, one_in),
            false => shadowed(WORK_ONCE, tracking, shadow, Some(one_in)),
        };
        if can_have(TEST, code, &stderr) {
            assert_eq!(code, 1, "{tracking}, {shadow}: {stderr}");
            let warned = format!(
                "THIS BUILD IS FOR TESTS: of {one_in} pages that the guest writes one is lost"
            );
            assert!(stderr.contains(&warned), "{stderr}");
            let last = stderr.lines().last().unwrap();
            println!("{tracking}, {shadow}: {last}; {:?}", begun.elapsed());
            assert!(last.contains("changed unreported, the first: "), "{stderr}");
            assert!(last.contains("the first: gfn 0x"), "{stderr}");
            assert!(last.len() < 400, "bounded: {stderr}");
        }
    }
}

#[test]
fn a_guest_of_threads_is_compared_too() {
    let (code, stderr) =
        shadowed("payload,ws=8M,rate=50M,seconds=1", "dirty-ring", "nothing", None);
    assert!(code == 2 && stderr.contains("unknown shadow \"nothing\""), "{code}: {stderr}");
    let threads = ["--backend", "threads", "--shadow", "compare"];
    let args = [GUEST, &["payload,ws=8M,rate=50M,pattern=random,seconds=1"], &threads].concat();
    let out = driftline(&args).output().unwrap();
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    assert!(text(&out.stderr).contains("no page was missed: "), "{}", text(&out.stderr));
}

#[test]
fn impossible_shadow_is_refused_before_launch() {
    let pair = |tracking, shadow| {
        fail(2, &[GUEST, &["payload", "--tracking", tracking, "--shadow", shadow]].concat())
    };
    let stderr = pair("userfault-wp", "userfault-wp");
    assert!(stderr.contains("guest memory has at most one userfaultfd"), "{stderr}");
    let stderr = pair("none", "compare");
    assert!(stderr.contains("--tracking none reports no pages"), "{stderr}");
}
