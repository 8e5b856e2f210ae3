//! Reads a static ELF file, of either class, into guest memory and finds its entry. The entry is
//! that of the PVH note. For a 64-bit file without the note it is the header's entry, for the Linux
//! protocol.
//!
//! The structures are linux-loader's. Its loader is not used: it knows only 64-bit files, takes the
//! answer of the last note segment (compilers add one after Xen's), and does not check segments of
//! zeros that reach past the end of memory.

use std::io::{ErrorKind, Read, Seek, SeekFrom};

use driftline_dirty_tracker::{FrameRun, Gfn};
use linux_loader::elf::{
    EI_CLASS, EI_DATA, ELFDATA2LSB, ELFMAG0, ELFMAG1, ELFMAG2, ELFMAG3, PT_GNU_STACK, PT_INTERP,
    PT_LOAD, PT_NOTE,
};
use vm_memory::{Bytes, GuestAddress, ReadVolatile};

use super::loaded::{Loaded, Start};
use super::{BootError, Taken, map, zero_page};
use crate::memory::Memory;

const CLASS_32: u8 = 1;
const CLASS_64: u8 = 2;
const MACHINE_386: u16 = 3;
const MACHINE_X86_64: u16 = 62;
/// `e_type` of an object file: a kernel module, or a compiler's output for the linker.
const TYPE_REL: u16 = 1;
/// `e_type` of a shared library or a position-independent program.
const TYPE_DYN: u16 = 3;
/// `e_type` of a core dump.
const TYPE_CORE: u16 = 4;
/// `XEN_ELFNOTE_PHYS32_ENTRY`.
const NOTE_PHYS32_ENTRY: u32 = 18;
/// `NT_GNU_ABI_TAG`: the system on which a program runs. The C library's start-up code contains it,
/// and no kernel is linked with that.
const NOTE_ABI_TAG: u32 = 1;
/// Where GNU's linker puts a program that is not position-independent, with its headers first.
const PROGRAM_BASE: u64 = 0x40_0000;
/// Maximum number of note bytes in all segments together. No kernel has more.
const MAX_NOTE_BYTES: u64 = 1 << 20;
/// Maximum number of program headers. No kernel has more: Linux has about five.
const MAX_HEADERS: u16 = 256;

/// One program header of either class.
#[derive(Clone, Copy, Debug)]
struct Segment {
    kind: u32,
    offset: u64,
    paddr: u64,
    file_bytes: u64,
    mem_bytes: u64,
}

/// Contents of the file header and the program headers.
struct Headers {
    /// `e_type`.
    kind: u16,
    segments: Vec<Segment>,
    /// The entry in the header of a 64-bit file.
    entry_64: Option<u64>,
}

/// Reads the ELF file `from`, called `what` in errors, into `memory`.
pub(super) fn load<F: Read + Seek + ReadVolatile>(
    what: &str,
    from: &mut F,
    memory: &Memory,
) -> Result<Loaded, BootError> {
    let reader = Reader { what, from };
    reader.load(memory)
}

struct Reader<'a, F> {
    what: &'a str,
    from: &'a mut F,
}

