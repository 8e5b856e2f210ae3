//! Measures the boot time of a guest, compared with QEMU's microvm and Firecracker where they are
//! on the path: `cargo bench -p driftline-cli --bench boot`.
//!
//! The first part boots a kernel of three instructions whose first effect is a byte on the console.
//! It measures the time from the start of the process to that byte, at 1 GiB, and the time that
//! Driftline itself reports (`boot_us`). The second part runs if `DRIFTLINE_LINUX_GUEST` names the
//! folder that `images/linux/build.sh` makes. It boots Linux with a disk and a network (in a
//! network namespace that ends with the process) and measures the time to its shell. Each row has
//! the median, the least and the most of its samples. The programs take turns.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, reason = "a bench")]

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const DRIFTLINE: &str = env!("CARGO_BIN_EXE_driftline");
const ROUNDS: usize = 21;
const LINUX_ROUNDS: usize = 3;
/// Time limit for a guest, in s.
const TIMEOUT_S: &str = "60";
const SHELL: &str = "driftline-linux: shell";

/// Works around hosts whose KVM emulates the guest's ring 0; harmless elsewhere. See images/linux.
const CMDLINE: &str = "console=ttyS0 reboot=k panic=-1 quiet noxsave tsc=reliable no_timer_check \
    rodata=off clearcpuid=popcnt,smap,erms,fsrm driftline.ip=10.0.0.2/24";

/// QEMU's command line up to the kernel's.
const MICROVM: &str = "qemu-system-x86_64 -M microvm,x-option-roms=off -accel kvm -cpu \
    host,-arch-capabilities,-cx16 -nodefaults -no-user-config -display none -no-reboot -serial \
    stdio";

fn main() {
    if let Err(why) = driftline_machine::doctor::usable_kvm() {
        println!("not measured: {why}");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    first_instruction(dir.path());
    match driftline_machine::testing::linux_guest() {
        Ok(guest) => linux(&guest, dir.path()),
        Err(why) => println!("Linux not measured: {why}"),
    }
}

fn first_instruction(dir: &Path) {
    // The kernel: mov dx, 0x3f8; mov al, '!'; out dx, al; hlt
    let code = [0xba, 0xf8, 0x03, 0, 0, 0xb0, b'!', 0xee, 0xf4];
    let kernel = dir.join("kernel.elf");
    std::fs::write(&kernel, driftline_machine::testing::Elf::new(&code).bytes()).unwrap();
    let kernel = kernel.to_str().unwrap();
    let mut programs = vec![
        ("Driftline", format!("{DRIFTLINE} run -v --kernel {kernel} --mem 1G --bare-cmdline")),
        ("QEMU microvm", format!("{MICROVM} -m 1G -kernel {kernel}")),
        ("Firecracker", firecracker(dir, kernel)),
    ];
    programs.retain(|(name, line)| is_installed(name, line));
    let mut samples = vec![Vec::new(); programs.len()];
    let mut reported = Vec::new();
    for _ in 0..ROUNDS {
        for ((_, line), samples) in programs.iter().zip(&mut samples) {
            let (ms, stderr) = until(line, |out| {
                let mut byte = [0];
                while out.read(&mut byte).unwrap() == 1 && byte[0] != b'!' {}
                byte[0] == b'!'
            });
            samples.push(ms);
            reported.extend(boot_us(&stderr));
        }
    }
    println!(
        "\n| start of the process to the first byte of a guest of 1 GiB, ms | median | least | \
         most |"
    );
    println!("| --- | --- | --- | --- |");
    for ((name, _), samples) in programs.iter().zip(samples) {
        row(name, samples);
    }
    row("Driftline's own figure (`boot_us`)", reported);
}

fn linux(guest: &Path, dir: &Path) {
    let disk = dir.join("disk");
    std::fs::File::create(&disk).unwrap().set_len(64 << 20).unwrap();
    let (guest, disk) = (guest.to_str().unwrap(), disk.to_str().unwrap());
    println!(
        "\n| start of the process to the shell of Linux, disk and network, 256 MiB, ms | median | \
         least | most |"
    );
    println!("| --- | --- | --- | --- |");
    for vcpus in [1, 2] {
        // Command lines of the SMP kernel: with one processor its lock prefixes stay.
        let cmdline = format!("{CMDLINE}{}", if vcpus == 1 { " noreplace-smp" } else { "" });
        let image = format!("{guest}/vmlinux");
        let initrd = format!("{guest}/initramfs.cpio");
        let driftline = format!(
            "{DRIFTLINE} run --kernel {image} --initrd {initrd} --mem 256M --vcpus {vcpus} --disk \
             path={disk} --net tap=tap0 --cmdline '{cmdline}'"
        );
        let qemu = format!(
            "{MICROVM} -m 256M -smp {vcpus} -kernel {image} -initrd {initrd} -drive \
            id=d,file={disk},format=raw,if=none -device virtio-blk-device,drive=d -netdev \
            tap,id=n,ifname=tap0,script=no,downscript=no -device virtio-net-device,netdev=n \
            -append '{cmdline}'"
        );
        let programs = [("Driftline", driftline), ("QEMU microvm", qemu)];
        let mut samples = vec![Vec::new(); programs.len()];
        for _ in 0..LINUX_ROUNDS {
            for ((name, line), samples) in programs.iter().zip(&mut samples) {
                if !is_installed(name, line) {
                    continue;
                }
                let network = "ip tuntap add tap0 mode tap && ip link set tap0 up";
                let line = format!("exec unshare --net sh -c \"{network} && exec {line}\"");
                let (ms, _) = until(&line, |out| {
                    BufReader::new(out).lines().map_while(Result::ok).any(|l| l.contains(SHELL))
                });
                samples.push(ms);
            }
        }
        for ((name, _), samples) in programs.iter().zip(samples).filter(|(_, s)| !s.is_empty()) {
            row(&format!("{name}, {vcpus} vCPU"), samples);
        }
    }
}

/// Returns the command line of a Firecracker that reads its configuration from a file.
fn firecracker(dir: &Path, kernel: &str) -> String {
    let config = dir.join("firecracker.json");
    let text = format!(
        r#"{{"boot-source":{{"kernel_image_path":"{kernel}"}},"drives":[],
        "machine-config":{{"vcpu_count":1,"mem_size_mib":1024}}}}"#
    );
    std::fs::write(&config, text).unwrap();
    format!("firecracker --no-api --config-file {}", config.display())
}

