//! The sectors of a log: what a disk writes whole or not at all, each with a checksum of its own.
//!
//! ```text
//!  0                                               508        512
//!  +-----------------------------------------------+-----------+
//!  | data: records, one after the other            | CRC32C    |  of the data, the sector's number, and its kind
//!  +-----------------------------------------------+-----------+
//! ```
//!
//! So that what a crash leaves behind can be told from damage: a sector that was never written is
//! missing or zeros, and its checksum is not that of zeros. Anything else that does not fit its
//! checksum is damage.

use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use driftline_format::{FormatError, is_zero};

use crate::backend::{StoreFile, is_media_error};
use crate::error::{Damage, StoreError};
use crate::limits::SECTOR;
use crate::pause_gate::Calm;
use crate::records::Digest;
use crate::unreadable::Unreadable;

/// Bytes of it that are data.
pub(crate) const DATA: usize = SECTOR - 4;
/// Sectors that are read at once: 64 KiB.
const READ: u64 = 128;
/// A sector that is being written while it is read may look damaged for so long.
const SETTLE: Duration = Duration::from_millis(1);

/// Where an epoch begins in a log, and what comes before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    pub(crate) sector: u64,
    /// Of the next record.
    pub(crate) sequence: u32,
    /// Of all records before it; `None` where some of those are damaged, and the next COMMIT says
    /// it.
    pub(crate) digest: Option<Digest>,
}

/// What a sector's checksum says that it is, whatever its data: a guest chooses what frames'
/// checksums are, and so the data of most sectors, but not that an epoch begins there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// The first of an epoch.
    First,
    /// Any other.
    Other,
}

impl Kind {
    fn word(self) -> u64 {
        match self {
            Self::First => u64::from_le_bytes(*b"FIRSTSEC"),
            Self::Other => u64::from_le_bytes(*b"OTHERSEC"),
        }
    }
}

/// Never 0, so that a sector of zeros was never written.
fn checksum(data: &[u8], number: u64, kind: Kind) -> u32 {
    let crc = crc32c::crc32c_append(crc32c::crc32c(data), &number.to_le_bytes());
    match crc32c::crc32c_append(crc, &kind.word().to_le_bytes()) {
        0 => u32::MAX,
        crc => crc,
    }
}

/// The end of a sector's `data`.
pub(crate) fn seal(data: &[u8], number: u64, kind: Kind) -> [u8; SECTOR - DATA] {
    checksum(data, number, kind).to_le_bytes()
}

/// Cuts bytes into sectors.
#[derive(Debug)]
pub(crate) struct Framer {
    /// The number of the first sector in `bytes`.
    first: u64,
    bytes: Vec<u8>,
    /// The sector in which an epoch begins.
    begin: u64,
}

impl Framer {
    /// The next byte goes to the beginning of sector `first`, where an epoch begins, or, if it is
    /// 0, the log.
    pub(crate) fn new(first: u64) -> Self {
        Self { first, bytes: Vec::new(), begin: first }
    }

    /// An epoch begins with the next byte, which is the first of its sector.
    pub(crate) fn begin(&mut self) {
        self.begin = self.sector();
    }

    /// Sectors that are complete.
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
                let kind = if first { Kind::First } else { Kind::Other };
                let end = seal(&self.bytes[at..], number, kind);
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

    /// The number of the sector that the next byte goes to.
    pub(crate) fn sector(&self) -> u64 {
        self.first + self.whole() as u64
    }

    /// Bytes of data in that sector so far.
    pub(crate) fn filled(&self) -> usize {
        self.bytes.len() % SECTOR
    }

    /// Bytes of complete sectors.
    pub(crate) fn ready(&self) -> usize {
        self.whole() * SECTOR
    }

    /// Writes the complete sectors to where they belong and forgets them.
    pub(crate) fn write_to(&mut self, file: &dyn StoreFile) -> io::Result<()> {
        let ready = self.ready();
        file.write_all_at(&self.bytes[..ready], self.first * SECTOR as u64)?;
        self.first = self.sector();
        self.bytes.drain(..ready);
        Ok(())
    }
}

