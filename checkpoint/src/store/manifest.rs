//! The manifest: which log and page file are the store's, and whose it is. Replaced whole, or not at all.

use std::io;

use super::records::{FILES_LEN, Files, TAG_FILES, decode_files, decode_head, encode_files};
use super::{Damage, MANIFEST, MANIFEST_NEW, Store, StoreError};
use driftline_format::{HEADER_LEN, Header, MAGIC_STORE, RECORD_HEAD_LEN, RecordHead};
use driftline_guest::VmId;

const LEN: usize = HEADER_LEN + RECORD_HEAD_LEN + FILES_LEN;

/// What a manifest says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Manifest {
    pub(crate) vm_id: VmId,
    pub(crate) files: Files,
}

/// A manifest that was not written.
#[derive(Debug)]
pub(crate) struct NotWritten {
    pub(crate) cause: StoreError,
    /// Nobody knows which of the two a crash would leave.
    pub(crate) unsettled: bool,
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

    /// What is wrong, and at which byte.
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
        let (payload, behind) = payload.split_at(head.length as usize);
        head.check(payload).map_err(|e| (payload_at, e.into()))?;
        let files = decode_files(payload).map_err(|e| (HEADER_LEN, e))?;
        let fields = [
            (0, "the generation in the header", header.epoch(), files.log),
            (0, "the layout in the header of a manifest", header.layout_hash().into(), 0),
            (LEN, "bytes behind the manifest", behind.len() as u64, 0),
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
    /// The manifest; `None` if there is none, and so no epoch.
    pub(crate) fn manifest(&self) -> Result<Option<Manifest>, StoreError> {
        let io = |e| self.io("reading", MANIFEST, e);
        let file = match self.backend().open(MANIFEST) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.map_err(io)?,
        };
        // One byte more than it has: what is longer is none.
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

    /// Puts a manifest in place of the one that is there, durably. The names of the files in it become durable with it.
    pub(crate) fn put_manifest(&self, manifest: Manifest) -> Result<(), NotWritten> {
        let backend = self.backend();
        let before = || -> Result<(), StoreError> {
            let bytes = manifest.encode().map_err(|e| self.io("writing", MANIFEST_NEW, e))?;
            let file = backend.create(MANIFEST_NEW);
            let file = file.map_err(|e| self.io("creating", MANIFEST_NEW, e))?;
            file.write_all_at(&bytes, 0).map_err(|e| self.io("writing", MANIFEST_NEW, e))?;
            file.sync().map_err(|e| self.io("syncing", MANIFEST_NEW, e))?;
            // Before anything can name them.
            self.sync_dir()?;
            self.check_lock()?;
            let renamed = backend.rename(MANIFEST_NEW, MANIFEST);
            renamed.map_err(|e| self.io("renaming", MANIFEST_NEW, e))
        };
        before().map_err(|cause| NotWritten { cause, unsettled: false })?;
        self.sync_dir().map_err(|cause| NotWritten { cause, unsettled: true })
    }
}
