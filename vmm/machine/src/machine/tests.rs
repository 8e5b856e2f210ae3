//! Machines with slow or stuck devices: every wait for such a device has a limit.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use driftline_guest::{HandOver, Lifecycle, NextHost, RunState, Stateful, VmId};

use super::supervisor::Supervisor;
use super::vcpus::VcpuHandle;
use super::{BuildOptions, KvmMachine};
use crate::config::{DeviceConfig, HostConfig, MachineConfig, RngConfig, SerialSink};
use crate::devices::{DeviceLimits, DeviceSet, PORT_BYTES, PortInput, fake};
use crate::memory::Memory;
use crate::terminal::Stdin;
use crate::testing::{ECHO, Elf, disk, kernel_config, kvm_or_skip, run_in_child};
use crate::vm::{EndReason, Vm};

pub(super) const LONG: Duration = Duration::from_secs(60);

/// A machine that runs given code and has one device, whose behavior `script` sets.
struct FakeDeviceMachine {
    machine: Arc<KvmMachine>,
    script: Arc<fake::Script>,
    dir: tempfile::TempDir,
}

impl FakeDeviceMachine {
    fn new(code: &[u8], stall: Duration) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let kernel = dir.path().join("kernel");
        std::fs::write(&kernel, Elf::new(code).bytes()).unwrap();
        let config = kernel_config(&kernel);
        let serial = SerialSink::File(dir.path().join("serial"));
        let host = HostConfig { serial, ..Default::default() };
        let script = Arc::new(fake::Script::default());
        let device = Box::new(fake::FakeDevice(script.clone()));
        let devices = |_: &_, memory: &Memory, _, _| {
            let fake = fake::spawn("fake", device, memory.ram().clone()).unwrap();
            Ok(DeviceSet::of(vec![fake], DeviceLimits { stall, ..DeviceLimits::default() }))
        };
        let options = BuildOptions::default();
        let built = KvmMachine::assemble(VmId::random(), config, &host, devices, options);
        Self { machine: built.unwrap(), script, dir }
    }

    /// Calls `f` with the first vCPU, on the supervisor's thread.
    fn with_first_vcpu(&self, f: impl FnOnce(&VcpuHandle) + Send + 'static) {
        let call = |supervisor: &mut Supervisor| {
            supervisor.with_first_vcpu(f);
            Ok(())
        };
        self.machine.ask("use a vCPU", call).unwrap();
    }

    /// Makes the first vCPU, which is paused, wait in a job until the returned sender is dropped.
    fn block_vcpu(&self) -> mpsc::Sender<()> {
        let (gate, closed) = mpsc::channel::<()>();
        self.with_first_vcpu(|vcpu| _ = vcpu.paused().tell(move |_| _ = closed.recv()));
        gate
    }

    fn printed(&self) -> String {
        let path: &Path = &self.dir.path().join("serial");
        std::fs::read_to_string(path).unwrap_or_default()
    }

    #[track_caller]
    fn wait_for(&self, what: &str) {
        wait_until(what, || self.printed() == what);
    }
}

