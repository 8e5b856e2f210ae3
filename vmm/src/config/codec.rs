//! Owns the bytes of a configuration on wires and in stores: a version, then postcard. They come
//! from strangers: nothing in them is believed before it is checked.
//!
//! | version | fields |
//! | --- | --- |
//! | 1 | memory, vCPUs, tracking, ring entries, backend, boot |
//! | 2 | those, of which a kernel's boot has `bare` at its end; then the processor, then the virtio devices |
//! | 3 | those; the processor has its registers of features and its TSC's frequency at its end |
//! | 4 | those; a disk has its block and its identity at its end |
//! | 5 | those; written only of a guest that is tracked by `dirty-bitmap-manual` or `userfault-wp`, which older ones do not know |

use std::path::PathBuf;

use checkpoint::GuestError;
use dirty_tracker::{PAGE_SIZE, TrackingMode};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::{
    Backend, BalloonConfig, Boot, CpuConfig, CpuModel, CpuidWord, DeviceConfig, DiskConfig,
    MAX_MEM_BYTES, MAX_VCPUS, MIN_MEM_BYTES, MachineConfig, NetConfig, VsockConfig, devices,
};

/// The newest that is written; older ones are read.
const VERSION: u16 = 5;
/// Written where it says the same.
const BEFORE_NEW_MODES: u16 = 4;
const WHAT: &str = "the guest's configuration";

/// Version 1.
#[derive(Deserialize)]
struct V1 {
    mem_bytes: u64,
    vcpus: u8,
    tracking: TrackingMode,
    ring_entries: u32,
    backend: Backend,
    boot: BootV1,
}

#[derive(Deserialize)]
enum BootV1 {
    Payload(String),
    Kernel { kernel: PathBuf, initrd: Option<PathBuf>, cmdline: String },
}

impl From<V1> for MachineConfig {
    fn from(v1: V1) -> Self {
        let V1 { mem_bytes, vcpus, tracking, ring_entries, backend, boot } = v1;
        let boot = match boot {
            BootV1::Payload(spec) => Boot::Payload(spec),
            // Nothing was ever added.
            BootV1::Kernel { kernel, initrd, cmdline } => {
                Boot::Kernel { kernel, initrd, cmdline, bare: true }
            }
        };
        let (cpu, devices) = (CpuConfig::default(), Vec::new());
        Self { mem_bytes, vcpus, tracking, ring_entries, backend, boot, cpu, devices }
    }
}

/// Version 2.
#[derive(Deserialize)]
struct V2 {
    mem_bytes: u64,
    vcpus: u8,
    tracking: TrackingMode,
    ring_entries: u32,
    backend: Backend,
    boot: Boot,
    cpu: CpuV2,
    devices: Vec<DeviceV3>,
}

#[derive(Deserialize)]
struct CpuV2 {
    model: CpuModel,
    without: Vec<String>,
    shown: Vec<CpuidWord>,
}

impl From<V2> for MachineConfig {
    fn from(v2: V2) -> Self {
        let V2 { mem_bytes, vcpus, tracking, ring_entries, backend, boot, cpu, devices } = v2;
        let CpuV2 { model, without, shown } = cpu;
        let cpu = CpuConfig { model, without, shown, ..CpuConfig::default() };
        let devices = devices.into_iter().map(DeviceConfig::from).collect();
        Self { mem_bytes, vcpus, tracking, ring_entries, backend, boot, cpu, devices }
    }
}

/// Version 3.
#[derive(Deserialize)]
struct V3 {
    mem_bytes: u64,
    vcpus: u8,
    tracking: TrackingMode,
    ring_entries: u32,
    backend: Backend,
    boot: Boot,
    cpu: CpuConfig,
    devices: Vec<DeviceV3>,
}

/// Of versions 2 and 3.
#[derive(Deserialize)]
enum DeviceV3 {
    Disk(DiskV3),
    Rng,
    Net(NetConfig),
    Vsock(VsockConfig),
    Balloon(BalloonConfig),
}

#[derive(Deserialize)]
struct DiskV3 {
    id: String,
    path: PathBuf,
    readonly: bool,
    serial: String,
    bytes: u64,
}

