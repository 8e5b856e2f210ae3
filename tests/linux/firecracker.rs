//! A Linux guest that a client of Firecracker's API configures and starts.

use std::fs::File;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tests::{
    EchoClient, GuestConsole, LINUX_CMDLINE, LinuxImage, Namespace, PEER, SOON, ScratchDir,
    assert_clean, driftline, has_booted, wait_for,
};

use super::served::BOOT;
use super::topology::siblings;
use super::{DISK_BYTES, text};

/// What the guest does besides the harness's options.
const CHECKS: &str = "driftline.ip=10.77.0.2/24 driftline.check=disk,tcp \
     driftline.disk=path=/dev/vda,pause=50ms";

/// Length of a value of the guest's metadata, in bytes: many segments.
const LARGE: usize = 40_000;

/// A process named `firecracker`. Dropping it kills the process.
pub(super) struct FirecrackerProcess {
    child: Child,
    socket: PathBuf,
    console: GuestConsole,
}

impl FirecrackerProcess {
    /// Starts the process that `program`, a command without arguments, runs.
    pub(super) fn start(mut program: Command, scratch: &ScratchDir) -> Self {
        let (socket, console) = (scratch.path("fc.sock"), scratch.path("fc.console"));
        let child = program
            .args(["firecracker", "--id", "linux-1", "--api-sock"])
            .arg(&socket)
            // Without a file of its own the log is on the console.
            .arg("--log-path")
            .arg(scratch.path("fc.log"))
            .arg("--metrics-path")
            .arg(scratch.path("fc.metrics"))
            .stdin(Stdio::piped())
            .stdout(File::create(&console).expect("a console file"))
            .stderr(File::create(scratch.path("fc.stderr")).expect("a file"))
            .spawn()
            .expect("driftline starts");
        let process = Self { child, socket, console: GuestConsole::at(console) };
        wait_for("API socket", SOON, || UnixStream::connect(&process.socket).ok());
        process
    }

    /// Sends a request. Returns the status and the body.
    fn ask(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let mut stream = UnixStream::connect(&self.socket).expect("it listens");
        let request =
            format!("{method} {path} HTTP/1.1\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        stream.write_all(request.as_bytes()).expect("it reads");
        stream.shutdown(Shutdown::Write).expect("it is connected");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer in UTF-8");
        let (head, body) = answer.split_once("\r\n\r\n").expect("an answer");
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        (status.expect("a status"), body.to_owned())
    }

    pub(super) fn done(&self, method: &str, path: &str, body: &Value) {
        let (status, answer) = self.ask(method, path, &body.to_string());
        assert_eq!(status, 204, "{method} {path}: {answer}");
    }

    fn page(&self, path: &str) -> Value {
        let (status, page) = self.ask("GET", path, "");
        assert_eq!(status, 200, "GET {path}: {page}");
        serde_json::from_str(&page).expect("a page")
    }

    fn state(&self) -> Value {
        self.page("/")["state"].take()
    }

    /// Returns the last number of the guest's flushed records.
    fn flushed(&self) -> Option<u64> {
        let lines = self.console.lines();
        let line = lines.iter().rev().find(|line| line.starts_with("check disk: flushed="))?;
        line.split(['=', ' ']).nth(3)?.parse().ok()
    }

    fn await_flushed(&self, more_than: u64) -> u64 {
        wait_for("flushed record", BOOT, || {
            // The kernel's warnings until then do not count.
            if !has_booted(&self.console) {
                return None;
            }
            assert_clean(&self.console);
            self.flushed().filter(|flushed| *flushed > more_than)
        })
    }

    /// Waits until the guest's shell runs.
    pub(super) fn await_shell(&self) {
        wait_for("shell of the guest", BOOT, || has_booted(&self.console).then_some(()));
    }

    /// Returns what the guest's shell prints for a command.
    pub(super) fn shell(&mut self, command: &str) -> String {
        let outputs = || {
            let lines = self.console.lines();
            let found = lines.iter().filter_map(|line| line.strip_prefix("[output] "));
            found.map(|output| output.trim_end().to_owned()).collect::<Vec<_>>()
        };
        let before = outputs().len();
        let input = self.child.stdin.as_mut().expect("a pipe");
        // The console shows the command, too.
        writeln!(input, "echo; echo \"[out\"\"put] $({command})\"").expect("it reads");
        wait_for("output of the shell", BOOT, || outputs().into_iter().nth(before))
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        kill_process(pid.expect("a process"), signal).expect("it is a child of ours");
    }
}

impl Drop for FirecrackerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Exchanges data with the guest's echo over the vsock's socket.
fn echo_over_vsock(linux: &LinuxImage, socket: &Path) {
    let through = format!("vsock={}", text(socket));
    let mut client = Command::new(linux.file("driftline-check"));
    client.args(["echo", &through, "port=7", "interval=20ms", "run=1s", "drain=60s"]);
    let out = client.output().expect("the image's checkers run");
    let answers = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success() && answers.contains("intact=yes"), "{answers}");
}

