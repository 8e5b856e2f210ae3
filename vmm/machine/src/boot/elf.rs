//! Reads a static ELF file, of either class, into guest memory and finds its entry. The entry is
//! that of the PVH note. For a 64-bit file without the note it is the header's entry, for the Linux
//! protocol.
//!
//! The headers and notes are read by `object`. linux-loader is not used: it knows only 64-bit
//! files, takes the entry from the last note segment (compilers add one after Xen's), and does not
//! check segments of zeros that reach past the end of memory.

mod headers;

use std::io::{ErrorKind, Read, Seek, SeekFrom};

use driftline_dirty_tracker::{FrameRun, Gfn};
use object::elf::{ET_CORE, ET_DYN, ET_REL, FileType, PT_GNU_STACK, PT_INTERP, PT_LOAD};
use vm_memory::{Bytes, GuestAddress, ReadVolatile};

use self::headers::{ElfReader, ProgramSegment};
use super::defect::{BootMisfit, ElfDefect, HeaderDefect};
use super::error::BootError;
use super::loaded::{Loaded, Start};
use super::platform::GuestRange;
use super::{map, zero_page};
use crate::memory::Memory;

/// Address at which GNU's linker puts a program that is not position-independent, with its headers
/// first.
const PROGRAM_BASE: u64 = 0x40_0000;

/// Reads the ELF file `from`, called `what` in errors, into `memory`.
pub(super) fn load<F: Read + Seek + ReadVolatile>(
    what: &str,
    from: &mut F,
    memory: &Memory,
) -> Result<Loaded, BootError> {
    let file = ElfReader { what };
    let headers = file.headers(from)?;
    if headers.pvh_entry.is_none()
        && let Some(is) = other_kind(headers.kind, &headers.segments, headers.abi_tag)
    {
        return Err(BootError::Program { what: what.to_owned(), is });
    }
    let (kind, rip, start) = match (headers.pvh_entry, headers.entry_64) {
        (Some(rip), _) => ("PVH entry", rip, Start::Pvh { rip }),
        (None, Some(rip)) => {
            let header = Box::new(zero_page::header_of_an_elf());
            ("entry", rip, Start::Linux64 { rip, header })
        }
        (None, None) => return Err(BootError::NoPvhNote { what: what.to_owned() }),
    };
    let is_loaded = |s: &ProgramSegment| s.kind == PT_LOAD && s.mem_bytes > 0;
    let loads: Vec<ProgramSegment> = headers.segments.into_iter().filter(is_loaded).collect();
    if loads.is_empty() {
        return Err(file.damaged(ElfDefect::NothingToLoad));
    }
    let room_for = |s| file.room_for(s, memory);
    let segments: Vec<GuestRange> = loads.iter().map(room_for).collect::<Result<_, _>>()?;
    file.refuse_overlap(&segments)?;
    if !segments.iter().any(|&(start, end)| (start..end).contains(&rip)) {
        return Err(file.damaged(ElfDefect::EntryOutside { kind, entry: rip }));
    }
    if matches!(start, Start::Linux64 { .. }) && rip >= zero_page::MAPPED_END {
        let cause = HeaderDefect::EntryNotMapped { entry: rip, mapped_end: zero_page::MAPPED_END };
        return Err(BootError::BadHeader { what: what.to_owned(), cause });
    }
    for s in &loads {
        file.read_segment(s, from, memory)?;
    }
    Ok(Loaded { start, segments })
}

