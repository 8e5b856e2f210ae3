//! Reads a bzImage: checks its setup header and loads its protected-mode part into guest memory.
//!
//! Only the 64-bit entry is used, which came with protocol 2.12 (Linux 3.8). linux-loader's own
//! loader is not used: it enters at 32 bits and trusts most sizes in the header.

use std::io::{Read, Seek, SeekFrom};

use linux_loader::loader::bootparam::{LOADED_HIGH, XLF_KERNEL_64, setup_header};
use vm_memory::{ByteValued, Bytes, GuestAddress, ReadVolatile};

use super::defect::{BootMisfit, HeaderDefect};
use super::error::BootError;
use super::loaded::{Loaded, Start};
use super::map;
use super::platform::GuestRange;
use crate::memory::Memory;

/// Bytes at the start of the file that contain the header.
pub(super) const HEAD_BYTES: usize = 0x280;
const BOOT_FLAG_AT: usize = 0x1fe;
const BOOT_FLAG: [u8; 2] = [0x55, 0xaa];
const MAGIC_AT: usize = 0x202;
const MAGIC: &[u8; 4] = b"HdrS";
/// The header begins at the byte that counts setup sectors.
const HEADER_AT: usize = 0x1f1;
/// Offset of the distance of the jump over the header, which gives the end of the header.
const JUMP_AT: usize = 0x201;
const SECTOR: u64 = 512;
/// The unit of `syssize`, in bytes.
const PARAGRAPH: u64 = 16;

const OLDEST: u16 = 0x020c;
/// The last version of protocol 2. Another major version would be another protocol.
const NEWEST: u16 = 0x02ff;
const ENTRY_64: u64 = 0x200;

/// Returns whether a file that begins with `head` is a bzImage, valid or not.
pub(super) fn has_signature(head: &[u8]) -> bool {
    head.get(BOOT_FLAG_AT..BOOT_FLAG_AT + 2) == Some(&BOOT_FLAG[..])
        && head.get(MAGIC_AT..MAGIC_AT + 4) == Some(&MAGIC[..])
}

/// Reads the bzImage `from`, which begins with `head`, into `memory`.
pub(super) fn load<F: Read + Seek + ReadVolatile>(
    what: &str,
    head: &[u8],
    from: &mut F,
    memory: &Memory,
) -> Result<Loaded, BootError> {
    let unreadable = |cause| BootError::Unreadable { what: what.to_owned(), cause };
    let header = read_header(what, head)?;
    let file_bytes = from.seek(SeekFrom::End(0)).map_err(unreadable)?;
    let placement = ImagePlacement::new(what, &header, file_bytes, memory)?;
    from.seek(SeekFrom::Start(placement.setup_bytes)).map_err(unreadable)?;
    memory
        .ram()
        .read_exact_volatile_from(GuestAddress(placement.load.0), from, placement.bytes() as usize)
        .map_err(|e| unreadable(std::io::Error::other(e)))?;
    let rip = placement.load.0 + ENTRY_64;
    let start = Start::Linux64 { rip, header: Box::new(header) };
    Ok(Loaded { start, segments: vec![placement.load, placement.run] })
}

/// Returns the header up to the end that the file declares; fields past that end are 0.
fn read_header(what: &str, head: &[u8]) -> Result<setup_header, BootError> {
    let bad = |cause| BootError::BadHeader { what: what.to_owned(), cause };
    let mut header = setup_header::default();
    let claimed = MAGIC_AT + head.get(JUMP_AT).copied().map_or(0, usize::from);
    let end = claimed.min(HEADER_AT + header.as_slice().len()).min(head.len());
    let bytes = head.get(HEADER_AT..end).unwrap_or_default();
    header.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);

    let version = header.version;
    if version < OLDEST {
        return Err(bad(HeaderDefect::OldProtocol { version }));
    }
    if version > NEWEST {
        return Err(bad(HeaderDefect::NewProtocol { version }));
    }
    if header.loadflags & LOADED_HIGH == 0 {
        return Err(bad(HeaderDefect::LoadedLow { loadflags: header.loadflags }));
    }
    if header.xloadflags & XLF_KERNEL_64 == 0 {
        return Err(bad(HeaderDefect::NoEntry64 { xloadflags: header.xloadflags }));
    }
    Ok(header)
}