#[track_caller]
pub(super) fn wait_until(what: &str, f: impl Fn() -> bool) {
    let end = Instant::now() + LONG;
    while !f() {
        assert!(Instant::now() < end, "{what}: not in {LONG:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Resets the first device, then prints an R.
#[rustfmt::skip]
const RESET: [u8; 20] = [
    // mov ebx, 0xd0000070; mov dword [ebx], 0
    0xbb, 0x70, 0x00, 0x00, 0xd0, 0xc7, 0x03, 0, 0, 0, 0,
    // mov dx, 0x3f8; mov al, 'R'; out dx, al; jmp $
    0x66, 0xba, 0xf8, 0x03, 0xb0, b'R', 0xee, 0xeb, 0xfe,
];

#[test]
fn failed_pause_leaves_guest_and_console_running() {
    if !kvm_or_skip("failed_pause_leaves_guest_and_console_running") {
        return;
    }
    let fixture = FakeDeviceMachine::new(ECHO, Duration::from_millis(100));
    let (machine, com1) = (&fixture.machine, fixture.machine.bus.com1());
    machine.resume().unwrap();
    assert_eq!(com1.feed(b"a", false), 1);
    fixture.wait_for("a");
    fake::Script::set(&fixture.script.busy, true);
    let why = machine.pause().unwrap_err().to_string();
    assert!(why.contains("virtio-rng \"fake\" still has 1 requests in flight"), "{why}");
    assert_eq!(machine.run_state(), RunState::Running);
    assert_eq!(com1.feed(b"b", false), 1, "its console takes input");
    fixture.wait_for("ab");
    fake::Script::set(&fixture.script.busy, false);
    machine.pause().unwrap();
    assert_eq!(com1.feed(b"c", false), 0, "a paused guest gets no input");
    machine.resume().unwrap();
    assert_eq!(com1.feed(b"d", false), 1);
    fixture.wait_for("abd");
}

#[test]
fn guest_runs_while_pause_waits_for_device() {
    if !kvm_or_skip("guest_runs_while_pause_waits_for_device") {
        return;
    }
    let fixture = FakeDeviceMachine::new(ECHO, LONG);
    let (machine, com1) = (&fixture.machine, fixture.machine.bus.com1());
    machine.resume().unwrap();
    fake::Script::set(&fixture.script.busy, true);
    let pause = std::thread::scope(|scope| {
        let pause = scope.spawn(|| machine.pause_and_save().unwrap());
        wait_until("the pause waits", || fake::Script::is(&fixture.script.quiescing));
        assert_eq!(com1.feed(b"a", false), 1);
        fixture.wait_for("a");
        let answered = Instant::now();
        fake::Script::set(&fixture.script.busy, false);
        let pause = pause.join().unwrap();
        assert!(pause.since > answered, "the wait for the device is not part of the pause");
        pause
    });
    assert_eq!((pause.before, machine.run_state()), (RunState::Running, RunState::Paused));
    pause.saved.unwrap();
}

/// A guest that moves while it is paused takes along what is in its port.
#[test]
fn paused_port_has_all_input_that_was_read() {
    if !kvm_or_skip("paused_port_has_all_input_that_was_read") {
        return;
    }
    let fixture = FakeDeviceMachine::new(ECHO, LONG);
    let (machine, com1) = (&fixture.machine, fixture.machine.bus.com1());
    let (is_over, read_bytes) = (AtomicBool::new(false), AtomicUsize::new(0));
    let read = |room: &mut [u8]| {
        let n = room.len().min(3);
        read_bytes.fetch_add(n, Ordering::SeqCst);
        std::thread::sleep(Duration::from_micros(100));
        room[..n].fill(b'a');
        Ok(n)
    };
    machine.resume().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::SeqCst) {
                let mut buffer = [0; PORT_BYTES];
                match com1.feed_from(&mut buffer, read).unwrap() {
                    PortInput::Taken => {}
                    PortInput::NoRoom => std::thread::sleep(Duration::from_micros(100)),
                    left => panic!("{left:?}"),
                }
            }
        });
        let check = || {
            wait_until("the first echo", || !fixture.printed().is_empty());
            for _ in 0..50 {
                machine.pause().unwrap();
                let read = read_bytes.load(Ordering::SeqCst);
                // The guest may have one byte that it has not written yet.
                wait_until("all input in the port or echoed", || {
                    let had = fixture.printed().len() + com1.state().unread();
                    had == read || had + 1 == read
                });
                machine.resume().unwrap();
            }
        };
        let checked = catch_unwind(AssertUnwindSafe(check));
        is_over.store(true, Ordering::SeqCst);
        checked.unwrap_or_else(|failure| resume_unwind(failure));
    });
    let all = "a".repeat(read_bytes.load(Ordering::SeqCst));
    assert!(!all.is_empty());
    fixture.wait_for(&all);
}

/// Returns a machine whose guest waits for a device reset, which waits for requests under way.
fn in_a_reset(stall: Duration) -> FakeDeviceMachine {
    let fixture = FakeDeviceMachine::new(&RESET, stall);
    fake::Script::set(&fixture.script.busy, true);
    fixture.machine.resume().unwrap();
    wait_until("a reset", || fake::Script::is(&fixture.script.resetting));
    fixture
}

