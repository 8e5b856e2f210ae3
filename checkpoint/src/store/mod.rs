//! The epoch store: a page file with frames' contents, a log that says which epoch has which, and a manifest that names both.
//!
//! Bytes, names and the order of syncs are in `FORMAT.md`. A [`Store`] is either open for reading,
//! by anyone at any time, or open for one writer, which holds the directory's lock.
//!
//! ```text
//! sectors, records   the log's bytes                         log, group, build  epochs in it: read, written
//! object             memory and drives, as frames
//! frame_map          where an epoch's frames are             pages              the page file and its free slots
//! writer, entries    one epoch being written                 opening, commit    made durable, in order; old ones dropped
//! space, block_map   which slots which epochs need           rotate             another log, compaction
//! pin                epochs that are being read              verify, export     all of it read
//! salvage            what is left of a damaged store    repair             a sound one of that
//! unreadable         parts of a file that its disk cannot read
//! archive            one epoch in a file of its own             late, touched      frames as a guest asks for them
//! ```

mod archive;
mod backend;
mod block_map;
mod build;
mod commit;
mod entries;
mod error;
mod export;
mod fetch;
mod frame_map;
mod group;
mod late;
mod log;
mod manifest;
mod object;
mod opening;
mod pages;
mod pin;
mod records;
mod repair;
#[cfg(feature = "testing")]
mod reseal;
mod rotate;
mod salvage;
mod sectors;
mod space;
mod touched;
mod unreadable;
mod verify;
mod writer;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

pub use archive::Archive;
#[cfg(feature = "testing")]
pub use archive::reseal_archive;
pub use backend::{Backend, DirBackend, LOCK_FILE, LockError, RangeLock, StoreFile};
pub(crate) use commit::{Bounds, Committer, Published};
pub use error::{Damage, StoreError};
pub use export::{ExportReport, Place};
pub(crate) use fetch::{Sink, fetch};
pub(crate) use frame_map::{Cell, FrameMap};
pub(crate) use group::Record;
pub(crate) use late::LateFrames;
pub(crate) use log::LogFile;
pub(crate) use object::{of_object, place};
pub(crate) use pages::Pages;
pub(crate) use pin::{Machine, Mapped, Pinned};
pub(crate) use records::MAX_EPOCH;
pub use repair::RepairReport;
#[cfg(feature = "testing")]
pub use reseal::{reseal_log, reseal_manifest, reseal_pages};
pub use rotate::CompactReport;
pub use salvage::{CheckpointState, Survey};
pub use verify::VerifyReport;
pub(crate) use writer::{EpochWriter, Written};

use self::backend::is_media_error;
use self::log::{Tail, is_not_found};
use self::manifest::Manifest;
use self::pages::PageReader;
use self::records::{Files, MAX_GENERATION};
use self::sectors::SECTOR;
use self::unreadable::{PATIENCE, Unreadable};
use crate::calm::Calm;
use driftline_format::{HEADER_LEN, Header};
use driftline_guest::{Guest, LineId, Origin, VmId};

/// Names of files, beside [`LOCK_FILE`].
const MANIFEST: &str = "manifest";
const MANIFEST_NEW: &str = "manifest.tmp";
const LOG: &str = "log-";
const PAGES: &str = "pages-";
const TOUCHED: &str = "touched";
const TOUCHED_NEW: &str = "touched.tmp-";
/// Begins the names of files that a repair has kept aside: `damaged-1.log-2`.
const ASIDE: &str = "damaged-";

fn log_name(generation: u64) -> String {
    format!("{LOG}{generation}")
}

fn pages_name(generation: u64) -> String {
    format!("{PAGES}{generation}")
}

/// What a name in the directory stands for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Named {
    Manifest,
    ManifestNew,
    Log(u64),
    Pages(u64),
    Lock,
    Touched,
    TouchedNew,
    /// What a repair has kept aside, and its number.
    Aside(u64),
    /// An epoch of format 1.
    Epoch1,
    Foreign,
}

