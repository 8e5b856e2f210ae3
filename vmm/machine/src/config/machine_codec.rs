//! Encodes a machine's configuration for the network and for stores, and checks a decoded one.

use std::path::Path;

use driftline_dirty_tracker::PAGE_SIZE;
use driftline_guest::GuestError;

use super::backend::BackendKind;
use super::devices;
use super::error::{ConfigError, in_range};
use super::lineage::GuestName;
use super::machine::{Boot, MachineConfig};
use crate::codec::{decode_versioned, encode_versioned};
use crate::limits::{MAX_MEM_BYTES, MAX_VCPUS, MIN_MEM_BYTES};

const SUBJECT: &str = "the guest's configuration";

impl MachineConfig {
    /// Returns the bytes that `GuestIdentity::config` returns. The configuration must have passed
    /// [`Self::check`].
    pub fn encode(&self) -> Vec<u8> {
        // Only a path that is not UTF-8 can fail here, and no guest starts with one.
        encode_versioned(self).unwrap_or_default()
    }

    /// Decodes and checks bytes that [`Self::encode`] wrote on this host or another.
    ///
    /// # Errors
    ///
    /// The bytes are malformed, or their version is not supported.
    pub fn decode(bytes: &[u8]) -> Result<Self, GuestError> {
        let config: Self = decode_versioned(SUBJECT, bytes)?;
        config.check().map_err(|e| GuestError::malformed(SUBJECT, e))?;
        Ok(config)
    }

