//! Taps that cannot be used, and a Linux guest whose vsock device migrates to another host.
//!
//! Hosts are network namespaces with a tap and a bridge each, joined by a third namespace. The
//! tests need KVM, the right to create namespaces, and the Linux image that `images/linux/build.sh`
//! makes. They report what is missing.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::{TestDir, driftline, fail, succeed, text, wait_for};
use driftline_machine::testing::{kvm_or_skip, linux_guest, skip};
use serde_json::Value;

/// Limit for a boot. A guest boots in seconds where its ring 0 is not emulated.
const BOOT: Duration = Duration::from_secs(180);
const PEER: &str = "10.77.0.1/24";
const CMDLINE: &str = "console=ttyS0 reboot=k panic=-1 quiet noxsave tsc=reliable no_timer_check \
    rodata=off clearcpuid=popcnt,smap,erms,fsrm,cx16 noreplace-smp driftline.ip=10.77.0.2/24 \
    driftline.check=tcp";

/// Returns the folder of the Linux image.
fn image() -> PathBuf {
    linux_guest().unwrap()
}

fn try_ip(args: &[&str]) -> Result<(), String> {
    let out = Command::new("ip").args(args).output().map_err(|e| format!("ip: {e}"))?;
    match out.status.success() {
        true => Ok(()),
        false => Err(format!("ip {}: {}", args.join(" "), text(&out.stderr).trim())),
    }
}

fn ip(args: &[&str]) {
    try_ip(args).unwrap();
}

/// A network namespace, deleted on drop.
struct HostNamespace(String);

impl HostNamespace {
    fn new(name: &str) -> Result<Self, String> {
        let name = format!("dl{}{name}", std::process::id());
        try_ip(&["netns", "add", &name])?;
        let new = Self(name);
        new.ip(&["link", "set", "lo", "up"]);
        new.ip(&["link", "add", "br0", "type", "bridge"]);
        new.ip(&["link", "set", "br0", "up"]);
        Ok(new)
    }

    fn ip(&self, args: &[&str]) {
        ip(&[&["-n", &self.0], args].concat());
    }

    fn command(&self, program: &str, args: &[&str]) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.0, program]).args(args);
        command.env_remove("RUST_LOG").stdin(Stdio::null());
        command
    }

    fn address(&self) -> &'static str {
        if self.0.ends_with('s') { "10.77.0.11" } else { "10.77.0.12" }
    }

    fn add_tap(&self, name: &str, more: &[&str]) {
        self.ip(&[&["tuntap", "add", "dev", name, "mode", "tap"], more].concat());
        self.ip(&["link", "set", name, "master", "br0", "up"]);
    }
}

impl Drop for HostNamespace {
    fn drop(&mut self) {
        if let Err(e) = try_ip(&["netns", "del", &self.0]) {
            eprintln!("{e}");
        }
    }
}

/// Two hosts and the network between them.
struct TwoHosts {
    source: HostNamespace,
    destination: HostNamespace,
    _between: HostNamespace,
}

impl TwoHosts {
    fn new() -> Result<Self, String> {
        let peer = HostNamespace::new("p")?;
        peer.ip(&["addr", "add", PEER, "dev", "br0"]);
        let host = |name: &str, address: &str| {
            let host = HostNamespace::new(name)?;
            let port = format!("to-{name}");
            let ends = ["name", &port, "type", "veth", "peer", "name", "up0", "netns", &host.0];
            peer.ip(&[&["link", "add"], &ends[..]].concat());
            peer.ip(&["link", "set", &port, "master", "br0", "up"]);
            host.ip(&["link", "set", "up0", "master", "br0", "up"]);
            host.ip(&["addr", "add", address, "dev", "br0"]);
            host.add_tap("tap0", &[]);
            Ok::<_, String>(host)
        };
        let (source, destination) = (host("s", "10.77.0.11/24")?, host("d", "10.77.0.12/24")?);
        Ok(Self { source, destination, _between: peer })
    }
}

/// Creates the network that these tests need. Reports what is missing for `test`, if anything.
fn network_or_skip(test: &str) -> Option<TwoHosts> {
    if !kvm_or_skip(test) {
        return None;
    }
    if let Err(why) = linux_guest() {
        skip(test, &why.to_string());
        return None;
    }
    TwoHosts::new().map_err(|why| skip(test, &why)).ok()
}

/// A process of a test, killed when dropped. Uses `name.out` and `name.err` in the test's
/// directory.
struct LoggedProcess<'p> {
    tmp: &'p TestDir,
    name: &'static str,
    child: Child,
}

