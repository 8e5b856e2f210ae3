//! The sectors of a log: units that a disk writes completely or not at all, each with its own
//! checksum.
//!
//! ```text
//!  0                                               508        512
//!  +-----------------------------------------------+-----------+
//!  | data: records, one after the other            | CRC32C    |
//!  +-----------------------------------------------+-----------+
//! ```
//!
//! The CRC32C covers the data, the sector's number, and its kind.
//!
//! The checksums distinguish the remains of a crash from damage. A sector that was never written is
//! missing or zeros, and zeros never have a valid checksum. Any other sector whose checksum is
//! wrong is damaged.

use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use driftline_format::{FormatError, is_zero};

use crate::backend::{StoreFile, is_media_error};
use crate::damage::Damage;
use crate::error::StoreError;
use crate::limits::SECTOR;
use crate::pause_gate::PauseGate;
use crate::records::Digest;
use crate::unreadable::UnreadableUnits;

/// Bytes of data in a sector.
pub(crate) const DATA: usize = SECTOR - 4;
/// Number of sectors that are read in one call: 64 KiB.
const READ: u64 = 128;
/// Time for which a sector may look damaged because it is being written while it is read.
const SECTOR_WRITE_TIME: Duration = Duration::from_millis(1);

/// Position in a log at which an epoch begins, and what comes before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LogPosition {
    pub(crate) sector: u64,
    /// Sequence number of the next record.
    pub(crate) sequence: u32,
    /// Digest of all records before it; `None` if some of those are damaged: the next COMMIT then
    /// gives the digest.
    pub(crate) digest: Option<Digest>,
}

impl LogPosition {
    /// Returns the offset in the file, in bytes.
    pub(crate) fn offset(self) -> u64 {
        self.sector * SECTOR as u64
    }
}

/// Kind of a sector, which its checksum covers. A guest chooses the checksums of frames, and so the
/// data of most sectors. It cannot make a sector look like the beginning of an epoch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SectorKind {
    /// First sector of an epoch.
    First,
    /// Any other sector.
    Other,
}

impl SectorKind {
    fn word(self) -> u64 {
        match self {
            Self::First => u64::from_le_bytes(*b"FIRSTSEC"),
            Self::Other => u64::from_le_bytes(*b"OTHERSEC"),
        }
    }
}

/// Returns a sector's checksum, which is never 0: so a sector of zeros is one that was never
/// written.
fn checksum(data: &[u8], number: u64, kind: SectorKind) -> u32 {
    let crc = crc32c::crc32c_append(crc32c::crc32c(data), &number.to_le_bytes());
    match crc32c::crc32c_append(crc, &kind.word().to_le_bytes()) {
        0 => u32::MAX,
        crc => crc,
    }
}

/// Returns the bytes that follow a sector's `data`.
pub(crate) fn trailer(data: &[u8], number: u64, kind: SectorKind) -> [u8; SECTOR - DATA] {
    checksum(data, number, kind).to_le_bytes()
}

/// Cuts bytes into sectors.
#[derive(Debug)]
pub(crate) struct Framer {
    /// Number of the first sector in `bytes`.
    first: u64,
    bytes: Vec<u8>,
    /// Number of the sector in which the current epoch begins.
    begin: u64,
}

impl Framer {
    /// Returns a framer whose next byte is the first of sector `first`. An epoch begins there, or
    /// the log if `first` is 0.
    pub(crate) fn new(first: u64) -> Self {
        Self { first, bytes: Vec::new(), begin: first }
    }

    /// Begins an epoch at the next byte, which must be the first of its sector.
    pub(crate) fn begin(&mut self) {
        self.begin = self.sector();
    }

    /// Returns the number of complete sectors.
    fn whole(&self) -> usize {
        self.bytes.len() / SECTOR
    }

    pub(crate) fn push(&mut self, mut data: &[u8]) {
        while !data.is_empty() {
            let room = DATA - self.bytes.len() % SECTOR;
            let (now, later) = data.split_at(room.min(data.len()));
            self.bytes.extend_from_slice(now);
            if self.bytes.len() % SECTOR == DATA {
                let at = self.whole() * SECTOR;
                let number = self.first + self.whole() as u64;
                let first = number == self.begin && number > 0;
                let kind = if first { SectorKind::First } else { SectorKind::Other };
                let end = trailer(&self.bytes[at..], number, kind);
                self.bytes.extend_from_slice(&end);
            }
            data = later;
        }
    }

    /// Completes the last sector with zeros.
    pub(crate) fn pad(&mut self) {
        let used = self.bytes.len() % SECTOR;
        if used > 0 {
            self.push(&[0; DATA][used..]);
        }
    }

    /// Returns the number of the sector of the next byte.
    pub(crate) fn sector(&self) -> u64 {
        self.first + self.whole() as u64
    }

    /// Returns the number of data bytes in that sector so far.
    pub(crate) fn filled(&self) -> usize {
        self.bytes.len() % SECTOR
    }

