//! `run --config-file`: the same guest from the JSON of `GET /vm/config`, options that win over it,
//! and refusals that name the field.

use crate::common::{TestDir, Vmm, fail, request};
use driftline_machine::testing::{Elf, TestTap, kvm_or_skip, skip};
use serde_json::{Value, json};

/// Returns the answer to `GET /vm/config`.
fn config(vmm: &Vmm) -> Value {
    page(vmm, "/vm/config")
}

fn page(vmm: &Vmm, path: &str) -> Value {
    let answer = request(&vmm.socket(), "GET", path, "");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{answer}");
    serde_json::from_str(body).unwrap()
}

/// Stops a guest. Returns its configuration.
fn stopped(mut vmm: Vmm) -> Value {
    let config = config(&vmm);
    vmm.tell(&["stop"]);
    assert_eq!(vmm.wait(), Some(0));
    config
}

fn write(tmp: &TestDir, config: &Value) -> String {
    std::fs::write(tmp.path("config.json"), config.to_string()).unwrap();
    tmp.text("config.json")
}

fn payload_file(tmp: &TestDir) -> Value {
    let guest = stopped(Vmm::run(
        tmp,
        "a",
        &["--backend", "threads", "--mem", "64M", "--guest", "payload,ws=1M", "--name", "web-1"],
    ));
    assert_eq!(
        (&guest["name"], &guest["boot-source"]["guest"]),
        (&json!("web-1"), &json!("payload,ws=1M"))
    );
    guest
}

#[test]
fn configuration_of_a_kvm_guest_restarts_it() {
    const NAME: &str = "configuration_of_a_kvm_guest_restarts_it";
    if !kvm_or_skip(NAME) {
        return;
    }
    let tap = match TestTap::new("f") {
        Ok(tap) => tap,
        Err(why) => return skip(NAME, &why.to_string()),
    };
    let tmp = TestDir::new();
    // hlt; jmp $-1
    std::fs::write(tmp.path("kernel"), Elf::new(&[0xf4, 0xeb, 0xfd]).bytes()).unwrap();
    std::fs::write(tmp.path("initrd"), [7; 5000]).unwrap();
    for (name, bytes) in [("a.img", 1 << 20), ("b,readonly.img", 3 << 20)] {
        std::fs::File::create(tmp.path(name)).unwrap().set_len(bytes).unwrap();
    }
    let (kernel, initrd) = (tmp.text("kernel"), tmp.text("initrd"));
    let disk = format!("path={},bandwidth=8M,iops=7", tmp.text("a.img"));
    let net = format!("tap={},tx-bandwidth=8K", tap.0);
    let vsock = format!("cid=7,uds={}", tmp.text("v.sock"));
    let kernel = ["--kernel", &kernel, "--initrd", &initrd, "--cmdline", "root=/dev/vda quiet"];
    let machine = [
        "--bare-cmdline",
        "--mem",
        "65540K",
        "--vcpus",
        "2",
        "--cpu",
        "host,-cx16",
        "--tracking",
        "dirty-bitmap",
        "--ring-entries",
        "1024",
        "--name",
        "web-1",
    ];
    let devices =
        ["--disk", &disk, "--net", &net, "--vsock", &vsock, "--balloon", "size=1028K,hinting=off"];
    let mut first = stopped(Vmm::run(&tmp, "a", &[&kernel[..], &machine, &devices].concat()));
    assert_eq!(first["boot-source"]["boot_args"], "root=/dev/vda quiet");
    assert_eq!(first["balloon"]["target_bytes"], 1028 << 10);
    assert_eq!(first["machine-config"]["cpu"].as_str(), Some("host,-cx16"));
    first["machine-config"]["smt"] = json!(true);
    let bucket =
        |size: u64, ms: u64| json!({ "size": size, "one_time_burst": null, "refill_time": ms });
    let limits = json!({ "bandwidth": bucket(1 << 20, 125), "ops": bucket(7, 1000) });
    assert_eq!(first["drives"][0]["rate_limiter"], limits);
    let limits = json!({ "bandwidth": bucket(1 << 10, 125), "ops": null });
    assert_eq!(first["network-interfaces"][0]["tx_rate_limiter"], limits);
    assert!(first["network-interfaces"][0].get("rx_rate_limiter").is_none());
    let burst = json!({ "size": 5, "refill_time": 6, "one_time_burst": 7 });
    first["entropy"]["rate_limiter"] = json!({ "bandwidth": null, "ops": burst });
    // A name that no option could give.
    let second = json!({ "path_on_host": tmp.text("b,readonly.img"), "is_read_only": true });
    first["drives"].as_array_mut().unwrap().push(second);
    first["balloon"]["stats_polling_interval_s"] = json!(5);
    let again = stopped(Vmm::run(&tmp, "b", &["--config-file", &write(&tmp, &first)]));
    let added = json!({
        "drive_id": "disk1", "path_on_host": tmp.text("b,readonly.img"), "is_root_device": false,
        "is_read_only": true, "serial": "disk1", "bytes": 3 << 20,
    });
    first["drives"][1] = added;
    assert_eq!(again, first);
    let third = stopped(Vmm::run(&tmp, "c", &["--config-file", &write(&tmp, &again)]));
    assert_eq!(third, first);
    first.as_object_mut().unwrap().remove("entropy");
    let fourth = stopped(Vmm::run(&tmp, "d", &["--config-file", &write(&tmp, &first)]));
    assert_eq!(fourth, first, "without a source of randomness");
}