#[test]
fn guest_waiting_for_device_can_pause_and_stop() {
    if !kvm_or_skip("guest_waiting_for_device_can_pause_and_stop") {
        return;
    }
    // The device takes longer than the limit of the pause: the guest keeps waiting.
    let fixture = in_a_reset(Duration::from_millis(100));
    let began = Instant::now();
    let why = fixture.machine.pause().unwrap_err();
    assert!(began.elapsed() < LONG, "{:?}: {why}", began.elapsed());
    assert_eq!(fixture.machine.run_state(), RunState::Running);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(fixture.printed(), "", "the reset is not done");
    fake::Script::set(&fixture.script.busy, false);
    fixture.wait_for("R");
    // The reset completes in time: the guest is paused, and resumes after its write.
    wait_until("a pause before the end of the reset", || {
        let fixture = in_a_reset(LONG);
        std::thread::scope(|scope| {
            let pausing = scope.spawn(|| fixture.machine.pause().unwrap());
            std::thread::sleep(Duration::from_millis(50));
            fake::Script::set(&fixture.script.busy, false);
            pausing.join().unwrap();
        });
        // On a busy host the reset may complete first.
        let is_paused_in_it = fixture.printed().is_empty();
        fixture.machine.resume().unwrap();
        fixture.wait_for("R");
        is_paused_in_it
    });
    // The reset never completes.
    let fixture = in_a_reset(Duration::from_millis(100));
    let began = Instant::now();
    fixture.machine.stop("it takes too long");
    assert!(began.elapsed() < LONG, "{:?}", began.elapsed());
    let end = EndReason::Stopped("it takes too long".to_owned());
    assert_eq!(fixture.machine.wait_end(None), Some(end));
    fake::Script::set(&fixture.script.busy, false);
}

#[test]
fn stuck_device_does_not_delay_stop() {
    if !kvm_or_skip("stuck_device_does_not_delay_stop") {
        return;
    }
    let fixture = FakeDeviceMachine::new(ECHO, Duration::from_millis(100));
    let machine = &fixture.machine;
    machine.resume().unwrap();
    machine.pause().unwrap();
    fake::Script::set(&fixture.script.stuck, true);
    let why = machine.save_state().unwrap_err().to_string();
    assert!(why.contains("virtio-rng \"fake\" did not save its state"), "{why}");
    let began = Instant::now();
    machine.stop("it is stuck");
    assert!(began.elapsed() < LONG, "{:?}", began.elapsed());
    assert_eq!(machine.run_state(), RunState::Stopped);
    fake::Script::set(&fixture.script.stuck, false);
}

#[test]
fn vcpu_hanging_in_a_save_refuses_the_resume() {
    if !kvm_or_skip("vcpu_hanging_in_a_save_refuses_the_resume") {
        return;
    }
    let fixture = FakeDeviceMachine::new(ECHO, LONG);
    let machine = &fixture.machine;
    machine.resume().unwrap();
    machine.pause().unwrap();
    let gate = fixture.block_vcpu();
    let why = machine.save_state().unwrap_err().to_string();
    assert!(why.contains("vCPU 0 did not save its state"), "{why}");
    let began = Instant::now();
    let why = machine.resume().unwrap_err().to_string();
    assert!(why.contains("vCPU 0 did not finish the job"), "{why}");
    assert!(began.elapsed() < LONG, "{:?}", began.elapsed());
    assert_eq!(machine.run_state(), RunState::Paused);
    drop(gate);
    machine.resume().unwrap();
    assert_eq!(machine.bus.com1().feed(b"a", false), 1);
    fixture.wait_for("a");
}

#[test]
fn resume_waits_for_a_busy_vcpu() {
    if !kvm_or_skip("resume_waits_for_a_busy_vcpu") {
        return;
    }
    let fixture = FakeDeviceMachine::new(ECHO, LONG);
    let machine = &fixture.machine;
    let gate = fixture.block_vcpu();
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || tell.send(machine.resume()));
        told.recv_timeout(Duration::from_millis(100)).expect_err("the vCPU has not resumed");
        drop(gate);
        told.recv_timeout(LONG).unwrap().unwrap();
    });
}

/// Another thread may have the ID of one that has ended.
#[test]
fn ended_vcpu_thread_has_no_id() {
    if !kvm_or_skip("ended_vcpu_thread_has_no_id") {
        return;
    }
    let fixture = FakeDeviceMachine::new(ECHO, LONG);
    let id = |vcpu: &VcpuHandle| vcpu.thread_id().is_some();
    fixture.with_first_vcpu(move |vcpu| {
        wait_until("the thread to start", || id(vcpu));
        vcpu.running().end();
        wait_until("the thread to end", || !id(vcpu));
    });
}

