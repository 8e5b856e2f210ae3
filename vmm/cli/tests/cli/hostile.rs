//! A guest whose driver breaks the rules of virtio, on every device and in every way listed here.
//! The VMM reports the device and the reason, and stops only that device. The machine and its other
//! devices continue.

use std::fs::File;

use crate::common::script::{
    BUFFERS, DEVICES, DriverScript, INDIRECT, MEM_BYTES, NEXT, QUEUE_DESC_LOW, QUEUE_NUM,
    QUEUE_READY, QUEUE_SEL, QUEUE_USED_LOW, RINGS, SIZE, STATUS, ScriptedDevice, WRITE,
};
use crate::common::{TestDir, driftline, text};
use driftline_machine::testing::{TestTap, kvm_or_skip, skip};

/// A violation's name, the driver's actions, and a part of the resulting message.
type DriverViolation = (&'static str, fn(&mut DriverScript, ScriptedDevice), &'static str);

const VIOLATIONS: [DriverViolation; 11] = [
    (
        "a loop",
        |s, d| {
            s.describe(0, BUFFERS, 64, NEXT, 1);
            s.describe(1, BUFFERS, 64, NEXT, 0);
            s.offer(d, 0, 1);
        },
        "the descriptor chain from 0 is broken: it loops",
    ),
    (
        "a next descriptor that does not exist",
        |s, d| {
            s.describe(0, BUFFERS, 64, NEXT, SIZE);
            s.offer(d, 0, 1);
        },
        "the descriptor chain from 0 is broken",
    ),
    (
        "a head that does not exist",
        |s, d| s.offer(d, SIZE, 1),
        "the descriptor chain from 8 is broken",
    ),
    ("an available index that runs away", |s, d| s.offer(d, 0, SIZE + 1), "of 8 entries: "),
    (
        "a length past memory",
        |s, d| {
            s.describe(0, MEM_BYTES - 0x1000, 0x2000, 0, 0);
            s.offer(d, 0, 1);
        },
        "a buffer of 8192 bytes at 0x1fff000 does not lie in guest memory",
    ),
    (
        "registers as a buffer",
        |s, d| {
            s.describe(0, DEVICES, 16, WRITE, 0);
            s.offer(d, 0, 1);
        },
        "a buffer of 16 bytes at 0xd0000000 does not lie in guest memory",
    ),
    (
        "an indirect table in no memory",
        |s, d| {
            s.describe(0, MEM_BYTES, 32, INDIRECT, 0);
            s.offer(d, 0, 1);
        },
        "the descriptor chain from 0 is broken",
    ),
    (
        "a queue moved while in use",
        |s, d| s.set(d, QUEUE_DESC_LOW, RINGS + 0x4000),
        "(register 0x80) while it is in use",
    ),
    (
        "a queue resized while in use",
        |s, d| s.set(d, QUEUE_NUM, 4),
        "(register 0x38) while it is in use",
    ),
    (
        "a queue that does not exist",
        |s, d| {
            s.set(d, QUEUE_SEL, 77);
            s.set(d, QUEUE_READY, 1);
        },
        "its driver sets up queue 77, which does not exist",
    ),
    (
        "rings in no memory",
        |s, d| {
            s.set(d, QUEUE_READY, 0);
            s.set(d, QUEUE_USED_LOW, MEM_BYTES - 16);
            s.set(d, QUEUE_READY, 1);
        },
        "its used ring of 70 bytes at 0x1fffff0 is not in guest memory",
    ),
];

/// Offers read-only buffers to a device that has to write. Returns a part of the resulting message.
fn read_only(label: &str) -> Option<&'static str> {
    match label.split(' ').next()? {
        "virtio-blk" => Some("has no room for a status"),
        "virtio-rng" => Some("has no room for randomness"),
        // The queues of the other devices misused here are for reading.
        _ => None,
    }
}