fn parse_name(name: &str) -> Named {
    let number = |digits: &str| {
        let plain = digits.bytes().all(|b| b.is_ascii_digit()) && !digits.starts_with('0');
        digits.parse().ok().filter(|n| plain && (1..=MAX_GENERATION).contains(n))
    };
    match name {
        MANIFEST => return Named::Manifest,
        MANIFEST_NEW => return Named::ManifestNew,
        LOCK_FILE => return Named::Lock,
        TOUCHED => return Named::Touched,
        _ if name.starts_with(TOUCHED_NEW) => return Named::TouchedNew,
        _ => {}
    }
    if let Some(n) = name.strip_prefix(LOG).and_then(number) {
        return Named::Log(n);
    }
    if let Some(n) = name.strip_prefix(PAGES).and_then(number) {
        return Named::Pages(n);
    }
    let aside = name.strip_prefix(ASIDE).and_then(|rest| rest.split_once('.'));
    if let Some(n) = aside.and_then(|(digits, _)| number(digits)) {
        return Named::Aside(n);
    }
    let epoch = name.strip_prefix("epoch-").and_then(|rest| rest.strip_suffix(".dl"));
    match epoch {
        Some(n) if n.len() == 20 && n.bytes().all(|b| b.is_ascii_digit()) => Named::Epoch1,
        _ => Named::Foreign,
    }
}

/// One stored epoch, as it describes itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct EpochInfo {
    /// Its number, from 1 on, ascending in time.
    pub epoch: u64,
    /// Whose epoch it is.
    pub vm_id: VmId,
    /// The epoch that it was built on; that may have been dropped since.
    pub parent: Option<u64>,
    /// Whether it was taken of all memory.
    pub full: bool,
    /// Frames that it brought, of memory and drives, those of zeros included.
    pub frames: u64,
    /// Frames of zeros, stored without contents.
    pub zero_frames: u64,
    /// Bytes that it took: slots of its own in the page file, and its records.
    pub bytes: u64,
    /// Drives that it has, whose blocks are among the frames.
    pub drives: u32,
    /// When it was begun: milliseconds since 1970, by the host's clock.
    pub created_unix_ms: u64,
    /// The line of the guest that took it.
    pub line: LineId,
}

impl EpochInfo {
    /// What tells it from all others.
    pub fn origin(&self) -> Origin {
        let Self { vm_id, epoch, created_unix_ms, line, .. } = *self;
        Origin { vm_id, epoch, created_unix_ms, line }
    }
}

/// What is in a store's directory.
#[derive(Debug, Default)]
pub struct Listing {
    /// Epochs that are kept, ascending: those in front of any damage of the log.
    pub epochs: Vec<EpochInfo>,
    /// What is wrong with the log.
    pub damaged: Vec<StoreError>,
    /// Files, and the end of the log, that a crash left unfinished, or that are being written now.
    pub unfinished: Vec<String>,
    /// Files that have no place in a store; never touched.
    pub foreign: Vec<String>,
    /// Files that [`repair`](Store::repair) replaced and kept under other names. The operator may
    /// remove them.
    pub aside: Vec<String>,
}

/// A directory of epochs.
///
/// ```
/// use driftline_checkpoint::Store;
/// let dir = tempfile::tempdir()?;
/// let store = Store::create_or_open(dir.path())?;
/// assert!(store.epochs()?.is_empty());
/// let second = Store::create_or_open(dir.path()).unwrap_err().to_string();
/// assert!(second.contains(&format!("in use by process {}", std::process::id())));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Store {
    backend: Box<dyn Backend>,
    writable: bool,
    calm: Calm,
    /// Time that reads of each file may take which fail.
    patience: Duration,
}

impl Store {
    /// Opens the store in `dir` for writing, creating it if need be, and removes what a crashed
    /// writer left unfinished.
    ///
    /// Fails if another process, or another `Store` in this one, writes to it.
    pub fn create_or_open(dir: &Path) -> Result<Self, StoreError> {
        let backend = DirBackend::create_or_open(dir).map_err(|e| creating(dir, e))?;
        Self::with_backend(Box::new(backend), true)
    }

