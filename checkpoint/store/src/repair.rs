//! Repair: puts a sound store in place of a damaged one.
//!
//! ```text
//! new page file and log written, synced -> old files get a second name, `damaged-N.NAME`
//!   -> directory synced -> new manifest renamed into place: from here on the store is the new one
//!   -> old names removed
//! ```
//!
//! A crash leaves either the new store, or the old one and files that belong to no store. The
//! replaced files keep their second names until an operator removes them. If a checkpoint is given
//! up, the frames of the sound ones are copied to a new page file, and the old one stays as it is.
//!
//! On a file system without hard links, the manifest is copied, and the other files are renamed at
//! the end instead of removed. None of them is read, since a failing disk may be unable to read it.
//! A list of them is written before the new manifest (`quarantine.rs`).

use std::io;

use driftline_dirty_tracker::PAGE_SIZE;
use serde::Serialize;

use crate::backend::{has_no_links, is_media_error};
use crate::error::StoreError;
use crate::limits::NO_SLOT;
use crate::manifest::{Manifest, ManifestNotWritten, is_leftover};
use crate::names::{
    MANIFEST, MANIFEST_NEW, Named, list_name, log_name, pages_name, parse_name, quarantine_name,
};
use crate::page_file::{PageReader, begin_pages};
use crate::records::Files;
use crate::rotate::copy_log;
use crate::salvage::{Salvage, Survey};
use crate::store::Store;

/// Result of [`Store::repair`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct RepairReport {
    /// Findings before the repair.
    #[serde(flatten)]
    pub survey: Survey,
    /// Whether a repair was needed.
    pub repaired: bool,
    /// Names of the files that keep the replaced content.
    pub quarantined: Vec<String>,
}

/// Which files a repair makes and replaces.
struct RepairPlan {
    /// Names of all files before the repair.
    names: Vec<String>,
    new: Files,
    /// Generation of those new files that do not exist yet.
    next: u64,
    /// Names of the files that are replaced.
    replaced: Vec<String>,
    /// Number of the repair.
    number: u64,
}

/// The files that a repair replaces and keeps.
struct KeptFiles<'p> {
    /// Second names that exist already.
    quarantined: Vec<String>,
    /// Files that have one name only, and are renamed at the end.
    to_rename: Vec<&'p str>,
}

impl Store {
    /// Makes a sound store from the sound checkpoints of a damaged one, which must be opened with
    /// [`open_to_repair`](Store::open_to_repair). Keeps the files that it replaces under other
    /// names.
    ///
    /// # Errors
    ///
    /// Fails for the reasons of [`survey`](Store::survey), if another process writes to the store,
    /// or if there is no room for a copy of the sound checkpoints. The store is then as it was
    /// before.
    pub fn repair(&self) -> Result<RepairReport, StoreError> {
        // First: keeps other processes from freeing slots or writing while the store is read.
        let locked = self.lock_page_files()?;
        let mut salvage = self.salvage()?;
        let Salvage { vm_id, files: old, .. } = salvage;
        let survey = salvage.survey.clone();
        if salvage.manifest_is_sound && salvage.log_is_sound && salvage.pages_are_sound {
            return Ok(RepairReport { survey, repaired: false, quarantined: Vec::new() });
        }
        if survey.sound == 0 && !survey.checkpoints.is_empty() {
            return Err(StoreError::NothingSound { dir: self.dir() });
        }
        if salvage.manifest_is_sound {
            self.quarantine(&self.names()?, &Manifest { vm_id, files: old }, &mut Vec::new())?;
        }
        let plan = self.plan_repair(&salvage)?;
        let manifest_was = self.manifest_file();
        let manifest = Manifest { vm_id, files: plan.new };
        let prepared = self
            .write_sound(&mut salvage, plan.new)
            .and_then(|()| self.keep_replaced(&plan))
            .map_err(|cause| ManifestNotWritten { cause, in_doubt: false });
        let prepared = prepared.and_then(|kept| self.put_manifest(manifest).map(|()| kept));
        drop(locked);
        let KeptFiles { mut quarantined, to_rename } = prepared.map_err(|e| {
            // A failed rename may still have taken effect. Only the same file under the manifest's
            // name proves that it did not, whether or not that file can be read.
            let is_old =
                manifest_was.is_ok_and(|was| self.manifest_file().is_ok_and(|is| was == is));
            if !e.in_doubt && is_old {
                self.remove_new_files(&plan);
            }
            e.cause
        })?;
        let is_removed = |name: &&String| {
            is_leftover(name, Some(&manifest)) && !to_rename.contains(&name.as_str())
        };
        for name in plan.names.iter().filter(is_removed) {
            // The next process that opens the store removes what cannot be removed now.
            let _ = self.backend().remove(name);
        }
        let mut renamed = Vec::new();
        let finished = self.names().and_then(|names| {
            self.quarantine(&names, &manifest, &mut renamed)?;
            if !to_rename.is_empty() {
                // The list is not needed any more.
                let _ = self.backend().remove(&list_name(plan.number));
            }
            self.sync_dir()
        });
        quarantined.extend(renamed.into_iter().map(|renamed| renamed.to));
        if let Err(e) = finished {
            // The new manifest is durable, so a crash can bring back old names, but nothing else.
            tracing::warn!("{e}; the store is repaired, and its next writer finishes this");
        }
        Ok(RepairReport { survey, repaired: true, quarantined })
    }

