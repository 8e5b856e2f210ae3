//! Snapshots whose state file is well-formed and describes an impossible machine.

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use driftline_control::firecracker::{MemBackendConfig, NetworkOverride, VsockOverride};
use driftline_guest::VmId;
use driftline_machine::config::{
    BackendKind, Boot, CpuConfig, DEFAULT_RING_ENTRIES, DiskConfig, MacAddr, MetadataVersion,
    NetConfig, NetMetadata, RateLimits, RngConfig, VsockConfig,
};
use driftline_machine::memory::HugePages;
use driftline_machine::tracking::TrackingMode;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;

const MEM_BYTES: u64 = 32 << 20;

/// The files of a snapshot with a drive and a source of randomness.
struct TestSnapshot {
    dir: TempDir,
    config: MachineConfig,
    api: Value,
    state: SnapshotState,
}

impl TestSnapshot {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let disk = DiskConfig {
            id: "a".to_owned(),
            serial: String::new(),
            path: dir.path().join("disk"),
            readonly: true,
            bytes: 512,
            block_bytes: 512,
            identity: None,
            limits: RateLimits::default(),
        };
        std::fs::write(&disk.path, [0; 512]).unwrap();
        let config = MachineConfig {
            identity: Identity::default(),
            mem_bytes: MEM_BYTES,
            vcpus: 2,
            tracking: TrackingMode::default(),
            ring_entries: DEFAULT_RING_ENTRIES,
            backend: BackendKind::Kvm,
            boot: Boot::Payload("payload".to_owned()),
            cpu: CpuConfig::default(),
            devices: vec![
                DeviceConfig::Disk(disk),
                DeviceConfig::Rng(RngConfig { limits: RateLimits::default() }),
            ],
        };
        let api = json!({ "machine-config": { "vcpu_count": 2, "mem_size_mib": 32 },
            "drives": [{ "drive_id": "a", "is_root_device": true,
                "path_on_host": dir.path().join("disk"), "cache_type": "Writeback" }],
            "network-interfaces": [], "entropy": {} });
        let state = SnapshotState {
            vm_id: VmId::random(),
            created_unix_ms: 1,
            tracked: false,
            layout: layout(MEM_BYTES).unwrap(),
            config: Vec::new(),
            sections: vec![Section::new(SectionTag::KVM_VM, 0, vec![1, 2, 3])],
        };
        Self { dir, config, api, state }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes the files, with the sections of the state and `more`, and plans to load them.
    fn plan_with(&self, more: Vec<Section>, body: Value) -> Result<LoadPlan, String> {
        let mut state = self.state.clone();
        state.config = self.config.encode();
        state.sections.extend(more);
        std::fs::write(self.path("state"), state.encode().unwrap()).unwrap();
        let bytes = driftline_store::MemoryFileLayout::new(&state.layout).bytes();
        File::create(self.path("memory")).unwrap().set_len(bytes).unwrap();
        let params = serde_json::from_value::<Overrides>(body).unwrap();
        let params = LoadSnapshotParams {
            snapshot_path: self.path("state"),
            mem_backend: match params.handler {
                Some(backend_path) => {
                    MemBackendConfig { backend_path, backend_type: MemBackendType::Uffd }
                }
                None => MemBackendConfig {
                    backend_path: self.path("memory"),
                    backend_type: MemBackendType::File,
                },
            },
            track_dirty_pages: true,
            resume_vm: false,
            network_overrides: params.network_overrides,
            vsock_override: params.vsock_override,
            clock_realtime: false,
            huge_pages: params.huge_pages,
        };
        load_plan("b-1", &params, &MicroVmConfig::new(64)).map_err(|e| e.to_string())
    }

    fn plan(&self) -> Result<LoadPlan, String> {
        self.plan_with(vec![api_section(&self.api)], json!({}))
    }

    fn refusal(&self) -> String {
        self.plan().err().unwrap()
    }
}

/// The part of a request that tests choose.
#[derive(serde::Deserialize)]
struct Overrides {
    #[serde(default)]
    network_overrides: Vec<NetworkOverride>,
    vsock_override: Option<VsockOverride>,
    #[serde(default)]
    huge_pages: SnapshotLoadHugePageConfig,
    /// The socket of a page handler, instead of the memory file.
    handler: Option<PathBuf>,
}

fn api_section(api: &Value) -> Section {
    let bytes = serde_json::to_vec(api).unwrap();
    Section { must_understand: false, ..Section::new(SectionTag::API, 0, bytes) }
}

