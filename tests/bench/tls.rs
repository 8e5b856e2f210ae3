//! Compares a live migration over TLS with one in clear text, and with QEMU's over TLS, in turn:
//! `cargo bench -p tests --bench tls`.
//!
//! | figure | of |
//! | --- | --- |
//! | MB/s | pass 0 of incompressible memory; for QEMU, multifd with two channels and x509, the whole migration |
//! | CPU seconds a GiB | all threads of the source and of the destination, guest included |
//! | downtime | from the source's request to pause until the destination has resumed the guest |
//!
//! Both ends share the processors of this host. The figures are medians of five migrations of each
//! kind; a number as an argument is their number. `openssl` makes the certificates.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a bench")]

mod process;
mod qemu;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use driftline_images::PayloadSpec;
use process::{CpuTimes, has_ended, wait_for_pass};
use qemu::QemuProcess;
use tests::{Driftline, SOON, ScratchDir, json_of};

/// Default number of migrations of each kind.
const COUNT: usize = 5;
/// A guest whose memory does not compress and is written only once.
const SPEC: &str = "payload,ws=768M,rate=400M,pattern=once,fill=random";
const MEM: &str = "1G";
const DOWNTIME_MS: u64 = 300;

/// One migration.
#[derive(Clone, Copy)]
struct Sample {
    bytes_per_s: f64,
    downtime_ms: f64,
    cpu_s_a_gib: [f64; 2],
}