    /// Like [`create_or_open`](Self::create_or_open), past the host's page cache ([`DirBackend::direct`]).
    pub fn create_or_open_direct(dir: &Path) -> Result<Self, StoreError> {
        let backend = DirBackend::create_or_open(dir).map_err(|e| creating(dir, e))?;
        Self::with_backend(Box::new(backend.direct()), true)
    }

    /// Opens the store in `dir` for reading; nothing in it needs to be writable. Sees the epochs that are kept at each moment,
    /// also while another process writes.
    pub fn open(dir: &Path) -> Result<Self, StoreError> {
        let backend = DirBackend::open(dir).map_err(|cause| StoreError::Io {
            what: "opening the store",
            path: dir.to_owned(),
            cause,
        })?;
        Self::with_backend(Box::new(backend), false)
    }

    /// A store on something other than a directory.
    pub fn with_backend(backend: Box<dyn Backend>, writable: bool) -> Result<Self, StoreError> {
        let store = Self { backend, writable, calm: Calm::default(), patience: PATIENCE };
        if writable {
            store.lock()?;
        }
        let names = store.names()?;
        let has = |named: Named| names.iter().any(|name| parse_name(name) == named);
        if has(Named::Epoch1) && !has(Named::Manifest) {
            return Err(StoreError::Format1 { dir: store.dir() });
        }
        if writable && let Some(manifest) = store.or_repair(store.manifest())? {
            store.remove_leftovers(&names, &manifest)?;
        }
        Ok(store)
    }