fn is_installed(name: &str, line: &str) -> bool {
    let program = line.split(' ').next().unwrap();
    let found = Command::new("sh").args(["-c", &format!("command -v {program}")]).output().unwrap();
    if !found.status.success() {
        println!("not measured: {name}: {program} is not installed");
    }
    found.status.success()
}

/// Starts `line`, and stops it when `has_arrived` returns true for its output. Returns the time
/// until then, in ms, and its standard error.
fn until(line: &str, has_arrived: impl FnOnce(&mut dyn Read) -> bool) -> (f64, String) {
    let start = Instant::now();
    // `timeout` is the process that is killed; it ends the guest as well.
    let mut child = Command::new("timeout")
        .args([
            "--kill-after=1",
            TIMEOUT_S,
            "sh",
            "-c",
            &format!("exec {}", line.trim_start_matches("exec ")),
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let arrived = has_arrived(child.stdout.as_mut().unwrap());
    let ms = start.elapsed().as_secs_f64() * 1e3;
    // The process reports its figure shortly afterwards.
    std::thread::sleep(Duration::from_millis(20));
    let pid = child.id().to_string();
    Command::new("kill").args(["-TERM", &pid]).status().unwrap();
    let out = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(
        arrived,
        "{line} did not print the awaited text within {TIMEOUT_S} s, and said: {stderr}"
    );
    (ms, stderr)
}

/// Returns the figure that `-v` logs, in ms.
fn boot_us(stderr: &str) -> Option<f64> {
    let plain: String =
        stderr.split('\u{1b}').map(|s| s.split_once('m').map_or(s, |s| s.1)).collect();
    let digits = plain.split_once("boot_us=")?.1;
    let digits: String = digits.chars().take_while(char::is_ascii_digit).collect();
    Some(digits.parse::<f64>().ok()? / 1e3)
}

fn row(name: &str, mut samples: Vec<f64>) {
    samples.sort_by(f64::total_cmp);
    let (Some(least), Some(most)) = (samples.first(), samples.last()) else { return };
    println!("| {name} | {:.1} | {least:.1} | {most:.1} |", samples[samples.len() / 2]);
}
