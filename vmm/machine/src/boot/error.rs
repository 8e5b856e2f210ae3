//! The reasons why a guest cannot be booted.

use driftline_dirty_tracker::Layout;

use super::defect::{BootMisfit, ElfDefect, HeaderDefect};

/// The reason why a guest cannot be booted.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// A file cannot be read.
    #[error("{what} cannot be read: {cause}")]
    Unreadable {
        /// The file, as the user knows it.
        what: String,
        /// The system's answer.
        #[source]
        cause: std::io::Error,
    },
    /// The file is not a kernel.
    #[error("{what} is neither an ELF file nor a bzImage")]
    NoKernel {
        /// The file, as the user knows it.
        what: String,
    },
    /// The file is an ELF file for another purpose.
    #[error(
        "{what} is {is}, not a kernel: --kernel takes a vmlinux, another kernel as a static ELF \
         file, or a bzImage"
    )]
    Program {
        /// The file, as the user knows it.
        what: String,
        /// The kind of file that it is.
        is: &'static str,
    },
    /// The kernel is for another processor.
    #[error("{what} is an ELF file for another architecture (machine {machine}), not for x86")]
    WrongArchitecture {
        /// The file, as the user knows it.
        what: String,
        /// `e_machine`.
        machine: u16,
    },
    /// A 32-bit kernel does not name its PVH entry.
    #[error(
        "{what} is a 32-bit ELF file without a PVH note (XEN_ELFNOTE_PHYS32_ENTRY), so there is no \
         way to enter it"
    )]
    NoPvhNote {
        /// The file, as the user knows it.
        what: String,
    },
    /// A kernel's header asks for something that this VMM cannot provide.
    #[error("{what} cannot be booted: {cause}")]
    BadHeader {
        /// The file, as the user knows it.
        what: String,
        /// The field and its value.
        #[source]
        cause: HeaderDefect,
    },
    /// The kernel's headers contradict themselves or its length.
    #[error("{what} is a damaged ELF file: {cause}")]
    Damaged {
        /// The file, as the user knows it.
        what: String,
        /// The defect.
        #[source]
        cause: ElfDefect,
    },
    /// Something does not fit in guest memory.
    #[error("{what} does not fit in guest memory of {mem_bytes} bytes: {cause}")]
    DoesNotFit {
        /// The part that does not fit.
        what: String,
        /// Size of guest memory, in bytes.
        mem_bytes: u64,
        /// The range that it needs.
        #[source]
        cause: BootMisfit,
    },
    /// The command line contains a byte that none can have.
    #[error("the kernel's command line contains a NUL byte")]
    NulInCmdline,
    /// The machine's part cannot be added to the command line.
    #[error("the kernel's command line cannot be extended: {0}")]
    Cmdline(linux_loader::cmdline::Error),
    /// The configuration names an embedded guest, and the program embeds none.
    #[error("this program embeds no guest \"{name}\"")]
    NoImage {
        /// The guest's name.
        name: String,
    },
}

impl BootError {
    pub(super) fn does_not_fit(
        what: impl Into<String>,
        layout: &Layout,
        cause: impl Into<BootMisfit>,
    ) -> Self {
        let mem_bytes = layout.frames() * driftline_dirty_tracker::PAGE_SIZE;
        Self::DoesNotFit { what: what.into(), mem_bytes, cause: cause.into() }
    }
}
