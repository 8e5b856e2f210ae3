//! The manifest names the store's log, its page file and its guest. It is always replaced as a
//! whole.

use std::io;

use driftline_format::{HEADER_LEN, Header, MAGIC_STORE, RECORD_HEAD_LEN, RecordHead};
use driftline_guest::VmId;

use crate::backend::is_media_error;
use crate::damage::Damage;
use crate::error::StoreError;
use crate::limits::MAX_GENERATION;
use crate::names::{MANIFEST, MANIFEST_NEW, Named, log_name, pages_name, parse_name};
use crate::records::{FILES_LEN, Files, TAG_FILES, decode_files, decode_head, encode_files};
use crate::store::Store;

const LEN: usize = HEADER_LEN + RECORD_HEAD_LEN + FILES_LEN;

/// The content of a manifest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Manifest {
    pub(crate) vm_id: VmId,
    pub(crate) files: Files,
}

/// A failed write of a manifest.
#[derive(Debug)]
pub(crate) struct ManifestNotWritten {
    pub(crate) cause: StoreError,
    /// Whether it is unknown which of the two manifests a crash would leave.
    pub(crate) in_doubt: bool,
}

impl Manifest {
    fn encode(&self) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(LEN);
        Header::new(MAGIC_STORE, self.vm_id, self.files.log, 0).write_to(&mut bytes)?;
        let payload = encode_files(self.files);
        let head = RecordHead {
            tag: TAG_FILES,
            must_understand: true,
            instance: 0,
            length: payload.len() as u32,
            payload_crc: crc32c::crc32c(&payload),
            sequence: 0,
        };
        bytes.extend_from_slice(&head.to_bytes());
        bytes.extend_from_slice(&payload);
        Ok(bytes)
    }

    /// Decodes a manifest. The error is the damage and its offset in bytes.
    fn decode(bytes: &[u8]) -> Result<Self, (usize, Damage)> {
        let header = Header::read_from(bytes, MAGIC_STORE).map_err(|e| (0, e.into()))?;
        let early = |from: usize, wanted: usize| {
            (from, Damage::EndsEarly { length: bytes.len() as u64, wanted: wanted as u64 })
        };
        let rest = &bytes[HEADER_LEN..];
        let (head, payload) = rest
            .split_at_checked(RECORD_HEAD_LEN)
            .ok_or_else(|| early(HEADER_LEN, RECORD_HEAD_LEN))?;
        let head = decode_head(head, 0).map_err(|e| (HEADER_LEN, e))?;
        if head.tag != TAG_FILES {
            return Err((HEADER_LEN, Damage::Misplaced { tag: head.tag }));
        }
        let payload_at = HEADER_LEN + RECORD_HEAD_LEN;
        if payload.len() < head.length as usize {
            return Err(early(payload_at, head.length as usize));
        }
        let (payload, after) = payload.split_at(head.length as usize);
        head.check(payload).map_err(|e| (payload_at, e.into()))?;
        let files = decode_files(payload).map_err(|e| (HEADER_LEN, e))?;
        let fields = [
            (0, "the generation in the header", header.epoch(), files.log),
            (0, "the layout in the header of a manifest", header.layout_hash().into(), 0),
            (LEN, "bytes after the manifest", after.len() as u64, 0),
        ];
        match fields.into_iter().find(|(_, _, found, expected)| found != expected) {
            Some((at, what, found, expected)) => {
                Err((at, Damage::Mismatch { what, found, expected }))
            }
            None => Ok(Self { vm_id: header.vm_id(), files }),
        }
    }
}

impl Store {
    /// Returns the manifest; `None` if there is none, and so no epoch.
    pub(crate) fn manifest(&self) -> Result<Option<Manifest>, StoreError> {
        let io = |e| self.not_read("reading", MANIFEST, e);
        let file = match self.backend().open(MANIFEST) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.map_err(io)?,
        };
        // Reads one byte more than a manifest has: a longer file is not a manifest.
        let len = file.len().map_err(io)?.min(LEN as u64 + 1);
        let mut bytes = vec![0; len as usize];
        file.read_exact_at(&mut bytes, 0).map_err(io)?;
        let damaged = |(offset, damage): (usize, Damage)| StoreError::Damaged {
            file: self.path(MANIFEST),
            offset: offset as u64,
            damage,
        };
        if bytes.len() < HEADER_LEN {
            let (length, wanted) = (len, HEADER_LEN as u64);
            return Err(damaged((0, Damage::EndsEarly { length, wanted })));
        }
        Manifest::decode(&bytes).map(Some).map_err(damaged)
    }

    /// Replaces the manifest, durably. The names of the files that it names become durable first.
    pub(crate) fn put_manifest(&self, manifest: Manifest) -> Result<(), ManifestNotWritten> {
        let backend = self.backend();
        let before = || -> Result<(), StoreError> {
            let bytes = manifest.encode().map_err(|e| self.io("writing", MANIFEST_NEW, e))?;
            let file = backend.create(MANIFEST_NEW);
            let file = file.map_err(|e| self.io("creating", MANIFEST_NEW, e))?;
            file.write_all_at(&bytes, 0).map_err(|e| self.io("writing", MANIFEST_NEW, e))?;
            file.sync().map_err(|e| self.io("syncing", MANIFEST_NEW, e))?;
            // The names of the files must be durable before a manifest names them.
            self.sync_dir()?;
            self.check_lock()?;
            let renamed = backend.rename(MANIFEST_NEW, MANIFEST);
            renamed.map_err(|e| self.io("renaming", MANIFEST_NEW, e))
        };
        before().map_err(|cause| ManifestNotWritten { cause, in_doubt: false })?;
        self.sync_dir().map_err(|cause| ManifestNotWritten { cause, in_doubt: true })
    }

    /// Returns the guest in a file's header; `None` if the file is missing, or the header is
    /// damaged.
    pub(crate) fn header_owner(
        &self,
        name: &str,
        magic: [u8; 8],
    ) -> Result<Option<VmId>, StoreError> {
        let mut header = [0; HEADER_LEN];
        let read = self.backend().open(name).and_then(|file| file.read_exact_at(&mut header, 0));
        match read {
            Ok(()) => Ok(Header::read_from(&header[..], magic).ok().map(|header| header.vm_id())),
            Err(e) if is_media_error(&e) => Ok(None),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            Err(e) => Err(self.not_read("reading", name, e)),
        }
    }

    /// Returns generations for a new log and a new page file, higher than those of all existing
    /// files.
    pub(crate) fn next_files(&self) -> Result<Files, StoreError> {
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
}

/// Returns whether a file is a store's, but not a part of the store of this manifest.
pub(crate) fn is_leftover(name: &str, manifest: Option<&Manifest>) -> bool {
    match parse_name(name) {
        Named::ManifestNew | Named::WorkingSetNew | Named::QuarantineList(_) => true,
        Named::Log(n) => manifest.is_none_or(|m| m.files.log != n),
        Named::Pages(n) => manifest.is_none_or(|m| m.files.pages != n),
        Named::Manifest | Named::Lock | Named::WorkingSet | Named::Quarantined(_) => false,
        Named::Foreign => false,
    }
}