impl<F: Read + Seek + ReadVolatile> Reader<'_, F> {
    fn load(mut self, memory: &Memory) -> Result<Loaded, BootError> {
        let Headers { kind, segments, entry_64 } = self.headers()?;
        let notes = self.notes(&segments)?;
        if notes.pvh_entry.is_none()
            && let Some(is) = no_kernel(kind, &segments, notes.abi_tag)
        {
            return Err(BootError::Program { what: self.what.to_owned(), is });
        }
        let (kind, rip, start) = match (notes.pvh_entry, entry_64) {
            (Some(rip), _) => ("PVH entry", rip, Start::Pvh { rip }),
            (None, Some(rip)) => {
                let header = Box::new(zero_page::header_of_an_elf());
                ("entry", rip, Start::Linux64 { rip, header })
            }
            (None, None) => return Err(BootError::NoPvhNote(self.what.to_owned())),
        };
        let loads: Vec<Segment> =
            segments.into_iter().filter(|s| s.kind == PT_LOAD && s.mem_bytes > 0).collect();
        if loads.is_empty() {
            return Err(self.damaged("it has nothing to load"));
        }
        let mut taken = Vec::new();
        for s in &loads {
            taken.push(self.room_for(s, memory)?);
        }
        self.require_apart(&taken)?;
        if !taken.iter().any(|&(start, end)| (start..end).contains(&rip)) {
            return Err(self.damaged(format!("its {kind} {rip:#x} lies in no segment")));
        }
        if matches!(start, Start::Linux64 { .. }) && rip >= zero_page::MAPPED_END {
            let end = zero_page::MAPPED_END;
            let why =
                format!("its {kind} {rip:#x} lies at or above {end:#x}, which is not mapped yet");
            return Err(BootError::BadHeader { what: self.what.to_owned(), why });
        }
        for s in &loads {
            self.seek(s.offset)?;
            let len = s.file_bytes as usize;
            memory
                .ram()
                .read_exact_volatile_from(GuestAddress(s.paddr), self.from, len)
                .map_err(|e| self.damaged(format!("a segment cannot be read: {e}")))?;
        }
        Ok(Loaded { start, segments: taken })
    }

    /// Checks that a segment lies in memory, and returns its range.
    fn room_for(&self, s: &Segment, memory: &Memory) -> Result<Taken, BootError> {
        if s.file_bytes > s.mem_bytes {
            return Err(self.damaged("a segment is longer in the file than in memory"));
        }
        let end = s.paddr.checked_add(s.mem_bytes);
        let end = end.ok_or_else(|| self.damaged("a segment ends past the last address"))?;
        let start = Gfn::containing(s.paddr);
        let count = Gfn::containing(end - 1).0 - start.0 + 1;
        if !memory.layout().contains(FrameRun { start, count }) {
            let why = format!("a segment goes to {:#x}..{end:#x}", s.paddr);
            return Err(BootError::does_not_fit(self.what, memory.layout(), why));
        }
        Ok((s.paddr, end))
    }

    /// Refuses segments that share bytes: their content would depend on the order of headers.
    fn require_apart(&self, taken: &[Taken]) -> Result<(), BootError> {
        let mut sorted = taken.to_vec();
        sorted.sort_unstable();
        match sorted.windows(2).find(|w| w[1].0 < w[0].1) {
            None => Ok(()),
            Some(w) => Err(self.damaged(format!(
                "its segments {:#x}..{:#x} and {:#x}..{:#x} overlap",
                w[0].0, w[0].1, w[1].0, w[1].1
            ))),
        }
    }

    fn headers(&mut self) -> Result<Headers, BootError> {
        let mut ident = [0; 64];
        let got = self.read_up_to(&mut ident)?;
        let magic = [ELFMAG0, ELFMAG1, ELFMAG2, ELFMAG3];
        if got < 20 || ident[..4] != magic {
            return Err(BootError::NoKernel(self.what.to_owned()));
        }
        let class = ident[EI_CLASS];
        let wide = class == CLASS_64;
        let machine = u16_at(&ident, 18);
        let little = ident[EI_DATA] == ELFDATA2LSB;
        if !little || !matches!(machine, MACHINE_386 | MACHINE_X86_64) {
            let machine = if little { machine } else { machine.swap_bytes() };
            return Err(BootError::WrongArchitecture { what: self.what.to_owned(), machine });
        }
        if class != CLASS_32 && !wide {
            return Err(self.damaged(format!("its class is {class}")));
        }
        if got < if wide { 64 } else { 52 } {
            return Err(self.damaged("its header is cut short"));
        }
        let (table, size, count, least) = if wide {
            (u64_at(&ident, 32), u16_at(&ident, 54), u16_at(&ident, 56), 56)
        } else {
            (u64::from(u32_at(&ident, 28)), u16_at(&ident, 42), u16_at(&ident, 44), 32)
        };
        if count > 0 && size < least {
            return Err(self.damaged(format!("its program headers have {size} bytes each")));
        }
        if count > MAX_HEADERS {
            let why = format!("it has {count} program headers, more than {MAX_HEADERS}");
            return Err(self.damaged(why));
        }
        self.seek(table)?;
        let mut segments = Vec::new();
        let mut one = vec![0; usize::from(size)];
        for i in 0..count {
            if self.read_up_to(&mut one)? < one.len() {
                return Err(self.damaged(format!("program header {i} of {count} is cut short")));
            }
            segments.push(if wide { segment_64(&one) } else { segment_32(&one) });
        }
        let entry_64 = wide.then(|| u64_at(&ident, 24));
        Ok(Headers { kind: u16_at(&ident, 16), segments, entry_64 })
    }

    /// Reads the note segments, up to the first PVH entry.
    fn notes(&mut self, segments: &[Segment]) -> Result<Notes, BootError> {
        let mut found = Notes::default();
        let mut total = 0u64;
        for s in segments.iter().filter(|s| s.kind == PT_NOTE) {
            total = total.saturating_add(s.file_bytes);
            if total > MAX_NOTE_BYTES {
                let why = format!("it has {total} bytes of notes, more than {MAX_NOTE_BYTES}");
                return Err(self.damaged(why));
            }
            self.seek(s.offset)?;
            let mut notes = vec![0; s.file_bytes as usize];
            if self.read_up_to(&mut notes)? < notes.len() {
                return Err(self.damaged("its notes are cut short"));
            }
            found.read(&notes);
            if found.pvh_entry.is_some() {
                break;
            }
        }
        Ok(found)
    }

    fn seek(&mut self, offset: u64) -> Result<(), BootError> {
        match self.from.seek(SeekFrom::Start(offset)) {
            Ok(_) => Ok(()),
            // An offset that the system cannot express is the file's fault.
            Err(e) if e.kind() == ErrorKind::InvalidInput => {
                Err(self.damaged(format!("it refers to its byte {offset:#x}")))
            }
            Err(cause) => Err(self.unreadable(cause)),
        }
    }

    /// Fills `buffer` up to the end of the file. Returns the number of bytes read.
    fn read_up_to(&mut self, buffer: &mut [u8]) -> Result<usize, BootError> {
        let mut got = 0;
        while got < buffer.len() {
            match Read::read(self.from, &mut buffer[got..]) {
                Ok(0) => break,
                Ok(n) => got += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(cause) => return Err(self.unreadable(cause)),
            }
        }
        Ok(got)
    }

    fn unreadable(&self, cause: std::io::Error) -> BootError {
        BootError::Unreadable { what: self.what.to_owned(), cause }
    }

    fn damaged(&self, why: impl Into<String>) -> BootError {
        BootError::Damaged { what: self.what.to_owned(), why: why.into() }
    }
}

