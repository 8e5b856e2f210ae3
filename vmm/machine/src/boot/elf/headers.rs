//! The headers and the notes of an ELF file of either class, as `object` reads them.

use std::io::{self, Read, Seek, SeekFrom};

use object::elf::{
    ELF_NOTE_GNU, ELFCLASS32, ELFCLASS64, EM_386, EM_X86_64, FileClass, FileHeader32, FileHeader64,
    FileType, NT_GNU_ABI_TAG, NoteType, PT_NOTE, ProgramType,
};
use object::read::elf::{FileHeader, NoteIterator, ProgramHeader};
use object::read::{ReadCache, ReadCacheOps, ReadRef};
use object::{Endian, Endianness};

use crate::boot::defect::ElfDefect;
use crate::boot::error::BootError;

/// `XEN_ELFNOTE_PHYS32_ENTRY`.
pub(super) const NOTE_PHYS32_ENTRY: NoteType = NoteType(18);
/// Maximum number of note bytes in all segments together. No kernel has more.
const MAX_NOTE_BYTES: u64 = 1 << 20;
/// Maximum number of program headers. No kernel has more: Linux has about five.
const MAX_HEADERS: u16 = 256;

/// One program header of either class.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProgramSegment {
    pub(super) kind: ProgramType,
    pub(super) offset: u64,
    pub(super) paddr: u64,
    pub(super) file_bytes: u64,
    pub(super) mem_bytes: u64,
}

/// Contents of the file header, the program headers and the notes.
pub(super) struct Headers {
    pub(super) kind: FileType,
    pub(super) segments: Vec<ProgramSegment>,
    /// The entry in the header of a 64-bit file.
    pub(super) entry_64: Option<u64>,
    /// The entry of the first Xen PHYS32_ENTRY note.
    pub(super) pvh_entry: Option<u64>,
    /// Whether there is a note that names the system on which a program runs. The C library's
    /// start-up code contains it, and no kernel is linked with that.
    pub(super) abi_tag: bool,
}

/// Reads one file; its errors name the file.
pub(super) struct ElfReader<'a> {
    pub(super) what: &'a str,
}

