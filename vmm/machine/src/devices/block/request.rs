//! A chain's request to a disk, read from guest memory and bounded, and the disk's configuration
//! space.

use driftline_guest::GuestRam;
use virtio_bindings::virtio_blk::*;

use super::operation::{DiskWork, ZeroRange};
use crate::config::DiskConfig;
use crate::devices::virtio::{Buffers, Chain, RequestDefect, Violation};

/// Bytes of a sector, virtio's unit.
pub(super) const SECTOR: u64 = 512;
/// Preferred alignment of discards in sectors: a block of 4 KiB, as most file systems have.
const DISCARD_ALIGNMENT: u32 = 8;
/// Bytes of a request's header: type, a reserved word, the first sector.
const HEADER_BYTES: u32 = 16;
/// Bytes of one range of a discard or write-zeroes request.
const RANGE_BYTES: u32 = 16;
/// Upper bound on the bytes of one buffer, as announced to drivers. A request with the maximum
/// number of such buffers has fewer than [`MAX_REQUEST_BYTES`].
pub(super) const SIZE_MAX: u32 = 128 << 10;
/// Upper bound on the bytes that one request moves: a pause waits for all requests in flight.
const MAX_REQUEST_BYTES: u32 = 32 << 20;
/// Upper bound on the ranges in one discard or write-zeroes request.
const MAX_RANGES: u32 = 16;
/// Upper bound on the sectors of one range to discard: 1 GiB.
const MAX_DISCARD_SECTORS: u32 = 1 << 21;
/// Upper bound on the sectors of one range of zeros: 16 MiB, for files where they must be written.
const MAX_ZERO_SECTORS: u32 = 1 << 15;

/// A well-formed request.
pub(super) struct DiskRequest {
    /// The work to do, or the status with which the request is refused.
    pub(super) work: Result<DiskWork, u32>,
    /// The status byte.
    pub(super) status: Buffers,
    /// Bytes of data that the driver gets, without the status.
    pub(super) data_len: u32,
}

impl DiskRequest {
    /// Returns the bytes that count for the bandwidth limit: those that the request moves, and
    /// zeros, which the device writes itself where the file system cannot.
    pub(super) fn limited_bytes(&self) -> u64 {
        match &self.work {
            Ok(DiskWork::WriteZeroes(ranges)) => ranges.iter().map(|range| range.len).sum(),
            Ok(work) => work.bytes(),
            Err(_) => 0,
        }
    }

    /// Reads the request to `disk` in `chain`, a chain of queue `queue`.
    ///
    /// # Errors
    ///
    /// The chain has no complete header or no room for a status, or guest memory cannot be read.
    pub(super) fn read(
        queue: u16,
        chain: &Chain,
        disk: &DiskConfig,
        ram: &GuestRam,
    ) -> Result<Self, Violation> {
        let Chain { head, readable, writable } = chain;
        let broken = |cause| Violation::Malformed { queue, cause };
        let mut header = [0; HEADER_BYTES as usize];
        if readable.read(ram, 0, &mut header)? < header.len() {
            return Err(broken(RequestDefect::DiskHeader { head: *head }));
        }
        let Some(data_len) = writable.len().checked_sub(1) else {
            return Err(broken(RequestDefect::DiskStatus { head: *head }));
        };
        let status = writable.part(data_len, 1);
        let [kind, _, low, high] = words(&header);
        let sector = u64::from(high) << 32 | u64::from(low);
        let given = readable.part(HEADER_BYTES, u32::MAX);
        let wanted = writable.part(0, data_len);
        let work =
            match kind {
                VIRTIO_BLK_T_IN => transfer(disk, sector, &wanted)
                    .map(|offset| DiskWork::Read { offset, to: wanted }),
                _ if disk.readonly && writes(kind) => Err(VIRTIO_BLK_S_IOERR),
                VIRTIO_BLK_T_OUT => transfer(disk, sector, &given)
                    .map(|offset| DiskWork::Write { offset, from: given }),
                VIRTIO_BLK_T_FLUSH => Ok(DiskWork::Flush),
                VIRTIO_BLK_T_GET_ID if data_len >= VIRTIO_BLK_ID_BYTES => {
                    Ok(DiskWork::Identify(writable.part(0, VIRTIO_BLK_ID_BYTES)))
                }
                VIRTIO_BLK_T_DISCARD => {
                    ranges(disk, &given, ram, MAX_DISCARD_SECTORS, 0)?.map(|ranges| {
                        DiskWork::Discard(ranges.iter().map(|r| (r.offset, r.len)).collect())
                    })
                }
                VIRTIO_BLK_T_WRITE_ZEROES => {
                    let unmap = VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP;
                    ranges(disk, &given, ram, MAX_ZERO_SECTORS, unmap)?.map(DiskWork::WriteZeroes)
                }
                _ => Err(VIRTIO_BLK_S_UNSUPP),
            };
        let data_len = match (&work, kind) {
            (Ok(_), VIRTIO_BLK_T_IN | VIRTIO_BLK_T_GET_ID) => data_len,
            _ => 0,
        };
        Ok(Self { work, status, data_len })
    }
}