fn main() {
    if let Err(why) = driftline_machine::doctor::usable_kvm() {
        println!("not measured: {why}");
        return;
    }
    let count = std::env::args().find_map(|a| a.parse().ok()).unwrap_or(COUNT).max(1);
    let certificates = Certificates::new();
    let qemu = qemu::version();
    println!("{}", qemu.as_deref().unwrap_or("QEMU is not measured: it is not installed"));
    let (mut plain, mut tls, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..count {
        plain.push(driftline(None));
        tls.push(driftline(Some(certificates.dir())));
        if qemu.is_some() {
            theirs.push(in_qemu(certificates.dir()));
        }
    }
    println!(
        "\n| migration | MB/s | of plain | CPU s a GiB, source | destination | downtime, ms |"
    );
    println!("| --- | --- | --- | --- | --- | --- |");
    let base = median(&plain, |s| s.bytes_per_s);
    for (name, samples) in
        [("plain, pass 0", &plain), ("TLS, pass 0", &tls), ("QEMU, multifd and x509", &theirs)]
    {
        if samples.is_empty() {
            continue;
        }
        let rate = median(samples, |s| s.bytes_per_s);
        println!(
            "| {name} | {:.0} | {:.2} | {:.2} | {:.2} | {:.2} |",
            rate / 1e6,
            rate / base,
            median(samples, |s| s.cpu_s_a_gib[0]),
            median(samples, |s| s.cpu_s_a_gib[1]),
            median(samples, |s| s.downtime_ms),
        );
    }
}

fn driftline(tls_dir: Option<&Path>) -> Sample {
    let scratch = ScratchDir::new();
    let protection: Vec<&str> =
        tls_dir.iter().flat_map(|dir| ["--tls-dir", dir.to_str().unwrap()]).collect();
    let mut source = Driftline::run(&scratch, "source", SPEC, &["--mem", MEM]);
    wait_for_pass(&source.console(), 1);
    let args = [&["--json"], &protection[..]].concat();
    let (destination, address) = Driftline::receive_with(&scratch, "destination", &args);
    let before = CpuTimes::of([source.pid(), destination.pid()]);
    let downtime = DOWNTIME_MS.to_string();
    let args = [&[&*address, "--downtime-ms", &downtime, "--json"], &protection[..]].concat();
    let sent = source.cli("send-migration", &args);
    assert!(sent.status.success(), "{}", String::from_utf8_lossy(&sent.stderr));
    let report = json_of(&sent);
    tests::wait_for("end of the source", SOON, || has_ended(source.pid()).then_some(()));
    let cpu_s = before.since();
    source.wait_exit(SOON);
    let number = |value: &serde_json::Value| value.as_f64().expect("a figure of the report");
    let running = number(&destination.arrival()["taken_over_at_unix_us"]);
    let pass0 = &report["passes"][0];
    let gib = number(&report["transferred_bytes"]) / f64::from(1u32 << 30);
    Sample {
        bytes_per_s: number(&pass0["bytes"]) / number(&pass0["time_ms"]) * 1e3,
        downtime_ms: (running - number(&report["paused_at_unix_us"])) / 1e3,
        cpu_s_a_gib: cpu_s.map(|s| s / gib),
    }
}

fn in_qemu(tls_dir: &Path) -> Sample {
    let scratch = ScratchDir::new();
    let kernel = scratch.path("payload.elf");
    fs::write(&kernel, driftline_images::PAYLOAD_ELF).unwrap();
    let spec: PayloadSpec = SPEC.parse().unwrap();
    let (cmdline, size) = (spec.cmdline(1), (MEM, 1));
    let mut source = QemuProcess::start(&scratch, "source", &kernel, &cmdline, size, None);
    wait_for_pass(source.console(), 1);
    let address = qemu::free_address();
    let mut destination =
        QemuProcess::start(&scratch, "destination", &kernel, &cmdline, size, Some("defer"));
    source.use_tls(tls_dir, "client");
    destination.use_tls(tls_dir, "server");
    destination.listen(&address);
    let before = CpuTimes::of([source.pid(), destination.pid()]);
    let report = source.migrate(&address, DOWNTIME_MS);
    let cpu_s = before.since();
    let downtime_us = destination.event_us("RESUME") - source.event_us("STOP");
    let number = |value: &serde_json::Value| value.as_f64().expect("a figure of query-migrate");
    let sent = number(&report["ram"]["transferred"]);
    Sample {
        bytes_per_s: sent / (number(&report["total-time"]) / 1e3),
        downtime_ms: downtime_us / 1e3,
        cpu_s_a_gib: cpu_s.map(|s| s / (sent / f64::from(1u32 << 30))),
    }
}

/// A directory with a CA and the certificates of both roles for 127.0.0.1.
struct Certificates {
    dir: PathBuf,
    _scratch: ScratchDir,
}

impl Certificates {
    fn new() -> Self {
        let scratch = ScratchDir::new();
        let made = Self { dir: scratch.path("tls"), _scratch: scratch };
        fs::create_dir(&made.dir).unwrap();
        made.openssl("ecparam -name prime256v1 -genkey -noout -out ca-key.pem");
        made.openssl(
            "req -x509 -new -key ca-key.pem -days 2 -subj /CN=bench -out ca-cert.pem \
             -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign",
        );
        for role in ["client", "server"] {
            let names = format!("subjectAltName=IP:127.0.0.1\nextendedKeyUsage={role}Auth\n");
            fs::write(made.dir().join("ext"), names).unwrap();
            made.openssl(&format!("ecparam -name prime256v1 -genkey -noout -out {role}-key.pem"));
            made.openssl(&format!("req -new -key {role}-key.pem -subj /CN={role} -out csr"));
            made.openssl(&format!(
                "x509 -req -in csr -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial -days 2 \
                 -extfile ext -out {role}-cert.pem"
            ));
        }
        made
    }

    fn dir(&self) -> &Path {
        &self.dir
    }

    fn openssl(&self, line: &str) {
        let args = line.split_whitespace();
        let out = Command::new("openssl").args(args).current_dir(self.dir()).output().unwrap();
        assert!(out.status.success(), "{line}: {}", String::from_utf8_lossy(&out.stderr));
    }
}

fn median(samples: &[Sample], of: impl Fn(&Sample) -> f64) -> f64 {
    let mut values: Vec<f64> = samples.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