/// Why a sector cannot be read.
#[derive(Debug)]
pub(crate) enum Stop {
    /// From this byte of this file on nothing was written: it ends, or a sector is zeros.
    Unwritten(PathBuf, u64),
    /// It is damaged, or could not be read.
    Wrong(StoreError),
}

impl From<StoreError> for Stop {
    fn from(e: StoreError) -> Self {
        Self::Wrong(e)
    }
}

/// For who knows that all was written.
impl From<Stop> for StoreError {
    fn from(stop: Stop) -> Self {
        match stop {
            Stop::Wrong(e) => e,
            Stop::Unwritten(file, offset) => {
                Self::Damaged { file, offset, damage: Damage::Unwritten }
            }
        }
    }
}

/// A log's sectors, for reading.
#[derive(Debug)]
pub(crate) struct Sectors {
    file: Box<dyn StoreFile>,
    pub(crate) path: PathBuf,
    len: u64,
    buffer: Vec<u8>,
    /// The number of the first sector in `buffer`.
    buffered: u64,
    calm: Calm,
    /// The last of sectors that could not be read at once.
    bad: Option<u64>,
    /// What could not be read by itself.
    unreadable: Unreadable,
    /// Damaged state of a guest is passed over, for a salvage.
    pub(super) lenient: bool,
}

impl Sectors {
    /// Of the log in `file`; reading yields to `calm`.
    pub(super) fn new(
        file: Box<dyn StoreFile>,
        path: PathBuf,
        calm: Calm,
        unreadable: Unreadable,
    ) -> Result<Self, StoreError> {
        let mut new = Self {
            file,
            path,
            len: 0,
            buffer: Vec::new(),
            buffered: 0,
            calm,
            bad: None,
            unreadable,
            lenient: false,
        };
        new.look_again()?;
        Ok(new)
    }

    /// Bytes of the file when it was looked at last.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Whole sectors in it.
    pub(crate) fn count(&self) -> u64 {
        self.len / SECTOR as u64
    }

    /// Learns how long the file is now, and forgets what was read.
    pub(crate) fn look_again(&mut self) -> Result<(), StoreError> {
        self.buffer.clear();
        self.unreadable.forget();
        self.len = self.file.len().map_err(|e| self.io(e))?;
        Ok(())
    }

    fn io(&self, cause: io::Error) -> StoreError {
        StoreError::Io { what: "reading", path: self.path.clone(), cause }
    }

    pub(crate) fn damaged(&self, offset: u64, damage: impl Into<Damage>) -> StoreError {
        StoreError::Damaged { file: self.path.clone(), offset, damage: damage.into() }
    }

    fn read(&mut self, number: u64, count: u64) -> io::Result<()> {
        self.buffer.resize(count as usize * SECTOR, 0);
        self.file.read_exact_at(&mut self.buffer, number * SECTOR as u64)
    }

