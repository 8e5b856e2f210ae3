//! What is wrong with a kernel: its setup header, its ELF file, or the memory that it needs.

use linux_loader::configurator;
use vm_memory::GuestMemoryError;

use super::map;
use super::platform::GuestRange;

/// Something that a kernel asks for and that this VMM cannot provide, or that contradicts itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HeaderDefect {
    /// The boot protocol is older than the 64-bit entry.
    #[error("its boot protocol is {}, and the 64-bit entry needs 2.12", protocol(*version))]
    OldProtocol {
        /// The protocol's version: major number in the upper byte.
        version: u16,
    },
    /// The boot protocol has another major version.
    #[error("its boot protocol is {}, and only protocol 2 is supported", protocol(*version))]
    NewProtocol {
        /// The protocol's version: major number in the upper byte.
        version: u16,
    },
    /// The kernel's code is for low memory.
    #[error("it wants to be loaded below 1 MiB (loadflags {loadflags:#x})")]
    LoadedLow {
        /// The field that says so.
        loadflags: u8,
    },
    /// The kernel is entered with 32 bits only.
    #[error("it has no 64-bit entry (xloadflags {xloadflags:#x})")]
    NoEntry64 {
        /// The field that says so.
        xloadflags: u16,
    },
    /// The file is shorter than its header says.
    #[error("it is cut short: it has {bytes} bytes, and needs {needed}")]
    CutShort {
        /// The file's length in bytes.
        bytes: u64,
        /// The length that its header asks for, in bytes.
        needed: u64,
    },
    /// The address to load the kernel to is in low memory.
    #[error("its preferred address {address:#x} lies below 1 MiB")]
    LowAddress {
        /// The preferred address.
        address: u64,
    },
    /// The alignment is invalid.
    #[error("its alignment {alignment:#x} is not a power of two")]
    Alignment {
        /// The alignment in bytes.
        alignment: u64,
    },
    /// The entry is not in the page tables with which the guest starts.
    #[error("its entry {entry:#x} lies at or above {mapped_end:#x}, which is not mapped yet")]
    EntryNotMapped {
        /// The entry's address.
        entry: u64,
        /// End of the mapped addresses.
        mapped_end: u64,
    },
}

/// Returns a boot protocol's version as its documentation spells it.
fn protocol(version: u16) -> String {
    format!("{}.{:02}", version >> 8, version & 0xff)
}

/// The way in which an ELF file contradicts itself or its length.
#[derive(Debug, thiserror::Error)]
pub enum ElfDefect {
    /// The class is neither of 32 nor of 64 bits.
    #[error("its class is {class}")]
    Class {
        /// The class in the file.
        class: u8,
    },
    /// The file header cannot be used.
    #[error("its header is cut short or wrong")]
    Header(#[source] object::read::Error),
    /// The file has more program headers than a kernel has.
    #[error("it has {count} program headers, more than {most}")]
    TooManyHeaders {
        /// Number of program headers.
        count: u16,
        /// The largest number that is accepted.
        most: u16,
    },
    /// The program headers cannot be read.
    #[error(
        "its {count} program headers of {size} bytes at {at:#x} are cut short, or of another size"
    )]
    Headers {
        /// Number of program headers.
        count: u16,
        /// Length of a program header in bytes.
        size: u16,
        /// Offset of the program headers in the file.
        at: u64,
        /// The reader's error.
        #[source]
        cause: object::read::Error,
    },
    /// The file has more notes than a kernel has.
    #[error("it has {bytes} bytes of notes, more than {most}")]
    TooManyNotes {
        /// Length of the notes in bytes.
        bytes: u64,
        /// The largest length that is accepted, in bytes.
        most: u64,
    },
    /// The notes reach past the end of the file.
    #[error("its notes are cut short")]
    Notes,
    /// No segment is to be loaded.
    #[error("it has nothing to load")]
    NothingToLoad,
    /// The entry is in none of the segments.
    #[error("its {kind} {entry:#x} lies in no segment")]
    EntryOutside {
        /// The kind of entry.
        kind: &'static str,
        /// The entry's address.
        entry: u64,
    },
    /// A segment has more bytes in the file than memory for them.
    #[error("a segment is longer in the file than in memory")]
    LongerInFile,
    /// A segment is not in the address space.
    #[error("a segment ends past the last address")]
    PastLastAddress,
    /// Two segments have memory in common.
    #[error("its segments {} and {} overlap", range(*.0), range(*.1))]
    Overlap(GuestRange, GuestRange),
    /// A segment is at an offset that no file has.
    #[error("it refers to its byte {offset:#x}")]
    Offset {
        /// The offset in the file.
        offset: u64,
    },
    /// A segment's content cannot be read.
    #[error("a segment cannot be read: {0}")]
    Segment(#[source] GuestMemoryError),
}