impl ElfReader<'_> {
    /// Checks that a segment lies in memory, and returns its range.
    fn room_for(&self, s: &ProgramSegment, memory: &Memory) -> Result<GuestRange, BootError> {
        if s.file_bytes > s.mem_bytes {
            return Err(self.damaged(ElfDefect::LongerInFile));
        }
        let end = s.paddr.checked_add(s.mem_bytes);
        let end = end.ok_or_else(|| self.damaged(ElfDefect::PastLastAddress))?;
        let start = Gfn::containing(s.paddr);
        let count = Gfn::containing(end - 1).0 - start.0 + 1;
        if !memory.layout().contains(FrameRun { start, count }) {
            let cause = BootMisfit::Segment((s.paddr, end));
            return Err(BootError::does_not_fit(self.what, memory.layout(), cause));
        }
        Ok((s.paddr, end))
    }

    /// Refuses segments that overlap: their content would depend on the order of headers.
    fn refuse_overlap(&self, ranges: &[GuestRange]) -> Result<(), BootError> {
        let mut sorted = ranges.to_vec();
        sorted.sort_unstable();
        match sorted.windows(2).find(|w| w[1].0 < w[0].1) {
            None => Ok(()),
            Some(w) => Err(self.damaged(ElfDefect::Overlap(w[0], w[1]))),
        }
    }

    fn read_segment<F: Seek + ReadVolatile>(
        &self,
        s: &ProgramSegment,
        from: &mut F,
        memory: &Memory,
    ) -> Result<(), BootError> {
        match from.seek(SeekFrom::Start(s.offset)) {
            Ok(_) => {}
            // An offset that the system cannot express is the file's fault.
            Err(e) if e.kind() == ErrorKind::InvalidInput => {
                return Err(self.damaged(ElfDefect::Offset { offset: s.offset }));
            }
            Err(cause) => return Err(self.unreadable(cause)),
        }
        memory
            .ram()
            .read_exact_volatile_from(GuestAddress(s.paddr), from, s.file_bytes as usize)
            .map_err(|e| self.damaged(ElfDefect::Segment(e)))
    }
}