#[test]
fn machine_is_that_of_the_snapshot() {
    let snapshot = TestSnapshot::new();
    let plan = snapshot.plan().unwrap();
    assert_eq!(plan.sections, snapshot.state.sections, "the machine gets its own sections only");
    assert_eq!(plan.config.devices, snapshot.config.devices);
    assert_eq!(plan.config.identity.name.as_ref().unwrap().to_string(), "b-1");
    assert!(plan.config.identity.line.own != snapshot.config.identity.line.own);
    assert_eq!(plan.host.opened.disks[0].cache, driftline_machine::config::DiskCache::Writeback);
    assert!(plan.shown.machine.track_dirty_pages && plan.shown.drives[0].is_root_device);
    let of = std::fs::metadata(snapshot.path("memory")).unwrap();
    assert_eq!(plan.backing, Some((of.dev(), of.ino())));
}

#[test]
fn page_handler_takes_the_place_of_the_file() {
    let snapshot = TestSnapshot::new();
    let socket = snapshot.path("handler");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let plan = |body| snapshot.plan_with(vec![api_section(&snapshot.api)], body);
    let plan_2m = plan(json!({ "handler": socket, "huge_pages": "2M" })).unwrap();
    assert_eq!(plan_2m.backing, None);
    assert!(matches!(plan_2m.contents, FirstContents::Handler(_)));
    assert_eq!(plan_2m.host.memory.huge_pages, Some(HugePages::Hugetlbfs));
    let refusal = plan(json!({ "handler": snapshot.path("none") })).err().unwrap();
    let text = "from uffd: Failed to connect to UDS Unix stream: No such file or directory (os \
                error 2)";
    assert!(refusal.ends_with(text), "{refusal}");
}

#[test]
fn configuration_of_another_machine_is_refused() {
    for (change, value) in [
        ("/machine-config/vcpu_count", json!(1)),
        ("/machine-config/mem_size_mib", json!(33)),
        ("/machine-config/mem_size_mib", json!(u64::MAX)),
        ("/drives/0/drive_id", json!("b")),
        ("/drives", json!([])),
        ("/entropy", json!(null)),
        ("/network-interfaces", json!([{ "iface_id": "a", "host_dev_name": "t" }])),
    ] {
        let mut snapshot = TestSnapshot::new();
        *snapshot.api.pointer_mut(change).unwrap() = value;
        let refusal = snapshot.refusal();
        assert!(refusal.ends_with("is not that of the machine"), "{change}: {refusal}");
    }
    let mut snapshot = TestSnapshot::new();
    snapshot.api["more"] = json!(1);
    assert!(snapshot.refusal().contains("unknown field `more`"), "{}", snapshot.refusal());
}

#[test]
fn metadata_service_is_that_of_the_machine() {
    let mut snapshot = TestSnapshot::new();
    let metadata = NetMetadata {
        address: [169, 254, 169, 254].into(),
        version: MetadataVersion::V2,
        imds_compat: false,
    };
    snapshot.config.devices.push(DeviceConfig::Net(NetConfig {
        id: "n".to_owned(),
        tap: "t".to_owned(),
        mac: MacAddr([6, 0, 0, 0, 0, 1]),
        queues: 1,
        mtu: None,
        limits: NetLimits::default(),
        metadata: Some(metadata),
    }));
    snapshot.api["network-interfaces"] = json!([{ "iface_id": "n", "host_dev_name": "t" }]);
    let v2 = json!({ "network_interfaces": ["n"], "version": "V2" });
    snapshot.api["mmds-config"] = v2.clone();
    let plan = snapshot.plan().unwrap();
    assert_eq!(plan.config.devices, snapshot.config.devices);
    for (field, value) in [
        ("version", json!("V1")),
        ("ipv4_address", json!("169.254.1.1")),
        ("network_interfaces", json!([])),
        ("network_interfaces", json!(["n", "m"])),
    ] {
        snapshot.api["mmds-config"] = v2.clone();
        snapshot.api["mmds-config"][field] = value;
        let refusal = snapshot.refusal();
        assert!(refusal.ends_with("is not that of the machine"), "{field}: {refusal}");
    }
}

#[test]
fn one_configuration_of_the_api_is_needed() {
    let snapshot = TestSnapshot::new();
    let one = api_section(&snapshot.api);
    for count in [0, 2, 3] {
        let sections = (0..count).map(|instance| Section { instance, ..one.clone() }).collect();
        let refusal = snapshot.plan_with(sections, json!({})).err().unwrap();
        assert!(refusal.contains(&format!("has {count} configurations of the API")), "{refusal}");
    }
}

#[test]
fn layout_of_another_size_is_refused() {
    let mut snapshot = TestSnapshot::new();
    snapshot.state.layout = layout(2 * MEM_BYTES).unwrap();
    assert!(snapshot.refusal().contains("its layout is not that of its machine's memory"));
    let mut snapshot = TestSnapshot::new();
    snapshot.config.mem_bytes = 1;
    assert!(snapshot.refusal().contains("Load snapshot error"), "{}", snapshot.refusal());
}