#[test]
fn balloon_of_a_file_has_statistics() {
    if !kvm_or_skip("balloon_of_a_file_has_statistics") {
        return;
    }
    let tmp = TestDir::new();
    // hlt; jmp $-1
    std::fs::write(tmp.path("kernel"), Elf::new(&[0xf4, 0xeb, 0xfd]).bytes()).unwrap();
    let with = |balloon: Value| {
        let boot = json!({ "kernel_image_path": tmp.text("kernel") });
        let machine = json!({ "vcpu_count": 1, "mem_size_mib": 64 });
        write(&tmp, &json!({ "boot-source": boot, "machine-config": machine, "balloon": balloon }))
    };
    let balloon = with(json!({ "amount_mib": 2, "stats_polling_interval_s": 5 }));
    let vmm = Vmm::run(&tmp, "a", &["--config-file", &balloon]);
    let sizes = json!({ "target_pages": 512, "actual_pages": 0, "target_mib": 2, "actual_mib": 0 });
    assert_eq!(page(&vmm, "/balloon/statistics"), sizes);
    assert_eq!(page(&vmm, "/balloon")["stats_polling_interval_s"], 5);
    stopped(vmm);
    let vmm = Vmm::run(&tmp, "b", &["--config-file", &with(json!({}))]);
    let answer = request(&vmm.socket(), "GET", "/balloon/statistics", "");
    assert!(answer.contains("the guest's balloon was configured without statistics"), "{answer}");
    stopped(vmm);
}

#[test]
fn options_win_over_the_file() {
    let tmp = TestDir::new();
    let file = write(&tmp, &payload_file(&tmp));
    let own = ["--mem", "128M", "--guest", "payload,ws=2M", "--name", "web-2", "--vcpus", "2"];
    let changed = stopped(Vmm::run(&tmp, "b", &[&["--config-file", &file][..], &own].concat()));
    let mut expected = payload_file(&tmp);
    expected["name"] = json!("web-2");
    expected["boot-source"]["guest"] = json!("payload,ws=2M");
    for (field, value) in [("mem_bytes", 128 << 20), ("mem_size_mib", 128), ("vcpu_count", 2)] {
        expected["machine-config"][field] = json!(value);
    }
    assert_eq!(changed, expected);
}

#[test]
fn short_file_has_the_options_defaults() {
    let tmp = TestDir::new();
    let short = json!({
        "boot-source": { "guest": "payload,ws=1M" }, "machine-config": { "backend": "threads" },
    });
    let short = stopped(Vmm::run(&tmp, "a", &["--config-file", &write(&tmp, &short)]));
    let options = ["--backend", "threads", "--guest", "payload,ws=1M"];
    assert_eq!(short, stopped(Vmm::run(&tmp, "b", &options)));
}

fn machine(value: Value) -> Value {
    json!({ "boot-source": { "guest": "payload" }, "machine-config": value })
}

/// Returns a configuration of an embedded guest with one more part.
fn with(part: &str, value: Value) -> Value {
    json!({ "boot-source": { "guest": "payload" }, part: value })
}

/// Checks that each configuration is refused for its reason, whatever the `options`.
fn refuse_each(tmp: &TestDir, options: &[&str], cases: &[(Value, &str)]) {
    for (config, why) in cases {
        let file = write(tmp, config);
        let stderr = fail(2, &[&["run", "--config-file", &file][..], options].concat());
        assert!(stderr.contains(&format!("--config-file {file}: ")), "{config}: {stderr}");
        assert!(stderr.contains(why), "{config}: {stderr}");
    }
}

