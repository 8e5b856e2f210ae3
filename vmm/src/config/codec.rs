//! Owns the bytes of a configuration on wires and in stores: a version, then postcard. They come
//! from strangers: nothing in them is believed before it is checked.

use checkpoint::GuestError;
use dirty_tracker::PAGE_SIZE;

use super::{Backend, Boot, MAX_MEM_BYTES, MAX_VCPUS, MIN_MEM_BYTES, MachineConfig};

/// The encoding of all configurations so far.
const VERSION: u16 = 1;
const WHAT: &str = "the guest's configuration";

impl MachineConfig {
    /// The configuration as `Guest::config` hands it out. It must have passed [`Self::check`].
    pub fn encode(&self) -> Vec<u8> {
        // Only a path that is not UTF-8 can fail here, and no guest is started with one.
        postcard::to_stdvec(&(VERSION, self)).unwrap_or_default()
    }

    /// Reads what [`Self::encode`] wrote, here or elsewhere, and checks it.
    pub fn decode(bytes: &[u8]) -> Result<Self, GuestError> {
        let malformed = |why: String| GuestError::Malformed { what: WHAT.to_owned(), why };
        let (version, rest) =
            postcard::take_from_bytes::<u16>(bytes).map_err(|e| malformed(e.to_string()))?;
        if version != VERSION {
            let why =
                format!("it has version {version}, and this is written for version {VERSION}");
            return Err(GuestError::Unsupported { what: WHAT.to_owned(), why });
        }
        let (config, rest) =
            postcard::take_from_bytes::<Self>(rest).map_err(|e| malformed(e.to_string()))?;
        if !rest.is_empty() {
            return Err(malformed(format!("{} bytes follow its end", rest.len())));
        }
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
            && let Some(path) = [Some(kernel), initrd.as_ref()]
                .into_iter()
                .flatten()
                .find(|path| path.to_str().is_none())
        {
            return Err(format!("its file {path:?} has a name that is not UTF-8"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dirty_tracker::TrackingMode;
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
        }
    }

    fn kernel(path: &OsStr) -> MachineConfig {
        let boot = Boot::Kernel { kernel: path.into(), initrd: None, cmdline: "quiet".to_owned() };
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
            assert_eq!(config.encode(), *bytes);
            assert_eq!(MachineConfig::decode(bytes).unwrap(), *config);
        }
    }

    #[test]
    fn other_versions_and_trailing_bytes_are_refused_in_a_sentence() {
        let refused = |bytes: &[u8]| MachineConfig::decode(bytes).unwrap_err().to_string();
        let mut bytes = payload().encode();
        bytes.extend([0; 3]);
        assert!(refused(&bytes).contains("3 bytes follow its end"));
        bytes[0] = 2;
        assert!(refused(&bytes).contains("it has version 2, and this is written for version 1"));
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
