//! Dirty tracking of a machine that is built: prepares the VM for the tracking mode, and creates
//! the dirty source.

use std::sync::Arc;

use driftline_dirty_tracker::ring::RingFull;
use kvm_bindings::CpuId;
use kvm_ioctls::VcpuFd;

use super::{HostLack, MachineError};
#[cfg(all(feature = "broken-source", debug_assertions))]
use crate::config::HostConfig;
use crate::config::MachineConfig;
use crate::kvm::{Capabilities, KvmVm, RingMap};
use crate::measure::SharedSink;
#[cfg(all(feature = "broken-source", debug_assertions))]
use crate::memory::Memory;
use crate::sources::{
    BitmapSource, DirtySource, Diverted, ManualSource, RingSource, UserfaultWpSource,
};
use crate::tracking::TrackingMode;

fn enable_rings(vm: &KvmVm, caps: &Capabilities, entries: u32) -> Result<(), HostLack> {
    let (capability, most) = caps.dirty_ring().ok_or(HostLack::DirtyRing)?;
    let enabled = vm.enable_dirty_ring(capability, entries);
    enabled.map_err(|cause| HostLack::RingEntries { entries, most, cause })
}

fn enable_manual(vm: &KvmVm, caps: &Capabilities) -> Result<(), HostLack> {
    let flags = caps.manual_dirty_log().ok_or(HostLack::ManualDirtyLog)?;
    let enabled = vm.enable_manual_dirty_log(flags);
    enabled.map_err(|cause| HostLack::ManualDirtyLogRefused { cause })
}

/// The dirty tracking of one machine.
pub(super) struct DirtyTracking {
    /// The source of dirty frames; `None` if the guest is not tracked.
    pub(super) source: Option<Box<dyn DirtySource>>,
    /// For each vCPU, its handle to report a full ring; `None` in modes without rings.
    pub(super) ring_full: Vec<Option<RingFull>>,
}

/// Prepares the VM for the tracking mode. KVM requires this before the first vCPU exists. If the
/// guest is `tracked` from its start, KVM's logging is on from now on, in the modes that use it.
pub(super) fn enable(
    vm: &KvmVm,
    capabilities: &Capabilities,
    config: &MachineConfig,
    tracked: bool,
) -> Result<(), MachineError> {
    match config.tracking {
        TrackingMode::DirtyRing => enable_rings(vm, capabilities, config.ring_entries)?,
        TrackingMode::DirtyBitmap => {}
        TrackingMode::DirtyBitmapManual => enable_manual(vm, capabilities)?,
        TrackingMode::UserfaultWp | TrackingMode::None => return Ok(()),
    }
    match tracked {
        true => vm.log_early().map_err(MachineError::system("switching dirty logging on")),
        false => Ok(()),
    }
}

/// Creates the dirty source. `sink`, if present, takes the place of the tracker's trees.
pub(super) fn create(
    vm: &Arc<KvmVm>,
    vcpus: &[(VcpuFd, CpuId)],
    config: &MachineConfig,
    sink: Option<SharedSink>,
) -> Result<DirtyTracking, MachineError> {
    let mut ring_full = vec![None; vcpus.len()];
    let source: Option<Box<dyn DirtySource>> = match config.tracking {
        TrackingMode::DirtyRing => {
            let entries = config.ring_entries;
            let map = |(vcpu, _): &(VcpuFd, CpuId)| RingMap::new(vm.clone(), vcpu, entries);
            let rings: Result<_, _> = vcpus.iter().map(map).collect();
            let rings = rings.map_err(MachineError::system("mapping a dirty ring"))?;
            let source = RingSource::new(vm.clone(), rings);
            ring_full = source.ring_full_reports();
            Some(boxed(source, sink))
        }
        TrackingMode::DirtyBitmap => Some(boxed(BitmapSource::new(vm.clone()), sink)),
        TrackingMode::DirtyBitmapManual => Some(Box::new(ManualSource::new(vm.clone()))),
        TrackingMode::UserfaultWp => {
            let source = UserfaultWpSource::new(vm.clone());
            Some(Box::new(source.map_err(|cause| HostLack::UserfaultWp { cause })?))
        }
        TrackingMode::None => None,
    };
    Ok(DirtyTracking { source, ring_full })
}

/// Boxes the source, with its `sink` if there is one.
fn boxed<S>(source: S, sink: Option<SharedSink>) -> Box<dyn DirtySource>
where
    S: DirtySource + 'static,
    Diverted<S>: DirtySource + 'static,
{
    match sink {
        Some(sink) => Box::new(Diverted::new(source, sink)),
        None => Box::new(source),
    }
}

/// Wraps the source in one that loses writes, to check that the tests detect it.
#[cfg(all(feature = "broken-source", debug_assertions))]
#[allow(clippy::panic, reason = "tests")]
pub(super) fn broken(
    source: Box<dyn DirtySource>,
    memory: &Memory,
    host: &HostConfig,
) -> Box<dyn DirtySource> {
    use crate::sources::BrokenSource;
    match host.loses_one_in.or_else(loses_one_in) {
        Some(one_in) => match BrokenSource::new(source, memory.tracker(), one_in) {
            Ok(broken) => Box::new(broken),
            Err(e) => panic!("a source that loses writes: {e}"),
        },
        None => source,
    }
}

/// Reads the loss rate that a test requests from a process that it starts. Logs a warning, so that
/// the loss is never a surprise.
#[cfg(all(feature = "broken-source", debug_assertions))]
fn loses_one_in() -> Option<std::num::NonZeroU64> {
    const NAME: &str = "DRIFTLINE_LOSES_ONE_IN";
    let value = std::env::var(NAME).ok()?;
    let one_in = value.parse().ok();
    match one_in {
        Some(n) => tracing::warn!(
            "THIS BUILD IS FOR TESTS: of {n} pages that the guest writes one is lost ({NAME})"
        ),
        None => tracing::warn!(
            "this build is for tests; {NAME} is \"{value}\", which is not a number, so no page \
             is lost"
        ),
    }
    one_in
}
