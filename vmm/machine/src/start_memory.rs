//! Memory that only the start of a process needs. It is given back once the guest runs, so that a
//! host has room for more guests, and each page of the program counts for fewer of them.
//!
//! A start reads and builds much that is never used again: options, configuration, snapshots. The
//! allocator keeps the freed blocks, and the program's pages stay mapped, 16 with each that was
//! used. `cargo bench -p tests --bench firecracker` shows a clone's share of memory.

use std::ffi::c_void;

use libc::{PF_W, PT_LOAD, c_int, dl_phdr_info};
use rustix::mm::{Advice, madvise};

/// Unmaps the pages of the program that are never written, and gives freed blocks back to the
/// system. Takes some 0.1 ms. Pages that are used again are mapped again, from the page cache.
pub fn give_back() {
    // SAFETY: the function is called only meanwhile, and the data that it receives is not used.
    unsafe { libc::dl_iterate_phdr(Some(unmap_program), std::ptr::null_mut()) };
    // The allocator of the static program has no such function.
    #[cfg(target_env = "gnu")]
    // SAFETY: the function changes no block that is in use.
    unsafe {
        libc::malloc_trim(0)
    };
}

/// Unmaps the pages of the segments that are never written, of the first program or library that it
/// is called for: the program. Returns nonzero, which ends the iteration.
unsafe extern "C" fn unmap_program(
    info: *mut dl_phdr_info,
    _size: usize,
    _data: *mut c_void,
) -> c_int {
    // SAFETY: the C library passes a description that is valid during the call.
    let info = unsafe { &*info };
    // SAFETY: it has this number of headers, valid as long as the program is loaded.
    let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
    // SAFETY: the function reads a constant of the process.
    let page = unsafe { libc::getauxval(libc::AT_PAGESZ) };
    for header in headers.iter().filter(|h| h.p_type == PT_LOAD && h.p_flags & PF_W == 0) {
        let start = info.dlpi_addr + header.p_vaddr;
        // Whole pages only: the segment before, or after, may share the others.
        let (first, end) = (start.next_multiple_of(page), start + header.p_memsz);
        let length = (end - end % page).saturating_sub(first) as usize;
        // SAFETY: the pages are private, come from a file and are never written, so they have the
        // same content when they are mapped again.
        if let Err(e) = unsafe { madvise(first as *mut c_void, length, Advice::LinuxDontNeed) } {
            tracing::debug!("pages of the program stay mapped: {e}");
        }
    }
    1
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the resident KiB of this program's code.
    fn resident_code() -> u64 {
        let program = std::env::current_exe().unwrap();
        let mappings = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = mappings.lines().skip_while(|line| {
            !line.contains(" r-xp ") || !line.ends_with(program.to_str().unwrap())
        });
        let rss = lines.find_map(|line| line.strip_prefix("Rss:")).unwrap();
        rss.trim().trim_end_matches(" kB").parse().unwrap()
    }

    #[test]
    fn program_is_unmapped_and_continues() {
        let before = resident_code();
        give_back();
        let after = resident_code();
        assert!(after < before, "{before} KiB before, {after} after");
    }
}