/// Returns the guest's devices, in the order of their register pages, and the options that create
/// them.
fn devices(tmp: &TestDir, tap: Option<&TestTap>) -> (Vec<ScriptedDevice>, Vec<String>) {
    let disk = tmp.path("disk");
    File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let mut options = vec!["--disk".to_owned(), format!("path={}", disk.display())];
    let mut labels = vec![(0, "virtio-blk \"disk0\"")];
    if let Some(tap) = tap {
        options.extend(["--net".to_owned(), format!("tap={}", tap.0)]);
        labels.push((1, "virtio-net \"net0\""));
    }
    let uds = tmp.text("vsock");
    options.extend(["--vsock".to_owned(), format!("cid=5,uds={uds}"), "--balloon".to_owned()]);
    labels.extend([
        (1, "virtio-vsock \"vsock\""),
        (0, "virtio-rng \"rng\""),
        (0, "virtio-balloon \"balloon\""),
    ]);
    let target = |(index, (queue, label))| ScriptedDevice { index, queue, label };
    ((0..).zip(labels).map(target).collect(), options)
}

/// Runs a guest that performs `script`. Returns the guest's output and the VMM's messages.
fn run(tmp: &TestDir, script: &DriverScript, options: &[String], log: &[&str]) -> (String, String) {
    let kernel = tmp.path("kernel");
    std::fs::write(&kernel, script.kernel()).unwrap();
    let memory = MEM_BYTES.to_string();
    let fixed = ["run", "--mem", &memory, "--kernel", kernel.to_str().unwrap()];
    let out = driftline(&fixed).args(options).args(log).output().unwrap();
    let stderr = text(&out.stderr);
    assert_eq!(out.status.code(), Some(0), "{stderr}");
    assert!(stderr.ends_with("driftline: the guest asked for a reset\n"), "{stderr}");
    (text(&out.stdout), stderr)
}

#[test]
fn violation_stops_only_its_device() {
    const TEST: &str = "violation_stops_only_its_device";
    if !kvm_or_skip(TEST) {
        return;
    }
    let tmp = TestDir::new();
    let tap = TestTap::new("h");
    if let Err(why) = &tap {
        skip(TEST, &format!("without a network interface: {why}"));
    }
    let (targets, options) = devices(&tmp, tap.as_ref().ok());
    let (mut script, mut expected) = (DriverScript::default(), Vec::new());
    for &device in &targets {
        // Another device continues meanwhile.
        let witness = if device.label.contains("rng") { "blk" } else { "rng" };
        let witness = *targets.iter().find(|t| t.label.contains(witness)).unwrap();
        let mut add_case = |violation: &dyn Fn(&mut DriverScript), says: &str| {
            script.start(device);
            violation(&mut script);
            script.await_stop(device);
            script.use_well(witness);
            expected.push((device.label, says.to_owned()));
        };
        for (_, violation, says) in &VIOLATIONS {
            add_case(&|s| violation(s, device), says);
        }
        if let Some(says) = read_only(device.label) {
            let violation = |s: &mut DriverScript| {
                s.describe(0, BUFFERS, 64, 0, 0);
                s.offer(device, 0, 1);
            };
            add_case(&violation, says);
        }
    }
    // The device works again for a correct driver.
    script.use_well(targets[0]);
    let (printed, stderr) = run(&tmp, &script, &options, &["--log", "driftline_machine=debug"]);
    assert_eq!(printed, "SW".repeat(expected.len()) + "W", "{stderr}");
    let stops: Vec<&str> = stderr.lines().filter(|line| line.contains(" is stopped")).collect();
    assert_eq!(stops.len(), expected.len(), "{stderr}");
    for (stop, (label, says)) in stops.iter().zip(expected) {
        assert!(stop.contains(label) && stop.contains(&says), "{label}: {says}: {stop}");
    }
}

#[test]
fn a_driver_cannot_fill_the_log() {
    if !kvm_or_skip("a_driver_cannot_fill_the_log") {
        return;
    }
    let tmp = TestDir::new();
    let (targets, options) = devices(&tmp, None);
    let mut script = DriverScript::default();
    for _ in 0..50 {
        script.start(targets[0]);
        script.set(targets[0], QUEUE_NUM, 3);
        script.await_stop(targets[0]);
        // The driver gives the device up: status FAILED.
        script.set(targets[0], STATUS, 128);
    }
    let (printed, stderr) = run(&tmp, &script, &options, &[]);
    assert_eq!(printed, "S".repeat(50));
    let lines: Vec<&str> = stderr.lines().collect();
    assert_eq!(lines.len(), 2, "one line of the device, one of the end: {stderr}");
    assert!(lines[0].contains("virtio-blk \"disk0\" is stopped until its driver resets it: "));
}
