//! `/metrics`, on the API socket and on `--metrics-listen`: its counts in the life of a guest, the
//! requests that it answers, and a real Prometheus that scrapes it.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::common::{
    ClosedAddress, TestDir, Vmm, fail, output, receiver, request, succeed, text, wait_for,
};
use driftline_machine::testing::{kvm_or_skip, skip};
use serde_json::{Value, json};

const THREADS: &[&str] =
    &["--backend", "threads", "--mem", "64M", "--guest", "payload,ws=16M,rate=64M"];
const LISTEN: &[&str] = &["--metrics-listen", "127.0.0.1:0"];

/// Returns the address at which a process answers `/metrics`, from its log.
pub fn address(vmm: &Vmm<'_>) -> String {
    wait_for("the address of the metrics", || {
        let stderr = vmm.stderr();
        let (_, rest) = stderr.split_once("metrics on http://")?;
        Some(rest.split_once("/metrics")?.0.to_owned())
    })
}

/// Sends one request to `address`. Returns the head of the answer and its body.
fn http(address: &str, head: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    write!(stream, "{head}\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let answer = text(&answer);
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer}"));
    (head.to_owned(), body.to_owned())
}

/// A page of metrics: each sample's value by its name and labels.
#[derive(Debug)]
struct ScrapedPage(BTreeMap<String, f64>);

impl ScrapedPage {
    fn parse(page: &str) -> Self {
        let samples = page.lines().filter(|line| !line.starts_with('#')).map(|line| {
            let (sample, value) = line.rsplit_once(' ').unwrap();
            (sample.to_owned(), value.parse().unwrap())
        });
        Self(samples.collect())
    }

    fn scrape(address: &str) -> Self {
        let (head, body) = http(address, "GET /metrics HTTP/1.1");
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        Self::parse(&body)
    }

    /// Returns the sum of the samples whose name is `name` and whose labels contain `labels`.
    fn sum(&self, name: &str, labels: &str) -> f64 {
        let is = |sample: &str| sample.split('{').next() == Some(name) && sample.contains(labels);
        self.0.iter().filter(|(sample, _)| is(sample)).map(|(_, value)| value).sum()
    }

    fn has(&self, name: &str) -> bool {
        self.0.keys().any(|sample| sample.split('{').next() == Some(name))
    }

    /// Checks that no counter is smaller than it was in `earlier`.
    fn follows(&self, earlier: &ScrapedPage) {
        let grow = |sample: &str| {
            let name = sample.split('{').next().unwrap();
            ["_total", "_bucket", "_count", "_sum"].iter().any(|end| name.ends_with(end))
        };
        for (sample, before) in earlier.0.iter().filter(|(sample, _)| grow(sample)) {
            let now = self.0.get(sample).unwrap_or_else(|| panic!("{sample} is missing"));
            assert!(now >= before, "{sample}: {now} after {before}");
        }
    }
}

fn now_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}

/// Checks what `second` has of the seven checkpoints that were taken after `first`.
fn check_checkpoints(first: &ScrapedPage, second: &ScrapedPage) {
    second.follows(first);
    assert_eq!(second.sum("driftline_checkpoints_total", ""), 7.0);
    for times in ["pause", "durable"] {
        let name = format!("driftline_checkpoint_{times}_seconds");
        assert_eq!(second.sum(&format!("{name}_count"), ""), 7.0);
        assert_eq!(second.sum(&format!("{name}_bucket"), "le=\"+Inf\""), 7.0);
        assert!((1e-6..60.0).contains(&second.sum(&format!("{name}_sum"), "")), "{second:?}");
    }
    let [pause, durable] = ["pause", "durable"]
        .map(|times| second.sum(&format!("driftline_checkpoint_{times}_seconds_sum"), ""));
    assert!(durable > pause, "{durable} until durable, {pause} of pauses");
    let age = now_s() - second.sum("driftline_checkpoint_last_success_timestamp_seconds", "");
    assert!((0.0..60.0).contains(&age), "{age}");
    assert!(second.sum("driftline_checkpoint_pages_total", "") > 1000.0, "{second:?}");
    assert!(second.sum("driftline_checkpoint_written_bytes_total", "") > 4096.0);
    let [before, after] = [first, second].map(|page| page.sum("driftline_dirty_bytes_total", ""));
    assert!(after > before, "{after} after {before}");
    let interval = second.sum("driftline_checkpoint_last_interval_seconds", "");
    // A checkpoint that begins on time may follow one that began late, almost an interval later.
    assert!((1e-6..60.0).contains(&interval), "{interval}");
}

