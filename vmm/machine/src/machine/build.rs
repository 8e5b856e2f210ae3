//! Assembles a machine in the order that KVM requires: dirty tracking and interrupt controllers
//! before vCPUs, CPUID before registers.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use driftline_guest::{SharedGuest, VmId};
use kvm_bindings::*;
use kvm_ioctls::{Kvm, VcpuFd};

#[cfg(all(feature = "broken-source", debug_assertions))]
use super::dirty_tracking::broken;
use super::dirty_tracking::{self, DirtyTracking};
use super::early::{BuiltVm, EarlyVm, EmptyVm};
use super::error::step;
use super::status::MachineStatus;
use super::supervisor::{EndReporter, Peer, Supervisor};
use super::threads::{start_collector, start_vcpus};
use super::vcpus::VcpuHandle;
use super::{HostLack, KvmMachine, MachineError};
use crate::actor;
use crate::boot::{self, BootError, Entry};
use crate::collector;
use crate::config::{BackendKind, CpuConfig, CpuTemplate, HostConfig, MachineConfig, SerialSink};
use crate::devices::{
    Bus, Com1, DeviceError, DevicePlacement, DeviceSet, Keyboard, SerialInput, SerialOutputThread,
    open_serial_output, placement,
};
use crate::kvm::{Capabilities, KvmVm, register_kick_handler};
use crate::measure::MeasureOptions;
use crate::memory::{Memory, MemoryError, MemoryOptions, PageHandlerSocket, PrivateFile};
use crate::vcpu::cpuid::Topology;
use crate::vcpu::{StateContext, TemplateLack, cpu_compat, cpuid, msrs, template, tsc};

/// The first contents of a machine's memory.
#[derive(Debug, Default)]
pub enum FirstContents {
    /// A kernel or another payload that the configuration boots: the guest is new, and has
    /// acquired its disks.
    #[default]
    Boot,
    /// Zeros: memory and state are restored into the machine. The guest has acquired nothing: call
    /// `acquire`, then `resume`.
    Zeros,
    /// Those of a file, which belong to a state that is restored. Otherwise as
    /// [`Zeros`](Self::Zeros).
    File(PrivateFile),
    /// The memory of another guest, which may still be running in it. Otherwise as
    /// [`Zeros`](Self::Zeros).
    Shared(SharedGuest),
    /// Pages that another process serves when they are touched. Otherwise as [`File`](Self::File).
    Handler(PageHandlerSocket),
}

/// Options of a build. By default the guest is new.
#[derive(Default)]
pub struct BuildOptions {
    /// The first contents of memory.
    pub contents: FirstContents,
    /// A VM whose creation began before the configuration was known.
    pub early: Option<EarlyVm>,
    /// Whether the caller subscribes to the guest's writes before the guest runs, so that dirty
    /// logging is on from the start. Otherwise the first subscription switches it on, which may
    /// wait for ticks of the kernel's clock, because interrupt controllers exist by then.
    pub tracked: bool,
    /// What is done between the memory and the first device.
    pub before_devices: Option<BeforeDevices>,
    /// Options of a machine that exists to be measured.
    pub measured: MeasureOptions,
}

impl BuildOptions {
    /// Returns the options of a machine with zeroed memory, into which a state is restored.
    pub fn empty() -> Self {
        Self { contents: FirstContents::Zeros, ..Self::default() }
    }
}

/// What a caller does once a guest's memory and a new guest's kernel are loaded, before the machine
/// starts its first thread. An error ends the build.
pub type BeforeDevices = Box<dyn FnOnce() -> io::Result<()>>;

/// A machine whose threads have not been started.
struct MachineParts {
    vm: Arc<KvmVm>,
    vcpus: Vec<(VcpuFd, CpuId)>,
    tracking: DirtyTracking,
    context: Arc<StateContext>,
    com1: Com1,
    devices: DeviceSet,
    /// Whether the machine has acquired what only one host may have.
    acquired: bool,
    serial: SerialOutputThread,
}

