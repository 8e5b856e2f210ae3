//! Starts the guest that was configured over Firecracker's API, or loads one from a snapshot.
//!
//! The sandbox closes in between: once the guest's memory and kernel are loaded, and before the
//! machine has a device or a thread. A start that fails earlier, for example for its kernel, can be
//! retried with other files. After it, only files that are open, or that the closed sandbox allows,
//! can be used.

use std::cell::Cell;
use std::io;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use driftline_control::api::{App, ControlThread};
use driftline_control::firecracker::{
    ApiFault, LoadFault, LoadSnapshotParams, MicroVmConfig, StartFault,
};
use driftline_control::jobs::{Jobs, SnapshotBase};
use driftline_guest::{Clock, VmId};
use driftline_machine::config::{
    BootClock, DeviceConfig, HostConfig, MachineConfig, SerialSink, disks, guest_span,
};
use driftline_machine::exit;
use driftline_machine::machine::{BuildOptions, HostLack, KvmMachine, MachineError, TemplateLack};
use driftline_machine::memory::MemoryOptions;
use driftline_machine::sandbox::{self, SandboxOptions};
use driftline_machine::vm::SharedVm;

use super::load::{LoadPlan, build_fault, load_plan};
use super::opened::ClientFiles;
use super::plan::{GuestPlan, plan};
use crate::end::end_without_memory;

/// A guest that runs, or that was loaded and is paused.
pub(super) struct StartedGuest {
    pub(super) vm: SharedVm,
    pub(super) jobs: Arc<Jobs>,
    pub(super) memory: MemoryOptions,
}

/// Starts a guest.
pub(super) struct GuestStarter {
    /// Id of the instance.
    id: String,
    vm_id: VmId,
    /// The restrictions of a process with a guest that names no files.
    sandbox: SandboxOptions,
    /// Whether these restrictions have been applied.
    is_closed: Rc<Cell<bool>>,
    /// Directory of this host's hand-over records.
    state_dir: PathBuf,
    control: ControlThread,
    app: Arc<App>,
    /// Whether the guest has the register by which it reports that it has booted.
    has_boot_timer: bool,
}

impl GuestStarter {
    pub(super) fn new(
        id: String,
        sandbox: SandboxOptions,
        state_dir: PathBuf,
        control: ControlThread,
        app: Arc<App>,
        has_boot_timer: bool,
    ) -> Self {
        let (vm_id, is_closed) = (VmId::random(), Rc::default());
        Self { id, vm_id, sandbox, is_closed, state_dir, control, app, has_boot_timer }
    }

    /// Returns the id of the guest to be started.
    pub(super) fn vm_id(&self) -> VmId {
        self.vm_id
    }

    /// Builds the guest of `config` with its open files, and runs it.
    ///
    /// # Errors
    ///
    /// A part of the configuration cannot be honoured, or the machine cannot be built.
    pub(super) fn start(
        &self,
        config: &MicroVmConfig,
        files: &ClientFiles,
    ) -> Result<StartedGuest, ApiFault> {
        let boot_timer = self.has_boot_timer.then(BootClock::start);
        let tracked = config.machine.track_dirty_pages;
        let GuestPlan { config, mut host } = plan(&self.id, config, files)?;
        host.boot_timer = boot_timer;
        let _logged = guest_span(self.vm_id, &config.identity).entered();
        let failed = |e: &dyn ToString| StartFault::Machine(e.to_string());
        let before_devices = Some(self.close_sandbox(self.restrictions(&config, &host)));
        let options = BuildOptions { before_devices, tracked, ..BuildOptions::default() };
        let vm = KvmMachine::build(self.vm_id, config, &host, options);
        let vm: SharedVm = vm.map_err(|e| start_fault(&e))?;
        let base = SnapshotBase::booted(&vm, tracked).map_err(|e| failed(&e))?;
        let jobs = Jobs::new(vm.clone(), self.state_dir.clone());
        jobs.keep_snapshot_base(base);
        vm.resume().map_err(|e| failed(&e))?;
        tracing::info!("the guest runs");
        self.app.provide(jobs.clone());
        Ok(StartedGuest { vm, jobs, memory: host.memory })
    }