fn segment_64(b: &[u8]) -> Segment {
    Segment {
        kind: u32_at(b, 0),
        offset: u64_at(b, 8),
        paddr: u64_at(b, 24),
        file_bytes: u64_at(b, 32),
        mem_bytes: u64_at(b, 40),
    }
}

fn segment_32(b: &[u8]) -> Segment {
    let at = |i| u64::from(u32_at(b, i));
    Segment {
        kind: u32_at(b, 0),
        offset: at(4),
        paddr: at(12),
        file_bytes: at(16),
        mem_bytes: at(20),
    }
}

/// Returns what a file without a PVH note is, if it certainly is not a kernel.
///
/// Linux and other kernels name their own physical addresses, and have no interpreter and no C
/// library. Some do map their ELF header or ask for an unexecutable stack, so only all marks of a
/// linker's default layout together count.
fn no_kernel(kind: u16, segments: &[Segment], abi_tag: bool) -> Option<&'static str> {
    let loads = || segments.iter().filter(|s| s.kind == PT_LOAD && s.mem_bytes > 0);
    let has = |kind| segments.iter().any(|s| s.kind == kind);
    let lowest = loads().min_by_key(|s| s.paddr);
    match (kind, lowest) {
        (TYPE_REL, _) => Some("an object file or kernel module"),
        (TYPE_CORE, _) => Some("a core dump"),
        _ if has(PT_INTERP) => Some("a user-space program (dynamic ELF)"),
        (TYPE_DYN, Some(s)) if s.paddr < map::ONE_MIB => {
            Some("a user-space program or library (position-independent ELF)")
        }
        _ if abi_tag => Some("a user-space program (static ELF)"),
        (_, Some(s)) if s.paddr == PROGRAM_BASE && s.offset == 0 && has(PT_GNU_STACK) => {
            Some("a user-space program (static ELF)")
        }
        _ => None,
    }
}

/// The notes that matter here.
#[derive(Default)]
struct Notes {
    /// The entry of the first Xen PHYS32_ENTRY note.
    pvh_entry: Option<u64>,
    /// Whether there is an [`NOTE_ABI_TAG`].
    abi_tag: bool,
}

impl Notes {
    /// Reads the notes: name size, descriptor size, type, then name and descriptor, both padded to
    /// four bytes.
    fn read(&mut self, mut notes: &[u8]) {
        while self.pvh_entry.is_none()
            && let Some((Note { name, kind, desc }, rest)) = first_note(notes)
        {
            match (kind, name) {
                (NOTE_PHYS32_ENTRY, b"Xen\0") if desc.len() >= 4 => {
                    self.pvh_entry = Some(u64::from(u32_at(desc, 0)));
                }
                (NOTE_ABI_TAG, b"GNU\0") => self.abi_tag = true,
                _ => {}
            }
            notes = rest;
        }
    }
}