fn configure(process: &FirecrackerProcess, linux: &LinuxImage, disk: &Path) {
    process.done("PUT", "/machine-config", &json!({ "vcpu_count": 2, "mem_size_mib": 128 }));
    let (kernel, initrd) = (linux.file("vmlinux"), linux.file("initramfs.cpio"));
    let boot = json!({ "kernel_image_path": text(&kernel), "initrd_path": text(&initrd),
        "boot_args": format!("{LINUX_CMDLINE} {CHECKS}") });
    process.done("PUT", "/boot-source", &boot);
    let drive = json!({ "drive_id": "root", "is_root_device": true, "path_on_host": text(disk),
        "cache_type": "Writeback" });
    process.done("PUT", "/drives/root", &drive);
    let other = disk.with_extension("other");
    File::create(&other).and_then(|file| file.set_len(1 << 20)).expect("a file for a disk");
    let drive = json!({ "drive_id": "other", "is_root_device": false, "is_read_only": true,
        "path_on_host": text(&other) });
    process.done("PUT", "/drives/other", &drive);
    process.done("PUT", "/entropy", &json!({}));
    let net = json!({ "iface_id": "eth0", "host_dev_name": "tap0",
        "guest_mac": "06:00:0a:4d:00:02", "mtu": 1400 });
    process.done("PUT", "/network-interfaces/eth0", &net);
    let balloon = json!({ "amount_mib": 0, "deflate_on_oom": true, "free_page_hinting": true,
        "stats_polling_interval_s": 1 });
    process.done("PUT", "/balloon", &balloon);
    let mmds = json!({ "network_interfaces": ["eth0"], "version": "V2" });
    process.done("PUT", "/mmds/config", &mmds);
    process.done("PUT", "/mmds", &json!({ "name": "web-1", "large": "v".repeat(LARGE) }));
    let vsock = json!({ "guest_cid": 3, "uds_path": text(&disk.with_extension("vsock")) });
    process.done("PUT", "/vsock", &vsock);
}