    /// Reads sector `number`, and as many behind it as can be had at once.
    fn fill(&mut self, number: u64) -> io::Result<()> {
        let end = match self.unreadable.next(number) {
            Some(next) if next == number => return Err(self.unreadable.error()),
            next => next.map_or(self.count(), |next| next.min(self.count())),
        };
        let mut count = READ.min(end.saturating_sub(number)).max(1);
        // What is behind an unreadable sector is likely to be one.
        if number.checked_sub(1).is_some_and(|before| self.unreadable.has(before)) {
            count = 1;
        }
        // One sector that cannot be read does not cost those around it: halves are tried.
        if let Some(bad) = self.bad.filter(|bad| (number..number + count).contains(bad)) {
            count = ((bad + 1 - number) / 2).max(1);
        }
        loop {
            let begun = Instant::now();
            let e = match self.read(number, count) {
                Err(e) if is_media_error(&e) => e,
                read => return read,
            };
            self.unreadable.took(begun.elapsed());
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

    /// The bytes of sector `number`, which is there.
    pub(super) fn raw(&mut self, number: u64) -> Result<&[u8], StoreError> {
        let have = (self.buffer.len() / SECTOR) as u64;
        if number < self.buffered || number >= self.buffered + have {
            self.calm.stand_aside();
            self.buffered = number;
            self.fill(number).map_err(|e| {
                self.buffer.clear();
                self.io(e)
            })?;
        }
        let at = (number - self.buffered) as usize * SECTOR;
        Ok(&self.buffer[at..at + SECTOR])
    }

    /// The bytes of these sectors, if all of them were read last, at once.
    pub(crate) fn buffered(&self, sectors: Range<u64>) -> Option<Vec<u8>> {
        let at = |number: u64| usize::try_from(number.checked_sub(self.buffered)?).ok();
        let (from, to) = (at(sectors.start)? * SECTOR, at(sectors.end)? * SECTOR);
        self.buffer.get(from..to).map(<[u8]>::to_vec)
    }

    /// The data of sector `number`, which must be of that kind, checked.
    pub(crate) fn data(&mut self, number: u64, kind: Kind) -> Result<&[u8], Stop> {
        let offset = number.saturating_mul(SECTOR as u64);
        if number >= self.count() {
            return Err(Stop::Unwritten(self.path.clone(), offset.min(self.len)));
        }
        let raw = match self.raw(number) {
            // Its writer has cut off an epoch that failed in this moment.
            Err(StoreError::Io { cause, .. }) if cause.kind() == io::ErrorKind::UnexpectedEof => {
                self.look_again()?;
                return Err(Stop::Unwritten(self.path.clone(), offset.min(self.len)));
            }
            Err(StoreError::Io { cause, .. }) if is_media_error(&cause) => {
                let why = self.unreadable.why(number);
                return Err(Stop::Wrong(match self.unreadable.is_hopeless() {
                    true => self.io(cause),
                    false => self.damaged(offset, Damage::Unreadable { why }),
                }));
            }
            raw => raw?,
        };
        let ((found, expected), zeros) = (checksums(raw, number, kind), is_zero(raw));
        if found != expected {
            if zeros {
                return Err(Stop::Unwritten(self.path.clone(), offset));
            }
            let damage = FormatError::Checksum { what: "a sector", found, expected };
            return Err(self.damaged(offset, damage).into());
        }
        let at = (number - self.buffered) as usize * SECTOR;
        Ok(&self.buffer[at..at + DATA])
    }

    /// Whether sector `number`, which was damaged, is not any more: it was being written when it
    /// was read.
    pub(crate) fn has_settled(&mut self, number: u64) -> bool {
        std::thread::sleep(SETTLE);
        let before = self.raw(number).map(<[u8]>::to_vec).ok();
        self.buffer.clear();
        let now = self.raw(number).map(<[u8]>::to_vec).ok();
        before != now
    }
}

fn checksums(raw: &[u8], number: u64, kind: Kind) -> (u32, u32) {
    let (data, end) = raw.split_at(DATA);
    let found = end.iter().rev().fold(0, |all, byte| all << 8 | u32::from(*byte));
    (found, checksum(data, number, kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_do_not_have_the_checksum_of_zeros() {
        // Or a sector of zeros could be one that was written. There is one number below 2^32 of
        // each kind that would have it.
        for kind in [Kind::First, Kind::Other] {
            let raw = |n: u32| {
                let crc =
                    crc32c::crc32c_append(crc32c::crc32c(&[0; DATA]), &u64::from(n).to_le_bytes());
                crc32c::crc32c_append(crc, &kind.word().to_le_bytes())
            };
            // Checksums of what differs in one bit differ by what that bit alone makes: solved for
            // 0 bit by bit.
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
            assert_ne!(checksum(&data, n, Kind::First), checksum(&data, n, Kind::Other));
        }
    }
}
