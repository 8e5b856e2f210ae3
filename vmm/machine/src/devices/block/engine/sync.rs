//! A disk's work by ordinary system calls, on the device's own thread.

use std::io;
use std::os::unix::fs::FileExt;

use driftline_guest::GuestRam;
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryError};

use crate::devices::block::file::DiskFile;
use crate::devices::block::operation::{DiskOperation, DiskWork};
use crate::devices::virtio::Buffer;

/// Most bytes that one system call transfers, through a buffer on the stack. Many requests of Linux
/// have no more.
const CHUNK_BYTES: usize = 32 << 10;

/// Performs an operation and waits for its end.
///
/// Not inlined: if it were, the device's other calls would also touch the eight stack pages of the
/// buffer. After a hand-over the first of these calls is made while the guest is paused.
#[inline(never)]
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
    // Offsets are explicit: a process to which the disk is offered shares the file's position.
    let file = disk.file();
    match work {
        DiskWork::Read { offset, to } => by_chunks(to.pieces(), *offset, |bytes, at, addr| {
            file.read_exact_at(bytes, at)?;
            ram.write_slice(bytes, addr).map_err(system)
        }),
        DiskWork::Write { offset, from } => by_chunks(from.pieces(), *offset, |bytes, at, addr| {
            ram.read_slice(bytes, addr).map_err(system)?;
            file.write_all_at(bytes, at)
        }),
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

/// Calls `transfer` for each chunk of `pieces`, which lie one after another in the file from
/// `offset` on: with a buffer of the chunk's length, its offset in the file and its guest address.
fn by_chunks(
    pieces: &[Buffer],
    mut offset: u64,
    mut transfer: impl FnMut(&mut [u8], u64, GuestAddress) -> io::Result<()>,
) -> io::Result<()> {
    let mut buffer = [0; CHUNK_BYTES];
    for piece in pieces {
        let mut done = 0;
        while done < piece.len {
            let len = CHUNK_BYTES.min((piece.len - done) as usize);
            transfer(&mut buffer[..len], offset, piece.addr.unchecked_add(done.into()))?;
            done += len as u32;
            offset += len as u64;
        }
    }
    Ok(())
}

fn system(e: GuestMemoryError) -> io::Error {
    match e {
        GuestMemoryError::IOError(e) => e,
        e => io::Error::other(e),
    }
}