    /// Returns the number of bytes in complete sectors.
    pub(crate) fn ready(&self) -> usize {
        self.whole() * SECTOR
    }

    /// Writes the complete sectors to their places in the file and forgets them.
    pub(crate) fn write_to(&mut self, file: &dyn StoreFile) -> io::Result<()> {
        let ready = self.ready();
        file.write_all_at(&self.bytes[..ready], self.first * SECTOR as u64)?;
        self.first = self.sector();
        self.bytes.drain(..ready);
        Ok(())
    }
}

/// Reason why a sector cannot be read.
#[derive(Debug)]
pub(crate) enum SectorError {
    /// Nothing was written from this byte of this file on: the file ends, or a sector is zeros.
    Unwritten(PathBuf, u64),
    /// The sector is damaged, or could not be read.
    Damaged(StoreError),
}

impl From<StoreError> for SectorError {
    fn from(e: StoreError) -> Self {
        Self::Damaged(e)
    }
}

/// For callers that know that the sectors were written: an unwritten one is damage.
impl From<SectorError> for StoreError {
    fn from(stop: SectorError) -> Self {
        match stop {
            SectorError::Damaged(e) => e,
            SectorError::Unwritten(file, offset) => {
                Self::Damaged { file, offset, damage: Damage::Unwritten }
            }
        }
    }
}

/// The sectors of a log that is read.
#[derive(Debug)]
pub(crate) struct Sectors {
    file: Box<dyn StoreFile>,
    pub(crate) path: PathBuf,
    len: u64,
    buffer: Vec<u8>,
    /// Number of the first sector in `buffer`.
    buffered: u64,
    pause_gate: PauseGate,
    /// Last sector of a range that could not be read in one call.
    bad: Option<u64>,
    /// Sectors that could not be read one by one.
    unreadable: UnreadableUnits,
    /// Whether damaged state of a guest is skipped, for a salvage.
    pub(super) lenient: bool,
}

impl Sectors {
    /// Returns the sectors of the log in `file`; reading yields to `pause_gate`.
    pub(super) fn new(
        file: Box<dyn StoreFile>,
        path: PathBuf,
        pause_gate: PauseGate,
        unreadable: UnreadableUnits,
    ) -> Result<Self, StoreError> {
        let mut new = Self {
            file,
            path,
            len: 0,
            buffer: Vec::new(),
            buffered: 0,
            pause_gate,
            bad: None,
            unreadable,
            lenient: false,
        };
        new.refresh()?;
        Ok(new)
    }

    /// Returns the length of the file in bytes, as last determined.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Returns the number of whole sectors.
    pub(crate) fn count(&self) -> u64 {
        self.len / SECTOR as u64
    }

    /// Determines the length of the file again, and forgets what was read.
    pub(crate) fn refresh(&mut self) -> Result<(), StoreError> {
        self.buffer.clear();
        self.unreadable.forget();
        self.len = self.file.len().map_err(|e| self.io(e))?;
        Ok(())
    }

    fn io(&self, cause: io::Error) -> StoreError {
        StoreError::not_read("reading", self.path.clone(), cause)
    }

    pub(crate) fn damaged(&self, offset: u64, damage: impl Into<Damage>) -> StoreError {
        StoreError::Damaged { file: self.path.clone(), offset, damage: damage.into() }
    }

    fn read(&mut self, number: u64, count: u64) -> io::Result<()> {
        self.buffer.resize(count as usize * SECTOR, 0);
        self.file.read_exact_at(&mut self.buffer, number * SECTOR as u64)
    }

    /// Reads sector `number`, and as many after it as can be read in one call.
    fn fill(&mut self, number: u64) -> io::Result<()> {
        let end = match self.unreadable.next(number) {
            Some(next) if next == number => return Err(self.unreadable.error()),
            next => next.map_or(self.count(), |next| next.min(self.count())),
        };
        let mut count = READ.min(end.saturating_sub(number)).max(1);
        // The sector after an unreadable one is likely to be unreadable, too.
        if number.checked_sub(1).is_some_and(|before| self.unreadable.has(before)) {
            count = 1;
        }
        // An unreadable sector must not cost those around it: halves are tried.
        if let Some(bad) = self.bad.filter(|bad| (number..number + count).contains(bad)) {
            count = ((bad + 1 - number) / 2).max(1);
        }
        loop {
            let begun = Instant::now();
            let e = match self.read(number, count) {
                Err(e) if is_media_error(&e) => e,
                read => return read,
            };
            self.unreadable.add_time(begun.elapsed());
            if count == 1 {
                let (file, end) = (&self.file, self.len / SECTOR as u64);
                let read = |n: u64| file.read_exact_at(&mut [0; SECTOR], n * SECTOR as u64);
                self.unreadable.note(number, end, &e, read)?;
                return Err(e);
            }
            self.bad = Some(number + count - 1);
            count /= 2;
        }
    }

