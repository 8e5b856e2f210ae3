//! `driftline compare`: refusals before any machine is started, a small matrix from end to end, and
//! its page in a real browser.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::{TestDir, driftline, fail, succeed, text};
use driftline_machine::testing::{hide_userfaultfd, kvm_or_skip, skip};
use serde_json::Value;

#[test]
fn unknown_tracking_is_refused_with_the_known() {
    for wrong in ["bogus", "dirty-ring+bogus", "none+tree"] {
        let stderr = fail(2, &["compare", "--modes", &format!("dirty-ring,{wrong}")]);
        assert!(stderr.contains(&format!("unknown way to track \"{wrong}\"")), "{stderr}");
        assert!(stderr.contains("dirty-ring+tree, dirty-ring+list, dirty-ring+flat"), "{stderr}");
    }
    fail(2, &["compare", "--guest", "paperload"]);
    fail(2, &["compare", "--mem", "1G,1"]);
    fail(2, &["compare", "--repeat", "0"]);
    for (option, most) in [("--interval", "3600"), ("--duration", "86400"), ("--boot-time", "3600")]
    {
        let bound = format!("it is at most {most} s");
        for (much, why) in
            [("18446744073709551615s", "a duration is at most 365d"), ("86401s", &bound)]
        {
            let stderr = fail(2, &["compare", "--kernel", "none", option, much]);
            assert!(stderr.contains(why), "{option} {much}: {stderr}");
        }
    }
}

#[test]
fn unusable_report_files_are_refused_first() {
    let tmp = TestDir::new();
    let stderr = fail(1, &["compare", "--svg", "/dev/null"]);
    assert!(stderr.contains("/dev/null cannot be written: it is not a regular file"), "{stderr}");
    std::fs::write(tmp.path("page"), "as it was").unwrap();
    std::os::unix::fs::symlink("page", tmp.path("link")).unwrap();
    let stderr = fail(1, &["compare", "--html", &tmp.text("page"), "--svg", &tmp.text("link")]);
    assert!(stderr.contains("--html and --svg are the same file"), "{stderr}");
    assert!(!stderr.contains("machines"), "nothing was started: {stderr}");
    assert_eq!(tmp.read("page"), "as it was");
}

#[test]
fn unwritable_page_is_refused_first() {
    let tmp = TestDir::new();
    for path in [tmp.text("no/such/page.html"), tmp.text("."), "/proc/page.html".to_owned()] {
        let stderr = fail(1, &["compare", "--html", &path]);
        assert!(stderr.contains(&format!("{path} cannot be written")), "{stderr}");
        assert!(!stderr.contains("machines"), "nothing was started: {stderr}");
    }
    let stderr = fail(2, &["compare", "--duration", "100ms", "--repeat", "5"]);
    assert!(stderr.contains("no room for four epochs"), "{stderr}");
}

#[test]
fn compare_without_kvm_exits_3() {
    let test = "compare_without_kvm_exits_3";
    let hidden = |args: &str| {
        let script = format!("mount --bind /dev/null /dev/kvm && {args}");
        Command::new("unshare").args(["--mount", "sh", "-c", &script]).output()
    };
    if !Path::new("/dev/kvm").exists() {
        fail(3, &["compare"]);
        return;
    }
    if !hidden("true").is_ok_and(|out| out.status.success()) {
        return skip(test, "/dev/kvm cannot be hidden here");
    }
    let out = hidden(&format!("exec {} compare", env!("CARGO_BIN_EXE_driftline"))).unwrap();
    let stderr = text(&out.stderr);
    assert_eq!(out.status.code(), Some(3), "{stderr}");
    assert!(stderr.contains("this host lacks a usable /dev/kvm"), "{stderr}");
}

#[test]
fn missing_userfaultfd_is_named_and_others_measured() {
    if !kvm_or_skip("missing_userfaultfd_is_named_and_others_measured") {
        return;
    }
    // Run on a separate thread: a hidden system call cannot be restored on its thread.
    let hidden = std::thread::spawn(|| {
        hide_userfaultfd().unwrap();
        let matrix = ["--modes", "userfault-wp,dirty-bitmap", "--mem", "64M"];
        let short = ["--guest", "payload,ws=2M,rate=40M", "--duration", "100ms", "--repeat", "1"];
        let compared = driftline(&[&["compare", "--json"], &matrix[..], &short].concat());
        let machine = ["run", "--guest", "payload,ws=16M", "--mem", "64M", "--serial", "null"];
        let tracked = driftline(&[&machine[..], &["--tracking", "userfault-wp"]].concat());
        let shadowed = driftline(&[&machine[..], &["--shadow", "userfault-wp"]].concat());
        [compared, tracked, shadowed].map(|mut run| run.output().unwrap())
    });
    let [compared, tracked, shadowed] = hidden.join().unwrap();
    let stderr = text(&compared.stderr);
    assert_eq!(compared.status.code(), Some(0), "{stderr}");
    let lacks = "this host has no asynchronous write protection of userfaultfd: ";
    let first = stderr.lines().next().unwrap();
    assert!(first.contains(&format!("userfault-wp+tree is not measured: {lacks}")), "{stderr}");
    assert!(stderr.lines().nth(1).unwrap().contains("2 machines"), "{stderr}");
    let report: Value = serde_json::from_slice(&compared.stdout).unwrap();
    let rows = rows(&report);
    let row = |way: &str| rows.iter().find(|row| row["way"] == way).unwrap();
    let lacking = row("userfault-wp+tree");
    assert!(lacking["figures"].is_null(), "{lacking}");
    assert!(lacking["why"].as_str().unwrap().starts_with(lacks), "{lacking}");
    assert_eq!(row("dirty-bitmap+tree")["figures"]["missed_frames"], 0);
    for run in [tracked, shadowed] {
        let stderr = text(&run.stderr);
        assert_eq!(run.status.code(), Some(3), "{stderr}");
        assert!(stderr.contains("this host lacks userfaultfd's asynchronous"), "{stderr}");
    }
}