fn writes(kind: u32) -> bool {
    matches!(kind, VIRTIO_BLK_T_OUT | VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES)
}

fn words(bytes: &[u8; 16]) -> [u32; 4] {
    let word = |i: usize| u32::from_le_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
    [word(0), word(4), word(8), word(12)]
}

/// Returns the offset of `sector` for a transfer of `data`, if that is permitted.
fn transfer(disk: &DiskConfig, sector: u64, data: &Buffers) -> Result<u64, u32> {
    if data.len() > MAX_REQUEST_BYTES {
        Err(VIRTIO_BLK_S_IOERR)
    } else {
        span(disk, sector, data.len())
    }
}

/// Returns the offset of `len` bytes from `sector`, if all of them lie on the disk.
fn span(disk: &DiskConfig, sector: u64, len: u32) -> Result<u64, u32> {
    let len = u64::from(len);
    let offset = sector.checked_mul(SECTOR).ok_or(VIRTIO_BLK_S_IOERR)?;
    let end = offset.checked_add(len).ok_or(VIRTIO_BLK_S_IOERR)?;
    match len > 0 && len.is_multiple_of(SECTOR) && end <= disk.bytes {
        true => Ok(offset),
        false => Err(VIRTIO_BLK_S_IOERR),
    }
}

/// Returns the ranges of a discard or write-zeroes request. `flags` are the permitted flags.
fn ranges(
    disk: &DiskConfig,
    given: &Buffers,
    ram: &GuestRam,
    most_sectors: u32,
    flags: u32,
) -> Result<Result<Vec<ZeroRange>, u32>, Violation> {
    let count = given.len() / RANGE_BYTES;
    if !given.len().is_multiple_of(RANGE_BYTES) || !(1..=MAX_RANGES).contains(&count) {
        return Ok(Err(VIRTIO_BLK_S_IOERR));
    }
    let mut ranges = Vec::new();
    for i in 0..count {
        let mut bytes = [0; RANGE_BYTES as usize];
        given.read(ram, i * RANGE_BYTES, &mut bytes)?;
        let [low, high, sectors, has] = words(&bytes);
        if has & !flags != 0 {
            return Ok(Err(VIRTIO_BLK_S_UNSUPP));
        }
        let sector = u64::from(high) << 32 | u64::from(low);
        if sectors > most_sectors {
            return Ok(Err(VIRTIO_BLK_S_IOERR));
        }
        match span(disk, sector, sectors * SECTOR as u32) {
            Ok(offset) => {
                let len = u64::from(sectors) * SECTOR;
                ranges.push(ZeroRange { offset, len, unmap: has & flags != 0 });
            }
            Err(code) => return Ok(Err(code)),
        }
    }
    Ok(Ok(ranges))
}

/// Returns the configuration space: `struct virtio_blk_config` up to the fields of write-zeroes.
pub(super) fn config_space(disk: &DiskConfig, queues: u16, seg_max: u32) -> Vec<u8> {
    let mut bytes = vec![0; 60];
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(0, &(disk.bytes / SECTOR).to_le_bytes());
    put(8, &SIZE_MAX.to_le_bytes());
    put(12, &seg_max.to_le_bytes());
    // The block size of the host where the guest was started. Requests count in sectors in any
    // case.
    put(20, &disk.block_bytes.to_le_bytes());
    put(34, &queues.to_le_bytes());
    if !disk.readonly {
        put(36, &MAX_DISCARD_SECTORS.to_le_bytes());
        put(40, &MAX_RANGES.to_le_bytes());
        put(44, &DISCARD_ALIGNMENT.to_le_bytes());
        put(48, &MAX_ZERO_SECTORS.to_le_bytes());
        put(52, &MAX_RANGES.to_le_bytes());
        put(56, &[1]);
    }
    bytes
}
