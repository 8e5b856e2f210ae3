//! Writes a stored guest as an ELF core, which gdb and crash open: memory by guest physical
//! address, and the registers of every vCPU as notes.
//!
//! ```text
//! ELF header, program headers   PT_NOTE, and one PT_LOAD per memory slot: its physical and virtual
//!                               address are both the guest's physical address
//! notes                         for each vCPU "CORE" NT_PRSTATUS; then for each vCPU "QEMU":
//!                               control and segment registers
//! memory                        slot after slot; frames never written are holes in the file
//! ```
//!
//! NT_PRSTATUS is `struct elf_prstatus` of Linux on x86-64. The notes named QEMU are those of its
//! `dump-guest-memory`: crash uses the page tables and the interrupt table in them to locate a
//! relocated kernel (KASLR).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use driftline_dirty_tracker::{FrameRun, Layout, PAGE_SIZE};
use kvm_bindings::{kvm_dtable, kvm_segment};
use object::Endianness;
use object::elf::{
    ELFOSABI_NONE, EM_X86_64, ET_CORE, FileFlags, NT_PRSTATUS, PF_R, PF_W, PF_X, PT_LOAD, PT_NOTE,
    ProgramFlags,
};
use object::write::elf::{FileHeader, ProgramHeader, Writer};
use zerocopy::{Immutable, IntoBytes};

use crate::vcpu::CoreRegisters;

/// `struct elf_prstatus`, 336 bytes.
#[repr(C)]
#[derive(IntoBytes, Immutable)]
struct PrStatus {
    signal_info: [u32; 3],
    signal: u16,
    _pad: [u8; 2],
    pending_and_held: [u64; 2],
    /// Ids of process, parent, group, session.
    ids: [u32; 4],
    /// Four times of two words each.
    times: [u64; 8],
    /// `struct user_regs_struct`.
    regs: [u64; 27],
    fp_valid: u32,
    _end: u32,
}

/// QEMU's `QEMUCPUSegment`.
#[repr(C)]
#[derive(IntoBytes, Immutable, Clone, Copy)]
struct QemuSegment {
    selector: u32,
    limit: u32,
    flags: u32,
    _pad: u32,
    base: u64,
}

/// QEMU's `QEMUCPUState`, version 1.
#[repr(C)]
#[derive(IntoBytes, Immutable)]
struct QemuCpuState {
    version: u32,
    size: u32,
    /// rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp, r8 to r15, rip, rflags.
    regs: [u64; 18],
    /// cs, ds, es, fs, gs, ss, ldt, tr, gdt, idt.
    segments: [QemuSegment; 10],
    cr: [u64; 5],
    kernel_gs_base: u64,
}

impl PrStatus {
    fn new(cpu: &CoreRegisters, id: u32) -> Self {
        let (r, s) = (&cpu.regs, &cpu.sregs);
        let selector = |segment: &kvm_segment| u64::from(segment.selector);
        // gdb numbers threads from 1.
        let ids = [id + 1, 0, 0, 0];
        // The word between rdi and rip is a system call number; -1 means none.
        let no_call = u64::MAX;
        let regs = [
            r.r15,
            r.r14,
            r.r13,
            r.r12,
            r.rbp,
            r.rbx,
            r.r11,
            r.r10,
            r.r9,
            r.r8,
            r.rax,
            r.rcx,
            r.rdx,
            r.rsi,
            r.rdi,
            no_call,
            r.rip,
            selector(&s.cs),
            r.rflags,
            r.rsp,
            selector(&s.ss),
            s.fs.base,
            s.gs.base,
            selector(&s.ds),
            selector(&s.es),
            selector(&s.fs),
            selector(&s.gs),
        ];
        Self {
            signal_info: [0; 3],
            signal: 0,
            _pad: [0; 2],
            pending_and_held: [0; 2],
            ids,
            times: [0; 8],
            regs,
            fp_valid: 0,
            _end: 0,
        }
    }
}

impl QemuCpuState {
    fn new(cpu: &CoreRegisters) -> Self {
        let (r, s) = (&cpu.regs, &cpu.sregs);
        let table = |t: &kvm_dtable| QemuSegment {
            selector: 0,
            limit: u32::from(t.limit),
            flags: 0,
            _pad: 0,
            base: t.base,
        };
        Self {
            version: 1,
            size: size_of::<Self>() as u32,
            regs: [
                r.rax, r.rbx, r.rcx, r.rdx, r.rsi, r.rdi, r.rsp, r.rbp, r.r8, r.r9, r.r10, r.r11,
                r.r12, r.r13, r.r14, r.r15, r.rip, r.rflags,
            ],
            segments: [
                segment(&s.cs),
                segment(&s.ds),
                segment(&s.es),
                segment(&s.fs),
                segment(&s.gs),
                segment(&s.ss),
                segment(&s.ldt),
                segment(&s.tr),
                table(&s.gdt),
                table(&s.idt),
            ],
            // There is no CR1.
            cr: [s.cr0, 0, s.cr2, s.cr3, s.cr4],
            kernel_gs_base: cpu.kernel_gs_base,
        }
    }
}