impl KvmMachine {
    /// Boots the guest that `config` describes, paused at its first instruction, with a new id.
    ///
    /// # Errors
    ///
    /// As [`build`](Self::build).
    pub fn launch(config: MachineConfig, host: &HostConfig) -> Result<Arc<Self>, MachineError> {
        Self::build(VmId::random(), config, host, BuildOptions::default())
    }

    /// Builds the machine that `config` describes, paused. [`MachineFactory`] builds one for a
    /// received guest.
    ///
    /// # Errors
    ///
    /// See [`MachineError`]: a lacking host, an invalid configuration, a failed step or a failure
    /// of one of the options.
    ///
    /// [`MachineFactory`]: super::MachineFactory
    pub fn build(
        vm_id: VmId,
        config: MachineConfig,
        host: &HostConfig,
        options: BuildOptions,
    ) -> Result<Arc<Self>, MachineError> {
        let devices = |config: &MachineConfig, memory: &Memory, guest: VmId, acquire: bool| {
            DeviceSet::build(config, memory, guest, acquire, host)
        };
        Self::assemble(vm_id, config, host, devices, options)
    }

    /// Builds all parts, in the order that KVM requires, and starts the threads.
    pub(super) fn assemble(
        vm_id: VmId,
        mut config: MachineConfig,
        host: &HostConfig,
        devices: impl FnOnce(&MachineConfig, &Memory, VmId, bool) -> Result<DeviceSet, DeviceError>,
        BuildOptions { contents, early, tracked, before_devices, measured }: BuildOptions,
    ) -> Result<Arc<Self>, MachineError> {
        check(&config)?;
        let empty = early.map_or_else(EmptyVm::new, EarlyVm::wait)?;
        step("CPUID")?;
        let offered = offered_cpuid(&empty.kvm, &empty.supported, &config.cpu)?;
        register_kick_handler().map_err(MachineError::system("installing a signal handler"))?;
        step("memory")?;
        let is_new = matches!(contents, FirstContents::Boot);
        let memory = create_memory(contents, config.mem_bytes, &host.memory, measured.sparse)?;
        let memory = Arc::new(memory);
        step("kernel")?;
        let boot = || boot::load(&config, host, &memory, &placements(config.devices.len()));
        let entry = is_new.then(boot).transpose()?;
        if let Some(before_devices) = before_devices {
            before_devices().map_err(MachineError::system("restricting the process"))?;
        }
        let (sink, serial) = open_serial_output(&host.serial, host.serial_limit)?;
        let devices = devices(&config, &memory, vm_id, is_new)?;
        devices.note_disks(&mut config.devices);

        let built = empty.finish(&memory, &config, tracked)?;
        let BuiltVm { vm, kvm, capabilities, mut supported } = built;
        let vm = Arc::new(vm);
        let vcpus = create_vcpus(&kvm, &capabilities, &offered, &vm, &config, entry)?;
        if let Some((fd, cpuid)) = vcpus.first() {
            match is_new {
                true => record_exposed_features(&mut config.cpu, &kvm, &supported, fd, cpuid)?,
                false => check_tsc(&config.cpu, fd, &capabilities)?,
            }
        }
        step("dirty source")?;
        let tracking = dirty_tracking::create(&vm, &vcpus, &config, measured.sink)?;
        #[cfg(all(feature = "broken-source", debug_assertions))]
        let tracking = DirtyTracking {
            source: tracking.source.map(|source| broken(source, &memory, host)),
            ..tracking
        };
        // A state may have what the template promises.
        let cpu_template = &config.cpu.template;
        template::change_cpuid(&mut supported, cpu_template).map_err(HostLack::from)?;
        let context = Arc::new(state_context(&kvm, capabilities, supported, &vcpus, cpu_template)?);
        step("COM1")?;
        let com1 = Com1::new(vm.clone(), sink);
        let com1 = com1.map_err(MachineError::system("creating an event file descriptor"))?;
        devices.connect(&vm).map_err(MachineError::system("connecting virtio devices"))?;
        // A new guest locks its disks before it runs; an arriving guest locks them on `acquire`.
        let acquired = is_new || config.devices.is_empty();
        let parts = MachineParts { vm, vcpus, tracking, context, com1, devices, acquired, serial };
        Self::start(vm_id, config, host, parts)
    }

