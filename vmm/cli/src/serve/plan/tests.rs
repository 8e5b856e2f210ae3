//! Configurations with files of their own, and the machines that they result in.

use driftline_machine::config::{
    ChangedBits, DiskCache, DiskEngine, MetadataVersion, MsrChange, NetMetadata,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;

/// A configuration with its files.
struct TestConfig {
    dir: TempDir,
    config: MicroVmConfig,
    files: ClientFiles,
}

impl TestConfig {
    fn new(boot_args: Option<&str>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (config, files) = (MicroVmConfig::new(64), ClientFiles::default());
        let mut test = Self { dir, config, files };
        let kernel = test.file("kernel", 512);
        let source = json!({ "kernel_image_path": kernel, "boot_args": boot_args });
        let source = serde_json::from_value(source).unwrap();
        test.files.open_boot_source(&source).unwrap();
        test.config.boot_source = Some(source);
        test
    }

    fn file(&self, name: &str, bytes: usize) -> String {
        let path = self.dir.path().join(name);
        std::fs::write(&path, vec![0; bytes]).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// Adds a drive with a file of 1000 bytes and more settings.
    fn add_drive(&mut self, id: &str, more: Value) {
        let mut drive = json!({ "drive_id": id, "is_root_device": false });
        drive["path_on_host"] = self.file(id, 1000).into();
        let more = more.as_object().unwrap().clone();
        drive.as_object_mut().unwrap().extend(more);
        let drive: BlockDeviceConfig = serde_json::from_value(drive).unwrap();
        self.files.open_drive(&drive).unwrap();
        self.config.drives.push(drive);
    }

    fn plan(&self) -> Result<GuestPlan, String> {
        plan("web-1", &self.config, &self.files).map_err(|e| e.to_string())
    }

    fn cmdline(&self) -> String {
        match self.plan().unwrap().config.boot {
            Boot::Kernel { cmdline, bare: true, .. } => cmdline,
            boot => panic!("{boot:?}"),
        }
    }
}

#[test]
fn default_command_line_is_firecrackers() {
    let mut test = TestConfig::new(None);
    let default = "reboot=k panic=1 nomodule 8250.nr_uarts=0 i8042.noaux i8042.nomux \
                   i8042.dumbkbd swiotlb=noforce pci=off";
    assert_eq!(test.cmdline(), default);
    let device = "virtio_mmio.device=4K@0xd0000000:5";
    test.add_drive("root", json!({ "is_root_device": true }));
    assert_eq!(test.cmdline(), format!("{default} root=/dev/vda rw {device}"));
}

#[test]
fn root_is_named_before_inits_arguments() {
    let device = "virtio_mmio.device=4K@0xd0000000:5";
    for (more, root) in [
        (json!({}), ""),
        (json!({ "is_root_device": true, "is_read_only": true }), " root=/dev/vda ro"),
        (json!({ "is_root_device": true, "partuuid": "0a-01" }), " root=PARTUUID=0a-01 rw"),
    ] {
        let mut test = TestConfig::new(Some(" console=ttyS0 -- sh "));
        test.add_drive("root", more);
        assert_eq!(test.cmdline(), format!("console=ttyS0 pci=off{root} {device} -- sh"));
    }
}

#[test]
fn long_command_line_is_refused() {
    // The limit without the final 0 and without the added parameter.
    let room = 2048 - 1 - " pci=off".len();
    assert!(TestConfig::new(Some(&"x".repeat(room))).plan().is_ok());
    let refusal = TestConfig::new(Some(&"x".repeat(room + 1))).plan().unwrap_err();
    assert!(refusal.starts_with("Start microvm error: Kernel cmdline error"), "{refusal}");
}

#[test]
fn devices_have_firecrackers_order_and_settings() {
    let mut test = TestConfig::new(None);
    test.add_drive("root", json!({ "is_root_device": true, "is_read_only": true }));
    test.add_drive("data", json!({ "cache_type": "Writeback", "io_engine": "Async" }));
    test.add_drive("swap", json!({ "cache_type": "Unsafe", "io_engine": "Sync" }));
    test.config.entropy = serde_json::from_value(json!({})).unwrap();
    let balloon = json!({ "amount_mib": 8, "deflate_on_oom": false, "free_page_reporting": true,
        "stats_polling_interval_s": 7 });
    test.config.balloon = serde_json::from_value(balloon).unwrap();
    let GuestPlan { config, host } = test.plan().unwrap();
    assert_eq!((config.mem_bytes, config.vcpus), (128 << 20, 1));
    assert_eq!(config.identity.name.unwrap().to_string(), "web-1");
    let ids: Vec<_> = config.devices.iter().map(DeviceConfig::id).collect();
    assert_eq!(ids, ["balloon", "root", "data", "swap", "rng"]);
    let balloon = BalloonConfig {
        bytes: 8 << 20,
        deflate_on_oom: false,
        reporting: true,
        hinting: false,
        statistics_interval_s: 7,
    };
    assert_eq!(config.devices[0], DeviceConfig::Balloon(balloon));
    let disks: Vec<_> = driftline_machine::config::disks(&config.devices).collect();
    // The part of a sector at the end is not counted.
    assert!(disks.iter().all(|disk| (disk.bytes, disk.block_bytes) == (512, 512)));
    assert_eq!(disks.iter().map(|disk| disk.readonly).collect::<Vec<_>>(), [true, false, false]);
    assert!(disks[0].serial.len() <= 20 && disks[0].serial != disks[1].serial);
    let of = |id: &str| {
        let opened = host.opened.disks.iter().find(|disk| disk.id == id).unwrap();
        (opened.cache, opened.engine)
    };
    assert_eq!(of("root"), (DiskCache::Unsafe, DiskEngine::Automatic));
    assert_eq!(of("data"), (DiskCache::Writeback, DiskEngine::Uring));
    assert_eq!(of("swap"), (DiskCache::Unsafe, DiskEngine::Blocking));
    assert!(host.opened.kernel.is_some() && host.opened.initrd.is_none());
    assert_eq!(host.serial, SerialSink::Stdio);
}

#[test]
fn memory_has_the_pages_asked_for() {
    let pages = |kind: &str| {
        let mut test = TestConfig::new(None);
        let machine = json!({ "vcpu_count": 1, "mem_size_mib": 64, "huge_pages": kind });
        test.config.machine = serde_json::from_value(machine).unwrap();
        test.plan().unwrap().host.memory.huge_pages
    };
    assert_eq!(pages("None"), None);
    assert_eq!(pages("Transparent"), Some(HugePages::Thp));
    assert_eq!(pages("2M"), Some(HugePages::Hugetlbfs));
}

#[test]
fn serial_output_goes_to_a_file() {
    let mut test = TestConfig::new(None);
    let path = test.dir.path().join("serial");
    test.config.serial.serial_out_path = Some(path.clone());
    assert_eq!(test.plan().unwrap().host.serial, SerialSink::File(path.clone()));
    assert!(path.is_file(), "the sandbox can allow only files that exist");
    test.config.serial.serial_out_path = Some(test.dir.path().to_owned());
    let refusal = test.plan().unwrap_err();
    let why = "the serial port's output: it is neither a regular file nor a FIFO nor a character";
    assert!(refusal.contains(why), "{refusal}");
    test.config.serial.serial_out_path = Some("/dev/null".into());
    assert_eq!(test.plan().unwrap().host.serial, SerialSink::File("/dev/null".into()));
}

#[test]
fn devices_have_the_limits_of_their_rate_limiters() {
    let mut test = TestConfig::new(None);
    let bandwidth = json!({ "size": 4096, "refill_time": 100, "one_time_burst": 7 });
    test.add_drive("a", json!({ "rate_limiter": { "bandwidth": bandwidth } }));
    let entropy = json!({ "rate_limiter": { "ops": { "size": 1, "refill_time": 2 } } });
    test.config.entropy = serde_json::from_value(entropy).unwrap();
    let limit =
        |size, refill_ms, one_time_burst| Some(RateLimit { size, refill_ms, one_time_burst });
    let devices = test.plan().unwrap().config.devices;
    let [DeviceConfig::Disk(disk), DeviceConfig::Rng(rng)] = &devices[..] else {
        panic!("{devices:?}");
    };
    let expected = RateLimits { bandwidth: limit(4096, 100, 7), operations: None };
    assert_eq!(disk.limits, expected);
    assert_eq!(rng.limits, RateLimits { bandwidth: None, operations: limit(1, 2, 0) });
}

#[test]
fn interfaces_and_vsock_follow_the_drives() {
    let mut test = TestConfig::new(None);
    let net = |net: Value| serde_json::from_value(net).unwrap();
    let limiter = json!({ "bandwidth": { "size": 5, "refill_time": 6 } });
    test.config.interfaces = vec![
        net(json!({ "iface_id": "a", "host_dev_name": "t0", "guest_mac": "06:00:00:00:00:01",
            "mtu": 1400, "tx_rate_limiter": limiter })),
        net(json!({ "iface_id": "b", "host_dev_name": "t1" })),
    ];
    let vsock = json!({ "guest_cid": 7, "uds_path": test.dir.path().join("v") });
    test.config.vsock = serde_json::from_value(vsock).unwrap();
    test.config.entropy = serde_json::from_value(json!({})).unwrap();
    test.add_drive("d", json!({}));
    let devices = test.plan().unwrap().config.devices;
    let [_, DeviceConfig::Net(a), DeviceConfig::Net(b), DeviceConfig::Vsock(vsock), _] =
        &devices[..]
    else {
        panic!("{devices:?}");
    };
    assert_eq!((a.tap.as_str(), a.mac, a.queues), ("t0", MacAddr([6, 0, 0, 0, 0, 1]), 1));
    let bandwidth = Some(RateLimit { size: 5, refill_ms: 6, one_time_burst: 0 });
    assert_eq!(a.limits.transmit, RateLimits { bandwidth, operations: None });
    assert!(a.limits.receive.is_none());
    assert_eq!((b.tap.as_str(), a.mtu, b.mtu), ("t1", Some(1400), None));
    assert_eq!((vsock.cid, vsock.uds.clone()), (7, test.dir.path().join("v")));
}

#[test]
fn same_name_in_two_kinds_is_possible() {
    let mut test = TestConfig::new(None);
    test.add_drive("1", json!({}));
    test.add_drive("vsock", json!({}));
    let net = |id| {
        let net = json!({ "iface_id": id, "host_dev_name": format!("t-{id}") });
        serde_json::from_value(net).unwrap()
    };
    test.config.interfaces = vec![net("1"), net("vsock"), net("rng"), net("2")];
    let vsock = json!({ "guest_cid": 7, "uds_path": "v" });
    test.config.vsock = serde_json::from_value(vsock).unwrap();
    let GuestPlan { config, host } = test.plan().unwrap();
    let ids: Vec<_> = config.devices.iter().map(DeviceConfig::id).collect();
    assert_eq!(ids, ["1", "disk-vsock", "net-1", "net-vsock", "net-rng", "2", "vsock"]);
    let mut opened: Vec<_> = host.opened.disks.iter().map(|disk| disk.id.as_str()).collect();
    opened.sort();
    assert_eq!(opened, ["1", "disk-vsock"]);
}

#[test]
fn template_reaches_the_machine() {
    let mut test = TestConfig::new(None);
    assert_eq!(test.plan().unwrap().config.cpu.template, CpuTemplate::default());
    let template = json!({ "msr_modifiers": [{ "addr": "0x10a", "bitmap": "0b10" }] });
    test.config.cpu_template = serde_json::from_value(template).unwrap();
    let bits = ChangedBits { mask: 3, value: 2 };
    let msrs = vec![MsrChange { index: 0x10a, bits }];
    let expected = CpuTemplate { msrs, ..CpuTemplate::default() };
    assert_eq!(test.plan().unwrap().config.cpu.template, expected);
    let many = (0..2000).map(|n| json!({ "addr": format!("{n:#x}"), "bitmap": "1" }));
    let template = json!({ "msr_modifiers": many.collect::<Vec<_>>() });
    test.config.cpu_template = serde_json::from_value(template).unwrap();
    let refusal = test.plan().unwrap_err();
    assert!(refusal.contains("1025 model-specific registers in the CPU template"), "{refusal}");
}

#[test]
fn impossible_machine_is_refused() {
    let mut test = TestConfig::new(None);
    test.config.machine.mem_size_mib = usize::MAX;
    let refusal = test.plan().unwrap_err();
    assert!(
        refusal.starts_with("Start microvm error: ") && refusal.contains("memory"),
        "{refusal}"
    );
}

#[test]
fn named_interfaces_reach_the_metadata() {
    let mut test = TestConfig::new(None);
    for (id, mac) in [("a", "06:00:00:00:00:01"), ("b", "06:00:00:00:00:02")] {
        let net = json!({ "iface_id": id, "host_dev_name": format!("t{id}"), "guest_mac": mac });
        test.config.interfaces.push(serde_json::from_value(net).unwrap());
    }
    let metadata = |plan: &GuestPlan| {
        let of = |device: &DeviceConfig| match device {
            DeviceConfig::Net(net) => net.metadata,
            other => panic!("{other:?}"),
        };
        plan.config.devices.iter().map(of).collect::<Vec<_>>()
    };
    test.config.metadata.put(json!({ "a": 1 })).unwrap();
    assert_eq!(metadata(&test.plan().unwrap()), [None, None], "it was set, and nothing serves it");
    let mmds = json!({ "network_interfaces": ["b"], "version": "V2", "imds_compat": true });
    test.config.mmds = serde_json::from_value(mmds).unwrap();
    let plan = test.plan().unwrap();
    let served = NetMetadata {
        address: [169, 254, 169, 254].into(),
        version: MetadataVersion::V2,
        imds_compat: true,
    };
    assert_eq!(metadata(&plan), [None, Some(served)]);
    // What clients change from now on is what the guest reads.
    test.config.metadata.put(json!({ "a": 2 })).unwrap();
    assert_eq!(plan.host.metadata.shown(), json!({ "a": 2 }));
}