impl<'p> LoggedProcess<'p> {
    fn start(tmp: &'p TestDir, name: &'static str, mut command: Command) -> Self {
        let file = |ending: &str| File::create(tmp.path(&format!("{name}.{ending}"))).unwrap();
        let child = command.stdout(file("out")).stderr(file("err")).spawn().unwrap();
        Self { tmp, name, child }
    }

    /// Starts a VMM on `host`, with its own socket, serial file and directory.
    fn driftline(
        tmp: &'p TestDir,
        name: &'static str,
        host: &HostNamespace,
        args: &[&str],
    ) -> Self {
        let (socket, state) = (socket(tmp, name), tmp.text(&format!("{name}.state")));
        let serial = format!("file:{}", tmp.text(&format!("{name}.serial")));
        let own = ["--api-sock", &socket, "--serial", &serial, "--state-dir", &state];
        let all = [args, &own].concat();
        Self::start(tmp, name, host.command(env!("CARGO_BIN_EXE_driftline"), &all))
    }

    /// Starts a guest and waits until it has booted to its shell.
    fn linux(tmp: &'p TestDir, name: &'static str, host: &HostNamespace, more: &[&str]) -> Self {
        let file = |name: &str| image().join(name).to_str().unwrap().to_owned();
        let (kernel, initrd) = (file("vmlinux"), file("initramfs.cpio"));
        let boot = ["run", "--kernel", &kernel, "--initrd", &initrd, "--mem", "128M"];
        let args = [&boot[..], &["--cmdline", CMDLINE], more].concat();
        let mut guest = Self::driftline(tmp, name, host, &args);
        let begun = Instant::now();
        while !guest.serial().contains("driftline-linux: shell") {
            guest.assert_alive();
            assert!(begun.elapsed() < BOOT, "the guest does not boot: {}", guest.serial());
            std::thread::sleep(Duration::from_millis(100));
        }
        eprintln!("{name}: booted in {:.1} s", begun.elapsed().as_secs_f64());
        guest
    }

    fn serial(&self) -> String {
        self.tmp.read(&format!("{}.serial", self.name))
    }

    fn printed(&self) -> String {
        self.tmp.read(&format!("{}.out", self.name))
    }

    fn assert_alive(&mut self) {
        let ended = self.child.try_wait().unwrap();
        let stderr = self.tmp.read(&format!("{}.err", self.name));
        assert!(ended.is_none(), "{} ended: {ended:?}: {stderr}", self.name);
    }

    /// Returns the last number that it has printed as `key=number`.
    fn figure(&self, key: &str) -> Option<u64> {
        let printed = self.printed();
        let key = format!(" {key}=");
        let value = printed.rsplit_once(&key)?.1;
        value.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    }

    fn interrupt(&mut self) -> Option<i32> {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
        let child = &mut self.child;
        wait_for(self.name, || child.try_wait().unwrap()).code()
    }
}

impl Drop for LoggedProcess<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let stderr = self.tmp.read(&format!("{}.err", self.name));
            eprintln!("{} printed: {}\nand said: {stderr}", self.name, self.printed());
        }
    }
}

fn socket(tmp: &TestDir, name: &str) -> String {
    tmp.text(&format!("{name}.sock"))
}

/// Sends numbered messages to the guest's echo server every 20 ms, and checks the answers.
fn echo<'p>(
    tmp: &'p TestDir,
    name: &'static str,
    host: &HostNamespace,
    to: &str,
) -> LoggedProcess<'p> {
    let check = image().join("driftline-check");
    let args = ["echo", to, "port=7", "interval=20ms", "run=300s"];
    let mut process = LoggedProcess::start(tmp, name, host.command(check.to_str().unwrap(), &args));
    wait_for("answers of the guest's echo", || {
        process.assert_alive();
        process.figure("received").filter(|n| *n > 50)
    });
    process
}

