//! Small PVH kernels, assembled by hand and wrapped into ELF files of both classes.

/// Code that enables COM1's interrupt for received data, which it never handles, and echoes each
/// byte.
#[rustfmt::skip]
pub const ECHO: &[u8] = &[
    0x66, 0xba, 0xf9, 0x03, 0xb0, 0x01, 0xee, // mov dx, 0x3f9; mov al, 1; out dx, al
    0x66, 0xba, 0xfd, 0x03, 0xec, // next: mov dx, 0x3fd; in al, dx
    0xa8, 0x01, 0x74, 0xf7, // test al, 1; jz next
    0x66, 0xba, 0xf8, 0x03, 0xec, 0xee, // mov dx, 0x3f8; in al, dx; out dx, al
    0xeb, 0xef, // jmp next
];

/// Address of the code of such a kernel, and of its entry point.
pub const CODE_AT: u32 = 0x10_0000;

/// An ELF file with one segment of code and one of notes.
#[derive(Clone)]
pub struct Elf {
    /// ELF class: 1 is 32-bit, 2 is 64-bit.
    pub class: u8,
    /// `e_machine`: 62 is x86-64.
    pub machine: u16,
    /// Content of the code segment.
    pub code: Vec<u8>,
    /// Guest physical address of the code and of its first instruction.
    pub code_at: u64,
    /// Size of the code segment in memory, in bytes.
    pub mem_bytes: u64,
    /// Content of the note segment.
    pub notes: Vec<u8>,
}

impl Elf {
    /// Returns a 64-bit file whose PVH note makes [`CODE_AT`] the entry point of `code`.
    pub fn new(code: &[u8]) -> Self {
        Self {
            class: 2,
            machine: 62,
            code: code.to_vec(),
            code_at: CODE_AT.into(),
            mem_bytes: code.len() as u64,
            notes: note(b"Xen\0", 18, &CODE_AT.to_le_bytes()),
        }
    }

    /// Returns the whole file.
    pub fn bytes(&self) -> Vec<u8> {
        let wide = self.class == 2;
        let (header, program) = if wide { (64, 56) } else { (52, 32) };
        let code_offset = header + 2 * program;
        let notes_offset = code_offset + self.code.len() as u64;
        let mut out = vec![0x7f, b'E', b'L', b'F', self.class, 1, 1];
        out.resize(16, 0);
        out.extend(2u16.to_le_bytes());
        out.extend(self.machine.to_le_bytes());
        out.extend(1u32.to_le_bytes());
        let word = |out: &mut Vec<u8>, v: u64| {
            if wide { out.extend(v.to_le_bytes()) } else { out.extend((v as u32).to_le_bytes()) }
        };
        word(&mut out, self.code_at);
        word(&mut out, header);
        word(&mut out, 0);
        out.extend(0u32.to_le_bytes());
        for v in [header as u16, program as u16, 2, 0, 0, 0] {
            out.extend(v.to_le_bytes());
        }
        let segment = |out: &mut Vec<u8>, kind: u32, offset, paddr, file, mem| {
            out.extend(kind.to_le_bytes());
            if wide {
                out.extend(7u32.to_le_bytes());
            }
            for v in [offset, paddr, paddr, file, mem] {
                word(out, v);
            }
            if !wide {
                out.extend(7u32.to_le_bytes());
            }
            // QEMU aligns notes to their segment's alignment.
            word(out, if kind == 4 { 4 } else { 4096 });
        };
        let code = self.code.len() as u64;
        segment(&mut out, 1, code_offset, self.code_at, code, self.mem_bytes);
        let notes = self.notes.len() as u64;
        segment(&mut out, 4, notes_offset, 0, notes, notes);
        out.extend(&self.code);
        out.extend(&self.notes);
        out
    }
}

/// Returns a note in the format of a note segment.
pub fn note(name: &[u8], kind: u32, desc: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    out.extend((name.len() as u32).to_le_bytes());
    out.extend((desc.len() as u32).to_le_bytes());
    out.extend(kind.to_le_bytes());
    for part in [name, desc] {
        out.extend(part);
        out.resize(out.len().next_multiple_of(4), 0);
    }
    out
}