/// One note.
struct Note<'a> {
    name: &'a [u8],
    kind: u32,
    desc: &'a [u8],
}

/// Returns the first note, and the bytes after it.
fn first_note(notes: &[u8]) -> Option<(Note<'_>, &[u8])> {
    let padded = |len: u32| (len as usize).checked_next_multiple_of(4);
    if notes.len() < 12 {
        return None;
    }
    let (name_len, desc_len, kind) = (u32_at(notes, 0), u32_at(notes, 4), u32_at(notes, 8));
    let desc_at = padded(name_len)?.checked_add(12)?;
    let next = desc_at.checked_add(padded(desc_len)?)?;
    let name = notes.get(12..12 + name_len as usize)?;
    let desc = notes.get(desc_at..desc_at.checked_add(desc_len as usize)?)?;
    Some((Note { name, kind, desc }, notes.get(next..).unwrap_or_default()))
}

// Callers have checked the length.
fn u16_at(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([b[at], b[at + 1]])
}

fn u32_at(b: &[u8], at: usize) -> u32 {
    u32::from(u16_at(b, at)) | u32::from(u16_at(b, at + 2)) << 16
}

fn u64_at(b: &[u8], at: usize) -> u64 {
    u64::from(u32_at(b, at)) | u64::from(u32_at(b, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::MemoryOptions;
    use std::io::Cursor;

    const NOTES_AT: u64 = 0x8000;

    /// A 64-bit ELF file with these program headers: kind, paddr, bytes in the file, in memory.
    /// Notes lie at [`NOTES_AT`] and contain only the entry at 1 MiB, after `padding` bytes.
    fn file(headers: &[(u32, u64, u64, u64)], padding: usize) -> Vec<u8> {
        let mut out = vec![0; 64];
        out[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        out[18..20].copy_from_slice(&MACHINE_X86_64.to_le_bytes());
        out[32..40].copy_from_slice(&64u64.to_le_bytes());
        out[54..56].copy_from_slice(&56u16.to_le_bytes());
        out[56..58].copy_from_slice(&(headers.len() as u16).to_le_bytes());
        for &(kind, paddr, file, mem) in headers {
            out.extend(kind.to_le_bytes());
            out.extend(0u32.to_le_bytes());
            let offset = if kind == PT_NOTE { NOTES_AT } else { 0 };
            for v in [offset, paddr, paddr, file, mem, 0] {
                out.extend(v.to_le_bytes());
            }
        }
        out.resize(out.len().max(NOTES_AT as usize), 0);
        out.resize(NOTES_AT as usize + padding, 0);
        for v in [4u32, 4, NOTE_PHYS32_ENTRY, u32::from_le_bytes(*b"Xen\0"), 1 << 20] {
            out.extend(v.to_le_bytes());
        }
        out
    }

    /// A 64-bit file of type `kind` without a PVH note, whose entry is that of its first segment.
    fn without_pvh(kind: u16, headers: &[(u32, u64, u64, u64)]) -> Vec<u8> {
        let mut bytes = file(headers, 0);
        bytes[16..18].copy_from_slice(&kind.to_le_bytes());
        let entry = headers.iter().find(|h| h.0 == PT_LOAD).map_or(0, |h| h.1);
        bytes[24..32].copy_from_slice(&entry.to_le_bytes());
        // The note is of another kind.
        bytes[NOTES_AT as usize + 8] = 0x7f;
        bytes
    }

    fn load_it(bytes: Vec<u8>) -> Result<Loaded, String> {
        let memory = Memory::new(64 << 20, &MemoryOptions::default()).unwrap();
        load("it", &mut Cursor::new(&bytes[..]), &memory).map_err(|e| e.to_string())
    }

    #[test]
    fn segments_may_touch_but_not_overlap() {
        let notes = (PT_NOTE, 0, 20, 20);
        let two = |second: u64| {
            file(&[notes, (PT_LOAD, second, 16, 16), (PT_LOAD, 1 << 20, 16, 4096)], 0)
        };
        let loaded = load_it(two((1 << 20) + 4096)).unwrap();
        assert!(matches!(loaded.start, Start::Pvh { rip: 0x10_0000 }), "{loaded:?}");
        assert_eq!(loaded.segments.len(), 2);
        assert_eq!(
            load_it(two((1 << 20) + 4095)).unwrap_err(),
            "it is a damaged ELF file: its segments 0x100000..0x101000 and 0x100fff..0x10100f overlap"
        );
    }

    #[test]
    fn a_64_bit_entry_lies_where_the_tables_reach() {
        let at = |entry: u64, kind| {
            let mut bytes = file(&[kind, (PT_LOAD, 4 << 30, 16, 4096)], 0);
            bytes[24..32].copy_from_slice(&entry.to_le_bytes());
            let memory = Memory::new(5 << 30, &MemoryOptions::default()).unwrap();
            load("it", &mut Cursor::new(&bytes[..]), &memory).map_err(|e| e.to_string())
        };
        let low = (PT_LOAD, 1 << 20, 16, 4096);
        assert!(at(1 << 20, low).is_ok(), "segments may lie above");
        assert_eq!(
            at((4 << 30) + 8, low).unwrap_err(),
            "it cannot be booted: its entry 0x100000008 lies at or above 0x100000000, which is not mapped yet"
        );
    }

    const EXEC: u16 = 2;
    const STACK: (u32, u64, u64, u64) = (PT_GNU_STACK, 0, 0, 0);
    const NOTES: (u32, u64, u64, u64) = (PT_NOTE, 0, 20, 20);

    #[test]
    fn user_space_programs_are_refused_as_such() {
        let at = |paddr| (PT_LOAD, paddr, 16, 4096);
        let interpreter = (PT_INTERP, 0x318, 28, 28);
        let dynamic = "a user-space program (dynamic ELF)";
        let position_independent = "a user-space program or library (position-independent ELF)";
        let fixed = "a user-space program (static ELF)";
        let mut tagged = without_pvh(EXEC, &[at(0x20_0000), NOTES]);
        tagged[NOTES_AT as usize + 8] = 1;
        tagged[NOTES_AT as usize + 12..][..4].copy_from_slice(b"GNU\0");
        let cases = [
            (without_pvh(TYPE_DYN, &[interpreter, at(0), STACK]), dynamic),
            (without_pvh(EXEC, &[interpreter, at(0x40_0000), STACK]), dynamic),
            (without_pvh(TYPE_DYN, &[at(0), STACK]), position_independent),
            (without_pvh(EXEC, &[at(0x40_0000), STACK]), fixed),
            (tagged, fixed),
            (without_pvh(TYPE_REL, &[]), "an object file or kernel module"),
            (without_pvh(TYPE_CORE, &[at(0)]), "a core dump"),
        ];
        for (bytes, is) in cases {
            let all = format!(
                "it is {is}, not a kernel: --kernel takes a vmlinux, another kernel as a static ELF \
                 file, or a bzImage"
            );
            assert_eq!(load_it(bytes).unwrap_err(), all);
        }
    }

    #[test]
    fn kernels_that_resemble_programs_boot() {
        let at = |paddr| (PT_LOAD, paddr, 16, 4096);
        let interpreter = (PT_INTERP, 0x318, 28, 28);
        // FreeBSD's kernel has an interpreter, by name "/red/herring", and a PVH note.
        let mut herring = without_pvh(EXEC, &[at(1 << 20), interpreter, NOTES, STACK]);
        herring[NOTES_AT as usize + 8] = NOTE_PHYS32_ENTRY as u8;
        for bytes in [
            herring,
            without_pvh(EXEC, &[at(1 << 20), NOTES]),
            without_pvh(EXEC, &[at(1 << 20), STACK]),
            without_pvh(EXEC, &[at(0x20_0000), STACK]),
            without_pvh(EXEC, &[at(0x40_0000), NOTES]),
            without_pvh(TYPE_DYN, &[at(0x20_0000), STACK]),
        ] {
            load_it(bytes).unwrap();
        }
    }

    #[test]
    fn what_the_headers_may_cost_is_bounded() {
        let code = (PT_LOAD, 1 << 20, 16, 16);
        let many = vec![code; 257];
        assert_eq!(
            load_it(file(&many, 0)).unwrap_err(),
            "it is a damaged ELF file: it has 257 program headers, more than 256"
        );
        // The same notes, referenced again and again.
        let half = (PT_NOTE, 0, 1 << 19, 0);
        let zeros = |headers: &[(u32, u64, u64, u64)]| load_it(file(headers, 1 << 19)).unwrap_err();
        assert!(zeros(&[code, half, half]).contains("its entry 0x0 lies"), "1 MiB is allowed");
        assert_eq!(
            zeros(&[code, half, half, half]),
            "it is a damaged ELF file: it has 1572864 bytes of notes, more than 1048576"
        );
    }
}
