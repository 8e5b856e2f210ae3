//! A disk's work by ordinary system calls, on the device's own thread.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};

use driftline_guest::GuestRam;
use vm_memory::{Bytes, GuestMemoryError};

use crate::devices::block::file::DiskFile;
use crate::devices::block::operation::{DiskOperation, DiskWork};

/// Performs an operation and waits for its end.
pub(super) fn perform(
    disk: &DiskFile,
    operation: &DiskOperation,
    ram: &GuestRam,
) -> io::Result<()> {
    work(disk, &operation.work, ram)?;
    let changes = !operation.work.writes().is_empty();
    if operation.durable && changes { disk.file().sync_data() } else { Ok(()) }
}

fn work(disk: &DiskFile, work: &DiskWork, ram: &GuestRam) -> io::Result<()> {
    // Only this device uses the file position: the file was opened for it.
    let mut file: &File = disk.file();
    match work {
        DiskWork::Read { offset, to } => {
            file.seek(SeekFrom::Start(*offset))?;
            for piece in to.pieces() {
                ram.read_exact_volatile_from(piece.addr, &mut file, piece.len as usize)
                    .map_err(system)?;
            }
            Ok(())
        }
        DiskWork::Write { offset, from } => {
            file.seek(SeekFrom::Start(*offset))?;
            for piece in from.pieces() {
                ram.write_all_volatile_to(piece.addr, &mut file, piece.len as usize)
                    .map_err(system)?;
            }
            Ok(())
        }
        DiskWork::Flush => file.sync_data(),
        DiskWork::Discard(ranges) => {
            ranges.iter().try_for_each(|(offset, len)| disk.discard(*offset, *len))
        }
        DiskWork::WriteZeroes(ranges) => {
            ranges.iter().try_for_each(|r| disk.write_zeroes(r.offset, r.len, r.unmap))
        }
        DiskWork::Identify(_) => Ok(()),
    }
}

fn system(e: GuestMemoryError) -> io::Error {
    match e {
        GuestMemoryError::IOError(e) => e,
        e => io::Error::other(e),
    }
}
