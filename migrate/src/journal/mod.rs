//! The durable records of hand-overs: what each side must not forget when its process dies.
//!
//! One directory a host, shared by its processes. Words:
//! - *site*: the directory's own name, a UUID in the file `site`; PREPARED tells it to the source,
//!   and only the same site may later decide about an unknown token.
//! - *source record* `TOKEN.source.json`: written before COMMIT; while it exists, the guest may be
//!   running on `peer`. Removed when the migration is settled.
//! - *decision* `TOKEN.destination.json`: `committed` or `discarded`, made once: the file appears
//!   whole, and only if no other process has made one (a link that does not replace). So two
//!   processes that share the site can never decide differently.
//! - *prepared record* `TOKEN.prepared.json`: the destination's vote in the sense of two-phase
//!   commit, durable before it says READY, and so before PREPARED: the guest may run here from now
//!   on. A source asks only after PREPARED, so a token without a prepared record and without a
//!   decision is no guest's, and answering a question about it stores nothing. The record names the
//!   host's boot and the mount. Where it is of others, the decision may have been lost with them,
//!   and nobody may say any more that the guest did not run. A host that cannot tell its boots
//!   apart names none, and makes its decision durable before the guest runs.
//!
//! Everything is written to a temporary file, synced, linked into place, and the directory synced;
//! of a decision that a prepared record with a boot stands for, the directory is synced after the
//! guest has resumed. What is written in a pause is *staged* before.

use std::collections::HashSet;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use driftline_checkpoint::VmId;
use driftline_checkpoint::durable::{create_dir, sync_dir};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;
use uuid::Uuid;

use crate::log_limit::LogLimit;
use crate::protocol::decision::Decision;
use crate::protocol::ids::Token;

/// The version of the records that this program writes.
const VERSION: u32 = 1;

/// Where Linux names the host's boot.
const BOOT: &str = "/proc/sys/kernel/random/boot_id";

/// Has a file's mount told, by the number that is not used again: `STATX_MNT_ID_UNIQUE`.
const MOUNT: StatxFlags = StatxFlags::from_bits_retain(0x4000);

/// The end of a source record's name, behind its token.
const SOURCE_SUFFIX: &str = ".source.json";

/// The end of a prepared record's name, behind its token.
const PREPARED_SUFFIX: &str = ".prepared.json";

/// The end of a decision's name, behind its token.
const DECISION_SUFFIX: &str = ".destination.json";

/// The beginning of the name of a file that is no record yet.
const STAGED: &str = ".staged-";
/// The age of such a file after which the process that made it has died: no migration takes as
/// long.
const STALE: Duration = Duration::from_secs(60 * 24 * 3600);

/// A record could not be read or made durable.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what} the hand-over record {}: {cause}", path.display())]
pub struct RecordsError {
    /// "read", "write", "remove".
    pub what: &'static str,
    /// The file.
    pub path: PathBuf,
    /// The system's answer.
    pub cause: io::Error,
}

/// What the source keeps from before COMMIT until the migration is settled.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SourceRecord {
    /// The record's version.
    pub version: u32,
    /// The migration.
    pub token: Token,
    /// The guest that may be running on `peer`.
    pub vm_id: VmId,
    /// Where it was sent, as the operator gave it.
    pub peer: String,
    /// The destination's site.
    pub site: Uuid,
    /// When, ms since 1970.
    pub time_unix_ms: u64,
}

/// The unsettled migrations of a host.
#[derive(Debug, Default)]
pub struct Pending {
    /// Guests that may be running elsewhere.
    pub records: Vec<SourceRecord>,
    /// Files that stand where such records do and cannot be read as one. Any guest may be theirs.
    pub unreadable: Vec<RecordsError>,
}

#[derive(Serialize, Deserialize)]
struct DestinationRecord {
    version: u32,
    token: Token,
    vm_id: Option<VmId>,
    decision: Decision,
    time_unix_ms: u64,
}

#[derive(Serialize, Deserialize)]
struct PreparedRecord {
    version: u32,
    token: Token,
    vm_id: VmId,
    /// Of [`Life`]; null on a host that cannot tell its boots apart.
    boot: Option<Uuid>,
    /// Of [`Life`].
    mount: Option<u64>,
    time_unix_ms: u64,
}