/// The guest has no handler of the interrupt, so it cannot survive it.
#[test]
fn nmi_reaches_a_running_guest() {
    if !kvm_or_skip("nmi_reaches_a_running_guest") {
        return;
    }
    let fixture = FakeDeviceMachine::new(ECHO, LONG);
    let machine = &fixture.machine;
    machine.resume().unwrap();
    assert_eq!(machine.bus.com1().feed(b"a", false), 1);
    fixture.wait_for("a");
    machine.send_nmi().unwrap();
    let end = machine.wait_end(Some(LONG));
    assert!(matches!(&end, Some(EndReason::Crashed(_))), "{end:?}");
    let refused = machine.send_nmi().unwrap_err().to_string();
    assert_eq!(refused, "cannot send an NMI to a guest that is stopped");
}

/// Resumes the guest while another thread releases it. In either order, a released guest does not
/// run (I7).
#[test]
fn released_guest_never_runs() {
    if !kvm_or_skip("released_guest_never_runs") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let kernel = dir.path().join("kernel");
    std::fs::write(&kernel, Elf::new(ECHO).bytes()).unwrap();
    let config = kernel_config(&kernel);
    let host = HostConfig { serial: SerialSink::Null, ..Default::default() };
    let machine = KvmMachine::launch(config, &host).unwrap();
    for round in 0..500 {
        let both = std::sync::Barrier::new(2);
        let released = std::thread::scope(|scope| {
            let released = scope.spawn(|| {
                both.wait();
                // Each round releases at a different moment of the resume.
                (0..round * 20).for_each(|_| std::hint::spin_loop());
                machine.release(NextHost::Another)
            });
            both.wait();
            let _ = machine.resume();
            released.join().unwrap()
        });
        if released.is_ok() {
            assert_eq!(machine.run_state(), RunState::Paused, "round {round}");
            machine.resume().unwrap_err();
            machine.acquire().unwrap();
        } else {
            machine.pause().unwrap();
        }
    }
    machine.stop("the test is over");
}

/// The guest has two devices, one of which holds nothing.
#[test]
fn released_and_detached_guest_can_be_acquired() {
    if !kvm_or_skip("released_and_detached_guest_can_be_acquired") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let kernel = dir.path().join("kernel");
    std::fs::write(&kernel, Elf::new(ECHO).bytes()).unwrap();
    let path = dir.path().join("disk");
    std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let disk = DeviceConfig::Disk(disk("root", &path, 1 << 20));
    let devices = vec![disk, DeviceConfig::Rng(RngConfig::default())];
    let config = MachineConfig { devices, ..kernel_config(&kernel) };
    let host = HostConfig { serial: SerialSink::Null, ..Default::default() };
    let machine = KvmMachine::launch(config, &host).unwrap();
    machine.resume().unwrap();
    machine.release_and_detach(NextHost::This).unwrap_err();
    assert_eq!(machine.run_state(), RunState::Running);
    machine.pause().unwrap();
    for next in [NextHost::This, NextHost::Another] {
        assert!(machine.release_and_detach(next).unwrap().is_empty());
        machine.resume().unwrap_err();
        machine.acquire().unwrap();
    }
    machine.resume().unwrap();
    machine.stop("the test is over");
}

/// Runs in its own process, whose standard input is a pipe.
#[test]
fn console_belongs_to_the_guest_that_runs() {
    const CHILD: &str = "HAS_A_CONSOLE";
    if !kvm_or_skip("console_belongs_to_the_guest_that_runs") {
        return;
    }
    if std::env::var_os(CHILD).is_none() {
        let name = "machine::tests::console_belongs_to_the_guest_that_runs";
        let (stdin, _writer) = std::io::pipe().unwrap();
        return run_in_child(name, CHILD, "1", stdin);
    }
    let dir = tempfile::tempdir().unwrap();
    let kernel = dir.path().join("kernel");
    std::fs::write(&kernel, Elf::new(ECHO).bytes()).unwrap();
    let host = HostConfig { serial: SerialSink::Stdio, ..Default::default() };
    let machine = || KvmMachine::launch(kernel_config(&kernel), &host).unwrap();
    let is_taken = || Stdin::take().is_none();
    // `other` plays the source's guest on the same terminal.
    let (received, other) = (machine(), machine());
    assert!(!is_taken(), "a guest that has not run takes it");
    received.resume().unwrap();
    assert!(is_taken());
    drop(other);
    assert!(is_taken(), "the end of a guest that has not run frees it");
    let other = machine();
    other.resume().unwrap();
    drop(other);
    assert!(is_taken(), "the end of a guest that was refused it frees it");
    drop(received);
    assert!(!is_taken());
}