#[test]
fn metrics_follow_a_guest_through_its_life() {
    let tmp = TestDir::new();
    let (mut there, to) = receiver(&tmp, "there", LISTEN);
    let there_at = address(&there);
    let waiting = ScrapedPage::scrape(&there_at);
    assert_eq!(waiting.sum("driftline_migration_phase", "phase=\"waiting\""), 1.0, "{waiting:?}");
    assert!(waiting.sum("process_resident_memory_bytes", "") > 1e6, "{waiting:?}");
    assert!(!waiting.has("driftline_guest_state"), "{waiting:?}");

    let mut vmm = Vmm::run(&tmp, "vmm", &[THREADS, LISTEN, &["--name", "web-1"]].concat());
    let at = address(&vmm);
    let first = ScrapedPage::scrape(&at);
    assert_eq!(first.sum("driftline_guest_state", "state=\"running\""), 1.0);
    assert_eq!(first.sum("driftline_guest_state", ""), 1.0, "in one state");
    assert_eq!(first.sum("driftline_guest_memory_bytes", "name=\"web-1\""), 64.0 * 1048576.0);
    assert_eq!(first.sum("driftline_checkpoints_total", ""), 0.0);
    assert!(!first.has("driftline_checkpoint_last_success_timestamp_seconds"));
    assert!((now_s() - 600.0..now_s()).contains(&first.sum("process_start_time_seconds", "")));

    let store = tmp.text("store");
    // Two runs count together.
    for count in ["4", "3"] {
        vmm.tell(&["checkpoint", "--store", &store, "--every", "20ms", "--count", count]);
    }
    let second = ScrapedPage::scrape(&at);
    check_checkpoints(&first, &second);

    // A migration that fails, then one that does not. The end of the second one is not read, so
    // the process stays for a moment.
    let closed = ClosedAddress::new();
    vmm.refuse(4, &["send-migration", &format!("tcp:{}", closed.address)]);
    let third = ScrapedPage::scrape(&at);
    third.follows(&second);
    assert_eq!(third.sum("driftline_migrations_total", "result=\"failed\""), 1.0);
    request(&vmm.socket(), "POST", "/v1/migration", &json!({ "to": to }).to_string());
    let last = wait_for("the end of the migration", || {
        let page = ScrapedPage::scrape(&at);
        page.follows(&third);
        (page.sum("driftline_migrations_total", "result=\"completed\"") == 1.0).then_some(page)
    });
    assert_eq!(last.sum("driftline_migrations_total", ""), 2.0, "{last:?}");
    assert_eq!(last.sum("driftline_migration_phase", "phase=\"finished\""), 1.0, "{last:?}");
    let downtime = last.sum("driftline_migration_downtime_seconds", "");
    assert!((1e-6..60.0).contains(&downtime), "{downtime}");
    let sent = last.sum("driftline_migration_transferred_bytes_total", "role=\"source\"");
    assert!(sent > 1e6, "{sent}");
    assert_eq!(vmm.wait(), Some(0), "{}", vmm.stderr());

    there.await_api();
    let arrived = ScrapedPage::scrape(&there_at);
    let received = arrived.sum("driftline_migration_transferred_bytes_total", "name=\"web-1\"");
    assert!((0.5 * sent..1.1 * sent).contains(&received), "{received} of {sent}");
    assert_eq!(arrived.sum("driftline_guest_state", "state=\"running\""), 1.0);
    assert_eq!(arrived.sum("driftline_checkpoints_total", ""), 0.0);
    there.tell(&["stop"]);
    assert_eq!(there.wait(), Some(0), "{}", there.stderr());
}