    /// Removes files that the manifest does not name, once those that it names are known to be the
    /// store's: a manifest from a backup names none, and the others are all that there is.
    fn remove_leftovers(&self, names: &[String], manifest: &Manifest) -> Result<(), StoreError> {
        let leftovers = names.iter().filter(|name| is_leftover(name, Some(manifest)));
        let leftovers: Vec<&String> = leftovers.collect();
        if leftovers.is_empty() {
            return Ok(());
        }
        let has_content =
            |name: &&String| matches!(parse_name(name), Named::Log(_) | Named::Pages(_));
        if leftovers.iter().any(has_content) {
            self.or_repair(self.check_named(manifest))?;
        }
        // First: a crash may yet bring back the manifest before this one, and it names some of them.
        self.sync_dir()?;
        for name in leftovers {
            tracing::info!(name, "removing what was never finished");
            match self.backend.remove(name) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                // Whoever writes one has no lock, and may have given it its name by now.
                Err(e) if parse_name(name) == Named::TouchedNew => {
                    tracing::debug!("{name} stays: {e}");
                }
                other => other.map_err(|e| self.io("removing", name, e))?,
            }
        }
        self.sync_dir()
    }

    /// Refuses a manifest that names a log or page file that is missing, or whose header is not
    /// that of this store's.
    fn check_named(&self, manifest: &Manifest) -> Result<(), StoreError> {
        let Manifest { vm_id, files } = *manifest;
        let log = LogFile::check_header(self, files.log, vm_id);
        let pages = PageReader::open(self, files.pages, vm_id).map(drop);
        for (checked, file) in [(log, log_name(files.log)), (pages, pages_name(files.pages))] {
            checked.map_err(|e| match is_not_found(&e) {
                true => StoreError::NotThere { dir: self.dir(), file },
                false => e,
            })?;
        }
        Ok(())
    }

    pub(crate) fn sync_dir(&self) -> Result<(), StoreError> {
        self.backend.sync_dir().map_err(|e| self.io_dir("syncing", e))
    }

    /// Opens the store in `dir` to [repair](Self::repair) it. Fails if another process, or another
    /// `Store` in this one, writes to it, and if no file there is a store's.
    pub fn open_to_repair(dir: &Path) -> Result<Self, StoreError> {
        let opening =
            |cause| StoreError::Io { what: "opening the store", path: dir.to_owned(), cause };
        Self::with_backend_to_repair(Box::new(DirBackend::open(dir).map_err(opening)?))
    }

    /// As [`open_to_repair`](Self::open_to_repair), on something other than a directory.
    pub fn with_backend_to_repair(backend: Box<dyn Backend>) -> Result<Self, StoreError> {
        let calm = Calm::default();
        let store = Self { backend, writable: true, calm, patience: PATIENCE };
        store.check_is_store()?;
        store.lock()?;
        Ok(store)
    }

    /// Refuses a directory without any file of a store.
    pub fn check_is_store(&self) -> Result<(), StoreError> {
        let is_part = |name: &String| {
            matches!(
                parse_name(name),
                Named::Manifest | Named::Log(_) | Named::Pages(_) | Named::Epoch1
            )
        };
        match self.names()?.iter().any(is_part) {
            true => Ok(()),
            false => Err(StoreError::NotAStore { dir: self.dir() }),
        }
    }

    /// Where it is.
    pub fn location(&self) -> &Path {
        self.backend.location()
    }

    /// Whose epochs it is for; `None` if none was ever begun there. Reads its manifest only, of a hundred bytes.
    pub fn owner(&self) -> Result<Option<VmId>, StoreError> {
        Ok(self.manifest()?.map(|manifest| manifest.vm_id))
    }

    /// The configuration of the guest ([`Guest::config`]) in the latest epoch.
    pub fn config(&self) -> Result<Vec<u8>, StoreError> {
        Ok(self.pin(None)?.read_machine()?.config)
    }

    /// The epochs that are kept, ascending; an error if the log is damaged. Reads the log; contents of frames are only checked
    /// by [`verify`](Self::verify) and [`restore`](crate::restore()).
    pub fn epochs(&self) -> Result<Vec<EpochInfo>, StoreError> {
        let listing = self.list()?;
        match listing.damaged.into_iter().next() {
            Some(e) => Err(e),
            None => Ok(listing.epochs),
        }
    }

    /// Everything in the directory. Costs as much as [`epochs`](Self::epochs).
    pub fn list(&self) -> Result<Listing, StoreError> {
        let mut listing = Listing::default();
        let opened = match self.open_log() {
            Err(e @ StoreError::Damaged { .. }) => {
                listing.damaged.push(e);
                None
            }
            other => other?,
        };
        let manifest = opened.as_ref().map(|(manifest, _)| *manifest);
        for name in self.names()? {
            match parse_name(&name) {
                Named::Foreign | Named::Epoch1 => listing.foreign.push(name),
                Named::Aside(_) => listing.aside.push(name),
                // A damaged manifest says nothing of other files.
                _ if listing.damaged.is_empty() && is_leftover(&name, manifest.as_ref()) => {
                    listing.unfinished.push(name);
                }
                _ => {}
            }
        }
        if let Some((manifest, log)) = opened {
            listing.epochs = log.kept().iter().map(|g| g.info).collect();
            match log.tail {
                Tail::Clean => {}
                Tail::Torn(at) => {
                    listing
                        .unfinished
                        .push(format!("{} from byte {at} on", log_name(manifest.files.log)));
                }
                Tail::Damaged(e, _) => listing.damaged.push(e),
            }
        }
        listing.unfinished.sort_unstable();
        listing.foreign.sort_unstable();
        listing.aside.sort_unstable();
        Ok(listing)
    }

    /// The manifest and the log that it names; `None` if there is nothing yet.
    pub(crate) fn open_log(&self) -> Result<Option<(Manifest, LogFile)>, StoreError> {
        loop {
            let Some(manifest) = self.manifest()? else { return self.without_manifest() };
            match LogFile::open(self, manifest.files.log) {
                // A writer has begun another one in this moment.
                Err(e) if is_not_found(&e) => {
                    if self.manifest()? == Some(manifest) {
                        return Err(self.log_is_gone(log_name(manifest.files.log))?);
                    }
                }
                Err(e) => return Err(e),
                Ok(log) => {
                    log.check_owner(manifest.vm_id)?;
                    return Ok(Some((manifest, log)));
                }
            }
        }
    }

    /// What it means that the manifest names a log that is not there.
    fn log_is_gone(&self, name: String) -> Result<StoreError, StoreError> {
        let (dir, names) = (self.dir(), self.names()?);
        Ok(match names.iter().any(|name| matches!(parse_name(name), Named::Log(_))) {
            true => StoreError::NotThere { dir, file: name },
            false => StoreError::NoLog { dir, log: Some(name) },
        })
    }

    /// Without a manifest there may be files of a store that was never finished. A log that is
    /// longer than its header has epochs, or had some, whatever is damaged in it.
    fn without_manifest<T>(&self) -> Result<Option<T>, StoreError> {
        for name in self.names()? {
            let Named::Log(_) = parse_name(&name) else { continue };
            let len = match self.backend.open(&name).and_then(|file| file.len()) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                len => len.map_err(|e| self.io("reading", &name, e))?,
            };
            if len > SECTOR as u64 && self.manifest()?.is_none() {
                return Err(StoreError::NoManifest { log: self.path(&name) });
            }
        }
        Ok(None)
    }

    /// Whose a file is by its header; `None` if it is gone, or the header is damaged.
    fn header_owner(&self, name: &str, magic: [u8; 8]) -> Result<Option<VmId>, StoreError> {
        let mut header = [0; HEADER_LEN];
        let read = self.backend.open(name).and_then(|file| file.read_exact_at(&mut header, 0));
        match read {
            Ok(()) => Ok(Header::read_from(&header[..], magic).ok().map(|header| header.vm_id())),
            Err(e) if is_media_error(&e) => Ok(None),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            Err(e) => Err(self.io("reading", name, e)),
        }
    }

    /// Generations for a new log and a new page file: above those of all files that are there.
    fn next_files(&self) -> Result<Files, StoreError> {
        let mut last = Files { log: 0, pages: 0 };
        for name in self.names()? {
            match parse_name(&name) {
                Named::Log(n) => last.log = last.log.max(n),
                Named::Pages(n) => last.pages = last.pages.max(n),
                _ => {}
            }
        }
        let next = |n: u64, name: fn(u64) -> String| match n.checked_add(1) {
            Some(next) if next <= MAX_GENERATION => Ok(next),
            _ => Err(StoreError::LastName { file: self.path(&name(n)) }),
        };
        Ok(Files { log: next(last.log, log_name)?, pages: next(last.pages, pages_name)? })
    }

    /// Makes a file that is not there yet.
    fn create_new(&self, name: &str) -> Result<Box<dyn StoreFile>, StoreError> {
        self.backend.create_new(name).map_err(|e| self.io("creating", name, e))
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// Held while the guest stands for an epoch that goes through this one: work on the store that can wait does.
    pub(crate) fn calm(&self) -> &Calm {
        &self.calm
    }

    /// For a reader of a file, none of which has been read; one that `guesses` salvages.
    fn unreadable(&self, guesses: bool) -> Unreadable {
        Unreadable::new(self.patience, guesses)
    }

    /// Bounds the time that reads may take which fail, for each file.
    #[cfg(feature = "testing")]
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    pub(crate) fn is_writable(&self) -> bool {
        self.writable
    }

    /// Takes the lock, or says who has it.
    pub(crate) fn lock(&self) -> Result<(), StoreError> {
        self.backend.lock().map_err(|e| match e {
            LockError::Held { pid } => StoreError::InUse { dir: self.dir(), pid },
            LockError::Io(e) => self.io("locking", LOCK_FILE, e),
        })
    }

    /// Refuses to write on where another process could write too.
    pub(crate) fn check_lock(&self) -> Result<(), StoreError> {
        match self.backend.is_locked() {
            Ok(true) => Ok(()),
            Ok(false) => Err(StoreError::LockLost { dir: self.dir() }),
            Err(e) => Err(self.io("looking at", LOCK_FILE, e)),
        }
    }

    /// Refuses to write to a file that is no longer the one under its name.
    pub(crate) fn check_file(&self, name: &str, file: &dyn StoreFile) -> Result<(), StoreError> {
        let there = self.backend.open(name).and_then(|there| there.identity());
        match (there, file.identity()) {
            (Ok(there), Ok(ours)) if there == ours => Ok(()),
            (Err(e), _) if e.kind() != io::ErrorKind::NotFound => Err(self.io("opening", name, e)),
            _ => Err(StoreError::Replaced { file: self.path(name) }),
        }
    }

    /// Refuses a store that `guest` may not continue: one with another guest's epochs, or whose
    /// last one is of another line.
    pub(crate) fn check_line(&self, guest: &dyn Guest) -> Result<(), StoreError> {
        let last = self.open_log()?.and_then(|(_, log)| log.groups.last().map(|g| g.info));
        last.map_or(Ok(()), |last| self.check_follows(&last.origin(), guest))
    }

    /// Refuses to put an epoch of `guest` right behind `last`.
    pub(crate) fn check_follows(&self, last: &Origin, guest: &dyn Guest) -> Result<(), StoreError> {
        let (dir, asked, line) = (self.dir(), guest.vm_id(), guest.line());
        if last.vm_id != asked {
            return Err(StoreError::OtherVm { dir, stored: last.vm_id, asked });
        }
        if !line.follows(last) {
            let (last, from) = (last.epoch, line.from.map(|from| from.epoch));
            return Err(StoreError::OtherLine { dir, asked, last, from });
        }
        Ok(())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.location().join(name)
    }

    pub(crate) fn dir(&self) -> PathBuf {
        self.location().to_owned()
    }

    pub(crate) fn io(&self, what: &'static str, name: &str, cause: io::Error) -> StoreError {
        StoreError::Io { what, path: self.path(name), cause }
    }

    pub(crate) fn io_dir(&self, what: &'static str, cause: io::Error) -> StoreError {
        StoreError::Io { what, path: self.dir(), cause }
    }

    pub(crate) fn no_epoch(&self, epoch: Option<u64>) -> StoreError {
        StoreError::NoEpoch { dir: self.dir(), epoch }
    }

    fn names(&self) -> Result<Vec<String>, StoreError> {
        self.backend.list().map_err(|e| self.io_dir("listing", e))
    }
}

