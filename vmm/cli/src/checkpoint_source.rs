//! The source of a stored guest: a store, or an archive of one checkpoint.

use std::path::Path;
use std::sync::Arc;

use driftline_checkpoint::{RestoreError, RestoreReport};
use driftline_guest::{Clock, GuestFactory, VmId};
use driftline_machine::config::{Identity, MachineConfig};
use driftline_store::{Archive, EpochInfo, Listing, Store, StoreError, VerifyReport};

use super::failure::Failure;

/// Returns the hint for damage in the store at `dir`.
pub(super) fn repair_command(dir: &Path) -> String {
    format!("Salvage what is sound with: driftline store repair {}", dir.display())
}

/// Returns the failure of the store at `dir`, with the hint if it is damage.
pub(super) fn store_failure(dir: &Path, e: StoreError) -> Failure {
    let hint = e.is_damage().then(|| format!(". {}", repair_command(dir)));
    Failure::from(e).followed_by(&hint.unwrap_or_default())
}

/// What a path leads to: a directory is a store, a file is an archive.
pub(super) enum CheckpointSource {
    Store(Store),
    Archive(Box<Archive>),
}

impl CheckpointSource {
    pub(super) fn open(path: &Path) -> Result<Self, Failure> {
        if !path.is_file() {
            let store = Store::open(path)?;
            store.check_is_store()?;
            return Ok(Self::Store(store));
        }
        if let Ok(metadata) = path.metadata()
            && metadata.len() == 0
        {
            return Err(Failure::error(format_args!(
                "{} is neither a store nor an archive (0 bytes)",
                path.display()
            )));
        }
        Ok(Self::Archive(Box::new(Archive::open(path)?)))
    }

    /// Refuses, before anything is built, what this source cannot provide.
    pub(super) fn check(&self, epoch: Option<u64>, lazy: bool) -> Result<(), Failure> {
        let Self::Archive(archive) = self else { return Ok(()) };
        let (archived, dir) = (archive.info().epoch, archive.location().to_owned());
        if epoch.is_some_and(|epoch| epoch != archived) {
            return Err(StoreError::NoEpoch { dir, epoch }.into());
        }
        if lazy {
            return Err(Failure::error(format_args!(
                "{} is an archive: it is unpacked as a whole before its guest runs, so leave out \
                 --lazy",
                dir.display()
            )));
        }
        Ok(())
    }

    /// Returns the hint for damage, to be appended to a sentence. An archive has none.
    pub(super) fn repair_hint(&self) -> String {
        match self {
            Self::Store(store) => format!(". {}", repair_command(store.location())),
            Self::Archive(_) => String::new(),
        }
    }

    /// Returns the failure of reading it.
    pub(super) fn failure(&self, e: StoreError) -> Failure {
        match self {
            Self::Store(store) => store_failure(store.location(), e),
            Self::Archive(_) => e.into(),
        }
    }

    /// Lists all checkpoints that it contains.
    pub(super) fn list(&self) -> Result<Listing, StoreError> {
        match self {
            Self::Store(store) => store.list(),
            Self::Archive(archive) => {
                Ok(Listing { epochs: vec![*archive.info()], ..Listing::default() })
            }
        }
    }

    /// Returns its guest's identity at the latest checkpoint, or `None` if that cannot be read.
    pub(super) fn identity(&self) -> Option<Identity> {
        self.config().map(|config| config.identity)
    }

    /// Returns its guest's machine at the latest checkpoint, or `None` if that cannot be read.
    pub(super) fn config(&self) -> Option<MachineConfig> {
        match self {
            Self::Store(store) => MachineConfig::decode(&store.config().ok()?).ok(),
            Self::Archive(archive) => MachineConfig::decode(archive.config()).ok(),
        }
    }

    /// Returns the id of the guest in it, as far as that is known without reading all of it.
    pub(super) fn owner(&self) -> Result<Option<VmId>, StoreError> {
        match self {
            Self::Store(store) => store.owner(),
            Self::Archive(archive) => Ok(Some(archive.info().vm_id)),
        }
    }

    pub(super) fn verify(
        &self,
        mut on_epoch: impl FnMut(u64, Result<&EpochInfo, &StoreError>),
    ) -> Result<VerifyReport, StoreError> {
        match self {
            Self::Store(store) => store.verify(on_epoch),
            Self::Archive(archive) => {
                let report = archive.verify();
                on_epoch(archive.info().epoch, report.as_ref().map(|_| archive.info()));
                report
            }
        }
    }

    /// Restores the guest. The arguments must have been [checked](Self::check).
    pub(super) fn restore<F: GuestFactory>(
        &self,
        epoch: Option<u64>,
        lazy: bool,
        factory: &F,
    ) -> Result<(Arc<F::Guest>, RestoreReport), RestoreError> {
        let clock = Clock::Continue;
        match self {
            Self::Store(store) if lazy => {
                driftline_checkpoint::restore_lazily(store, epoch, factory, clock)
            }
            Self::Store(store) => driftline_checkpoint::restore(store, epoch, factory, clock),
            Self::Archive(archive) => {
                driftline_checkpoint::restore_archive(archive, factory, clock)
            }
        }
    }
}