/// Returns what a file without a PVH note is, if it certainly is not a kernel.
///
/// Linux and other kernels name their own physical addresses, and have no interpreter and no C
/// library. Some do map their ELF header or ask for an unexecutable stack, so only all marks of a
/// linker's default layout together count.
fn other_kind(kind: FileType, segments: &[ProgramSegment], abi_tag: bool) -> Option<&'static str> {
    let loads = || segments.iter().filter(|s| s.kind == PT_LOAD && s.mem_bytes > 0);
    let has = |kind| segments.iter().any(|s| s.kind == kind);
    let lowest = loads().min_by_key(|s| s.paddr);
    match (kind, lowest) {
        (ET_REL, _) => Some("an object file or kernel module"),
        (ET_CORE, _) => Some("a core dump"),
        _ if has(PT_INTERP) => Some("a user-space program (dynamic ELF)"),
        (ET_DYN, Some(s)) if s.paddr < map::ONE_MIB => {
            Some("a user-space program or library (position-independent ELF)")
        }
        _ if abi_tag => Some("a user-space program (static ELF)"),
        (_, Some(s)) if s.paddr == PROGRAM_BASE && s.offset == 0 && has(PT_GNU_STACK) => {
            Some("a user-space program (static ELF)")
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use object::elf::{EM_X86_64, ET_EXEC, PT_NOTE, ProgramType};
    use proptest::prelude::*;

    use super::headers::NOTE_PHYS32_ENTRY;
    use super::*;
    use crate::memory::MemoryOptions;

    const NOTES_AT: u64 = 0x8000;

    /// A 64-bit ELF file with these program headers: kind, paddr, bytes in the file, in memory.
    /// Notes lie at [`NOTES_AT`] and contain only the entry at 1 MiB, after `padding` bytes.
    fn file(headers: &[(ProgramType, u64, u64, u64)], padding: usize) -> Vec<u8> {
        let mut out = vec![0; 64];
        out[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        out[18..20].copy_from_slice(&EM_X86_64.0.to_le_bytes());
        out[32..40].copy_from_slice(&64u64.to_le_bytes());
        out[54..56].copy_from_slice(&56u16.to_le_bytes());
        out[56..58].copy_from_slice(&(headers.len() as u16).to_le_bytes());
        for &(kind, paddr, file, mem) in headers {
            out.extend(kind.0.to_le_bytes());
            out.extend(0u32.to_le_bytes());
            let offset = if kind == PT_NOTE { NOTES_AT } else { 0 };
            for v in [offset, paddr, paddr, file, mem, 0] {
                out.extend(v.to_le_bytes());
            }
        }
        out.resize(out.len().max(NOTES_AT as usize), 0);
        out.resize(NOTES_AT as usize + padding, 0);
        for v in [4u32, 4, NOTE_PHYS32_ENTRY.0, u32::from_le_bytes(*b"Xen\0"), 1 << 20] {
            out.extend(v.to_le_bytes());
        }
        out
    }

    /// A 64-bit file of type `kind` without a PVH note, whose entry is that of its first segment.
    fn without_pvh(kind: FileType, headers: &[(ProgramType, u64, u64, u64)]) -> Vec<u8> {
        let mut bytes = file(headers, 0);
        bytes[16..18].copy_from_slice(&kind.0.to_le_bytes());
        let entry = headers.iter().find(|h| h.0 == PT_LOAD).map_or(0, |h| h.1);
        bytes[24..32].copy_from_slice(&entry.to_le_bytes());
        // The note is of another kind.
        bytes[NOTES_AT as usize + 8] = 0x7f;
        bytes
    }

    fn load_bytes(bytes: Vec<u8>) -> Result<Loaded, BootError> {
        let memory = Memory::new(64 << 20, &MemoryOptions::default()).unwrap();
        load("it", &mut Cursor::new(&bytes[..]), &memory)
    }

    #[test]
    fn segments_may_touch_but_not_overlap() {
        let notes = (PT_NOTE, 0, 20, 20);
        let two = |second: u64| {
            file(&[notes, (PT_LOAD, second, 16, 16), (PT_LOAD, 1 << 20, 16, 4096)], 0)
        };
        let loaded = load_bytes(two((1 << 20) + 4096)).unwrap();
        assert!(matches!(loaded.start, Start::Pvh { rip: 0x10_0000 }), "{loaded:?}");
        assert_eq!(loaded.segments.len(), 2);
        assert_eq!(
            load_bytes(two((1 << 20) + 4095)).unwrap_err().to_string(),
            "it is a damaged ELF file: its segments 0x100000..0x101000 and 0x100fff..0x10100f \
             overlap"
        );
    }

    #[test]
    fn entry_beyond_the_page_tables_is_refused() {
        let at = |entry: u64, kind| {
            let mut bytes = file(&[kind, (PT_LOAD, 4 << 30, 16, 4096)], 0);
            bytes[24..32].copy_from_slice(&entry.to_le_bytes());
            let memory = Memory::new(5 << 30, &MemoryOptions::default()).unwrap();
            load("it", &mut Cursor::new(&bytes[..]), &memory)
        };
        let low = (PT_LOAD, 1 << 20, 16, 4096);
        assert!(at(1 << 20, low).is_ok(), "segments may lie above");
        assert_eq!(
            at((4 << 30) + 8, low).unwrap_err().to_string(),
            "it cannot be booted: its entry 0x100000008 lies at or above 0x100000000, which is \
             not mapped yet"
        );
    }

    const STACK: (ProgramType, u64, u64, u64) = (PT_GNU_STACK, 0, 0, 0);
    const NOTES: (ProgramType, u64, u64, u64) = (PT_NOTE, 0, 20, 20);

    #[test]
    fn user_space_programs_are_refused_as_such() {
        let at = |paddr| (PT_LOAD, paddr, 16, 4096);
        let interpreter = (PT_INTERP, 0x318, 28, 28);
        let dynamic = "a user-space program (dynamic ELF)";
        let position_independent = "a user-space program or library (position-independent ELF)";
        let fixed = "a user-space program (static ELF)";
        let mut tagged = without_pvh(ET_EXEC, &[at(0x20_0000), NOTES]);
        tagged[NOTES_AT as usize + 8] = 1;
        tagged[NOTES_AT as usize + 12..][..4].copy_from_slice(b"GNU\0");
        let cases = [
            (without_pvh(ET_DYN, &[interpreter, at(0), STACK]), dynamic),
            (without_pvh(ET_EXEC, &[interpreter, at(0x40_0000), STACK]), dynamic),
            (without_pvh(ET_DYN, &[at(0), STACK]), position_independent),
            (without_pvh(ET_EXEC, &[at(0x40_0000), STACK]), fixed),
            (tagged, fixed),
            (without_pvh(ET_REL, &[]), "an object file or kernel module"),
            (without_pvh(ET_CORE, &[at(0)]), "a core dump"),
        ];
        for (bytes, is) in cases {
            let all = format!(
                "it is {is}, not a kernel: --kernel takes a vmlinux, another kernel as a static \
                 ELF file, or a bzImage"
            );
            assert_eq!(load_bytes(bytes).unwrap_err().to_string(), all);
        }
    }

    #[test]
    fn kernels_that_resemble_programs_boot() {
        let at = |paddr| (PT_LOAD, paddr, 16, 4096);
        let interpreter = (PT_INTERP, 0x318, 28, 28);
        // FreeBSD's kernel has an interpreter, by name "/red/herring", and a PVH note.
        let mut herring = without_pvh(ET_EXEC, &[at(1 << 20), interpreter, NOTES, STACK]);
        herring[NOTES_AT as usize + 8] = NOTE_PHYS32_ENTRY.0 as u8;
        for bytes in [
            herring,
            without_pvh(ET_EXEC, &[at(1 << 20), NOTES]),
            without_pvh(ET_EXEC, &[at(1 << 20), STACK]),
            without_pvh(ET_EXEC, &[at(0x20_0000), STACK]),
            without_pvh(ET_EXEC, &[at(0x40_0000), NOTES]),
            without_pvh(ET_DYN, &[at(0x20_0000), STACK]),
        ] {
            load_bytes(bytes).unwrap();
        }
    }

    proptest! {
        /// Headers and notes of any content are refused, or loaded within memory.
        #[test]
        fn no_header_makes_it_panic(
            class in 1u8..=2,
            changes in prop::collection::vec((0usize..420, any::<u8>()), 1..6),
        ) {
            let code = |paddr| (PT_LOAD, paddr, 16, 4096);
            let mut bytes = file(&[NOTES, code(1 << 20), NOTES, code(2 << 20), STACK], 0);
            bytes[4] = class;
            for (at, byte) in changes {
                // Positions from 400 on select bytes of the notes.
                let at = if at < 400 { at } else { NOTES_AT as usize + at - 400 };
                bytes[at] = byte;
            }
            if let Ok(loaded) = load_bytes(bytes) {
                prop_assert!(loaded.segments.iter().all(|(_, end)| *end <= 64 << 20));
            }
        }
    }

    #[test]
    fn cost_of_headers_is_bounded() {
        let code = (PT_LOAD, 1 << 20, 16, 16);
        let many = vec![code; 257];
        assert_eq!(
            load_bytes(file(&many, 0)).unwrap_err().to_string(),
            "it is a damaged ELF file: it has 257 program headers, more than 256"
        );
        // The same notes, referenced again and again.
        let half = (PT_NOTE, 0, 1 << 19, 0);
        let zeros = |headers: &[(ProgramType, u64, u64, u64)]| {
            load_bytes(file(headers, 1 << 19)).unwrap_err().to_string()
        };
        assert!(zeros(&[code, half, half]).contains("its entry 0x0 lies"), "1 MiB is allowed");
        assert_eq!(
            zeros(&[code, half, half, half]),
            "it is a damaged ELF file: it has 1572864 bytes of notes, more than 1048576"
        );
    }
}