/// Bytes from sources whose guests did not arrive still count.
#[test]
fn receiver_counts_bytes_of_all_sources() {
    let tmp = TestDir::new();
    let (there, to) = receiver(&tmp, "there", LISTEN);
    let at = address(&there);
    let name = "driftline_migration_transferred_bytes_total";
    let vmm = Vmm::run(&tmp, "vmm", THREADS);
    let mut before = ScrapedPage::scrape(&at);
    for _ in 0..2 {
        let limited = json!({ "to": to, "max_bandwidth_bytes_per_s": 4 << 20 }).to_string();
        request(&vmm.socket(), "POST", "/v1/migration", &limited);
        let least = before.sum(name, "") + 1e6;
        wait_for("a megabyte", || (ScrapedPage::scrape(&at).sum(name, "") > least).then_some(()));
        vmm.tell(&["cancel-migration"]);
        wait_for("the guest to stay", || (vmm.state() == "running").then_some(()));
        wait_for("its end", || {
            let page = ScrapedPage::scrape(&at);
            page.follows(&before);
            (page.sum("driftline_migration_phase", "phase=\"waiting\"") == 1.0).then_some(())
        });
        let after = ScrapedPage::scrape(&at);
        after.follows(&before);
        assert!(after.sum(name, "") > least, "{after:?}");
        before = after;
    }
    assert_eq!(before.sum("driftline_migration_refusals_total", ""), 2.0, "{before:?}");
}

#[test]
fn lazy_restore_counts_its_faults() {
    if !kvm_or_skip("lazy_restore_counts_its_faults") {
        return;
    }
    let tmp = TestDir::new();
    let store = tmp.text("store");
    let guest = ["--mem", "64M", "--guest", "payload,ws=32M,rate=64M,fill=random,report=200"];
    let mut vmm = Vmm::run(&tmp, "vmm", &guest);
    wait_for("a whole pass", || vmm.reports().iter().any(|r| r.passes > 0).then_some(()));
    vmm.tell(&["checkpoint", "--store", &store, "--count", "2", "--every", "50ms"]);
    vmm.kill();
    let args = ["restore", "--store", &store, "--lazy", "-v"];
    let mut vmm = Vmm::start(&tmp, "lazy", &[&args[..], LISTEN].concat());
    vmm.await_api();
    if vmm.stderr().contains("no userfaultfd") {
        return skip("lazy_restore_counts_its_faults", "this host has no userfaultfd");
    }
    let at = address(&vmm);
    let page = wait_for("all pages", || {
        let page = ScrapedPage::scrape(&at);
        (page.sum("driftline_restore_pages_left", "") == 0.0).then_some(page)
    });
    assert!(page.sum("driftline_restore_pages_total", "") > 8000.0, "{page:?}");
    let [faults, sum_s] =
        ["count", "sum"].map(|end| page.sum(&format!("driftline_restore_fault_seconds_{end}"), ""));
    assert!(faults >= 1.0 && sum_s > 0.0 && sum_s < 60.0, "{faults} faults, {sum_s} s");
    // A run of checkpoints has the rings harvested.
    vmm.tell(&["checkpoint", "--store", &tmp.text("other"), "--count", "2", "--every", "50ms"]);
    assert!(ScrapedPage::scrape(&at).sum("driftline_dirty_harvest_seconds_count", "") >= 2.0);
    assert!(ScrapedPage::scrape(&at).sum("driftline_guest_info", "checkpoint=\"2\"") == 1.0);
}

#[test]
fn address_of_metrics_answers_nothing_else() {
    let tmp = TestDir::new();
    let vmm = Vmm::run(&tmp, "vmm", &[THREADS, LISTEN].concat());
    let at = address(&vmm);
    for (request, status) in [
        ("GET /v1/info HTTP/1.1", "404"),
        ("POST /v1/stop HTTP/1.1", "404"),
        ("PATCH /vm HTTP/1.1", "404"),
        ("POST /metrics HTTP/1.1", "405"),
        ("DELETE /metrics HTTP/1.1", "405"),
    ] {
        let (head, _) = http(&at, request);
        assert!(head.starts_with(&format!("HTTP/1.1 {status}")), "{request}: {head}");
    }
    assert_eq!(vmm.state(), "running");
    let (head, body) = http(&at, "HEAD /metrics HTTP/1.1");
    assert!(head.starts_with("HTTP/1.1 200") && body.is_empty(), "{head}{body}");
    assert!(head.contains("content-type: text/plain; version=0.0.4; charset=utf-8"), "{head}");
    let accept = "GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text;version=1.0.0";
    let (head, body) = http(&at, accept);
    let kind = "content-type: application/openmetrics-text; version=1.0.0; charset=utf-8";
    assert!(head.contains(kind) && body.ends_with("\n# EOF\n"), "{head}");
    // The API socket answers in the same way.
    let page = request(&vmm.socket(), "GET", "/metrics", "");
    assert!(page.contains("text/plain; version=0.0.4") && page.contains("driftline_guest_state"));
}