impl PreparedRecord {
    /// Whether no decision about this guest can have been lost: it was made on this boot and mount,
    /// or, where the record names no boot, durable before the guest ran.
    fn decision_would_stand(&self, present: Option<Life>) -> bool {
        let life = self.boot.map(|boot| Life { boot, mount: self.mount });
        life.is_none() || life == present
    }
}

/// The time in which every process finds in the directory what any of them has put there, durable
/// or not.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Life {
    /// The host's boot.
    boot: Uuid,
    /// The mount that the directory is on, by a number that is not used again in that boot; of
    /// Linux before 6.8 it is not known.
    mount: Option<u64>,
}

impl Life {
    /// The present one of `dir`, where it can be told.
    fn of(dir: &Path) -> Option<Self> {
        let boot = fs::read_to_string(BOOT).ok()?;
        let boot = Uuid::parse_str(boot.trim()).ok()?;
        let stat = statx(CWD, dir, AtFlags::empty(), MOUNT).ok();
        let told = stat.filter(|stat| stat.stx_mask & MOUNT.bits() != 0);
        Some(Self { boot, mount: told.map(|stat| stat.stx_mnt_id) })
    }
}

/// The directory of one host's hand-over records.
#[derive(Debug, Clone)]
pub struct Records {
    dir: PathBuf,
    site: Uuid,
    #[cfg(test)]
    pretended: Option<Option<Life>>,
}

