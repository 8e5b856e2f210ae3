//! Loads a kernel of either file format into guest memory, and the RAM disk that goes with it.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

use driftline_dirty_tracker::PAGE_SIZE;
use vm_memory::{Bytes, GuestAddress, ReadVolatile};

use super::defect::BootMisfit;
use super::error::BootError;
use super::loaded::Loaded;
use super::platform::GuestRange;
use super::{bzimage, elf, map};
use crate::memory::Memory;

/// Reads the kernel `from`, called `what` in errors, into `memory`.
pub(super) fn load<F: Read + Seek + ReadVolatile>(
    what: &str,
    from: &mut F,
    memory: &Memory,
) -> Result<Loaded, BootError> {
    let unreadable = |cause| BootError::Unreadable { what: what.to_owned(), cause };
    let mut head = Vec::new();
    from.by_ref().take(bzimage::HEAD_BYTES as u64).read_to_end(&mut head).map_err(unreadable)?;
    from.seek(SeekFrom::Start(0)).map_err(unreadable)?;
    if bzimage::has_signature(&head) {
        bzimage::load(what, &head, from, memory)
    } else {
        elf::load(what, from, memory)
    }
}

/// Reads a RAM disk to the end of low memory, or as high as the kernel accepts it, above the
/// kernel. Returns its range.
pub(super) fn load_initrd(
    what: &str,
    mut file: File,
    memory: &Memory,
    kernel: &Loaded,
) -> Result<GuestRange, BootError> {
    let unreadable = |cause| BootError::Unreadable { what: what.to_owned(), cause };
    let bytes = file.metadata().map_err(unreadable)?.len();
    let low_end = map::low_end(memory);
    let ceiling = low_end.min(kernel.start.initrd_addr_max() + 1);
    let low_kernel_end = kernel.segments.iter().map(|s| s.1).filter(|e| *e <= low_end).max();
    let floor = low_kernel_end.unwrap_or(0).max(map::ONE_MIB);
    let start = ceiling.checked_sub(bytes).map(|s| s & !(PAGE_SIZE - 1)).filter(|s| *s >= floor);
    let Some(start) = start else {
        let cause = BootMisfit::Initrd { bytes, floor, ceiling };
        return Err(BootError::does_not_fit(what, memory.layout(), cause));
    };
    memory
        .ram()
        .read_exact_volatile_from(GuestAddress(start), &mut file, bytes as usize)
        .map_err(|e| unreadable(std::io::Error::other(e)))?;
    Ok((start, start + bytes))
}