fn creating(dir: &Path, cause: io::Error) -> StoreError {
    StoreError::Io { what: "creating the store", path: dir.to_owned(), cause }
}

/// Whether a file is a store's own, but not this one's.
fn is_leftover(name: &str, manifest: Option<&Manifest>) -> bool {
    match parse_name(name) {
        Named::ManifestNew | Named::TouchedNew => true,
        Named::Log(n) => manifest.is_none_or(|m| m.files.log != n),
        Named::Pages(n) => manifest.is_none_or(|m| m.files.pages != n),
        Named::Manifest | Named::Lock | Named::Touched | Named::Aside(_) => false,
        Named::Epoch1 | Named::Foreign => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_one_meaning() {
        assert_eq!(parse_name(&log_name(42)), Named::Log(42));
        assert_eq!(parse_name(&pages_name(MAX_GENERATION)), Named::Pages(MAX_GENERATION));
        assert_eq!(parse_name(&pages_name(MAX_GENERATION + 1)), Named::Foreign);
        assert_eq!(parse_name(&pages_name(u64::MAX)), Named::Foreign);
        assert_eq!(parse_name("touched"), Named::Touched);
        assert_eq!(parse_name("touched.tmp-1"), Named::TouchedNew);
        assert_eq!(parse_name("epoch-00000000000000000007.dl"), Named::Epoch1);
        for foreign in
            ["log-", "log-0", "log-01", "log-+1", "pages-1.bak", "epoch-7.dl", "notes.txt", ""]
        {
            assert_eq!(parse_name(foreign), Named::Foreign, "{foreign}");
        }
    }
}