#[test]
fn silent_clients_keep_no_collector_out() {
    let tmp = TestDir::new();
    let vmm = Vmm::run(&tmp, "vmm", &[THREADS, LISTEN].concat());
    let at = address(&vmm);
    let files = ScrapedPage::scrape(&at).sum("process_open_fds", "");
    let says = ["", "GET /metr", "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"];
    let clients: Vec<TcpStream> = says
        .iter()
        .cycle()
        .take(300)
        .map(|says| {
            let mut client = TcpStream::connect(&at).unwrap();
            // The connection may have been displaced already.
            let _ = client.write_all(says.as_bytes());
            client
        })
        .collect();
    // Requests that are being answered may be as many as is allowed.
    let now = wait_for("an answer", || {
        let (head, body) = http(&at, "GET /metrics HTTP/1.1");
        let answered = head.starts_with("HTTP/1.1 200");
        answered.then(|| ScrapedPage::parse(&body).sum("process_open_fds", ""))
    });
    assert!(now <= files + 64.0 + 16.0, "{now} files, {files} before");
    drop(clients);
    assert_eq!(vmm.state(), "running");
}

#[test]
fn addresses_for_metrics_are_checked() {
    let base = [&["run"], THREADS, &["--serial", "null", "--metrics-listen"]].concat();
    let run = |code: i32, address: &str| fail(code, &[&base[..], &[address]].concat());
    for bad in ["localhost:9464", "9464", "127.0.0.1", "127.0.0.1:65536", ""] {
        let stderr = run(2, bad);
        assert!(
            stderr.contains("--metrics-listen") && stderr.contains("127.0.0.1:9464"),
            "{stderr}"
        );
    }
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let stderr = run(1, &address);
    assert!(stderr.contains(&address) && stderr.contains("--metrics-listen"), "{stderr}");
    // An address that other hosts reach is allowed, with a warning.
    let tmp = TestDir::new();
    for (listen, warns) in [("0.0.0.0:0", true), ("127.0.0.1:0", false)] {
        let name = if warns { "open" } else { "closed" };
        let vmm = Vmm::run(&tmp, name, &[THREADS, &["--metrics-listen", listen]].concat());
        let stderr = vmm.stderr();
        assert_eq!(stderr.contains("no authentication"), warns, "{stderr}");
        assert!(stderr.contains("metrics on http://"), "the free port: {stderr}");
    }
}

/// A program that ends with its test.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs `promtool` with `input`. Returns whether it finds nothing wrong, and its output.
fn promtool(args: &[&str], input: &str) -> io::Result<(bool, String)> {
    let mut child = Command::new("promtool")
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    child.stdin.take().unwrap().write_all(input.as_bytes())?;
    let out = child.wait_with_output()?;
    Ok((out.status.success(), text(&out.stdout) + &text(&out.stderr)))
}

fn docs(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name).canonicalize().unwrap()
}

/// Returns the answer of the Prometheus at `at` to `query`, once it answers at all.
fn query(at: &str, query: &str) -> Option<Value> {
    let encoded: String = query.bytes().map(|b| format!("%{b:02x}")).collect();
    TcpStream::connect(at).ok()?;
    let head = format!("GET /api/v1/query?query={encoded} HTTP/1.0");
    let (_, body) = http(at, &head);
    serde_json::from_str(&body).ok()
}