/// Converts a segment to QEMU's form. The flags are the descriptor's second word, without base and
/// limit.
fn segment(s: &kvm_segment) -> QemuSegment {
    let bits = [
        (u32::from(s.type_), 8),
        (u32::from(s.s), 12),
        (u32::from(s.dpl), 13),
        (u32::from(s.present), 15),
        (u32::from(s.avl), 20),
        (u32::from(s.l), 21),
        (u32::from(s.db), 22),
        (u32::from(s.g), 23),
    ];
    let flags = bits.iter().fold(0, |flags, (bit, place)| flags | bit << place);
    QemuSegment { selector: u32::from(s.selector), limit: s.limit, flags, _pad: 0, base: s.base }
}

/// Appends one note. Name and content are each padded to four bytes.
fn note(name: &str, kind: u32, content: &[u8], into: &mut Vec<u8>) {
    let words = [name.len() as u32 + 1, content.len() as u32, kind];
    into.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    for part in [&[name.as_bytes(), &[0]].concat(), content] {
        into.extend_from_slice(part);
        into.resize(into.len().next_multiple_of(4), 0);
    }
}

fn notes(cpus: &[CoreRegisters]) -> Vec<u8> {
    let mut notes = Vec::new();
    for (cpu, id) in cpus.iter().zip(0u32..) {
        note("CORE", NT_PRSTATUS.0, PrStatus::new(cpu, id).as_bytes(), &mut notes);
    }
    for cpu in cpus {
        note("QEMU", 0, QemuCpuState::new(cpu).as_bytes(), &mut notes);
    }
    notes
}

/// A core file whose header is written. Memory goes where [`place`](Self::place) says.
pub(crate) struct CoreFile {
    slots: Vec<CoreSlot>,
}

/// A memory slot in the file.
#[derive(Clone, Copy)]
struct CoreSlot {
    frames: FrameRun,
    /// Offset of the first frame in the file, in bytes.
    place: u64,
}

impl CoreFile {
    /// Writes everything but memory to `file`, which must be empty, and sets its full length.
    /// Memory is a hole so far.
    pub(crate) fn begin(file: &File, layout: &Layout, cpus: &[CoreRegisters]) -> io::Result<Self> {
        let notes = notes(cpus);
        let mut head = Vec::new();
        let mut writer = Writer::new(Endianness::Little, true, &mut head);
        let loads = u32::try_from(layout.slots().count()).map_err(io::Error::other)?;
        writer.reserve_file_header();
        writer.reserve_program_headers(loads + 1);
        let notes_at = writer.reserve(notes.len() as u64, 4);
        let mut at = (notes_at + notes.len() as u64).next_multiple_of(PAGE_SIZE);
        let slots: Vec<CoreSlot> = layout
            .slots()
            .map(|slot| {
                let slot = CoreSlot { frames: slot.run(), place: at };
                at += slot.frames.bytes();
                slot
            })
            .collect();
        let header = FileHeader {
            os_abi: ELFOSABI_NONE,
            abi_version: 0,
            e_type: ET_CORE,
            e_machine: EM_X86_64,
            e_entry: 0,
            e_flags: FileFlags(0),
        };
        writer.write_file_header(&header).map_err(io::Error::other)?;
        writer.write_align_program_headers();
        writer.write_program_header(&ProgramHeader {
            p_type: PT_NOTE,
            p_flags: ProgramFlags(0),
            p_offset: notes_at,
            p_vaddr: 0,
            p_paddr: 0,
            p_filesz: notes.len() as u64,
            p_memsz: 0,
            p_align: 4,
        });
        for CoreSlot { frames, place } in slots.iter().copied() {
            let (address, bytes) = (frames.start.gpa(), frames.bytes());
            writer.write_program_header(&ProgramHeader {
                p_type: PT_LOAD,
                p_flags: PF_R | PF_W | PF_X,
                p_offset: place,
                p_vaddr: address,
                p_paddr: address,
                p_filesz: bytes,
                p_memsz: bytes,
                p_align: PAGE_SIZE,
            });
        }
        writer.pad_until(notes_at);
        writer.write(&notes);
        file.write_all_at(&head, 0)?;
        file.set_len(at)?;
        Ok(Self { slots })
    }

    /// Returns the offset of frame `gfn` in the file.
    pub(crate) fn place(&self, gfn: u64) -> Option<u64> {
        self.slots.iter().find_map(|CoreSlot { frames, place }| {
            let in_slot = gfn.checked_sub(frames.start.0).filter(|frame| *frame < frames.count)?;
            Some(place + in_slot * PAGE_SIZE)
        })
    }
}