/// Returns the median of a figure in a row whose way this host supports.
fn median(row: &Value, figure: &str) -> f64 {
    let value = &row["figures"][figure];
    let number =
        |name: &str| value[name].as_f64().unwrap_or_else(|| panic!("{figure}.{name} of {row}"));
    assert!(number("min") <= number("median") && number("median") <= number("max"), "{value}");
    number("median")
}

fn rows(report: &Value) -> Vec<&Value> {
    report["cells"].as_array().unwrap().iter().collect()
}

/// Checks the figures of a way that tracks.
fn check_tracked_row(row: &Value) {
    let count = |name: &str| row["figures"][name].as_u64().unwrap();
    assert_eq!(count("missed_frames"), 0, "{row}");
    let inside = count("reported_frames") - count("beside_frames");
    assert_eq!(inside, count("written_frames") + count("extra_frames"), "{row}");
    assert!(count("written_frames") > 100, "{row}");
    assert!(count("strict_checks") + count("marked_all_checks") >= 6, "{row}");
    let steps = ["harvest_us", "reprotect_us", "insert_us", "drain_us"].map(|s| median(row, s));
    assert!(median(row, "epoch_us") > 0.0 && steps.iter().all(|us| *us >= 0.0));
    // Most epochs of a busy host may be empty. None has more pages than the guest's 64 MiB.
    assert!((0.0..=16_384.0).contains(&median(row, "dirty_frames")), "{row}");
    assert!(median(row, "epoch_p99_us") >= median(row, "epoch_us"));
    median(row, "host_cpu_percent");
    median(row, "slow_down_percent");
}

