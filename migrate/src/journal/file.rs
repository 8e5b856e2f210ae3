//! Files of records: staging, syncing, naming, reading and removing them.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use driftline_format::durable::sync_dir;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;

use super::error::{RecordDefect, RecordsError, failed, invalid};
use crate::protocol::ids::Token;

/// The version of the records that this program writes.
pub(super) const VERSION: u32 = 1;

/// Largest record that is read, in bytes. A record has a few hundred, besides a path or an address.
const MAX_RECORD: u64 = 1 << 16;

/// Prefix of the name of a staged file.
const STAGED: &str = ".staged-";
/// Age of a staged file at which its process must have died: no migration takes that long.
const STALE: Duration = Duration::from_secs(60 * 24 * 3600);

pub(super) fn now_unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
}

pub(super) fn json(record: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec_pretty(record)?;
    bytes.push(b'\n');
    Ok(bytes)
}

/// The fields of every record, in any version.
#[derive(Deserialize)]
struct RecordEnvelope {
    version: u32,
    token: Token,
}

/// Reads a file of at most [`MAX_RECORD`] bytes. Returns `None` if it does not exist.
pub(super) fn read_bounded(path: &Path) -> Result<Option<Vec<u8>>, RecordsError> {
    let file = match File::open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(failed("read", path))?,
    };
    let mut bytes = Vec::new();
    file.take(MAX_RECORD + 1).read_to_end(&mut bytes).map_err(failed("read", path))?;
    if bytes.len() as u64 > MAX_RECORD {
        return Err(invalid(path, RecordDefect::TooLong { limit: MAX_RECORD }));
    }
    Ok(Some(bytes))
}

/// Reads the record of `token` in the file of that name.
pub(super) fn read<T: DeserializeOwned>(
    path: &Path,
    token: Token,
) -> Result<Option<T>, RecordsError> {
    let Some(bytes) = read_bounded(path)? else { return Ok(None) };
    let no_record = |e: serde_json::Error| failed("read", path)(e.into());
    let envelope: RecordEnvelope = serde_json::from_slice(&bytes).map_err(no_record)?;
    if envelope.version != VERSION {
        let (found, reads) = (envelope.version, VERSION);
        return Err(invalid(path, RecordDefect::Version { found, reads }));
    }
    if envelope.token != token {
        return Err(invalid(path, RecordDefect::Token { found: envelope.token }));
    }
    serde_json::from_slice(&bytes).map(Some).map_err(no_record)
}

/// Removes files that killed processes have staged. A failure is retried the next time.
pub(super) fn sweep_staged(dir: &Path) {
    let staged = fs::read_dir(dir).into_iter().flatten().flatten();
    let staged = staged.filter(|entry| entry.file_name().to_string_lossy().starts_with(STAGED));
    for entry in staged {
        let made = entry.metadata().and_then(|of| of.modified()).ok();
        if made.and_then(|made| made.elapsed().ok()).is_some_and(|age| age > STALE) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Writes a synced temporary file in `dir`.
pub(super) fn temporary(dir: &Path, bytes: &[u8]) -> io::Result<NamedTempFile> {
    let mut file = tempfile::Builder::new().prefix(STAGED).tempfile_in(dir)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    Ok(file)
}

/// Creates a file atomically and durably. Fails with `AlreadyExists` if the file exists; after any
/// other error it may exist.
pub(super) fn write_new(dir: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    place(dir, temporary(dir, bytes)?, path)
}

/// Links a synced temporary file to its name, durably.
pub(super) fn place(dir: &Path, file: NamedTempFile, path: &Path) -> io::Result<()> {
    file.persist_noclobber(path).map_err(|e| e.error)?;
    sync_dir(dir)
}

pub(super) fn remove(dir: &Path, path: &Path) -> io::Result<()> {
    if unlink(path)? { sync_removed(dir) } else { Ok(()) }
}

/// Removes a file without syncing the directory. Returns whether the file existed.
pub(super) fn unlink(path: &Path) -> io::Result<bool> {
    match fs::remove_file(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        removed => removed.map(|()| true),
    }
}

#[cfg(test)]
thread_local! {
    /// Number of syncs by [`sync_removed`].
    pub(super) static SYNCS: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

/// Syncs the directory, after removals or before them.
pub(super) fn sync_removed(dir: &Path) -> io::Result<()> {
    #[cfg(test)]
    SYNCS.set(SYNCS.get() + 1);
    sync_dir(dir)
}