/// Returns the dashboard's expressions, with what Grafana fills in.
fn dashboard() -> Vec<String> {
    let dashboard = std::fs::read_to_string(docs("grafana.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&dashboard).unwrap();
    let targets = dashboard["panels"].as_array().unwrap().iter();
    let targets = targets.filter_map(|panel| panel["targets"].as_array()).flatten();
    let expressions = targets.map(|target| target["expr"].as_str().unwrap());
    expressions.map(|e| e.replace("$__rate_interval", "30s").replace("$vm_id", ".*")).collect()
}

/// Starts a Prometheus that scrapes `target` every second. Returns its address.
fn start_prometheus(tmp: &TestDir, target: &str) -> (String, Program) {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let at = format!("127.0.0.1:{port}");
    let config = json!({
        "global": { "scrape_interval": "1s", "evaluation_interval": "1s" },
        "rule_files": [docs("alerts.yml")],
        "scrape_configs": [
            { "job_name": "driftline", "static_configs": [{ "targets": [target] }] },
        ],
    });
    // JSON is YAML.
    std::fs::write(tmp.path("prometheus.yml"), config.to_string()).unwrap();
    let log = std::fs::File::create(tmp.path("prometheus.log")).unwrap();
    let child = Command::new("prometheus")
        .arg(format!("--config.file={}", tmp.text("prometheus.yml")))
        .arg(format!("--storage.tsdb.path={}", tmp.text("tsdb")))
        .arg(format!("--web.listen-address={at}"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap();
    (at, Program(child))
}

#[test]
fn prometheus_scrapes_a_guest() {
    const TEST: &str = "prometheus_scrapes_a_guest";
    for program in ["prometheus", "promtool"] {
        if Command::new(program).arg("--version").stdout(Stdio::null()).spawn().is_err() {
            let why = "there is no Prometheus: apt-get install prometheus";
            return skip(TEST, why);
        }
    }
    if !kvm_or_skip(TEST) {
        return;
    }
    let tmp = TestDir::new();
    let disk = tmp.text("disk.img");
    std::fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let guest = ["--mem", "64M", "--vcpus", "2", "--guest", "payload,ws=16M,rate=64M", "--disk"];
    let disk = format!("path={disk}");
    let vmm = Vmm::run(&tmp, "vmm", &[&guest[..], &[&disk, "--name", "web-1"], LISTEN].concat());
    let target = address(&vmm);
    let store = tmp.text("store");
    vmm.tell(&["checkpoint", "--store", &store, "--every", "50ms", "--detach"]);

    let (_, page) = http(&target, "GET /metrics HTTP/1.1");
    let (is_good, stderr) = promtool(&["check", "metrics"], &page).unwrap();
    assert!(is_good && stderr.trim().is_empty(), "promtool: {stderr}");
    let alerts = docs("alerts.yml");
    let (is_good, stderr) = promtool(&["check", "rules", alerts.to_str().unwrap()], "").unwrap();
    assert!(is_good, "promtool: {stderr}");

    let (at, _prometheus) = start_prometheus(&tmp, &target);
    let sum = |expression: &str| {
        let answer = query(&at, &format!("sum({expression})"))?;
        answer["data"]["result"][0]["value"][1].as_str()?.parse::<f64>().ok()
    };
    wait_for("two scrapes", || (sum("count_over_time(up[1m])")? >= 2.0).then_some(()));
    assert_eq!(sum("up{job=\"driftline\"}"), Some(1.0), "{}", tmp.read("prometheus.log"));
    let state = "driftline_guest_state{state=\"running\",name=\"web-1\"}";
    assert_eq!(sum(state), Some(1.0));
    let answer = query(&at, state).unwrap();
    let id = vmm.info().unwrap()["vm_id"].clone();
    assert_eq!(answer["data"]["result"][0]["metric"]["vm_id"], id, "{answer}");
    let rate = "rate(driftline_checkpoints_total[1m])";
    wait_for("a rate", || (sum(rate)? > 1.0).then_some(()));
    let pause = "histogram_quantile(0.99, rate(driftline_checkpoint_pause_seconds_bucket[1m]))";
    let pause = sum(pause).unwrap();
    assert!((1e-5..=1.0).contains(&pause), "{pause}");
    assert_eq!(sum("count(driftline_disk_requests_total)"), Some(3.0));
    for expression in dashboard() {
        let answer = query(&at, &expression).unwrap();
        assert_eq!(answer["status"], "success", "{expression}: {answer}");
    }
    // Nothing is wrong with this guest.
    assert_eq!(sum("ALERTS{alertstate=\"firing\"}"), None);
    assert!(output(&["checkpoint", "--stop", "--api-sock", &vmm.socket()]).status.success());
    succeed(&["stop", "--api-sock", &vmm.socket()]);
}