    /// Returns the bytes of sector `number`, which must exist.
    pub(super) fn raw(&mut self, number: u64) -> Result<&[u8], StoreError> {
        let have = (self.buffer.len() / SECTOR) as u64;
        if number < self.buffered || number >= self.buffered + have {
            self.pause_gate.wait_until_open();
            self.buffered = number;
            self.fill(number).map_err(|e| {
                self.buffer.clear();
                self.io(e)
            })?;
        }
        let at = (number - self.buffered) as usize * SECTOR;
        Ok(&self.buffer[at..at + SECTOR])
    }

    /// Returns the bytes of these sectors, if the last read has returned all of them.
    pub(crate) fn buffered(&self, sectors: Range<u64>) -> Option<Vec<u8>> {
        let at = |number: u64| usize::try_from(number.checked_sub(self.buffered)?).ok();
        let (from, to) = (at(sectors.start)? * SECTOR, at(sectors.end)? * SECTOR);
        self.buffer.get(from..to).map(<[u8]>::to_vec)
    }

    /// Returns the data of sector `number`, which must be of this kind, and checks it.
    pub(crate) fn data(&mut self, number: u64, kind: SectorKind) -> Result<&[u8], SectorError> {
        let offset = number.saturating_mul(SECTOR as u64);
        if number >= self.count() {
            return Err(SectorError::Unwritten(self.path.clone(), offset.min(self.len)));
        }
        let raw = match self.raw(number) {
            // The writer has just cut off an epoch that failed.
            Err(StoreError::Io { cause, .. }) if cause.kind() == io::ErrorKind::UnexpectedEof => {
                self.refresh()?;
                return Err(SectorError::Unwritten(self.path.clone(), offset.min(self.len)));
            }
            Err(StoreError::Unreadable { cause, .. }) => {
                return Err(SectorError::Damaged(match self.unreadable.must_end() {
                    true => self.io(cause),
                    false => self.damaged(offset, self.unreadable.damage(number)),
                }));
            }
            raw => raw?,
        };
        let ((found, expected), zeros) = (checksums(raw, number, kind), is_zero(raw));
        if found != expected {
            if zeros {
                return Err(SectorError::Unwritten(self.path.clone(), offset));
            }
            let damage = FormatError::Checksum { what: "a sector", found, expected };
            return Err(self.damaged(offset, damage).into());
        }
        let at = (number - self.buffered) as usize * SECTOR;
        Ok(&self.buffer[at..at + DATA])
    }

    /// Reads a damaged sector again, and returns whether it has changed: it was being written when
    /// it was read first.
    pub(crate) fn changes_when_reread(&mut self, number: u64) -> bool {
        std::thread::sleep(SECTOR_WRITE_TIME);
        let before = self.raw(number).map(<[u8]>::to_vec).ok();
        self.buffer.clear();
        let now = self.raw(number).map(<[u8]>::to_vec).ok();
        before != now
    }
}

fn checksums(raw: &[u8], number: u64, kind: SectorKind) -> (u32, u32) {
    let (data, end) = raw.split_at(DATA);
    let found = end.iter().rev().fold(0, |all, byte| all << 8 | u32::from(*byte));
    (found, checksum(data, number, kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_do_not_have_the_checksum_of_zeros() {
        // Otherwise, a sector of zeros could be one that was written. For each kind, there is one
        // number below 2^32 that would have the checksum 0.
        for kind in [SectorKind::First, SectorKind::Other] {
            let raw = |n: u32| {
                let crc =
                    crc32c::crc32c_append(crc32c::crc32c(&[0; DATA]), &u64::from(n).to_le_bytes());
                crc32c::crc32c_append(crc, &kind.word().to_le_bytes())
            };
            // Checksums of inputs that differ in one bit differ by a constant for that bit. So the
            // equation for 0 is solved bit by bit.
            let mut rows: Vec<(u32, u32)> =
                (0..32).map(|b| (raw(1 << b) ^ raw(0), 1 << b)).collect();
            let (mut left, mut number) = (raw(0), 0);
            for bit in (0..32).rev() {
                let Some(at) = rows.iter().position(|(sum, _)| sum >> bit == 1) else { continue };
                let (sum, bits) = rows.swap_remove(at);
                for row in rows.iter_mut().filter(|(other, _)| other >> bit & 1 == 1) {
                    *row = (row.0 ^ sum, row.1 ^ bits);
                }
                if left >> bit & 1 == 1 {
                    (left, number) = (left ^ sum, number ^ bits);
                }
            }
            assert_eq!((left, raw(number)), (0, 0));
            assert_ne!(checksum(&[0; DATA], number.into(), kind), 0, "sector {number}");
        }
    }

    #[test]
    fn no_sector_is_of_both_kinds() {
        for n in 0..10_000_u64 {
            let data = [n as u8; DATA];
            assert_ne!(
                checksum(&data, n, SectorKind::First),
                checksum(&data, n, SectorKind::Other)
            );
        }
    }
}