    /// Starts the threads of a machine, all of whose parts exist.
    fn start(
        vm_id: VmId,
        config: MachineConfig,
        host: &HostConfig,
        parts: MachineParts,
    ) -> Result<Arc<Self>, MachineError> {
        let MachineParts { vm, vcpus, tracking, context, com1, devices, acquired, serial } = parts;
        let DirtyTracking { source, ring_full } = tracking;
        let (drives, sources) = (devices.drives().to_vec(), devices.sources().to_vec());
        let (stats_handles, balloon) =
            (devices.stats_handles().to_vec(), devices.balloon().cloned());
        let rate_limits = devices.rate_limits().to_vec();
        let disk_files = devices.disk_files().to_vec();
        let device_counters = devices.counters().with_serial(com1.counters());
        let bus = Arc::new(Bus::new(com1, devices, host.boot_timer));
        // A restored guest's state says whether it has one.
        bus.set_keyboard(host.keyboard.then(Keyboard::default));
        let collector_inbox = collector::inbox();
        let status = Arc::new(MachineStatus::new(acquired));
        let (requests, inbox) = actor::inbox("the supervisor");
        let end = EndReporter { status: status.clone(), supervisor: requests.clone() };
        let peer = || Peer { end: end.clone(), collector: collector_inbox.0.clone() };
        // If a step fails from here on, dropping these joins the vCPU threads, whichever value owns
        // them by then.
        let handles = start_vcpus(vcpus.into_iter().zip(ring_full), &vm, &bus, &context, peer)?;
        let counters = handles.iter().map(|h| h.counters.clone()).collect();
        let throttles = handles.iter().map(VcpuHandle::throttle).collect();
        let input = serial_input(&host.serial, &bus);
        #[cfg(test)]
        let shared_bus = bus.clone();
        let supervisor =
            Supervisor::spawn(vm.clone(), bus, context, handles, status.clone(), inbox)?;
        let mut machine = Self {
            vm_id,
            config,
            memory: vm.memory().clone(),
            drives,
            sources,
            stats_handles,
            rate_limits,
            disk_files,
            device_counters,
            balloon,
            has_handed_over_files: host.opened.are_handed_over(),
            status,
            counters,
            started: Instant::now(),
            supervisor: requests,
            supervisor_thread: Some(supervisor),
            collector: None,
            #[cfg(test)]
            bus: shared_bus,
            input,
            serial,
        };
        machine.collector =
            start_collector(&vm, source, &machine.config, throttles, collector_inbox)?;
        machine.watch_handler()?;
        Ok(Arc::new(machine))
    }

    /// Watches the page handler, if there is one: the guest ends if a page is lost.
    fn watch_handler(&self) -> Result<(), MachineError> {
        let watched = self.memory.watch_handler(Box::new(self.memory_owner()));
        watched.map_err(MachineError::system("watching the page handler"))
    }
}

/// Creates guest memory of `bytes` with its first contents. Boot information and state come later.
fn create_memory(
    contents: FirstContents,
    bytes: u64,
    options: &MemoryOptions,
    sparse: bool,
) -> Result<Memory, MemoryError> {
    match contents {
        FirstContents::File(file) => Memory::of_file(bytes, options, &file),
        FirstContents::Handler(handler) => Memory::of_handler(bytes, options, handler),
        FirstContents::Shared(shared) => Memory::shared(bytes, options, &shared),
        FirstContents::Boot | FirstContents::Zeros if sparse => Memory::sparse(bytes, options),
        FirstContents::Boot | FirstContents::Zeros => Memory::new(bytes, options),
    }
}