#[test]
fn wrong_machine_is_refused_by_its_field() {
    let cases = [
        (json!({ "vcpus": 2 }), "machine-config.vcpus: unknown field `vcpus`"),
        (json!({ "vcpu_count": 33 }), "machine-config.vcpu_count: a guest has 1 to 32"),
        (json!({ "vcpu_count": 256 }), "machine-config.vcpu_count: invalid value"),
        (json!({ "mem_size_mib": "1G" }), "machine-config.mem_size_mib: invalid type"),
        (json!({ "mem_size_mib": 8 }), "machine-config.mem_size_mib: a guest has from 16M"),
        (json!({ "mem_size_mib": u64::MAX }), "MiB is too much"),
        (json!({ "mem_size_mib": 64, "mem_bytes": 1 << 20 }), "leave one out"),
        (json!({ "smt": true, "vcpu_count": 3 }), "machine-config.smt: each core has two threads"),
        (json!({ "ring_entries": 1000 }), "machine-config.ring_entries: it must be a power"),
        (json!({ "cpu": "host,-warp" }), "machine-config.cpu: unknown processor feature"),
        (
            json!({ "tracking": "none", "track_dirty_pages": true }),
            "machine-config.track_dirty_pages: it is true, and tracking is none",
        ),
    ];
    refuse_each(&TestDir::new(), &[], &cases.map(|(config, why)| (machine(config), why)));
}

#[test]
fn wrong_device_is_refused_by_its_field() {
    let tmp = TestDir::new();
    let disk = tmp.text("disk");
    std::fs::File::create(&disk).unwrap().set_len(4096).unwrap();
    let drive = |value: Value| with("drives", json!([value]));
    let cases = [
        (with("drivs", json!([])), "unknown field `drivs`"),
        (drive(json!({ "is_read_only": true })), "drives[0]: missing field `path_on_host`"),
        (drive(json!({ "path_on_host": disk, "is_root_device": true })), "root=/dev/vda"),
        (drive(json!({ "path_on_host": disk, "bytes": 1 })), "drives[0].bytes: it is 1, and"),
        (drive(json!({ "path_on_host": disk, "drive_id": "a b" })), "\"a b\" is not a valid name"),
        (
            drive(json!({ "path_on_host": disk, "rate_limiter": { "iops": 1 } })),
            "drives[0].rate_limiter.iops: unknown field `iops`",
        ),
        (
            drive(json!({ "path_on_host": disk, "rate_limiter": {
                "ops": { "size": 1, "refill_time": 1, "burst": 1 } } })),
            "drives[0].rate_limiter.ops.burst: unknown field `burst`",
        ),
        (with("entropy", json!({})), "entropy: the embedded guest has no driver"),
        (with("balloon", json!({})), "balloon: the embedded guest has no driver"),
        (
            with("network-interfaces", json!([{ "host_dev_name": "t", "guest_mac": "x" }])),
            "network-interfaces[0].guest_mac: \"x\" is not a valid Ethernet address",
        ),
    ];
    refuse_each(&tmp, &[], &cases);
}

#[test]
fn wrong_boot_source_is_refused_by_its_field() {
    let tmp = TestDir::new();
    let boot = |value: Value| json!({ "boot-source": value });
    let both = json!({ "kernel_image_path": "/vmlinux", "guest": "payload" });
    let cases = [
        (json!({}), "boot-source: neither kernel_image_path nor guest is set"),
        (with("name", json!("a b")), "name: \"a b\" is not a valid name of a guest"),
        (boot(both), "boot-source.guest: the embedded guest has no kernel"),
        (boot(json!({ "guest": "payload,colour=red" })), "boot-source.guest: "),
    ];
    refuse_each(&tmp, &[], &cases);
    let why = "options about a kernel need --kernel";
    refuse_each(&tmp, &["--cmdline", "quiet"], &[(boot(json!({ "guest": "payload" })), why)]);
}

#[test]
fn unreadable_configuration_file_is_refused() {
    let tmp = TestDir::new();
    std::fs::write(tmp.path("config.json"), "{} {}").unwrap();
    let run = ["run", "--config-file", &tmp.text("config.json")];
    assert!(fail(2, &run).contains("trailing characters"));
    std::fs::write(tmp.path("config.json"), vec![b' '; (1 << 20) + 1]).unwrap();
    assert!(fail(2, &run).contains("more than 1 MiB"));
    let stderr = fail(1, &["run", "--config-file", &tmp.text("none")]);
    assert!(stderr.contains("No such file"), "{stderr}");
    let stderr = fail(1, &["run", "--config-file", "/dev/zero"]);
    assert!(stderr.contains("it is not a regular file"), "{stderr}");
}