/// Clients start each clone in a folder of its own.
#[test]
fn relative_paths_start_in_the_working_directory() {
    let mut snapshot = TestSnapshot::new();
    let vsock = VsockConfig { cid: 3, uds: snapshot.path("v") };
    snapshot.config.devices.push(DeviceConfig::Vsock(vsock));
    let here = std::env::current_dir().unwrap();
    let socket = tempfile::Builder::new().make_in(&here, |path| Ok(path.to_owned())).unwrap();
    let name = socket.path().file_name().unwrap().to_str().unwrap();
    snapshot.api["vsock"] = json!({ "guest_cid": 3, "uds_path": name });
    snapshot.api["drives"][0]["path_on_host"] = json!("Cargo.toml");
    let plan = snapshot.plan().unwrap();
    let DeviceConfig::Disk(disk) = &plan.config.devices[0] else { panic!("not the disk") };
    assert_eq!(disk.path, here.join("Cargo.toml"));
    let Some(DeviceConfig::Vsock(vsock)) = plan.config.devices.last() else { panic!("no vsock") };
    assert_eq!(vsock.uds, socket.path());
    assert!(UnixStream::connect(socket.path()).is_ok());
}

#[test]
fn missing_drive_is_refused_with_its_path() {
    let snapshot = TestSnapshot::new();
    std::fs::remove_file(snapshot.path("disk")).unwrap();
    let refusal = snapshot.refusal();
    assert!(refusal.contains("No such file or directory (os error 2)"), "{refusal}");
    assert!(refusal.ends_with(snapshot.path("disk").to_str().unwrap()), "{refusal}");
}

#[test]
fn overrides_need_a_device_and_a_mapping() {
    let snapshot = TestSnapshot::new();
    let refusal = |body| {
        let plan = snapshot.plan_with(vec![api_section(&snapshot.api)], body);
        plan.err().unwrap()
    };
    let nets = json!({ "network_overrides": [{ "iface_id": "n", "host_dev_name": "t" }] });
    assert!(refusal(nets).ends_with("Unknown Network Device."));
    assert!(refusal(json!({ "huge_pages": "2M" })).ends_with("Please use uffd."));
}

#[test]
fn memory_consists_of_whole_huge_pages() {
    let mut snapshot = TestSnapshot::new();
    let plan = |snapshot: &TestSnapshot, pages| {
        let body = json!({ "huge_pages": pages });
        snapshot.plan_with(vec![api_section(&snapshot.api)], body)
    };
    let memory = |pages| plan(&snapshot, pages).unwrap().host.memory.huge_pages;
    assert_eq!(memory("Transparent"), Some(HugePages::Thp));
    assert_eq!([memory("None"), memory("Snapshot")], [None, None]);
    snapshot.config.mem_bytes = 33 << 20;
    snapshot.state.layout = layout(33 << 20).unwrap();
    snapshot.api["machine-config"]["mem_size_mib"] = json!(33);
    assert!(plan(&snapshot, "None").is_ok());
    for pages in ["Transparent", "2M"] {
        let refusal = plan(&snapshot, pages).err().unwrap();
        let text = "Failed to build microVM from snapshot: Failed to update microVM \
                    configuration: The memory size (MiB) is either 0, or not a multiple of the \
                    configured page size.";
        assert!(refusal.ends_with(text), "{refusal}");
    }
}

#[test]
fn socket_is_bound_where_no_file_is() {
    let mut snapshot = TestSnapshot::new();
    let vsock = VsockConfig { cid: 3, uds: snapshot.path("v") };
    snapshot.config.devices.push(DeviceConfig::Vsock(vsock));
    snapshot.api["vsock"] = json!({ "guest_cid": 3, "uds_path": snapshot.path("v") });
    let plan = snapshot.plan().unwrap();
    assert!(UnixStream::connect(snapshot.path("v")).is_ok(), "the backlog takes it");
    drop(plan);
    assert!(UnixStream::connect(snapshot.path("v")).is_err());
    let text = "Failed to restore devices: Error restoring MMIO devices: VsockUnixBackend: Error \
                binding to the host-side Unix socket: Address already in use (os error 98)";
    assert!(snapshot.refusal().ends_with(text), "{}", snapshot.refusal());
    assert!(snapshot.path("v").exists());
    let other = json!({ "vsock_override": { "uds_path": snapshot.path("w") } });
    let _plan = snapshot.plan_with(vec![api_section(&snapshot.api)], other).unwrap();
    assert!(UnixStream::connect(snapshot.path("w")).is_ok());
}
