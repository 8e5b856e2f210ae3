//! Opens a store's files for writing, or creates them. What these files contain counts as durable
//! only after a sync: a process that was killed, or whose sync failed, may have left it in the
//! system's cache only.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use driftline_guest::{GuestIdentity, VmId};

use crate::alloc::Slots;
use crate::backend::StoreFile;
use crate::committer::{Bounds, Committer, LogStatus, RetainedEpoch};
use crate::epoch_encoder::begin_log;
use crate::error::StoreError;
use crate::manifest::{Manifest, ManifestNotWritten};
use crate::names::{log_name, pages_name};
use crate::page_file::{PageFile, PageReader, begin_pages};
use crate::records::Files;
use crate::retention::Space;
use crate::sectors::LogPosition;
use crate::store::Store;

/// Number of bytes of a log that are rewritten in one call.
const REWRITE_BYTES: u64 = 1 << 20;

impl Committer {
    /// Opens the store's files for `guest`; `None` if there are none. Cuts off what a crash left
    /// unfinished in the log.
    ///
    /// # Errors
    ///
    /// Fails if the log or the page file is damaged, or if `guest` may not continue the last epoch.
    pub fn open(store: &Arc<Store>, guest: &dyn GuestIdentity) -> Result<Option<Self>, StoreError> {
        let Some((locked, manifest, mut log)) = store.open_locked()? else { return Ok(None) };
        log.check_sound(store)?;
        let vm_id = guest.vm_id();
        match log.epochs.last() {
            Some(last) => store.check_follows(&last.info.origin(), guest)?,
            None if manifest.vm_id != vm_id => return Ok(None),
            None => {}
        }
        store.with_repair_hint(locked.check_header(manifest.files.pages, vm_id))?;
        let (space, slots) = Space::of_log(guest.layout(), &mut log, locked.slots()?)?;
        // A manifest that replaced another one, and the names of the files in it, may be in the
        // system's cache alone.
        store.sync_dir()?;
        let name = log_name(manifest.files.log);
        let file = store.backend().open_for_writing(&name);
        let file = file.map_err(|e| store.not_read("opening", &name, e))?;
        let bytes = log.bytes();
        if file.len().map_err(|e| store.not_read("reading", &name, e))? > bytes {
            tracing::info!("{name}: discarding an unfinished checkpoint");
            file.truncate(bytes).map_err(|e| store.io("truncating", &name, e))?;
        }
        if let Some(last) = log.epochs.last() {
            let again = rewrite(&*file, last.place.offset(), bytes);
            again.map_err(|e| store.io("writing", &name, e))?;
        }
        file.sync().map_err(|e| store.io("syncing", &name, e))?;
        let kept =
            log.kept().iter().map(|g| RetainedEpoch { epoch: g.info.epoch, sectors: g.sectors });
        let kept: VecDeque<RetainedEpoch> = kept.collect();
        let pages = Arc::new(PageFile::new(locked, slots));
        let mut new = Self {
            last: kept.back().map(|k| k.epoch),
            kept,
            ..Self::new(store, vm_id, manifest.files, (file, log.end), pages, space)
        };
        if let Some(e) = log.skipped {
            tracing::warn!("ignoring damage that no retained checkpoint needs: {e}");
            new.rotate_log();
        }
        Ok(Some(new))
    }

    /// Creates the store's files for `guest`, or replaces existing ones that have no epoch.
    ///
    /// # Errors
    ///
    /// The files cannot be created. None of them is left, unless the manifest may name them.
    pub fn create(store: &Arc<Store>, guest: &dyn GuestIdentity) -> Result<Self, StoreError> {
        let vm_id = guest.vm_id();
        let before = store.manifest()?.map(|manifest| manifest.files);
        let files = store.next_files()?;
        store.check_lock()?;
        let (locked, log, end) = create_files(store, vm_id, files).map_err(|e| {
            if !e.in_doubt {
                store.remove_unnamed(Some(files.log), Some(files.pages));
            }
            e.cause
        })?;
        for name in before.iter().flat_map(|f| [log_name(f.log), pages_name(f.pages)]) {
            // The next process that opens the store removes what cannot be removed now.
            let _ = store.backend().remove(&name);
        }
        let mut slots = Slots::new(1);
        slots.allocate(1, 1);
        let pages = Arc::new(PageFile::new(locked, slots));
        Ok(Self::new(store, vm_id, files, (log, end), pages, Space::new(guest.layout())))
    }

    fn new(
        store: &Arc<Store>,
        vm_id: VmId,
        files: Files,
        (log, end): (Box<dyn StoreFile>, LogPosition),
        pages: Arc<PageFile>,
        space: Space,
    ) -> Self {
        Self {
            store: store.clone(),
            vm_id,
            files,
            before: None,
            pages,
            log,
            end,
            log_status: LogStatus::Sound,
            kept: VecDeque::new(),
            last: None,
            space,
            uncertain_slots: Vec::new(),
            bounds: Bounds::default(),
            rotate_from: 0,
            blocked_drop: None,
            lost: false,
        }
    }
}

/// Creates the files of a store without epochs, and the manifest that names them.
fn create_files(
    store: &Store,
    vm_id: VmId,
    files: Files,
) -> Result<(PageReader, Box<dyn StoreFile>, LogPosition), ManifestNotWritten> {
    let write = || -> Result<_, StoreError> {
        let name = pages_name(files.pages);
        let pages = store.create_new(&name)?;
        let locked = PageReader::open_locked(store, files.pages)?;
        begin_pages(&*pages, vm_id, files.pages).map_err(|e| store.io("writing", &name, e))?;
        pages.sync().map_err(|e| store.io("syncing", &name, e))?;
        let name = log_name(files.log);
        let log = store.create_new(&name)?;
        let end = begin_log(&*log, vm_id, files.log).map_err(|e| store.io("writing", &name, e))?;
        log.sync().map_err(|e| store.io("syncing", &name, e))?;
        Ok((locked, log, end))
    };
    let made = write().map_err(|cause| ManifestNotWritten { cause, in_doubt: false })?;
    store.put_manifest(Manifest { vm_id, files })?;
    Ok(made)
}

/// Rewrites bytes `from` to `to` of a file in place. After a failed sync, the system has no reason
/// to write them, and reports that the next sync has succeeded.
fn rewrite(file: &dyn StoreFile, from: u64, to: u64) -> io::Result<()> {
    let mut buffer = Vec::new();
    let mut at = from;
    while at < to {
        buffer.resize((to - at).min(REWRITE_BYTES) as usize, 0);
        file.read_exact_at(&mut buffer, at)?;
        file.write_all_at(&buffer, at)?;
        at += buffer.len() as u64;
    }
    Ok(())
}