impl Records {
    /// Opens the directory, and makes it and its site where they do not exist yet.
    pub fn open(dir: impl Into<PathBuf>) -> Result<Self, RecordsError> {
        let dir = dir.into();
        create_dir(&dir).map_err(failed("write", &dir))?;
        sweep(&dir);
        let path = dir.join("site");
        let text = match fs::read_to_string(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                match write_new(&dir, &path, Uuid::new_v4().to_string().as_bytes()) {
                    // Another process was first.
                    Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                    made => made.map_err(failed("write", &path))?,
                }
                fs::read_to_string(&path)
            }
            // Whose name is durable before any record is: that takes a sync of the same directory.
            read => read,
        };
        let text = text.map_err(failed("read", &path))?;
        let site = Uuid::parse_str(text.trim())
            .map_err(|e| failed("read", &path)(io::Error::new(io::ErrorKind::InvalidData, e)))?;
        Ok(Self {
            dir,
            site,
            #[cfg(test)]
            pretended: None,
        })
    }

    /// The present life, looked at anew: a process outlives a mount.
    fn life(&self) -> Option<Life> {
        #[cfg(test)]
        if let Some(life) = self.pretended {
            return life;
        }
        Life::of(&self.dir)
    }

    /// The directory's name for peers.
    pub fn site(&self) -> Uuid {
        self.site
    }

    /// Migrations from here that are not settled: after a crash, guests that may be running
    /// elsewhere. An error only if the directory cannot be read; files in it that are no records
    /// are named.
    pub fn pending(&self) -> Result<Pending, RecordsError> {
        let mut pending = Pending::default();
        for entry in fs::read_dir(&self.dir).map_err(failed("read", &self.dir))? {
            let entry = entry.map_err(failed("read", &self.dir))?;
            let name = entry.file_name();
            let Some(stem) = name.to_str().and_then(|n| n.strip_suffix(SOURCE_SUFFIX)) else {
                continue;
            };
            let path = entry.path();
            let read = match Uuid::parse_str(stem) {
                Ok(token) => read(&path, Token(token)),
                Err(_) => Err(invalid(&path, "its name is not that of a migration".to_owned())),
            };
            match read {
                Ok(record) => pending.records.extend(record),
                Err(e) => pending.unreadable.push(e),
            }
        }
        Ok(pending)
    }

    /// Removes the record of a migration that the operator has settled after a crash.
    pub fn settle(&self, token: Token) -> Result<(), RecordsError> {
        let path = self.source_path(token);
        remove(&self.dir, &path).map_err(failed("remove", &path))
    }

    /// Writes the source's record without giving it its name: it is none yet, and goes with what
    /// this returns.
    pub(crate) fn stage_source(
        &self,
        token: Token,
        vm_id: VmId,
        peer: &str,
        site: Uuid,
    ) -> Result<StagedSource, RecordsError> {
        let peer = peer.to_owned();
        let time_unix_ms = now_unix_ms();
        let record = SourceRecord { version: VERSION, token, vm_id, peer, site, time_unix_ms };
        let staged = json(&record).and_then(|bytes| temporary(&self.dir, &bytes));
        let file = staged.map_err(failed("write", &self.source_path(token)))?;
        Ok(StagedSource { file, record })
    }

    /// Makes a staged record stand, durably. After an error it may stand.
    pub(crate) fn place_source(&self, staged: StagedSource) -> Result<SourceMark, RecordsError> {
        let StagedSource { file, record } = staged;
        let path = self.source_path(record.token);
        place(&self.dir, file, &path).map_err(failed("write", &path))?;
        Ok(SourceMark { record })
    }

    /// What was decided about a token by any process of this site.
    pub(crate) fn decision(&self, token: Token) -> Result<Option<Decision>, RecordsError> {
        let record: Option<DestinationRecord> = read(&self.decision_path(token), token)?;
        Ok(record.map(|r| r.decision))
    }

    /// Decides about a token, durably, unless that has been done; returns the decision that stands.
    pub(crate) fn decide(
        &self,
        token: Token,
        vm_id: Option<VmId>,
        decision: Decision,
    ) -> Result<Decision, RecordsError> {
        self.decide_by(self.stage(token, vm_id, decision)?)
    }

    /// Writes a decision without giving it its name: nothing is decided yet.
    pub(crate) fn stage(
        &self,
        token: Token,
        vm_id: Option<VmId>,
        decision: Decision,
    ) -> Result<StagedDecision, RecordsError> {
        let staged = decision_json(token, vm_id, decision)
            .and_then(|bytes| temporary(&self.dir, &bytes))
            .map_err(failed("write", &self.decision_path(token)));
        Ok(StagedDecision { file: staged?, token, decision })
    }

    /// As [`decide`](Self::decide), with what was staged for it.
    pub(crate) fn decide_by(&self, staged: StagedDecision) -> Result<Decision, RecordsError> {
        let (path, decision) = (self.decision_path(staged.token), staged.decision);
        if let Some(stands) = self.link(staged)? {
            return Ok(stands);
        }
        self.keep(&path, decision, sync_dir(&self.dir)).map_err(failed("write", &path))
    }

    /// As [`decide_by`](Self::decide_by), but where the decision is the staged one it holds among
    /// the host's processes alone until [`sync`](Self::sync), if the guest's prepared record names
    /// a boot: that one outlives the host's crash.
    pub(crate) fn decide_prepared(
        &self,
        staged: StagedDecision,
        prepared: &PreparedMark,
    ) -> Result<Decision, RecordsError> {
        if !prepared.names_boot {
            return self.decide_by(staged);
        }
        let decision = staged.decision;
        Ok(self.link(staged)?.unwrap_or(decision))
    }

    /// Gives a decision its name, or returns the one that has it, durable.
    fn link(&self, staged: StagedDecision) -> Result<Option<Decision>, RecordsError> {
        let StagedDecision { file, token, decision: _ } = staged;
        let path = self.decision_path(token);
        match file.persist_noclobber(&path).map_err(|e| e.error) {
            Ok(_) => Ok(None),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                // The other's file may not be durable yet; an answer that rests on it must be.
                sync_dir(&self.dir).map_err(failed("read", &path))?;
                let stands = self.decision(token)?;
                stands
                    .ok_or_else(|| failed("read", &path)(io::ErrorKind::NotFound.into()))
                    .map(Some)
            }
            Err(e) => Err(failed("write", &path)(e)),
        }
    }

    /// Makes durable what was decided.
    pub(crate) fn sync(&self, token: Token) -> Result<(), RecordsError> {
        sync_dir(&self.dir).map_err(failed("write", &self.decision_path(token)))
    }

    /// Makes the prepared record of a guest durable.
    pub(crate) fn prepare(&self, token: Token, vm_id: VmId) -> Result<PreparedMark, RecordsError> {
        let life = self.life();
        let (boot, mount) = (life.map(|life| life.boot), life.and_then(|life| life.mount));
        let path = self.prepared_path(token);
        let time_unix_ms = now_unix_ms();
        let version = VERSION;
        let record = PreparedRecord { version, token, vm_id, boot, mount, time_unix_ms };
        let file = json(&record).and_then(|bytes| {
            let file = temporary(&self.dir, &bytes)?;
            // Goes with this process, however that ends.
            file.as_file().try_lock()?;
            let file = file.persist_noclobber(&path).map_err(|e| e.error)?;
            sync_dir(&self.dir).inspect_err(|_| {
                // It may stand, and nobody would remove it.
                let _ = fs::remove_file(&path);
            })?;
            Ok(file)
        });
        let _lock = file.map_err(failed("write", &path))?;
        Ok(PreparedMark { _lock, names_boot: boot.is_some() })
    }

    /// Removes what processes that have died left behind, where every answer stays as it is:
    ///
    /// | prepared record | decision | what goes |
    /// | --- | --- | --- |
    /// | its process has died | none, and none can have been lost | the record: its guest never ran |
    /// | its process has died | `discarded` | both: without them the answer is *discarded*, too |
    /// | its process has died | `committed` | the record, once the decision is durable |
    /// | none | `discarded` | the decision: without it the answer is *discarded*, too |
    ///
    /// Costs two syncs of the directory at most. What fails goes next time, and so does a decision
    /// that comes back after a crash.
    pub(crate) fn sweep_settled(&self) {
        let (life, mut tokens) = (self.life(), HashSet::new());
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let name = name.to_str().unwrap_or_default();
            let stem = [PREPARED_SUFFIX, DECISION_SUFFIX].iter().find_map(|s| name.strip_suffix(s));
            tokens.extend(stem.and_then(|stem| Uuid::parse_str(stem).ok()).map(Token));
        }
        let settled = tokens.into_iter().filter_map(|token| self.settled(token, life).ok()?);
        let settled: Vec<Settled> = settled.collect();
        if settled.is_empty() {
            return;
        }
        let committed = settled.iter().any(|of| of.decision == Some(Decision::Committed));
        if committed && sync_removed(&self.dir).is_err() {
            return;
        }
        let mut discarded = Vec::new();
        for Settled { token, decision } in settled {
            if unlink(&self.prepared_path(token)).is_ok() && decision == Some(Decision::Discarded) {
                discarded.push(token);
            }
        }
        // As `remove_both`.
        if sync_removed(&self.dir).is_ok() {
            for token in discarded {
                let _ = unlink(&self.decision_path(token));
            }
        }
    }

    /// A migration of which something can go, by the table of
    /// [`sweep_settled`](Self::sweep_settled).
    fn settled(&self, token: Token, life: Option<Life>) -> Result<Option<Settled>, RecordsError> {
        let path = self.prepared_path(token);
        let Some(record) = read::<PreparedRecord>(&path, token)? else {
            // In this order: only about a guest whose prepared record stands is one decided.
            let decision = self.decision(token)?;
            let none = read::<PreparedRecord>(&path, token)?.is_none();
            let goes = decision == Some(Decision::Discarded) && none;
            return Ok(goes.then_some(Settled { token, decision }));
        };
        // In this order: a process decides before it dies.
        let has_died = fs::File::open(&path).is_ok_and(|file| file.try_lock().is_ok());
        if !has_died {
            return Ok(None);
        }
        let decision = self.decision(token)?;
        let goes = decision.is_some() || record.decision_would_stand(life);
        Ok(goes.then_some(Settled { token, decision }))
    }

    /// Removes the prepared record of a guest for which COMMIT cannot come any more. It need not be
    /// durable: nobody will ask.
    pub(crate) fn withdraw(&self, token: Token, _prepared: PreparedMark) {
        let path = self.prepared_path(token);
        if let Err(e) = fs::remove_file(&path) {
            tracing::warn!(%token, "{}", failed("remove", &path)(e));
        }
    }

    /// The decision about a token that the calling process does not know. Where a process of this
    /// site has prepared its guest and none has decided, this decides against running it, durably;
    /// unless it may have been decided and is forgotten: the host has crashed since, or lost this
    /// directory. Of any other token nothing is stored: its guest was never prepared here.
    pub(crate) fn decide_unknown(&self, token: Token) -> Result<Decision, RecordsError> {
        // While its source may ask, a prepared record is removed only if its guest never ran, or
        // behind a durable decision; so it is looked for first.
        let prepared = read(&self.prepared_path(token), token)?;
        self.decide_behind(token, prepared)
    }

    /// As [`decide_unknown`](Self::decide_unknown), after its prepared record was looked for.
    fn decide_behind(
        &self,
        token: Token,
        mut prepared: Option<PreparedRecord>,
    ) -> Result<Decision, RecordsError> {
        let mut decision = self.decision(token)?;
        if prepared.is_some() && decision.is_none() {
            // It is removed before its decision is. If it is there still, there was none.
            prepared = read(&self.prepared_path(token), token)?;
            if prepared.is_none() {
                decision = self.decision(token)?;
            }
        }
        let Some(prepared) = prepared.filter(|_| decision.is_none()) else {
            if decision.is_some() {
                // It may be another process's, and not durable yet; an answer that rests on it must
                // be.
                self.sync(token)?;
            }
            return Ok(decision.unwrap_or(Decision::Discarded));
        };
        if !prepared.decision_would_stand(self.life()) {
            static LIMIT: LogLimit = LogLimit::new();
            if let Some(unshown) = LIMIT.admit() {
                tracing::warn!(
                    %token,
                    unshown,
                    "its guest was prepared here in another boot, or on another mount of {}: it \
                     may have run, and its source stays in doubt until the operator resolves that",
                    self.dir.display()
                );
            }
            return Ok(Decision::Committed);
        }
        self.decide(token, Some(prepared.vm_id), Decision::Discarded)
    }

    /// What becomes of a decision that has its name, `synced` or not.
    fn keep(
        &self,
        path: &Path,
        decision: Decision,
        synced: io::Result<()>,
    ) -> io::Result<Decision> {
        if synced.is_err() && decision == Decision::Committed {
            // It may not survive, and the guest will not run for it: nobody shall read it. A
            // `discarded` stays: who has read and synced it meanwhile may have told the source.
            let _ = remove(&self.dir, path);
        }
        synced.map(|()| decision)
    }

    /// Replaces this process's own `committed` by `discarded`: the guest never ran.
    pub(crate) fn overturn(&self, token: Token, vm_id: VmId) -> Result<(), RecordsError> {
        let path = self.decision_path(token);
        decision_json(token, Some(vm_id), Decision::Discarded)
            .and_then(|bytes| temporary(&self.dir, &bytes))
            .and_then(|file| file.persist(&path).map_err(|e| e.error))
            .and_then(|_| sync_dir(&self.dir))
            .map_err(failed("write", &path))
    }

    /// Forgets a decision that nobody will ask for again, and that its guest was `prepared` by this
    /// process.
    pub(crate) fn forget_decision(
        &self,
        token: Token,
        prepared: Option<PreparedMark>,
    ) -> Result<(), RecordsError> {
        match prepared {
            Some(_mark) => self.remove_both(token),
            None => {
                let path = self.decision_path(token);
                remove(&self.dir, &path).map_err(failed("remove", &path))
            }
        }
    }

    /// Removes a prepared record, and once that is durable, the decision. A crash in between leaves
    /// the decision, which answers as before. The other way round it would leave a prepared record
    /// whose decision may have been lost: its answer, *committed*, nobody could ever take back.
    fn remove_both(&self, token: Token) -> Result<(), RecordsError> {
        // Synced even if another process has removed the first: that may not be durable yet.
        for path in [self.prepared_path(token), self.decision_path(token)] {
            unlink(&path).and_then(|_| sync_removed(&self.dir)).map_err(failed("remove", &path))?;
        }
        Ok(())
    }

    fn source_path(&self, token: Token) -> PathBuf {
        self.dir.join(format!("{token}{SOURCE_SUFFIX}"))
    }

    fn decision_path(&self, token: Token) -> PathBuf {
        self.dir.join(format!("{token}{DECISION_SUFFIX}"))
    }

    fn prepared_path(&self, token: Token) -> PathBuf {
        self.dir.join(format!("{token}{PREPARED_SUFFIX}"))
    }
}

