//! `userfault-wp`: writes found through the host's page tables (userfaultfd), without KVM's dirty
//! logging.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use driftline_dirty_tracker::Tracker;
use driftline_guest::CollectionReport;

use super::lap::lap;
use super::source::{DirtySource, SourceError};
use crate::kvm::KvmVm;
use crate::memory::WriteWatch;
use crate::tracking::TrackingMode;

/// Dirty source that uses a `WriteWatch` over a VM's memory.
#[derive(Debug)]
pub struct UserfaultWpSource {
    watch: WriteWatch,
    /// Whether a scan has failed. Some written frames may then be unknown.
    is_incomplete: bool,
    /// Keeps guest memory mapped.
    _vm: Arc<KvmVm>,
}

impl UserfaultWpSource {
    /// Returns a source over all memory of `vm`. Tracking is off until [`DirtySource::start`].
    ///
    /// # Errors
    ///
    /// Fails if the host does not allow userfaultfd write protection.
    pub fn new(vm: Arc<KvmVm>) -> io::Result<Self> {
        Ok(Self { watch: WriteWatch::open(vm.memory().ram())?, is_incomplete: false, _vm: vm })
    }
}

fn failed(what: &'static str) -> impl Fn(io::Error) -> SourceError {
    move |cause| SourceError { what, cause }
}

impl DirtySource for UserfaultWpSource {
    fn mode(&self) -> TrackingMode {
        TrackingMode::UserfaultWp
    }

    fn start(&mut self) -> Result<(), SourceError> {
        self.watch.begin().map_err(failed("write-protecting guest memory by userfaultfd"))?;
        self.is_incomplete = false;
        Ok(())
    }

    fn stop(&mut self) -> Result<(), SourceError> {
        self.watch.end().map_err(failed("UFFDIO_UNREGISTER"))
    }

    fn collect(&mut self, tracker: &Tracker) -> Result<CollectionReport, SourceError> {
        let mut out = CollectionReport::default();
        let (begun, mut insert_ns, mut foreign) = (Instant::now(), 0, false);
        // Stays set until a scan has completed.
        let was_incomplete = std::mem::replace(&mut self.is_incomplete, true);
        self.watch
            .written(|run| {
                let mut at = Instant::now();
                out.frames += run.count;
                foreign |= tracker.mark(run).is_err();
                insert_ns += lap(&mut at);
            })
            .map_err(failed("PAGEMAP_SCAN"))?;
        self.is_incomplete = false;
        if was_incomplete || foreign {
            // Frames of this scan that are not write-protected are found again by the next one, so
            // I3 holds for all of them.
            tracing::warn!("written pages were lost, all memory is marked");
            tracker.mark_all();
            out.marked_all = true;
        }
        // One call reads and write-protects, so the time of both is counted as `reprotect_ns`.
        let mut at = begun;
        (out.insert_ns, out.reprotect_ns) = (insert_ns, lap(&mut at).saturating_sub(insert_ns));
        Ok(out)
    }

    fn dirtied(&self) -> &[u64] {
        &[]
    }

    fn harvested(&self) -> &[u64] {
        &[]
    }
}

#[cfg(test)]
mod tests {
    use driftline_dirty_tracker::{Gfn, SlotId};
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::memory::{Memory, MemoryOptions};

    #[test]
    fn failed_scan_marks_all_memory() {
        const TEST: &str = "failed_scan_marks_all_memory";
        if !crate::testing::kvm_or_skip(TEST) {
            return;
        }
        let memory = Arc::new(Memory::new(64 << 20, &MemoryOptions::default()).unwrap());
        let (kvm, _) = crate::kvm::open().unwrap();
        let vm = Arc::new(KvmVm::new(kvm.create_vm().unwrap(), memory.clone()).unwrap());
        let mut source = match UserfaultWpSource::new(vm) {
            Ok(source) => source,
            Err(e) => return crate::testing::skip(TEST, &e.to_string()),
        };
        let write = |gfn: u64| memory.ram().write_obj(1u8, GuestAddress(Gfn(gfn).gpa())).unwrap();
        // A tracker of its own, so that it receives frames from this source only.
        let tracker = Arc::new(Tracker::new(memory.layout().clone()));
        let mut subscription = tracker.subscribe("test").unwrap();
        write(70);
        source.start().unwrap();
        write(70);
        let collected = source.collect(&tracker).unwrap();
        assert_eq!((collected.frames, collected.marked_all), (1, false));
        assert_eq!(subscription.drain().frames(), 1);

        source.watch.end().unwrap();
        let error = source.collect(&tracker).unwrap_err().to_string();
        assert!(error.starts_with("PAGEMAP_SCAN failed: "), "{error}");
        source.watch.begin().unwrap();
        assert!(source.collect(&tracker).unwrap().marked_all);
        let leaves = subscription.bitmap(SlotId(0)).unwrap();
        assert!(leaves.iter().all(|word| *word == u64::MAX), "all memory is marked");
        // All memory is marked only once.
        assert!(!source.collect(&tracker).unwrap().marked_all);
        source.stop().unwrap();
    }
}