#[test]
fn unusable_tap_is_refused_with_the_reason() {
    const TEST: &str = "unusable_tap_is_refused_with_the_reason";
    if !kvm_or_skip(TEST) {
        return;
    }
    let run = |net: &str| {
        let guest =
            ["--serial", "null", "--mem", "32M", "--guest", "payload,ws=1M,rate=1M,burst=8"];
        [&["run", "--net", net], &guest[..]].concat().iter().map(|s| (*s).to_owned()).collect()
    };
    let refused = |code, net: &str| {
        let args: Vec<String> = run(net);
        fail(code, &args.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let stderr = refused(3, "tap=dl-nowhere");
    assert!(stderr.contains("tap \"dl-nowhere\" does not exist on this host"), "{stderr}");
    for bad in ["dl0", "tap=", "tap=a/b", "tap=t,mac=1", "tap=t,queues=100"] {
        assert!(refused(2, bad).contains("--net"), "{bad}");
    }
    let host = match HostNamespace::new("t") {
        Ok(host) => host,
        Err(why) => return skip(TEST, &why),
    };
    host.add_tap("one", &[]);
    host.add_tap("many", &["multi_queue"]);
    let tmp = TestDir::new();
    let refused_on_host = |net: &str| {
        let args: Vec<String> = run(net);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let out = host.command(env!("CARGO_BIN_EXE_driftline"), &args).output().unwrap();
        assert_eq!(out.status.code(), Some(1), "{net}: {}", text(&out.stderr));
        text(&out.stderr)
    };
    let stderr = refused_on_host("tap=one,queues=2");
    assert!(stderr.contains("\"one\"") && stderr.contains("without `multi_queue`"), "{stderr}");
    let stderr = refused_on_host("tap=many");
    assert!(stderr.contains("\"many\"") && stderr.contains("with `multi_queue`"), "{stderr}");
    let stderr = refused_on_host("tap=br0");
    assert!(stderr.contains("\"br0\" cannot be used as a tap"), "{stderr}");
    // A tap has one owner, whether with one queue or several.
    let nets = ["--net", "tap=one", "--net", "tap=many,queues=2"];
    let guest = ["run", "--mem", "32M", "--guest", "payload,ws=1M"];
    let mut owner = LoggedProcess::driftline(&tmp, "owner", &host, &[&guest[..], &nets].concat());
    wait_for("the guest", || {
        owner.assert_alive();
        let out = driftline(&["info", "--api-sock", &socket(&tmp, "owner")]).output().unwrap();
        out.status.success().then_some(())
    });
    assert!(refused_on_host("tap=one").contains("tap \"one\" is in use by another"));
    assert!(refused_on_host("tap=many,queues=2").contains("tap \"many\" is in use by another"));
}

/// Migrates the guest of `from` to a new VMM `name` on `host`.
fn migrate<'p>(
    tmp: &'p TestDir,
    from: &str,
    name: &'static str,
    host: &HostNamespace,
) -> LoggedProcess<'p> {
    let address = format!("tcp:{}:7999", host.address());
    let vsock = format!("uds={}", tmp.text(&format!("{name}.vsock")));
    let args =
        ["receive-migration", &address, "--insecure", "--net", "tap=tap0", "--vsock", &vsock];
    let mut to = LoggedProcess::driftline(tmp, name, host, &args);
    wait_for("the destination", || {
        to.assert_alive();
        tmp.read(&format!("{name}.err")).contains("waiting for a migration").then_some(())
    });
    let sent =
        ["send-migration", &address, "--insecure", "--json", "--api-sock", &socket(tmp, from)];
    let report: Value = serde_json::from_str(&succeed(&sent)).unwrap();
    assert_eq!(report["status"], "completed", "{report}");
    to
}

#[test]
fn vsock_connection_ends_with_its_host() {
    let Some(network) = network_or_skip("vsock_connection_ends_with_its_host") else {
        return;
    };
    let tmp = TestDir::new();
    let vsock = format!("cid=5,uds={}", tmp.text("v0.vsock"));
    let devices = ["--net", "tap=tap0", "--vsock", &vsock];
    let _source = LoggedProcess::linux(&tmp, "v0", &network.source, &devices);
    let through = |name: &str| format!("vsock={}", tmp.text(&format!("{name}.vsock")));
    let mut old = echo(&tmp, "old", &network.source, &through("v0"));
    let mut moved = migrate(&tmp, "v0", "v1", &network.destination);
    let end = wait_for("the end of the old connection", || old.child.try_wait().unwrap());
    assert_eq!(end.code(), Some(1), "{}", old.printed());
    let mut new = echo(&tmp, "new", &network.destination, &through("v1"));
    assert_eq!(new.interrupt(), Some(0), "{}", new.printed());
    // The guest's server counts the previous connection as closed, because the device reported
    // that.
    wait_for("the guest's count of connections", || {
        moved.assert_alive();
        let serial = moved.serial();
        let last = serial.lines().rfind(|l| l.starts_with("check tcp: connections="))?;
        last.contains("connections=0 ").then_some(())
    });
}