/// Returns the input of a serial port that is on the terminal.
fn serial_input(sink: &SerialSink, bus: &Arc<Bus>) -> Option<SerialInput> {
    match sink {
        SerialSink::Stdio => Some(SerialInput::new(bus)),
        SerialSink::Null | SerialSink::File(_) => None,
    }
}

/// Returns the addresses and interrupts at which the guest finds its virtio devices.
fn placements(devices: usize) -> Vec<DevicePlacement> {
    (0..devices).filter_map(placement).collect()
}

/// Returns the command line of a kernel: `given` with `parameters` and the addresses of the virtio
/// devices, of which there are `devices`, before the arguments for init. It is complete, so the
/// guest boots it as it is ([`Boot::Kernel`](crate::config::Boot::Kernel), `bare`).
///
/// # Errors
///
/// The line is too long, or contains a character that a command line cannot have.
pub fn command_line(
    given: &str,
    parameters: &[String],
    devices: usize,
) -> Result<String, BootError> {
    boot::with_parameters(given, parameters, &placements(devices))
}

/// Checks that `config` is valid and selects the KVM backend.
fn check(config: &MachineConfig) -> Result<(), MachineError> {
    match config.backend {
        BackendKind::Kvm => Ok(config.check()?),
        other => Err(MachineError::Backend(other)),
    }
}

/// Creates the vCPUs, in order. The first starts at `entry`; it wakes the others.
fn create_vcpus(
    kvm: &Kvm,
    capabilities: &Capabilities,
    offered: &CpuId,
    vm: &KvmVm,
    config: &MachineConfig,
    entry: Option<Entry>,
) -> Result<Vec<(VcpuFd, CpuId)>, MachineError> {
    let most = kvm.get_max_vcpus();
    if usize::from(config.vcpus) > most {
        return Err(HostLack::Vcpus { vcpus: config.vcpus, most }.into());
    }
    let bits = cpuid::address_bits(offered.as_slice());
    if vm.memory().layout().slots().any(|s| s.run().end().gpa() > 1 << bits) {
        return Err(HostLack::AddressBits { mem_bytes: config.mem_bytes, bits }.into());
    }
    let tsc_deadline =
        capabilities.has(KVM_CAP_TSC_DEADLINE_TIMER) && cpuid::may_have_tsc_deadline(&config.cpu);
    let topology = Topology { vcpus: config.vcpus, smt: config.cpu.smt };
    let mut vcpus = Vec::new();
    for id in 0..config.vcpus {
        step("KVM_CREATE_VCPU")?;
        let fd = vm.fd().create_vcpu(id.into());
        let fd = fd.map_err(MachineError::system("KVM_CREATE_VCPU"))?;
        let cpuid = cpuid::for_vcpu(offered, id, topology, tsc_deadline);
        fd.set_cpuid2(&cpuid).map_err(MachineError::system("KVM_SET_CPUID2"))?;
        vcpus.push((fd, cpuid));
    }
    set_template_msrs(&vcpus, &config.cpu.template)?;
    let Some(entry) = entry else { return Ok(vcpus) };
    for (fd, cpuid) in &vcpus {
        msrs::set_first_values(fd, cpuid.as_slice())
            .map_err(|e| MachineError::system("setting the first MSRs")(io::Error::other(e)))?;
    }
    if let Some((first, _)) = vcpus.first() {
        let set = boot::set_registers(first, entry);
        set.map_err(MachineError::system("setting the first registers"))?;
    }
    Ok(vcpus)
}