/// Makes the guest report statistics of its memory repeatedly, and then its free memory.
fn use_balloon(process: &mut FirecrackerProcess) {
    let path = "/balloon/statistics";
    let total_kib = process.shell("sed -n 's/^MemTotal: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo");
    let total_bytes = total_kib.parse::<u64>().expect("a number") * 1024;
    let before = process.page(path);
    assert_eq!(before["total_memory"], total_bytes);
    let free = |statistics: &Value| statistics["free_memory"].as_u64().expect("free memory");
    assert_eq!(process.shell("head -c 40000000 /dev/zero >/filled; echo filled"), "filled");
    process.done("PATCH", path, &json!({ "stats_polling_interval_s": 2 }));
    wait_for("statistics of filled memory", BOOT, || {
        (free(&process.page(path)) + 20_000_000 < free(&before)).then_some(())
    });
    assert_eq!(process.page("/balloon")["stats_polling_interval_s"], 2);

    // Free memory that the host has given. The guest keeps what it has hinted until it is told that
    // the run is done.
    assert_eq!(process.shell("rm /filled; echo freed"), "freed");
    let status = "/balloon/hinting/status";
    assert_eq!(process.page(status), json!({ "host_cmd": 0, "guest_cmd": null }));
    process.done("PATCH", "/balloon/hinting/start", &json!({ "acknowledge_on_stop": false }));
    let hinted = json!({ "host_cmd": 2, "guest_cmd": 0 });
    wait_for("all hints", BOOT, || (process.page(status) == hinted).then_some(()));
    process.done("PATCH", "/balloon/hinting/stop", &json!({}));
    assert_eq!(process.page(status), json!({ "host_cmd": 1, "guest_cmd": 0 }));
    let (started, answer) = process.ask("PATCH", "/balloon/hinting/start", "");
    assert_eq!(started, 204, "{answer}");
    let done = json!({ "host_cmd": 1, "guest_cmd": 0 });
    wait_for("an acknowledged run", BOOT, || (process.page(status) == done).then_some(()));
}

/// Makes the guest read its metadata, in a session, while the client changes it.
fn read_metadata(process: &mut FirecrackerProcess) {
    let address = "169.254.169.254";
    let routed = process.shell(&format!("ip route add {address} dev eth0 && echo routed"));
    assert_eq!(routed, "routed");
    let ask = |process: &mut FirecrackerProcess, request: &str, filter: &str| {
        let request = format!("{request}\\r\\nConnection: close\\r\\n\\r\\n");
        process.shell(&format!("printf '{request}' | nc {address} 80 | {filter}"))
    };
    let refused = ask(process, "GET /name HTTP/1.1", "head -n 1");
    assert!(refused.starts_with("HTTP/1.1 401"), "{refused}");
    let session = "PUT /latest/api/token HTTP/1.1\\r\\nX-metadata-token-ttl-seconds: 60";
    let token = ask(process, session, "tail -n 1");
    let get = |path: &str| format!("GET {path} HTTP/1.1\\r\\nX-metadata-token: {token}");
    assert_eq!(ask(process, &get("/name"), "tail -n 1"), "web-1");
    let length = ask(process, &get("/large"), "tail -n 1 | tr -cd v | wc -c");
    assert_eq!(length, LARGE.to_string());
    process.done("PATCH", "/mmds", &json!({ "name": "web-2" }));
    assert_eq!(ask(process, &get("/name"), "tail -n 1"), "web-2");
}

