//! Reading a static ELF file, of either class, into guest memory, and finding its PVH note.
//!
//! The structures are linux-loader's. Its loader is not used: it knows only 64-bit files, takes the
//! answer of the last note segment (compilers add one after Xen's), and ignores segments that are
//! all zeros where they reach past the end of memory.

use std::io::{ErrorKind, Read, Seek, SeekFrom};

use dirty_tracker::{FrameRun, Gfn};
use linux_loader::elf::{
    EI_CLASS, EI_DATA, ELFDATA2LSB, ELFMAG0, ELFMAG1, ELFMAG2, ELFMAG3, PT_LOAD, PT_NOTE,
};
use vm_memory::{Bytes, GuestAddress, ReadVolatile};

use super::{BootError, Taken};
use crate::memory::Memory;

const CLASS_32: u8 = 1;
const CLASS_64: u8 = 2;
const MACHINE_386: u16 = 3;
const MACHINE_X86_64: u16 = 62;
/// `XEN_ELFNOTE_PHYS32_ENTRY`.
const NOTE_PHYS32_ENTRY: u32 = 18;
/// No kernel has more note bytes than this in one segment.
const MAX_NOTE_BYTES: u64 = 1 << 20;

/// A kernel in guest memory.
#[derive(Debug)]
pub(crate) struct Loaded {
    /// Where the PVH note says that it begins.
    pub(crate) entry: u64,
    /// The memory of its segments.
    pub(crate) segments: Vec<Taken>,
}

/// One program header of either class.
#[derive(Clone, Copy, Debug)]
struct Segment {
    kind: u32,
    offset: u64,
    paddr: u64,
    file_bytes: u64,
    mem_bytes: u64,
}

/// Reads the ELF file `from`, called `what` in errors, into `memory`.
pub(crate) fn load<F: Read + Seek + ReadVolatile>(
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
        let segments = self.headers()?;
        let entry = self.pvh_entry(&segments)?;
        let loads: Vec<Segment> =
            segments.into_iter().filter(|s| s.kind == PT_LOAD && s.mem_bytes > 0).collect();
        if loads.is_empty() {
            return Err(self.damaged("it has nothing to load"));
        }
        let mut taken = Vec::new();
        for s in &loads {
            taken.push(self.room_for(s, memory)?);
        }
        if !taken.iter().any(|&(start, end)| (start..end).contains(&entry)) {
            return Err(self.damaged(format!("its PVH entry {entry:#x} lies in no segment")));
        }
        for s in &loads {
            self.seek(s.offset)?;
            let len = s.file_bytes as usize;
            memory
                .ram()
                .read_exact_volatile_from(GuestAddress(s.paddr), self.from, len)
                .map_err(|e| self.damaged(format!("a segment cannot be read: {e}")))?;
        }
        Ok(Loaded { entry, segments: taken })
    }

    /// Checks that a segment lies in memory; gives its range.
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

    fn headers(&mut self) -> Result<Vec<Segment>, BootError> {
        let mut ident = [0; 64];
        let got = self.read_up_to(&mut ident)?;
        let magic = [ELFMAG0, ELFMAG1, ELFMAG2, ELFMAG3];
        if got < 20 || ident[..4] != magic {
            return Err(BootError::NotElf(self.what.to_owned()));
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
        self.seek(table)?;
        let mut headers = Vec::new();
        let mut one = vec![0; usize::from(size)];
        for i in 0..count {
            if self.read_up_to(&mut one)? < one.len() {
                return Err(self.damaged(format!("program header {i} of {count} is cut short")));
            }
            headers.push(if wide { segment_64(&one) } else { segment_32(&one) });
        }
        Ok(headers)
    }

    /// The entry of the first Xen PHYS32_ENTRY note in any note segment.
    fn pvh_entry(&mut self, segments: &[Segment]) -> Result<u64, BootError> {
        for s in segments.iter().filter(|s| s.kind == PT_NOTE) {
            if s.file_bytes > MAX_NOTE_BYTES {
                return Err(self.damaged(format!("it has {} bytes of notes", s.file_bytes)));
            }
            self.seek(s.offset)?;
            let mut notes = vec![0; s.file_bytes as usize];
            if self.read_up_to(&mut notes)? < notes.len() {
                return Err(self.damaged("its notes are cut short"));
            }
            if let Some(entry) = find_note(&notes) {
                return Ok(entry);
            }
        }
        Err(BootError::NoPvhNote(self.what.to_owned()))
    }

    fn seek(&mut self, offset: u64) -> Result<(), BootError> {
        match self.from.seek(SeekFrom::Start(offset)) {
            Ok(_) => Ok(()),
            // Offsets past what the system can express are the file's fault.
            Err(e) if e.kind() == ErrorKind::InvalidInput => {
                Err(self.damaged(format!("it refers to its byte {offset:#x}")))
            }
            Err(cause) => Err(self.unreadable(cause)),
        }
    }

    /// Fills `buffer` as far as the file goes.
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

/// Walks the notes: name size, descriptor size, type, then both padded to four bytes.
fn find_note(mut notes: &[u8]) -> Option<u64> {
    let padded = |len: u32| (len as usize).checked_next_multiple_of(4);
    while notes.len() >= 12 {
        let (name_len, desc_len, kind) = (u32_at(notes, 0), u32_at(notes, 4), u32_at(notes, 8));
        let desc_at = padded(name_len)?.checked_add(12)?;
        let next = desc_at.checked_add(padded(desc_len)?)?;
        let name = notes.get(12..12 + name_len as usize)?;
        let desc = notes.get(desc_at..desc_at.checked_add(desc_len as usize)?)?;
        if kind == NOTE_PHYS32_ENTRY && name == b"Xen\0" && desc.len() >= 4 {
            return Some(u64::from(u32_at(desc, 0)));
        }
        notes = notes.get(next..)?;
    }
    None
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