/// A migration of which nobody will ask what its records alone can answer.
struct Settled {
    token: Token,
    decision: Option<Decision>,
}

/// A source's record, synced, that does not stand yet. Dropping it removes it.
#[derive(Debug)]
pub(crate) struct StagedSource {
    file: NamedTempFile,
    record: SourceRecord,
}

impl StagedSource {
    /// The migration.
    pub(crate) fn token(&self) -> Token {
        self.record.token
    }
}

/// A decision, synced, that is not made yet. Dropping it removes it.
#[derive(Debug)]
pub(crate) struct StagedDecision {
    file: NamedTempFile,
    token: Token,
    decision: Decision,
}

/// Proof that a prepared record is durable. Only with it may a guest be offered to its source. It
/// is locked, as a sign that its process lives.
#[derive(Debug)]
pub(crate) struct PreparedMark {
    _lock: fs::File,
    /// The guest may run before the decision to run it is durable.
    names_boot: bool,
}

/// Proof that a source record is durable. Only with it can a held guest be sealed.
#[derive(Debug)]
pub(crate) struct SourceMark {
    record: SourceRecord,
}

impl SourceMark {
    pub(crate) fn record(&self) -> &SourceRecord {
        &self.record
    }
}

fn failed<'p>(what: &'static str, path: &'p Path) -> impl Fn(io::Error) -> RecordsError + 'p {
    move |cause| RecordsError { what, path: path.to_owned(), cause }
}