impl From<DeviceV3> for DeviceConfig {
    fn from(v3: DeviceV3) -> Self {
        match v3 {
            DeviceV3::Disk(DiskV3 { id, path, readonly, serial, bytes }) => {
                let (block_bytes, identity) = (512, None);
                Self::Disk(DiskConfig { id, path, readonly, serial, bytes, block_bytes, identity })
            }
            DeviceV3::Rng => Self::Rng,
            DeviceV3::Net(net) => Self::Net(net),
            DeviceV3::Vsock(vsock) => Self::Vsock(vsock),
            DeviceV3::Balloon(balloon) => Self::Balloon(balloon),
        }
    }
}

impl From<V3> for MachineConfig {
    fn from(v3: V3) -> Self {
        let V3 { mem_bytes, vcpus, tracking, ring_entries, backend, boot, cpu, devices } = v3;
        let devices = devices.into_iter().map(DeviceConfig::from).collect();
        Self { mem_bytes, vcpus, tracking, ring_entries, backend, boot, cpu, devices }
    }
}

/// Reads all of `bytes`, or says what is wrong.
fn whole<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    let (value, rest) = postcard::take_from_bytes(bytes).map_err(|e| e.to_string())?;
    match rest.len() {
        0 => Ok(value),
        left => Err(format!("{left} bytes follow its end")),
    }
}

impl MachineConfig {
    /// The configuration as `Guest::config` hands it out. It must have passed [`Self::check`].
    pub fn encode(&self) -> Vec<u8> {
        let version = match self.tracking {
            TrackingMode::DirtyRing | TrackingMode::DirtyBitmap | TrackingMode::None => {
                BEFORE_NEW_MODES
            }
            _ => VERSION,
        };
        // Only a path that is not UTF-8 can fail here, and no guest is started with one.
        postcard::to_stdvec(&(version, self)).unwrap_or_default()
    }

    /// Reads what [`Self::encode`] wrote, here or elsewhere, and checks it.
    pub fn decode(bytes: &[u8]) -> Result<Self, GuestError> {
        let malformed = |why: String| GuestError::Malformed { what: WHAT.to_owned(), why };
        let (version, rest) =
            postcard::take_from_bytes::<u16>(bytes).map_err(|e| malformed(e.to_string()))?;
        let config = match version {
            1 => whole::<V1>(rest).map(Self::from),
            2 => whole::<V2>(rest).map(Self::from),
            3 => whole::<V3>(rest).map(Self::from),
            BEFORE_NEW_MODES | VERSION => whole(rest),
            _ => {
                let why =
                    format!("it has version {version}, and this is written for version {VERSION}");
                return Err(GuestError::Unsupported { what: WHAT.to_owned(), why });
            }
        };
        let config = config.map_err(malformed)?;
        config.check().map_err(malformed)?;
        Ok(config)
    }