    /// Loads the guest of a snapshot, and runs it if the client asks for that. `own` is the
    /// configuration of this process. Returns the guest and its configuration.
    ///
    /// # Errors
    ///
    /// A part of the request cannot be honoured; or no guest can be loaded, and the process is to
    /// end.
    pub(super) fn load(
        &self,
        snapshot: &LoadSnapshotParams,
        own: &MicroVmConfig,
    ) -> Result<(StartedGuest, MicroVmConfig), ApiFault> {
        let loaded = self.try_load(snapshot, own);
        loaded.inspect_err(|fault| tracing::error!("no guest is loaded: {fault}"))
    }

    fn try_load(
        &self,
        snapshot: &LoadSnapshotParams,
        own: &MicroVmConfig,
    ) -> Result<(StartedGuest, MicroVmConfig), ApiFault> {
        let LoadPlan { config, host, contents, backing, sections, shown } =
            load_plan(&self.id, snapshot, own)?;
        let _logged = guest_span(self.vm_id, &config.identity).entered();
        let failed = |e: &dyn ToString| LoadFault::Machine(e.to_string());
        let before_devices = Some(self.close_sandbox(self.restrictions(&config, &host)));
        // A page handler may end.
        exit::set_lost_memory(end_without_memory);
        let tracked = snapshot.track_dirty_pages;
        let options = BuildOptions { contents, before_devices, tracked, ..BuildOptions::default() };
        let machine = KvmMachine::build(self.vm_id, config, &host, options);
        let machine = machine.map_err(build_fault)?;
        let vm: SharedVm = machine.clone();
        let base = SnapshotBase::loaded(&vm, tracked, backing);
        let base = base.map_err(|e| failed(&e))?;
        let clock = if snapshot.clock_realtime { Clock::AdvanceAnyTime } else { Clock::Continue };
        machine.restore_clone(&sections, clock).map_err(|e| failed(&e))?;
        let jobs = Jobs::new(vm.clone(), self.state_dir.clone());
        jobs.keep_snapshot_base(base);
        tracing::info!("the guest is loaded");
        if snapshot.resume_vm {
            let resumed = vm.acquire().and_then(|()| vm.resume());
            resumed.map_err(|e| LoadFault::Resume(e.to_string()))?;
            tracing::info!("the guest runs");
        }
        self.app.provide(jobs.clone());
        Ok((StartedGuest { vm, jobs, memory: host.memory }, shown))
    }

    /// Returns the restrictions of the process with this guest.
    fn restrictions(&self, config: &MachineConfig, host: &HostConfig) -> SandboxOptions {
        let mut sandbox = self.sandbox.clone();
        // Making a drive durable opens its file once more.
        for disk in disks(&config.devices) {
            let places = if disk.readonly { &mut sandbox.read } else { &mut sandbox.write };
            places.push(disk.path.clone());
        }
        sandbox.write.push(self.state_dir.clone());
        // The socket may have to be bound once more, after a migration that has failed.
        let sockets = config.devices.iter().filter_map(|device| match device {
            DeviceConfig::Vsock(vsock) => Some(vsock.uds.clone()),
            _ => None,
        });
        sandbox.sockets.extend(sockets);
        if let SerialSink::File(path) = &host.serial {
            sandbox.write.push(path.clone());
        }
        sandbox
    }

    /// Returns what restricts this thread, the control thread and the pool to `options`, once.
    fn close_sandbox(&self, options: SandboxOptions) -> Box<dyn FnOnce() -> io::Result<()>> {
        let (control, is_closed) = (self.control.clone(), self.is_closed.clone());
        Box::new(move || {
            if is_closed.get() {
                return Ok(());
            }
            let theirs = options.clone();
            control.run(move || sandbox::close(&theirs))?.map_err(io::Error::other)?;
            sandbox::close_pool(&options).map_err(io::Error::other)?;
            sandbox::close(&options).map_err(io::Error::other)?;
            is_closed.set(true);
            Ok(())
        })
    }
}

/// Returns the answer to a start whose machine cannot be built.
fn start_fault(e: &MachineError) -> StartFault {
    match e {
        MachineError::HostLacks(HostLack::Template(lack)) => match *lack {
            TemplateLack::Capability(number) => StartFault::Capability(number),
            TemplateLack::Leaf { function: leaf, index: subleaf } => {
                StartFault::CpuidLeaf { leaf, subleaf }
            }
            TemplateLack::Msr(index) => StartFault::Msr(index),
            TemplateLack::Value { .. } => StartFault::Machine(e.to_string()),
        },
        _ => StartFault::Machine(e.to_string()),
    }
}