fn now_unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
}

fn json(record: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec_pretty(record)?;
    bytes.push(b'\n');
    Ok(bytes)
}

fn decision_json(token: Token, vm_id: Option<VmId>, decision: Decision) -> io::Result<Vec<u8>> {
    let time_unix_ms = now_unix_ms();
    json(&DestinationRecord { version: VERSION, token, vm_id, decision, time_unix_ms })
}

/// What every record has, in any version.
#[derive(Deserialize)]
struct Head {
    version: u32,
    token: Token,
}

/// The record of `token` in the file of that name.
fn read<T: DeserializeOwned>(path: &Path, token: Token) -> Result<Option<T>, RecordsError> {
    let bytes = match fs::read(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        read => read.map_err(failed("read", path))?,
    };
    let no_record = |e: serde_json::Error| failed("read", path)(e.into());
    let head: Head = serde_json::from_slice(&bytes).map_err(no_record)?;
    if head.version != VERSION {
        let why = format!("its version is {}, and this program reads {VERSION}", head.version);
        return Err(invalid(path, why));
    }
    if head.token != token {
        return Err(invalid(
            path,
            format!("migration {} is in it, not that of its name", head.token),
        ));
    }
    serde_json::from_slice(&bytes).map(Some).map_err(no_record)
}