    /// Chooses the names of the new files, and the files that they replace.
    fn plan_repair(&self, salvage: &Salvage) -> Result<RepairPlan, StoreError> {
        let lost = salvage.survey.sound < salvage.survey.checkpoints.len() as u64;
        let old = salvage.files;
        let names = self.names()?;
        let next = self.next_files()?;
        let next = next.log.max(next.pages);
        let copies = lost || !salvage.pages_are_sound;
        let pages = if copies { next } else { old.pages };
        let log = if copies || !salvage.log_is_sound { next } else { old.log };
        let new = Files { log, pages };
        let is_replaced = |name: &&String| match parse_name(name) {
            Named::Manifest => true,
            Named::Log(n) if n == new.log => false,
            Named::Pages(n) if n == new.pages => false,
            Named::Log(n) if n == old.log => true,
            Named::Pages(n) if n == old.pages => true,
            // These files may have what was lost.
            Named::Log(_) | Named::Pages(_) => lost || !salvage.manifest_is_sound,
            _ => false,
        };
        let replaced = names.iter().filter(is_replaced).cloned().collect();
        let numbers = names.iter().map(|name| match parse_name(name) {
            Named::Quarantined(n) | Named::QuarantineList(n) => n,
            _ => 0,
        });
        let number = 1 + numbers.max().unwrap_or(0);
        Ok(RepairPlan { names, new, next, replaced, number })
    }

    /// Gives the files that are replaced a second name, or lists them to be renamed. Makes the
    /// names of all new files durable.
    fn keep_replaced<'p>(&self, plan: &'p RepairPlan) -> Result<KeptFiles<'p>, StoreError> {
        let mut kept = KeptFiles { quarantined: Vec::new(), to_rename: Vec::new() };
        for name in &plan.replaced {
            let second = quarantine_name(plan.number, name);
            let linked = match self.backend().link(name, &second) {
                Err(e) if has_no_links(&e) && *name == MANIFEST => self.copy_manifest(&second),
                Err(e) if has_no_links(&e) => {
                    kept.to_rename.push(name);
                    continue;
                }
                linked => linked,
            };
            linked.map_err(|e| self.io("keeping a copy of", name, e))?;
            kept.quarantined.push(second);
        }
        if !kept.to_rename.is_empty() {
            self.write_list(plan.number, &kept.to_rename)?;
        }
        self.sync_dir()?;
        Ok(kept)
    }

    /// Removes the files of a failed repair. A file that cannot be removed does no harm.
    fn remove_new_files(&self, plan: &RepairPlan) {
        let RepairPlan { new, next, replaced, number, .. } = plan;
        let made = [(new.log == *next, log_name(*next)), (new.pages == *next, pages_name(*next))];
        let made = made.into_iter().filter_map(|(made, name)| made.then_some(name));
        let second = replaced.iter().map(|name| quarantine_name(*number, name));
        let others = [MANIFEST_NEW.to_owned(), list_name(*number)];
        made.chain(second).chain(others).for_each(|name| {
            let _ = self.backend().remove(&name);
        });
    }

    /// Copies the readable part of the manifest.
    fn copy_manifest(&self, to: &str) -> io::Result<()> {
        let read = || {
            let file = self.backend().open(MANIFEST)?;
            let mut bytes = vec![0; file.len()?.min(PAGE_SIZE) as usize];
            file.read_exact_at(&mut bytes, 0).map(|()| bytes)
        };
        let bytes = match read() {
            Err(e) if is_media_error(&e) => Vec::new(),
            read => read?,
        };
        let file = self.backend().create_new(to)?;
        file.write_all_at(&bytes, 0)?;
        file.sync()
    }

    /// Returns the identity of the file under the manifest's name; `None` if there is none.
    fn manifest_file(&self) -> Result<Option<(u64, u64)>, StoreError> {
        match self.backend().open(MANIFEST).and_then(|file| file.identity()) {
            Ok(identity) => Ok(Some(identity)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(self.io("checking", MANIFEST, e)),
        }
    }

    /// Locks all page files, since it is not known yet which of them is the store's.
    fn lock_page_files(&self) -> Result<Vec<PageReader>, StoreError> {
        let locked = self.names()?.into_iter().filter_map(|name| match parse_name(&name) {
            Named::Pages(n) => Some(PageReader::open_locked(self, n)),
            _ => None,
        });
        locked.collect()
    }

    /// Writes the sound checkpoints to those files of `new` that do not exist yet.
    fn write_sound(&self, salvage: &mut Salvage, new: Files) -> Result<(), StoreError> {
        let Salvage { files: old, log, pages, chosen, vm_id, .. } = salvage;
        if new.log == old.log {
            return Ok(());
        }
        if new.pages == old.pages {
            return copy_log(self, log, chosen, new.log, &|slot| slot).map(drop);
        }
        let Some(pages) = pages else {
            let name = pages_name(new.pages);
            let file = self.create_new(&name)?;
            begin_pages(&*file, *vm_id, new.pages).map_err(|e| self.io("writing", &name, e))?;
            file.sync().map_err(|e| self.io("syncing", &name, e))?;
            return copy_log(self, log, chosen, new.log, &|slot| slot).map(drop);
        };
        let slots = self.copy_pages(log, chosen, pages, new.pages)?;
        let to = |slot: u32| slots.get(&slot).copied().unwrap_or(NO_SLOT);
        copy_log(self, log, chosen, new.log, &to).map(drop)
    }
}