/// Placement of the file's parts in guest memory.
struct ImagePlacement {
    /// Bytes of the real-mode part of the file, which is not used.
    setup_bytes: u64,
    /// Range of the rest of the file.
    load: GuestRange,
    /// Memory that the kernel uses until it has read the memory map.
    run: GuestRange,
}

impl ImagePlacement {
    fn bytes(&self) -> u64 {
        self.load.1 - self.load.0
    }

    fn new(
        what: &str,
        header: &setup_header,
        file_bytes: u64,
        memory: &Memory,
    ) -> Result<Self, BootError> {
        let bad = |cause| BootError::BadHeader { what: what.to_owned(), cause };
        let sectors = match header.setup_sects {
            // Kernels older than this field have four.
            0 => 4,
            n => u64::from(n),
        };
        let setup_bytes = (sectors + 1) * SECTOR;
        let syssize = u64::from(header.syssize) * PARAGRAPH;
        let init_size = u64::from(header.init_size);
        let bytes = file_bytes.saturating_sub(setup_bytes);
        // Whatever the header says, there must be an instruction at the entry. The header counts
        // paragraphs, and some files end within their last paragraph: the missing bytes are zero in
        // memory.
        let needed = syssize.saturating_sub(PARAGRAPH - 1).max(ENTRY_64 + 1);
        if bytes < needed {
            let needed = setup_bytes + needed;
            return Err(bad(HeaderDefect::CutShort { bytes: file_bytes, needed }));
        }
        let (wanted, alignment) = (header.pref_address, u64::from(header.kernel_alignment));
        if wanted < map::ONE_MIB {
            return Err(bad(HeaderDefect::LowAddress { address: wanted }));
        }
        let load = if header.relocatable_kernel == 0 {
            // It moves itself to the preferred address.
            map::ONE_MIB
        } else if !alignment.is_power_of_two() {
            return Err(bad(HeaderDefect::Alignment { alignment }));
        } else {
            wanted.checked_next_multiple_of(alignment).unwrap_or(u64::MAX)
        };
        let run = if header.relocatable_kernel == 0 { wanted } else { load };
        let end = |start: u64, bytes| start.saturating_add(bytes);
        let (load, run) = ((load, end(load, bytes)), (run, end(run, init_size.max(bytes))));
        let low_end = map::low_end(memory);
        if let Some(&place) = [load, run].iter().find(|place| place.1 > low_end) {
            let cause = BootMisfit::Image { bytes, init_size, place, low_end };
            return Err(BootError::does_not_fit(what, memory.layout(), cause));
        }
        Ok(Self { setup_bytes, load, run })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::MemoryOptions;
    use proptest::prelude::*;
    use std::io::Cursor;

    /// A bzImage whose header passes: one setup sector, 4096 bytes of kernel, relocatable.
    fn good() -> setup_header {
        setup_header {
            setup_sects: 1,
            boot_flag: u16::from_le_bytes(BOOT_FLAG),
            jump: 0x6aeb,
            header: u32::from_le_bytes(*MAGIC),
            version: 0x020f,
            loadflags: LOADED_HIGH,
            syssize: 256,
            initrd_addr_max: 0x7fff_ffff,
            kernel_alignment: 0x20_0000,
            relocatable_kernel: 1,
            xloadflags: XLF_KERNEL_64,
            cmdline_size: 2047,
            pref_address: 0x100_0000,
            init_size: 0x10_0000,
            ..Default::default()
        }
    }

    fn file(header: &setup_header) -> Vec<u8> {
        let mut file = vec![0; HEADER_AT];
        file.extend_from_slice(header.as_slice());
        file.resize(1024, 0);
        file.resize(1024 + 4096, 0xab);
        file
    }

    fn load_file(bytes: &[u8]) -> Result<Loaded, BootError> {
        let memory = Memory::new(64 << 20, &MemoryOptions::default()).unwrap();
        super::super::kernel::load("it", &mut Cursor::new(bytes), &memory)
    }

    fn refused(change: impl FnOnce(&mut setup_header)) -> String {
        let mut header = good();
        change(&mut header);
        load_file(&file(&header)).unwrap_err().to_string()
    }

    #[test]
    fn a_relocatable_kernel_goes_to_its_preferred_address() {
        let loaded = load_file(&file(&good())).unwrap();
        let Start::Linux64 { rip, header } = loaded.start else { panic!("{loaded:?}") };
        assert_eq!((rip, *header), (0x100_0200, good()));
        assert_eq!(loaded.segments, [(0x100_0000, 0x100_1000), (0x100_0000, 0x110_0000)]);
        let fixed = setup_header { relocatable_kernel: 0, kernel_alignment: 0, ..good() };
        let loaded = load_file(&file(&fixed)).unwrap();
        assert_eq!(loaded.segments, [(0x10_0000, 0x10_1000), (0x100_0000, 0x110_0000)]);
    }

    #[test]
    fn unbootable_headers_are_refused_with_the_value() {
        type Change = fn(&mut setup_header);
        let cases: [(Change, &str); 7] = [
            (|h| h.version = 0x0205, "its boot protocol is 2.05, and the 64-bit entry needs 2.12"),
            (|h| h.version = 0x0300, "its boot protocol is 3.00, and only protocol 2 is supported"),
            (|h| h.xloadflags = 0x7e, "it has no 64-bit entry (xloadflags 0x7e)"),
            (|h| h.loadflags = 0x80, "it wants to be loaded below 1 MiB (loadflags 0x80)"),
            (|h| h.syssize = 257, "it is cut short: it has 5120 bytes, and needs 5121"),
            (|h| h.kernel_alignment = 3 << 20, "its alignment 0x300000 is not a power of two"),
            (|h| h.pref_address = 0x8000, "its preferred address 0x8000 lies below 1 MiB"),
        ];
        for (change, why) in cases {
            let message = refused(change);
            assert_eq!(message.strip_prefix("it cannot be booted: ").unwrap_or(&message), why);
        }
        assert!(
            refused(|h| h.init_size = 64 << 20).ends_with(
                "its 4096 bytes, which become 67108864 (init_size), go to \
                 0x1000000..0x5000000, and memory below 4 GiB ends at 0x4000000"
            ),
            "{}",
            refused(|h| h.init_size = 64 << 20)
        );
        assert!(refused(|h| h.pref_address = u64::MAX - 1).contains("does not fit"));
        assert!(refused(|h| h.setup_sects = 255).contains("cut short"));
    }

    #[test]
    fn the_last_paragraph_may_be_cut() {
        let mut bytes = file(&good());
        bytes.truncate(1024 + 4096 - 15);
        let loaded = load_file(&bytes).unwrap();
        assert_eq!(loaded.segments[0], (0x100_0000, 0x100_1000 - 15));
        bytes.truncate(1024 + 4096 - 16);
        let why = load_file(&bytes).unwrap_err().to_string();
        assert!(why.ends_with("it is cut short: it has 5104 bytes, and needs 5105"), "{why}");
    }

    #[test]
    fn a_kernel_ends_behind_its_entry() {
        let header = setup_header { syssize: 0, init_size: 0, ..good() };
        let mut bytes = file(&header);
        bytes.truncate(1024 + 0x201);
        assert!(load_file(&bytes).is_ok());
        bytes.truncate(1024 + 0x200);
        let why = load_file(&bytes).unwrap_err().to_string();
        assert!(why.ends_with("it is cut short: it has 1536 bytes, and needs 1537"), "{why}");
    }

    #[test]
    fn a_header_ends_where_its_jump_says() {
        // Bytes after the header are code: xloadflags and all later fields count as 0.
        let short = refused(|h| h.jump = 0x30eb);
        assert_eq!(short, "it cannot be booted: it has no 64-bit entry (xloadflags 0x0)");
    }

    proptest! {
        #[test]
        fn no_damage_to_a_header_makes_it_panic(
            changes in proptest::collection::vec((HEADER_AT..HEAD_BYTES, any::<u8>()), 1..12),
            cut in 0usize..5200,
        ) {
            let mut bytes = file(&good());
            for (at, byte) in changes {
                bytes[at] = byte;
            }
            bytes.truncate(cut.max(64));
            if let Ok(loaded) = load_file(&bytes) {
                let inside = |s: &GuestRange| s.0 >= map::ONE_MIB && s.1 <= 64 << 20 && s.0 < s.1;
                prop_assert!(loaded.segments.iter().all(inside), "{:x?}", loaded.segments);
            }
        }
    }
}