    /// Checks that a host could run this configuration.
    ///
    /// # Errors
    ///
    /// A [`ConfigError`]: no host could.
    pub fn check(&self) -> Result<(), ConfigError> {
        let Self { mem_bytes, vcpus, ring_entries, .. } = *self;
        in_range("vCPUs", vcpus.into(), 1, MAX_VCPUS.into())?;
        in_range("bytes of memory", mem_bytes, MIN_MEM_BYTES, MAX_MEM_BYTES)?;
        let size = |part: &str, value, unit, wanted: &str| {
            let (part, wanted) = (part.to_owned(), wanted.to_owned());
            Err(ConfigError::Size { part, value, unit, wanted })
        };
        if !mem_bytes.is_multiple_of(PAGE_SIZE) {
            return size("the memory", mem_bytes, "bytes", "whole pages");
        }
        if self.backend == BackendKind::Kvm && !ring_entries.is_power_of_two() {
            return size("each dirty ring", ring_entries.into(), "entries", "a power of two");
        }
        let utf8 = |path: &Path| match path.to_str() {
            Some(_) => Ok(()),
            None => Err(ConfigError::NotUtf8(path.to_owned())),
        };
        if let Boot::Kernel { kernel, initrd, .. } = &self.boot {
            utf8(kernel)?;
            initrd.as_deref().map_or(Ok(()), utf8)?;
        }
        self.cpu.check()?;
        if self.cpu.smt && vcpus > 1 && !vcpus.is_multiple_of(2) {
            let wanted = "1 or an even number, because each core has two threads (smt)";
            return size("a guest", vcpus.into(), "vCPUs", wanted);
        }
        self.identity.name.as_ref().map_or(Ok(()), GuestName::check)?;
        if self.backend != BackendKind::Kvm && !self.devices.is_empty() {
            let (backend, count) = (self.backend.name(), self.devices.len());
            return Err(ConfigError::NoDevices { backend, count });
        }
        devices::paths(&self.devices).try_for_each(utf8)?;
        devices::check(&self.devices, self.mem_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{
        BalloonConfig, ChangedBits, CpuConfig, CpuModel, CpuTemplate, CpuidChange, CpuidWord,
        DiskConfig, MsrChange, MsrWord, NetConfig, NetLimits, RateLimit, RateLimits, RngConfig,
        VsockConfig,
    };
    use super::*;
    use crate::config::{
        DeviceConfig, DiskIdentity, Identity, Lineage, MAX_DEVICES, MacAddr, MetadataVersion,
        NetMetadata,
    };
    use crate::tracking::TrackingMode;
    use driftline_guest::{Line, LineId, Origin, VmId};
    use proptest::prelude::*;
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    fn payload() -> MachineConfig {
        MachineConfig {
            identity: Default::default(),
            mem_bytes: 64 << 20,
            vcpus: 2,
            tracking: TrackingMode::DirtyRing,
            ring_entries: 16_384,
            backend: BackendKind::Kvm,
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
            limits: RateLimits::default(),
        })
    }

    fn net(tap: &str, queues: u8) -> DeviceConfig {
        let mac = MacAddr([2, 0, 0, 0, 0, 9]);
        let (id, tap, limits) = ("n".to_owned(), tap.to_owned(), NetLimits::default());
        DeviceConfig::Net(NetConfig { id, tap, mac, queues, mtu: None, limits, metadata: None })
    }

    fn rng(limits: RateLimits) -> DeviceConfig {
        DeviceConfig::Rng(RngConfig { limits })
    }

    fn limits(size: u64) -> RateLimits {
        let limit = RateLimit { size, refill_ms: 100, one_time_burst: 300 };
        RateLimits { bandwidth: None, operations: Some(limit) }
    }

    fn vsock(cid: u32) -> DeviceConfig {
        DeviceConfig::Vsock(VsockConfig { cid, uds: "/v".into() })
    }

    fn kernel(path: &OsStr) -> MachineConfig {
        let (kernel, cmdline) = (path.into(), "quiet".to_owned());
        let boot = Boot::Kernel { kernel, initrd: None, cmdline, bare: true };
        let (backend, tracking) = (BackendKind::Threads, TrackingMode::None);
        MachineConfig { backend, tracking, boot, ..payload() }
    }

    /// Returns the identity of a guest that continues from a checkpoint.
    fn identity() -> Identity {
        let uuid = |n| uuid::Uuid::from_bytes([n; 16]);
        let (parent, own) = (VmId(uuid(0xa0)), LineId(uuid(0xb0)));
        let from = Origin {
            vm_id: VmId(uuid(0xc0)),
            epoch: 300,
            created_unix_ms: 5,
            line: LineId(uuid(0xd0)),
        };
        Identity {
            name: Some("web-1".parse().unwrap()),
            lineage: Some(Lineage { parent, checkpoint: 7 }),
            line: Line { own, from: Some(from) },
        }
    }

    fn uuid_bytes(n: u8) -> Vec<u8> {
        [&[16][..], &[n; 16]].concat()
    }

    /// Returns the bytes of the payload's configuration up to its devices.
    fn payload_head(tracking: u8) -> Vec<u8> {
        [
            b"\x01\x80\x80\x80\x20\x02",
            &[tracking][..],
            b"\x80\x80\x01\x00\x00\x07payload\x00\x00\x00\x00\x00\x00\x00\x00\x00",
        ]
        .concat()
    }

    fn template() -> CpuTemplate {
        let mut registers = [ChangedBits::default(); 4];
        registers[2] = ChangedBits { mask: 0x80, value: 0 };
        CpuTemplate {
            capabilities: vec![171],
            leaves: vec![CpuidChange { function: 7, index: 1, flags: 2, registers }],
            msrs: vec![MsrChange { index: 0x10a, bits: ChangedBits { mask: 5, value: 4 } }],
        }
    }

    /// Returns a model with all fields set.
    fn full_cpu() -> CpuConfig {
        CpuConfig {
            model: CpuModel::Baseline,
            without: vec!["cx16".to_owned()],
            smt: true,
            template: template(),
            exposed: vec![CpuidWord { function: 7, index: 1, registers: [0x80, 1, 0, u32::MAX] }],
            exposed_msrs: vec![MsrWord { index: 0x10a, value: 0x8b }],
            tsc_khz: Some(2_000_000),
        }
    }

    /// Fixes the bytes of configurations that each have one special part.
    #[test]
    fn a_configuration_has_its_bytes() {
        let (head, cpu) = (payload_head, full_cpu());
        let plain = Identity {
            name: None,
            lineage: None,
            line: Line { own: LineId(uuid::Uuid::from_bytes([0xb0; 16])), from: None },
        };
        let payload = || MachineConfig { identity: plain.clone(), ..payload() };
        let none = [b"\x00\x00".to_vec(), uuid_bytes(0xb0), b"\x00".to_vec()].concat();
        let with_identity = |identity| match disk("a") {
            DeviceConfig::Disk(d) => DeviceConfig::Disk(DiskConfig { identity, ..d }),
            other => other,
        };
        let file = |born_ns| Some(DiskIdentity::File { inode: 300, born_ns });
        let encoded = |tracking, devices: &[u8]| [&head(tracking)[..], devices].concat();
        let tracked = |tracking| MachineConfig { tracking, ..payload() };
        let with = |device: DeviceConfig| MachineConfig { devices: vec![device], ..payload() };
        let disk = |identity, bytes: &[u8]| {
            let device = b"\x01\x00\x01a\x02/d\x01\x02s1\x80\x80\x40\x80\x04";
            (with(with_identity(identity)), encoded(0, &[&device[..], bytes].concat()))
        };
        let balloon = BalloonConfig {
            bytes: 0,
            deflate_on_oom: true,
            reporting: false,
            hinting: true,
            statistics_interval_s: 300,
        };
        let golden: Vec<(MachineConfig, Vec<u8>)> = vec![
            (payload(), encoded(0, b"\x00")),
            (tracked(TrackingMode::DirtyBitmapManual), encoded(3, b"\x00")),
            (tracked(TrackingMode::UserfaultWp), encoded(4, b"\x00")),
            (with(rng(RateLimits::default())), encoded(0, b"\x01\x01\x00\x00")),
            (
                with(net("t0", 2)),
                encoded(
                    0,
                    b"\x01\x02\x01n\x02t0\x02\x00\x00\x00\x00\x09\x02\x00\x00\x00\x00\x00\x00",
                ),
            ),
            (with(DeviceConfig::Balloon(balloon)), encoded(0, b"\x01\x04\x00\x01\x00\x01\xac\x02")),
            (with(vsock(300)), encoded(0, b"\x01\x03\xac\x02\x02/v")),
            disk(None, b"\x00\x00\x00"),
            disk(file(None), b"\x01\x00\xac\x02\x00\x00\x00"),
            disk(file(Some(42)), b"\x01\x00\xac\x02\x01\x2a\x00\x00"),
            disk(Some(DiskIdentity::Device("naa.1".to_owned())), b"\x01\x01\x05naa.1\x00\x00"),
            (
                MachineConfig { cpu, identity: plain.clone(), ..kernel(OsStr::new("/k")) },
                b"\x01\x80\x80\x80\x20\x02\x02\x80\x80\x01\x01\x01\x02/k\x00\x05quiet\x01\x01\x01\
                  \x04cx16\x01\x01\xab\x01\x01\x07\x01\x02\x00\x00\x00\x00\x80\x01\x00\x00\x00\
                  \x01\x8a\x02\x05\x04\
                  \x01\x07\x01\x80\x01\x01\x00\xff\xff\xff\xff\x0f\x01\x8a\x02\x8b\x01\x01\
                  \x80\x89\x7a\x00"
                    .to_vec(),
            ),
        ];
        for (config, bytes) in golden {
            let bytes = [bytes, none.clone()].concat();
            assert_eq!(config.encode(), bytes, "{config:?}");
            assert_eq!(MachineConfig::decode(&bytes).unwrap(), config);
        }
    }

    #[test]
    fn an_identity_has_its_bytes() {
        let config = MachineConfig { identity: identity(), ..payload() };
        let whole = [
            payload_head(0),
            b"\x00\x01\x05web-1\x01".to_vec(),
            uuid_bytes(0xa0),
            b"\x07".to_vec(),
            uuid_bytes(0xb0),
            b"\x01".to_vec(),
            uuid_bytes(0xc0),
            b"\xac\x02\x05".to_vec(),
            uuid_bytes(0xd0),
        ]
        .concat();
        assert_eq!(config.encode(), whole);
        assert_eq!(MachineConfig::decode(&whole).unwrap(), config);
        let mut refused = whole.clone();
        let at = refused.windows(5).position(|w| w == b"web-1").unwrap();
        refused[at] = b' ';
        let message = MachineConfig::decode(&refused).unwrap_err().to_string();
        assert!(message.contains("name of a guest"), "{message}");
    }

    fn with_net(change: impl FnOnce(&mut NetConfig)) -> DeviceConfig {
        let mut device = net("t0", 2);
        if let DeviceConfig::Net(net) = &mut device {
            change(net);
        }
        device
    }

    #[test]
    fn parts_of_devices_have_their_bytes() {
        let base = payload();
        let of = |device| MachineConfig { devices: vec![device], ..base.clone() };
        let address = std::net::Ipv4Addr::new(169, 254, 169, 254);
        let metadata = NetMetadata { address, version: MetadataVersion::V2, imds_compat: true };
        let head = b"\x01\x02\x01n\x02t0\x02\x00\x00\x00\x00\x09\x02";
        let limit = b"\x00\x01\x05\x64\xac\x02";
        let none = b"\x00\x00";
        for (device, bytes) in [
            (rng(limits(5)), [b"\x01\x01", &limit[..]].concat()),
            (
                with_net(|net| net.mtu = Some(1500)),
                [&head[..], b"\x01\xdc\x0b", none, none, b"\x00"].concat(),
            ),
            (
                with_net(|net| net.limits.transmit = limits(5)),
                [&head[..], b"\x00", none, limit, b"\x00"].concat(),
            ),
            (
                with_net(|net| net.metadata = Some(metadata)),
                [&head[..], b"\x00", none, none, b"\x01\xa9\xfe\xa9\xfe\x01\x01"].concat(),
            ),
        ] {
            let config = of(device);
            let encoded = config.encode();
            assert_eq!(encoded[payload_head(0).len()..][..bytes.len()], bytes, "{config:?}");
            assert_eq!(MachineConfig::decode(&encoded).unwrap(), config);
        }
    }

    #[test]
    fn impossible_parts_of_devices_are_refused() {
        let refused = |device| {
            let bytes = MachineConfig { devices: vec![device], ..payload() }.encode();
            MachineConfig::decode(&bytes).unwrap_err().to_string()
        };
        assert!(refused(rng(limits(0))).contains("the source of randomness has 0 operations"));
        assert!(refused(with_net(|net| net.mtu = Some(67))).contains("67 bytes, not 68 to 65535"));
        let address = std::net::Ipv4Addr::new(10, 0, 0, 1);
        let metadata = NetMetadata { address, version: MetadataVersion::V1, imds_compat: false };
        let foreign = refused(with_net(|net| net.metadata = Some(metadata)));
        assert!(foreign.contains("\"10.0.0.1\" is not a valid address"), "{foreign}");
    }

    #[test]
    fn devices_are_checked_by_name() {
        let refused = |devices: Vec<DeviceConfig>| {
            MachineConfig { devices, ..payload() }.check().unwrap_err().to_string()
        };
        assert!(refused(vec![disk("a"), disk("b"), disk("a")]).contains("two devices"));
        assert!(refused(vec![disk("a b")]).contains("\"a b\""));
        assert!(refused(vec![disk("rng"), rng(RateLimits::default())]).contains("\"rng\""));
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
        assert!(refused(vec![vsock(1)]).contains("\"1\" is not a valid context ID"));
        assert!(refused(vec![vsock(3), vsock(4)]).contains("\"vsock\""));
        assert!(refused(vec![odd(0)]).contains("0 bytes"));
        assert!(refused(vec![odd(513)]).contains("513 bytes"));
        let block = |block_bytes| match disk("a") {
            DeviceConfig::Disk(d) => DeviceConfig::Disk(DiskConfig { block_bytes, ..d }),
            other => other,
        };
        for bytes in [0, 256, 513, 3072, 8192, 1 << 31] {
            let message = refused(vec![block(bytes)]);
            assert!(message.contains(&format!("has {bytes} bytes")), "{message}");
        }
        assert!(MachineConfig { devices: vec![block(4096)], ..payload() }.check().is_ok());
        let nameless = match disk("a") {
            DeviceConfig::Disk(d) => {
                let identity = Some(DiskIdentity::Device("\u{1b}[2J".to_owned()));
                DeviceConfig::Disk(DiskConfig { identity, ..d })
            }
            other => other,
        };
        assert!(refused(vec![nameless]).contains("is not a valid name of a block device"));
        let threads = MachineConfig {
            backend: BackendKind::Threads,
            devices: vec![rng(RateLimits::default())],
            ..payload()
        };
        assert!(threads.check().unwrap_err().to_string().contains("no devices"));
    }

    #[test]
    fn other_versions_and_trailing_bytes_are_refused() {
        let refused = |bytes: &[u8]| MachineConfig::decode(bytes).unwrap_err().to_string();
        let mut bytes = payload().encode();
        bytes.extend([0; 3]);
        assert!(refused(&bytes).contains("3 bytes follow its end"));
        bytes[0] = 6;
        assert!(
            refused(&bytes)
                .contains("it has version 6, and this version of Driftline reads version 1")
        );
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
        let cpu = CpuConfig { smt: true, ..CpuConfig::default() };
        let odd = MachineConfig { vcpus: 3, cpu: cpu.clone(), ..payload() };
        assert!(refused(odd).contains("3 vCPUs"));
        for vcpus in [1, 2, 32] {
            MachineConfig { vcpus, cpu: cpu.clone(), ..payload() }.check().unwrap();
        }
        assert!(refused(MachineConfig { mem_bytes: 1 << 60, ..payload() }).contains("bytes of"));
        let odd = MachineConfig { mem_bytes: (64 << 20) + 1, ..payload() };
        assert!(refused(odd).contains("whole pages"));
        assert!(
            refused(MachineConfig { ring_entries: 1000, ..payload() }).contains("power of two")
        );
        let mut cpu = CpuConfig::default();
        cpu.template.capabilities = vec![1; 257];
        let many = refused(MachineConfig { cpu, ..payload() });
        assert!(many.contains("257 KVM capabilities in the CPU template, not 0 to 256"), "{many}");
        let name = kernel(OsStr::from_bytes(b"/k\xff")).check().unwrap_err().to_string();
        assert!(name.contains("not UTF-8"), "{name}");
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = MachineConfig::decode(&bytes);
        }
    }
}