fn invalid(path: &Path, why: String) -> RecordsError {
    failed("read", path)(io::Error::new(io::ErrorKind::InvalidData, why))
}

/// Removes what processes that were killed have staged. Whatever fails is tried again next time.
fn sweep(dir: &Path) {
    let staged = fs::read_dir(dir).into_iter().flatten().flatten();
    let staged = staged.filter(|entry| entry.file_name().to_string_lossy().starts_with(STAGED));
    for entry in staged {
        let made = entry.metadata().and_then(|of| of.modified()).ok();
        if made.and_then(|made| made.elapsed().ok()).is_some_and(|age| age > STALE) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// A synced temporary file beside its later place.
fn temporary(dir: &Path, bytes: &[u8]) -> io::Result<NamedTempFile> {
    let mut file = tempfile::Builder::new().prefix(STAGED).tempfile_in(dir)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    Ok(file)
}

/// A file that appears whole and durable, or `AlreadyExists`, or (after other errors) perhaps.
fn write_new(dir: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    place(dir, temporary(dir, bytes)?, path)
}

/// Gives a synced temporary file its name.
fn place(dir: &Path, file: NamedTempFile, path: &Path) -> io::Result<()> {
    file.persist_noclobber(path).map_err(|e| e.error)?;
    sync_dir(dir)
}

fn remove(dir: &Path, path: &Path) -> io::Result<()> {
    if unlink(path)? { sync_removed(dir) } else { Ok(()) }
}

/// Removes a file, not durably; whether there was one.
fn unlink(path: &Path) -> io::Result<bool> {
    match fs::remove_file(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        removed => removed.map(|()| true),
    }
}

/// Makes durable that files were removed, or what has to be durable before they are.
fn sync_removed(dir: &Path) -> io::Result<()> {
    #[cfg(test)]
    tests::SYNCS.set(tests::SYNCS.get() + 1);
    sync_dir(dir)
}

#[cfg(test)]
mod tests;