/// Gives new vCPUs, whose CPUID is set, the registers of the template. For vCPUs into which a state
/// is restored, this checks that the host has them.
fn set_template_msrs(
    vcpus: &[(VcpuFd, CpuId)],
    template: &CpuTemplate,
) -> Result<(), MachineError> {
    let indices: Vec<u32> = template.msrs.iter().map(|msr| msr.index).collect();
    for (fd, _) in vcpus {
        let before = msrs::read(fd, &indices)
            .map_err(|e| MachineError::system("reading MSRs")(io::Error::other(e)))?;
        let values = template::changed_msrs(template, &before).map_err(HostLack::from)?;
        let refused = msrs::write(fd, &values).map_err(MachineError::system("KVM_SET_MSRS"))?;
        if let Some(&kvm_msr_entry { index, data: value, .. }) = refused.first() {
            return Err(HostLack::from(TemplateLack::Value { index, value }).into());
        }
    }
    Ok(())
}

/// Returns the CPUID that the guest is to see, without the values of each vCPU. Fails if the host
/// lacks something that the guest has seen elsewhere, or that its template needs.
fn offered_cpuid(kvm: &Kvm, supported: &CpuId, cpu: &CpuConfig) -> Result<CpuId, HostLack> {
    let lacks = cpu_compat::missing(&cpu.exposed, supported.as_slice())
        .or_else(|| Some(msrs::missing(&cpu.exposed_msrs, &msrs::offered(kvm))?.into()));
    if let Some(lacks) = lacks {
        return Err(HostLack::Exposed(lacks));
    }
    template::check_capabilities(kvm, &cpu.template)?;
    let mut offered = cpuid::restrict(supported, cpu)
        .map_err(|cause| HostLack::Feature { cpu: Box::new(cpu.clone()), cause })?;
    template::change_cpuid(&mut offered, &cpu.template)?;
    Ok(offered)
}

/// Records in the configuration the processor features that the guest sees and may rely on.
fn record_exposed_features(
    cpu: &mut CpuConfig,
    kvm: &Kvm,
    supported: &CpuId,
    fd: &VcpuFd,
    cpuid: &CpuId,
) -> Result<(), MachineError> {
    cpu.exposed = cpu_compat::exposed(cpuid.as_slice(), supported.as_slice());
    cpu.exposed_msrs = msrs::exposed(fd, cpuid.as_slice(), &msrs::offered(kvm))
        .map_err(|e| MachineError::system("reading MSRs")(io::Error::other(e)))?;
    // Fails where KVM does not know the rate; then there is nothing to compare.
    cpu.tsc_khz = tsc::is_promised(cpuid.as_slice()).then(|| fd.get_tsc_khz().ok()).flatten();
    Ok(())
}

/// Fails if the guest was promised a TSC rate that this host cannot provide.
fn check_tsc(
    cpu: &CpuConfig,
    fd: &VcpuFd,
    capabilities: &Capabilities,
) -> Result<(), MachineError> {
    let (Some(guest), Ok(host)) = (cpu.tsc_khz, fd.get_tsc_khz()) else { return Ok(()) };
    match tsc::missing(guest, host, capabilities.has(KVM_CAP_TSC_CONTROL)) {
        None => Ok(()),
        Some(rate) => Err(HostLack::TscRate(rate).into()),
    }
}

fn state_context(
    kvm: &Kvm,
    capabilities: Capabilities,
    supported: CpuId,
    vcpus: &[(VcpuFd, CpuId)],
    template: &CpuTemplate,
) -> Result<StateContext, MachineError> {
    step("MSRs")?;
    let msrs = kvm.get_msr_index_list();
    let msrs = msrs.map_err(MachineError::system("KVM_GET_MSR_INDEX_LIST"))?;
    let of_template = template.msrs.iter().map(|msr| msr.index);
    let msrs: Vec<u32> = msrs.as_slice().iter().copied().chain(of_template).collect();
    let failed = |e| MachineError::System { what: "reading MSRs", cause: e };
    let (first, _) =
        vcpus.first().ok_or_else(|| failed(io::Error::other("the guest has no vCPUs")))?;
    StateContext::new(capabilities, supported, &msrs, first)
        .map_err(|e| failed(io::Error::other(e)))
}
