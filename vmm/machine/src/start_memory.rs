//! The program's pages that only the start of a process needs. They are unmapped once the guest
//! runs.
//!
//! A start runs much code that is never used again, and the kernel maps 16 pages with each that is
//! used. The page cache has them once for all processes, but each process that has a page mapped is
//! charged a share of it. A clone's proportional set size is 1.09 MiB, and 1.43 MiB without this
//! (`cargo bench -p tests --bench firecracker`, 27 November 2026).

use std::ffi::c_void;

use libc::{PF_W, PT_LOAD, c_int, dl_phdr_info};
use rustix::mm::{Advice, madvise};

/// Unmaps the pages of the program that are never written. Those that are used again are mapped
/// again, from the page cache. Probes and breakpoints that were set in the code are lost.
pub fn unmap_program() {
    // SAFETY: the function is called only during this call, and its data argument is not used.
    unsafe { libc::dl_iterate_phdr(Some(unmap_read_only), std::ptr::null_mut()) };
}

/// Unmaps the pages of the segments that are never written, of the first program or library that it
/// is called for: the program. Returns nonzero, which ends the iteration.
unsafe extern "C" fn unmap_read_only(
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
        // SAFETY: the pages are private, come from a file, and this process never writes them, so
        // they have the same content when they are mapped again.
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
        // Other tests run meanwhile, and map pages again.
        let is_smaller = || {
            let before = resident_code();
            unmap_program();
            resident_code() < before
        };
        assert!((0..100).any(|_| is_smaller()));
    }
}