#[test]
fn small_matrix_misses_no_frame() {
    if !kvm_or_skip("small_matrix_misses_no_frame") {
        return;
    }
    let tmp = TestDir::new();
    let page = tmp.text("page.html");
    let guests = ["payload,ws=2M,rate=40M", "payload,ws=8M,rate=max,pattern=random"];
    let printed = succeed(&[
        "compare",
        "--json",
        "--html",
        &page,
        "--guest",
        guests[0],
        "--guest",
        guests[1],
        "--mem",
        "64M",
        "--duration",
        "300ms",
        "--repeat",
        "2",
    ]);
    let report: Value = serde_json::from_str(&printed).unwrap();
    assert_eq!(report["settings"]["interval_ms"], 10.0);
    let mut measured = 0;
    for row in rows(&report) {
        let Some(figures) = row["figures"].as_object() else {
            assert!(row["why"].as_str().is_some_and(|why| why.contains("this host")), "{row}");
            continue;
        };
        assert!(row["why"].is_null(), "{row}");
        assert!(median(row, "writes_per_s") > 0.0, "{row}");
        assert!(median(row, "pause_us") > 0.0);
        if row["way"] == "none" {
            assert!(figures["missed_frames"].is_null() && figures["epoch_us"].is_null(), "{row}");
            continue;
        }
        measured += 1;
        check_tracked_row(row);
    }
    assert!(measured >= 2, "the bitmap at least is everywhere");
    let answer: Vec<&str> =
        report["answer"].as_array().unwrap().iter().map(|line| line.as_str().unwrap()).collect();
    // Two runs are too few for a clear difference.
    assert!(answer[0].starts_with("No way's epoch is clearly cheaper"), "{answer:?}");
    assert!(answer.iter().any(|line| line.starts_with("No way missed a page: in ")), "{answer:?}");
    let page = tmp.read("page.html");
    let version = succeed(&["--version"]);
    let version = version.trim().strip_prefix("driftline ").unwrap();
    assert_eq!(report["version"], version);
    assert!(page.contains(&format!("Driftline {version}</p>")), "{version}");
    assert!(page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>\n"));
    assert!(page.contains("userfault-wp+tree") && page.contains(guests[1]));
    let command = report["command"].as_str().unwrap();
    assert!(command.starts_with("driftline compare --json --html /"), "{command}");
    assert!(page.contains(&format!("<dt>Command</dt><dd>{command}</dd>")), "{command}");
}

#[test]
fn ring_full_exits_and_their_time_agree() {
    if !kvm_or_skip("ring_full_exits_and_their_time_agree") {
        return;
    }
    let run = driftline(&[
        "compare",
        "--json",
        "--modes",
        "dirty-ring+tree",
        "--ring-entries",
        "1024",
        "--vcpus",
        "2",
        "--guest",
        "payload,ws=32M,rate=max",
        "--mem",
        "64M",
        "--duration",
        "400ms",
        "--repeat",
        "1",
        "--interval",
        "50ms",
    ])
    .output()
    .unwrap();
    let report: Value = serde_json::from_slice(&run.stdout)
        .unwrap_or_else(|e| panic!("{e}: {}", text(&run.stderr)));
    let rows = rows(&report);
    if let Some(why) = rows[0]["why"].as_str() {
        return skip("ring_full_exits_and_their_time_agree", why);
    }
    // The number depends on the host: the collector is quick.
    let (exits, ms) =
        (median(rows[0], "ring_full_exits_per_s"), median(rows[0], "ring_full_ms_per_s"));
    assert_eq!(exits > 0.0, ms > 0.0, "{}", rows[0]);
    assert!(median(rows[0], "dirty_frames") > 100.0, "{}", rows[0]);
    assert_eq!(rows[0]["figures"]["missed_frames"], 0, "{}", rows[0]);
}

/// Checks the page from within: its background, and texts that overlap or lie outside their
/// drawings.
const PAGE_CHECK: &str = r#"<pre id="looked"></pre><script>
const bad = [];
for (const svg of document.querySelectorAll('svg')) {
  const whole = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
  texts.forEach(([name, a], i) => {
    if (a.left < whole.left - 1 || a.right > whole.right + 1 || a.top < whole.top - 1 || a.bottom > whole.bottom + 1) bad.push(`outside: ${name}`);
    texts.slice(i + 1).forEach(([other, b]) => {
      if (a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom) bad.push(`${name} over ${other}`);
    });
  });
}
if (document.documentElement.scrollWidth > innerWidth) bad.push(`wider than the window: ${document.documentElement.scrollWidth}`);
const page = getComputedStyle(document.body);
document.getElementById('looked').textContent =
  `LOOKED ${document.querySelectorAll('svg').length} drawings, ${page.backgroundColor} ${page.color}, bad: ${bad.join('; ')}.`;
</script></body></html>"#;

fn browser() -> Option<&'static str> {
    ["chromium", "chromium-browser", "google-chrome"].into_iter().find(|name| {
        let mut command = Command::new(name);
        let command = command.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    })
}

#[test]
fn page_is_legible_in_light_and_dark() {
    let test = "page_is_legible_in_light_and_dark";
    let Some(browser) = browser() else {
        return skip(test, "there is no chromium");
    };
    if !kvm_or_skip(test) {
        return;
    }
    let tmp = TestDir::new();
    succeed(&[
        "compare",
        "--html",
        &tmp.text("page.html"),
        "--guest",
        "payload,ws=2M,rate=40M",
        "--guest",
        "payload,ws=8M,rate=max",
        "--mem",
        "64M,1G",
        "--duration",
        "100ms",
        "--repeat",
        "1",
    ]);
    let page = tmp.read("page.html");
    std::fs::write(tmp.path("looking.html"), page.replace("</body></html>", PAGE_CHECK)).unwrap();
    let mut backgrounds = Vec::new();
    for (name, scheme) in [("light", "1"), ("dark", "0")] {
        let mut command = Command::new(browser);
        command.args(["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,1600"]);
        command.arg(format!("--user-data-dir={}", tmp.text("profile")));
        command.arg(format!("--blink-settings=preferredColorScheme={scheme}"));
        let shot = tmp.text(&format!("{name}.png"));
        let out = command
            .arg(format!("--screenshot={shot}"))
            .arg("--dump-dom")
            .arg(format!("file://{}", tmp.text("looking.html")))
            .output()
            .unwrap();
        let dom = text(&out.stdout);
        let looked = dom.split("<pre id=\"looked\">").nth(1);
        let looked = looked.unwrap_or_else(|| panic!("{}", text(&out.stderr)));
        let looked = looked.split("</pre>").next().unwrap();
        assert!(looked.contains("LOOKED 4 drawings"), "{looked}");
        assert!(looked.contains("bad: ."), "{name}: {looked}");
        backgrounds.push(looked.split("drawings, ").nth(1).unwrap().to_owned());
    }
    assert!(backgrounds[0].starts_with("rgb(255, 255, 255)"), "{backgrounds:?}");
    assert_ne!(backgrounds[0], backgrounds[1], "dark is another page");
}