#[test]
fn client_of_firecracker_boots_linux() {
    let _alone = tests::one_at_a_time();
    let test = "client_of_firecracker_boots_linux";
    let Some(linux) = LinuxImage::or_skip(test) else { return };
    let host = Namespace::new(PEER).and_then(|host| host.add_tap("tap0").map(|()| host));
    let host = match host {
        Ok(host) => host,
        Err(why) => return driftline_machine::testing::skip(test, &why),
    };
    let scratch = ScratchDir::new();
    let disk = scratch.path("disk");
    File::create(&disk).and_then(|file| file.set_len(DISK_BYTES)).expect("a file");
    let mut process = FirecrackerProcess::start(host.command(driftline()), &scratch);
    assert_eq!(process.state(), "Not started");
    configure(&process, &linux, &disk);
    process.done("PUT", "/actions", &json!({ "action_type": "InstanceStart" }));
    assert_eq!(process.state(), "Running");
    process.await_flushed(0);
    let of = |of: &str| format!("$(cat /sys/block/{of})");
    let parts = ["vda/ro", "vdb/ro", "vda/queue/write_cache", "vdb/queue/write_cache"].map(of);
    let seen = process.shell(&format!("echo {} $(cat /proc/cmdline)", parts.join(", ")));
    assert!(seen.starts_with("0, 1, write back, write through "), "{seen}");
    assert!(seen.contains(" pci=off root=/dev/vda rw virtio_mmio.device=4K@0x"), "{seen}");

    assert_eq!(siblings(&mut process), "0 0-1");
    let of = process.shell("echo $(cat /sys/class/net/eth0/address /sys/class/net/eth0/mtu)");
    assert_eq!(of, "06:00:0a:4d:00:02 1400");
    read_metadata(&mut process);
    let mut echo = EchoClient::start(&linux, &host, &scratch, "echo");
    let socket = disk.with_extension("vsock");
    echo_over_vsock(&linux, &socket);
    // It waits for the limit, and answers again without one.
    let limit = |size: u64| {
        let bandwidth = json!({ "bandwidth": { "size": size, "refill_time": 3_600_000 } });
        json!({ "iface_id": "eth0", "rx_rate_limiter": bandwidth })
    };
    process.done("PATCH", "/network-interfaces/eth0", &limit(2000));
    wait_for("an echo without answers", SOON, || {
        let before = echo.received();
        std::thread::sleep(Duration::from_secs(2));
        (echo.received() == before).then_some(())
    });
    process.done("PATCH", "/network-interfaces/eth0", &limit(0));
    echo.wait_answers(50);
    echo.finish();

    let sectors = |process: &mut FirecrackerProcess| process.shell("cat /sys/block/vdb/size");
    assert_eq!(sectors(&mut process), "2048");
    let path = scratch.path("larger");
    let mut content = vec![0; 3 << 20];
    content[..6].copy_from_slice(b"larger");
    std::fs::write(&path, content).expect("a file for a disk");
    let larger = json!({ "drive_id": "other", "path_on_host": text(&path) });
    process.done("PATCH", "/drives/other", &larger);
    assert_eq!(sectors(&mut process), "6144");
    assert_eq!(process.shell("head -c 6 /dev/vdb"), "larger");

    // What the guest uses is not among the pages that it hints.
    assert_eq!(process.shell("cp /bin/busybox /kept && echo kept"), "kept");
    use_balloon(&mut process);
    assert_eq!(process.shell("cmp /bin/busybox /kept && echo same"), "same");
    process.done("PATCH", "/vm", &json!({ "state": "Paused" }));
    assert_eq!(process.state(), "Paused");
    process.done("PATCH", "/vm", &json!({ "state": "Resumed" }));
    let paused = process.flushed().unwrap_or(0);
    let flushed = process.await_flushed(paused);

    process.done("PUT", "/actions", &json!({ "action_type": "FlushMetrics" }));
    let metrics = std::fs::read_to_string(scratch.path("fc.metrics")).expect("metrics");
    let lines = metrics.lines().map(|line| serde_json::from_str(line).expect("JSON"));
    let lines: Vec<Value> = lines.collect();
    let sum = |group: &str, name: &str| -> u64 {
        lines.iter().filter_map(|line| line[group][name].as_u64()).sum()
    };
    assert_eq!(
        (sum("mmds", "connections_created"), sum("mmds", "rx_no_token")),
        (5, 1),
        "{metrics}"
    );
    assert!(sum("mmds", "tx_bytes") > LARGE as u64, "{metrics}");
    for (group, name) in [
        ("block_root", "read_bytes"),
        ("block_root", "write_count"),
        ("block_root", "flush_count"),
        ("balloon", "stats_updates_count"),
        ("balloon", "free_page_hint_freed"),
    ] {
        assert!(sum(group, name) > 0, "{group} {name}: {metrics}");
    }

    process.signal(Signal::TERM);
    let ended = process.child.wait().expect("a child of ours");
    assert_eq!(ended.signal(), Some(Signal::TERM.as_raw()), "{ended:?}");
    assert!(socket.exists(), "clients of Firecracker remove it");
    linux.verify_disk(&disk, flushed);
}