/// The reason why a part of a booting guest has no place in its memory.
#[derive(Debug, thiserror::Error)]
pub enum BootMisfit {
    /// A bzImage is too long.
    #[error(
        "its {bytes} bytes, which become {init_size} (init_size), go to {}, and memory below 4 GiB \
         ends at {low_end:#x}",
        range(*place)
    )]
    Image {
        /// Length of the kernel in the file, in bytes.
        bytes: u64,
        /// Memory that the kernel asks for, in bytes.
        init_size: u64,
        /// The range that it needs.
        place: GuestRange,
        /// End of the memory below 4 GiB.
        low_end: u64,
    },
    /// A segment is not in memory.
    #[error("a segment goes to {}", range(*.0))]
    Segment(GuestRange),
    /// A RAM disk is too long.
    #[error("its {bytes} bytes must lie between {floor:#x} and {ceiling:#x}")]
    Initrd {
        /// Length of the RAM disk in bytes.
        bytes: u64,
        /// Lowest address for it.
        floor: u64,
        /// End of the addresses for it.
        ceiling: u64,
    },
    /// The command line is longer than the kernel reads.
    #[error("it has {bytes} bytes, and the kernel takes {most}")]
    Cmdline {
        /// Length of the command line in bytes.
        bytes: usize,
        /// The kernel's limit in bytes.
        most: u32,
    },
    /// The kernel occupies low memory.
    #[error(
        "the kernel leaves no {bytes} bytes free between {:#x} and {:#x}",
        map::LOW.0,
        map::LOW.1
    )]
    NoGap {
        /// Number of bytes that are needed.
        bytes: u64,
    },
    /// The kernel occupies the range of a table.
    #[error(
        "the kernel needs {}, and {table} must lie in {}",
        range(*kernel),
        range(*place)
    )]
    Occupied {
        /// The kernel's range.
        kernel: GuestRange,
        /// The table.
        table: &'static str,
        /// The range of the table.
        place: GuestRange,
    },
    /// A table is longer than its range.
    #[error("{bytes} bytes must lie in {}", range(*place))]
    Table {
        /// Length of the table in bytes.
        bytes: usize,
        /// The range of the table.
        place: GuestRange,
    },
    /// Guest memory cannot be written to.
    #[error(transparent)]
    Memory(#[from] GuestMemoryError),
    /// The boot information cannot be written.
    #[error(transparent)]
    BootInfo(#[from] configurator::Error),
}

/// Returns a range of guest addresses as messages show it.
fn range((start, end): GuestRange) -> String {
    format!("{start:#x}..{end:#x}")
}

#[cfg(test)]
mod tests {
    use std::error::Error;

    use super::super::error::BootError;
    use super::*;
    use crate::memory::{Memory, MemoryOptions};

    #[test]
    fn boot_error_keeps_its_source() {
        let misfit = GuestMemoryError::HostAddressNotAvailable;
        let memory = Memory::new(16 << 20, &MemoryOptions::default()).unwrap();
        let error = BootError::does_not_fit("a table", memory.layout(), misfit);
        let source = error.source().unwrap();
        assert!(source.is::<BootMisfit>());
        let defect = ElfDefect::Segment(GuestMemoryError::HostAddressNotAvailable);
        assert!(defect.source().is_some_and(|e| e.is::<GuestMemoryError>()));
    }
}
