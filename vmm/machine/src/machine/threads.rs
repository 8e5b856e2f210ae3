//! Starts the threads of a machine's vCPUs and of its collector.

use std::sync::Arc;

use driftline_dirty_tracker::ring::RingFull;
use kvm_bindings::CpuId;
use kvm_ioctls::VcpuFd;

use super::MachineError;
use super::error::step;
use super::supervisor::Peer;
use super::vcpus::{VcpuHandle, Vcpus};
use crate::actor::{self, Handle, Inbox};
use crate::collector::{self, Collector};
use crate::config::MachineConfig;
use crate::devices::Bus;
use crate::kvm::{ImmediateExit, KvmVm};
use crate::sandbox::{self, Class};
use crate::sources::DirtySource;
use crate::throttle::ThrottleState;
use crate::vcpu::{self, Counters, StateContext, ThrottleHandle, Vcpu};

/// Number of frames in a collection from which on the next collection follows sooner. It is reduced
/// to a quarter of a ring if that is less.
const MANY_FRAMES: u64 = 4096;

/// Starts the thread of each vCPU.
pub(super) fn start_vcpus(
    vcpus: impl Iterator<Item = ((VcpuFd, CpuId), Option<RingFull>)>,
    vm: &Arc<KvmVm>,
    bus: &Arc<Bus>,
    context: &Arc<StateContext>,
    peer: impl Fn() -> Peer,
) -> Result<Vcpus, MachineError> {
    let mut handles = Vcpus::default();
    for (((fd, cpuid), ring_full), id) in vcpus.zip(0u8..) {
        step("kvm_run")?;
        let immediate_exit =
            ImmediateExit::new(vm.clone(), &fd).map_err(MachineError::system("mapping kvm_run"))?;
        let immediate_exit = Arc::new(immediate_exit);
        let counters = Arc::new(Counters::default());
        let (handle, inbox) = actor::inbox(format!("vCPU {id}"));
        let tsc_khz = fd.get_tsc_khz().ok();
        let vcpu = Vcpu {
            id,
            fd,
            cpuid,
            tsc_khz,
            immediate_exit: immediate_exit.clone(),
            bus: bus.clone(),
            counters: counters.clone(),
            ring_full,
            context: context.clone(),
            inbox,
            handle: handle.clone(),
            peers: Box::new(peer()),
            state: vcpu::VcpuState::default(),
            awaited: 0,
            throttle: ThrottleState::default(),
            reset: true,
            midway: false,
            paused_since: None,
            _vm: vm.clone(),
        };
        let thread = sandbox::spawn(Class::Vcpu, format!("vcpu{id}"), move || vcpu.run_thread());
        let thread = thread.map_err(MachineError::system("starting a vCPU thread"))?;
        handles.push(VcpuHandle::new(handle, immediate_exit, counters, thread));
    }
    Ok(handles)
}

/// Starts the collector of `source`, if the machine tracks what its vCPUs write.
pub(super) fn start_collector(
    vm: &Arc<KvmVm>,
    source: Option<Box<dyn DirtySource>>,
    config: &MachineConfig,
    throttles: Vec<ThrottleHandle>,
    inbox: (Handle<collector::CollectorState>, Inbox<collector::CollectorState>),
) -> Result<Option<Collector>, MachineError> {
    let Some(source) = source else { return Ok(None) };
    let many = MANY_FRAMES.min(u64::from(config.ring_entries) / 4);
    Collector::spawn(source, vm.memory().tracker().clone(), many, throttles, inbox)
        .map(Some)
        .map_err(MachineError::system("starting the collector"))
}