    /// Whether any host could run this; if not, why.
    pub fn check(&self) -> Result<(), String> {
        let Self { mem_bytes, vcpus, ring_entries, .. } = *self;
        if !(1..=MAX_VCPUS).contains(&vcpus) {
            return Err(format!("it has {vcpus} vCPUs, not 1 to {MAX_VCPUS}"));
        }
        if !(MIN_MEM_BYTES..=MAX_MEM_BYTES).contains(&mem_bytes) {
            return Err(format!(
                "it has {mem_bytes} bytes of memory, not {MIN_MEM_BYTES} to {MAX_MEM_BYTES}"
            ));
        }
        if !mem_bytes.is_multiple_of(PAGE_SIZE) {
            return Err(format!("its {mem_bytes} bytes of memory are not whole frames"));
        }
        if self.backend == Backend::Kvm && !ring_entries.is_power_of_two() {
            return Err(format!("its rings have {ring_entries} entries, not a power of two"));
        }
        if let Boot::Kernel { kernel, initrd, .. } = &self.boot
            && let Some(path) =
                [Some(kernel), initrd.as_ref()].into_iter().flatten().find(|p| p.to_str().is_none())
        {
            return Err(format!("its file {path:?} has a name that is not UTF-8"));
        }
        self.cpu.check()?;
        if self.backend != Backend::Kvm && !self.devices.is_empty() {
            let (backend, count) = (self.backend, self.devices.len());
            return Err(format!(
                "the {backend} backend has no devices, and {count} are given: they need --backend kvm"
            ));
        }
        if let Some(path) = devices::paths(&self.devices).find(|p| p.to_str().is_none()) {
            return Err(format!("its file {path:?} has a name that is not UTF-8"));
        }
        devices::check(&self.devices, self.mem_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::super::MsrWord;
    use super::*;
    use crate::config::{DiskIdentity, MAX_DEVICES, MacAddr};
    use proptest::prelude::*;
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    fn payload() -> MachineConfig {
        MachineConfig {
            mem_bytes: 64 << 20,
            vcpus: 2,
            tracking: TrackingMode::DirtyRing,
            ring_entries: 16_384,
            backend: Backend::Kvm,
            boot: Boot::Payload("payload".to_owned()),
            cpu: CpuConfig::default(),
            devices: Vec::new(),
        }
    }

    fn disk(id: &str) -> DeviceConfig {
        DeviceConfig::Disk(DiskConfig {
            id: id.to_owned(),
            path: "/d".into(),
            readonly: true,
            serial: "s1".to_owned(),
            bytes: 1 << 20,
            block_bytes: 512,
            identity: None,
        })
    }

    fn net(tap: &str, queues: u8) -> DeviceConfig {
        let mac = MacAddr([2, 0, 0, 0, 0, 9]);
        DeviceConfig::Net(NetConfig { id: "n".to_owned(), tap: tap.to_owned(), mac, queues })
    }

    fn vsock(cid: u32) -> DeviceConfig {
        DeviceConfig::Vsock(VsockConfig { cid, uds: "/v".into() })
    }

    fn kernel(path: &OsStr) -> MachineConfig {
        let (kernel, cmdline) = (path.into(), "quiet".to_owned());
        let boot = Boot::Kernel { kernel, initrd: None, cmdline, bare: true };
        let (backend, tracking) = (Backend::Threads, TrackingMode::None);
        MachineConfig { backend, tracking, boot, ..payload() }
    }

    /// The bytes of version 1, for ever: version, memory, vCPUs, tracking, ring, backend, boot.
    #[test]
    fn the_bytes_of_version_1_stay_as_they_are() {
        let golden: &[(MachineConfig, &[u8])] = &[
            (payload(), b"\x01\x80\x80\x80\x20\x02\x00\x80\x80\x01\x00\x00\x07payload"),
            (
                kernel(OsStr::new("/k")),
                b"\x01\x80\x80\x80\x20\x02\x02\x80\x80\x01\x01\x01\x02/k\x00\x05quiet",
            ),
        ];
        for (config, bytes) in golden {
            assert_eq!(MachineConfig::decode(bytes).unwrap(), *config);
        }
    }

    /// The bytes of version 2, for ever: those of version 1, `bare`, model, what it is without, and
    /// what it has shown; then the devices.
    #[test]
    fn the_bytes_of_version_2_stay_as_they_are() {
        let without = vec!["cx16".to_owned()];
        let shown = vec![CpuidWord { function: 7, index: 1, registers: [0x80, 1, 0, u32::MAX] }];
        let cpu = CpuConfig { model: CpuModel::Baseline, without, shown, ..CpuConfig::default() };
        let devices = vec![DeviceConfig::Rng, disk("a")];
        let golden: &[(MachineConfig, &[u8])] = &[
            (
                MachineConfig { devices, ..payload() },
                b"\x02\x80\x80\x80\x20\x02\x00\x80\x80\x01\x00\x00\x07payload\x00\x00\x00\
                  \x02\x01\x00\x01a\x02/d\x01\x02s1\x80\x80\x40",
            ),
            (
                MachineConfig { cpu, ..kernel(OsStr::new("/k")) },
                b"\x02\x80\x80\x80\x20\x02\x02\x80\x80\x01\x01\x01\x02/k\x00\x05quiet\x01\
                  \x01\x01\x04cx16\x01\x07\x01\x80\x01\x01\x00\xff\xff\xff\xff\x0f\x00",
            ),
            (
                MachineConfig { devices: vec![net("t0", 2), vsock(300)], ..payload() },
                b"\x02\x80\x80\x80\x20\x02\x00\x80\x80\x01\x00\x00\x07payload\x00\x00\x00\
                  \x02\x02\x01n\x02t0\x02\x00\x00\x00\x00\x09\x02\x03\xac\x02\x02/v",
            ),
        ];
        for (config, bytes) in golden {
            assert_eq!(MachineConfig::decode(bytes).unwrap(), *config);
        }
    }

    /// The bytes of version 3, for ever: those of version 2, with registers of features and the
    /// TSC's frequency behind what the processor has shown.
    #[test]
    fn the_bytes_of_version_3_stay_as_they_are() {
        let without = vec!["cx16".to_owned()];
        let shown = vec![CpuidWord { function: 7, index: 1, registers: [0x80, 1, 0, u32::MAX] }];
        let shown_msrs = vec![MsrWord { index: 0x10a, value: 0x8b }];
        let tsc_khz = Some(2_000_000);
        let cpu = CpuConfig { model: CpuModel::Baseline, without, shown, shown_msrs, tsc_khz };
        let devices = vec![DeviceConfig::Rng, disk("a")];
        let golden: &[(MachineConfig, &[u8])] = &[
            (
                MachineConfig { devices, ..payload() },
                b"\x03\x80\x80\x80\x20\x02\x00\x80\x80\x01\x00\x00\x07payload\x00\x00\x00\x00\x00\
                  \x02\x01\x00\x01a\x02/d\x01\x02s1\x80\x80\x40",
            ),
            (
                MachineConfig { cpu, ..kernel(OsStr::new("/k")) },
                b"\x03\x80\x80\x80\x20\x02\x02\x80\x80\x01\x01\x01\x02/k\x00\x05quiet\x01\
                  \x01\x01\x04cx16\x01\x07\x01\x80\x01\x01\x00\xff\xff\xff\xff\x0f\
                  \x01\x8a\x02\x8b\x01\x01\x80\x89\x7a\x00",
            ),
        ];
        for (config, bytes) in golden {
            assert_eq!(MachineConfig::decode(bytes).unwrap(), *config);
        }
    }

    /// The bytes of version 4, for ever: those of version 3, with a disk's block and identity behind its size.
    #[test]
    fn the_bytes_of_version_4_stay_as_they_are() {
        let known = |identity| match disk("a") {
            DeviceConfig::Disk(d) => DeviceConfig::Disk(DiskConfig { identity, ..d }),
            other => other,
        };
        let file = |born_ns| known(Some(DiskIdentity::File { inode: 300, born_ns }));
        let device = known(Some(DiskIdentity::Device("naa.1".to_owned())));
        let golden: &[(DeviceConfig, &[u8])] = &[
            (known(None), b"\x00"),
            (file(None), b"\x01\x00\xac\x02\x00"),
            (file(Some(42)), b"\x01\x00\xac\x02\x01\x2a"),
            (device, b"\x01\x01\x05naa.1"),
        ];
        for (disk, identity) in golden {
            let config =
                MachineConfig { devices: vec![DeviceConfig::Rng, disk.clone()], ..payload() };
            let before =
                b"\x04\x80\x80\x80\x20\x02\x00\x80\x80\x01\x00\x00\x07payload\x00\x00\x00\x00\x00\
                  \x02\x01\x00\x01a\x02/d\x01\x02s1\x80\x80\x40\x80\x04";
            let bytes = [before, *identity].concat();
            assert_eq!(config.encode(), bytes);
            assert_eq!(MachineConfig::decode(&bytes).unwrap(), config);
        }
    }

    /// The bytes of version 5, for ever: those of version 4, with modes that it lacks.
    #[test]
    fn the_bytes_of_version_5_stay_as_they_are() {
        for (tracking, byte) in
            [(TrackingMode::DirtyBitmapManual, 3), (TrackingMode::UserfaultWp, 4)]
        {
            let config = MachineConfig { tracking, ..payload() };
            let mut bytes = payload().encode();
            assert_eq!(bytes[..7], *b"\x04\x80\x80\x80\x20\x02\x00");
            (bytes[0], bytes[6]) = (5, byte);
            assert_eq!(config.encode(), bytes);
            assert_eq!(MachineConfig::decode(&bytes).unwrap(), config);
        }
    }

    #[test]
    fn devices_are_checked_by_name() {
        let refused = |devices: Vec<DeviceConfig>| {
            MachineConfig { devices, ..payload() }.check().unwrap_err()
        };
        assert!(refused(vec![disk("a"), disk("b"), disk("a")]).contains("two devices"));
        assert!(refused(vec![disk("a b")]).contains("\"a b\""));
        assert!(refused(vec![disk("rng"), DeviceConfig::Rng]).contains("\"rng\""));
        let many: Vec<_> = (0..=MAX_DEVICES).map(|i| disk(&i.to_string())).collect();
        assert!(refused(many).contains("17 virtio devices"));
        let odd = |bytes| match disk("a") {
            DeviceConfig::Disk(d) => DeviceConfig::Disk(DiskConfig { bytes, ..d }),
            other => other,
        };
        assert!(refused(vec![net("a b", 1)]).contains("\"a b\""));
        assert!(refused(vec![net("t", 0)]).contains("0 pairs"));
        let named = |id: &str| match net("t", 1) {
            DeviceConfig::Net(n) => DeviceConfig::Net(NetConfig { id: id.to_owned(), ..n }),
            other => other,
        };
        assert!(refused(vec![named("a"), named("b")]).contains("over the tap \"t\""));
        assert!(refused(vec![vsock(1)]).contains("1 is no context ID"));
        assert!(refused(vec![vsock(3), vsock(4)]).contains("\"vsock\""));
        assert!(refused(vec![odd(0)]).contains("0 bytes"));
        assert!(refused(vec![odd(513)]).contains("513 bytes"));
        let block = |block_bytes| match disk("a") {
            DeviceConfig::Disk(d) => DeviceConfig::Disk(DiskConfig { block_bytes, ..d }),
            other => other,
        };
        for bytes in [0, 256, 513, 3072, 8192, 1 << 31] {
            let said = refused(vec![block(bytes)]);
            assert!(said.contains(&format!("has blocks of {bytes}")), "{said}");
        }
        assert!(MachineConfig { devices: vec![block(4096)], ..payload() }.check().is_ok());
        let nameless = match disk("a") {
            DeviceConfig::Disk(d) => {
                let identity = Some(DiskIdentity::Device("\u{1b}[2J".to_owned()));
                DeviceConfig::Disk(DiskConfig { identity, ..d })
            }
            other => other,
        };
        assert!(refused(vec![nameless]).contains("is no name of a block device"));
        let threads = MachineConfig {
            backend: Backend::Threads,
            devices: vec![DeviceConfig::Rng],
            ..payload()
        };
        assert!(threads.check().unwrap_err().contains("no devices"));
    }

    #[test]
    fn other_versions_and_trailing_bytes_are_refused_in_a_sentence() {
        let refused = |bytes: &[u8]| MachineConfig::decode(bytes).unwrap_err().to_string();
        let mut bytes = payload().encode();
        bytes.extend([0; 3]);
        assert!(refused(&bytes).contains("3 bytes follow its end"));
        bytes[0] = 6;
        assert!(refused(&bytes).contains("it has version 6, and this is written for version 5"));
        assert!(refused(&[]).contains("configuration"));
        assert!(refused(&payload().encode()[..10]).contains("configuration"));
    }

    #[test]
    fn bounds_are_checked_by_name() {
        let refused = |config: MachineConfig| {
            MachineConfig::decode(&config.encode()).unwrap_err().to_string()
        };
        assert!(refused(MachineConfig { vcpus: 0, ..payload() }).contains("0 vCPUs"));
        assert!(refused(MachineConfig { vcpus: 33, ..payload() }).contains("33 vCPUs"));
        assert!(refused(MachineConfig { mem_bytes: 1 << 60, ..payload() }).contains("bytes of"));
        let odd = MachineConfig { mem_bytes: (64 << 20) + 1, ..payload() };
        assert!(refused(odd).contains("whole frames"));
        assert!(
            refused(MachineConfig { ring_entries: 1000, ..payload() }).contains("power of two")
        );
        let name = kernel(OsStr::from_bytes(b"/k\xff")).check().unwrap_err();
        assert!(name.contains("not UTF-8"), "{name}");
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = MachineConfig::decode(&bytes);
        }
    }
}