impl ElfReader<'_> {
    pub(super) fn headers(&self, from: &mut (impl Read + Seek)) -> Result<Headers, BootError> {
        let cache = ReadCache::new(ObjectSource { from, failed: None });
        let headers = self.headers_of_class(&cache);
        match cache.into_inner().failed {
            Some(cause) => Err(self.unreadable(cause)),
            None => headers,
        }
    }

    fn headers_of_class<'d>(&self, data: impl ReadRef<'d>) -> Result<Headers, BootError> {
        let Ok([0x7f, b'E', b'L', b'F', class]) = data.read_bytes_at(0, 5) else {
            return Err(BootError::NoKernel { what: self.what.to_owned() });
        };
        match FileClass(*class) {
            ELFCLASS32 => self.parse::<FileHeader32<Endianness>>(data),
            ELFCLASS64 => self.parse::<FileHeader64<Endianness>>(data),
            _ => Err(self.damaged(ElfDefect::Class { class: *class })),
        }
    }

    fn parse<'d, H>(&self, data: impl ReadRef<'d>) -> Result<Headers, BootError>
    where
        H: FileHeader<Endian = Endianness>,
    {
        let header = H::parse(data).map_err(|e| self.damaged(ElfDefect::Header(e)))?;
        let endian = if header.is_big_endian() { Endianness::Big } else { Endianness::Little };
        let machine = header.e_machine(endian);
        if endian.is_big_endian() || ![EM_386, EM_X86_64].contains(&machine) {
            let (what, machine) = (self.what.to_owned(), machine.0);
            return Err(BootError::WrongArchitecture { what, machine });
        }
        let count = header.e_phnum(endian);
        if count > MAX_HEADERS {
            return Err(self.damaged(ElfDefect::TooManyHeaders { count, most: MAX_HEADERS }));
        }
        let table = header.program_headers(endian, data);
        let table = table.map_err(|cause| {
            let (size, at) = (header.e_phentsize(endian), header.e_phoff(endian).into());
            self.damaged(ElfDefect::Headers { count, size, at, cause })
        })?;
        let mut headers = Headers {
            kind: header.e_type(endian),
            segments: table.iter().map(|segment| ProgramSegment::new(segment, endian)).collect(),
            entry_64: header.is_type_64().then(|| header.e_entry(endian).into()),
            pvh_entry: None,
            abi_tag: false,
        };
        self.read_notes::<H>(table, data, endian, &mut headers)?;
        Ok(headers)
    }

    /// Reads the note segments, up to the first PVH entry.
    fn read_notes<'d, H>(
        &self,
        table: &[H::ProgramHeader],
        data: impl ReadRef<'d>,
        endian: Endianness,
        found: &mut Headers,
    ) -> Result<(), BootError>
    where
        H: FileHeader<Endian = Endianness>,
    {
        let mut total = 0u64;
        for segment in table.iter().filter(|segment| segment.p_type(endian) == PT_NOTE) {
            total = total.saturating_add(segment.p_filesz(endian).into());
            if total > MAX_NOTE_BYTES {
                let (bytes, most) = (total, MAX_NOTE_BYTES);
                return Err(self.damaged(ElfDefect::TooManyNotes { bytes, most }));
            }
            let bytes = segment.data(endian, data);
            let bytes = bytes.map_err(|()| self.damaged(ElfDefect::Notes))?;
            // Linkers align some segments to 8 bytes although their notes, such as Xen's, are
            // padded to 4. The default alignment is that of the notes.
            let notes = NoteIterator::<H>::new(endian, Default::default(), bytes);
            for note in notes.into_iter().flatten().map_while(Result::ok) {
                match (note.n_type(endian), note.name(), note.desc()) {
                    (NOTE_PHYS32_ENTRY, b"Xen", [a, b, c, d, ..]) => {
                        found.pvh_entry = Some(u32::from_le_bytes([*a, *b, *c, *d]).into());
                        return Ok(());
                    }
                    (NT_GNU_ABI_TAG, ELF_NOTE_GNU, _) => found.abi_tag = true,
                    _ => {}
                }
            }
        }
        Ok(())
    }

    pub(super) fn unreadable(&self, cause: io::Error) -> BootError {
        BootError::Unreadable { what: self.what.to_owned(), cause }
    }

    pub(super) fn damaged(&self, cause: ElfDefect) -> BootError {
        BootError::Damaged { what: self.what.to_owned(), cause }
    }
}

impl ProgramSegment {
    fn new<H: ProgramHeader>(header: &H, endian: H::Endian) -> Self {
        Self {
            kind: header.p_type(endian),
            offset: header.p_offset(endian).into(),
            paddr: header.p_paddr(endian).into(),
            file_bytes: header.p_filesz(endian).into(),
            mem_bytes: header.p_memsz(endian).into(),
        }
    }
}

/// The file as `object` reads it, with the system's last error, which `object` does not report.
struct ObjectSource<'a, F> {
    from: &'a mut F,
    failed: Option<io::Error>,
}

impl<F> ObjectSource<'_, F> {
    fn note<T>(&mut self, result: io::Result<T>) -> Result<T, ()> {
        result.map_err(|e| self.failed = Some(e))
    }
}

impl<F: Read + Seek> ReadCacheOps for ObjectSource<'_, F> {
    fn len(&mut self) -> Result<u64, ()> {
        let result = self.from.seek(SeekFrom::End(0));
        self.note(result)
    }

    fn seek(&mut self, to: u64) -> Result<u64, ()> {
        let result = self.from.seek(SeekFrom::Start(to));
        self.note(result)
    }

    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, ()> {
        let result = Read::read(self.from, buffer);
        self.note(result)
    }

    fn read_exact(&mut self, buffer: &mut [u8]) -> Result<(), ()> {
        let result = Read::read_exact(self.from, buffer);
        self.note(result)
    }
}
