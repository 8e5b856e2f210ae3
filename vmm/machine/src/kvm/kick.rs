//! Makes a vCPU thread leave `KVM_RUN`: a signal, and a flag that closes the race between the
//! thread's last check and `KVM_RUN`.
//!
//! *Kick*: the sender puts a job into the thread's inbox, sets `immediate_exit` and sends the
//! signal. The thread, once out of `KVM_RUN`, first clears the flag and then empties its inbox. If
//! the signal arrives after the thread's last check and before the next `KVM_RUN`, the flag is
//! still set and `KVM_RUN` returns immediately, so no kick is lost. A thread that has not started
//! yet, or has ended, needs no signal.

use std::io;
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

use kvm_bindings::kvm_run;
use kvm_ioctls::VcpuFd;
use libc::{c_int, c_void, siginfo_t};
use rustix::thread::{Pid, gettid};
use vmm_sys_util::errno;
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler, unblock_signal};

use super::mapping::Mapping;
use super::vm::KvmVm;

const MAP_BYTES: usize = 4096;
const FLAG_OFFSET: usize = std::mem::offset_of!(kvm_run, immediate_exit);
const PORT_WIDTH_OFFSET: usize = std::mem::offset_of!(kvm_run, __bindgen_anon_1.io.size);

/// Handle for kicking one vCPU: the ID of its thread, and a second mapping of its `kvm_run`. The
/// mapping gives access to the `immediate_exit` flag and to exit details that kvm-ioctls does not
/// return.
#[derive(Debug)]
pub struct ImmediateExit {
    map: Mapping,
    /// ID of the thread that receives kicks; 0 if there is none.
    thread: AtomicI32,
}

impl ImmediateExit {
    /// Maps the `kvm_run` of a vCPU of `vm`.
    pub fn new(vm: Arc<KvmVm>, vcpu: &VcpuFd) -> io::Result<Self> {
        let map = Mapping::new(vm, vcpu, MAP_BYTES, 0)?;
        Ok(Self { map, thread: AtomicI32::new(0) })
    }

    /// Directs kicks to the calling thread and unblocks their signal in its signal mask.
    pub fn listen(&self) {
        if let Err(e) = unblock_signal(SIGRTMIN()) {
            tracing::warn!("the kick signal cannot be unblocked: {e:?}");
        }
        self.thread.store(gettid().as_raw_pid(), Ordering::SeqCst);
    }

    /// Directs kicks to no thread: another one may get the ID of the calling thread, which ends.
    pub fn stop_listening(&self) {
        self.thread.store(0, Ordering::SeqCst);
    }

    /// Returns the thread that receives kicks; `None` before it listens and once it has ended. It
    /// may end while the caller uses its ID.
    pub fn thread(&self) -> Option<Pid> {
        Pid::from_raw(self.thread.load(Ordering::SeqCst))
    }

    /// Kicks the vCPU out of `KVM_RUN`. The caller must have put a job into its inbox before.
    pub fn kick(&self) {
        self.set();
        let thread = self.thread.load(Ordering::SeqCst);
        if thread == 0 {
            return;
        }
        let [process, signal] = [std::process::id().into(), libc::c_long::from(SIGRTMIN())];
        // SAFETY: tgkill takes numbers and reaches threads of this process only. The handler of the
        // signal does nothing, so a signal to a thread that has reused the ID of an ended one does
        // no harm.
        let sent =
            unsafe { libc::syscall(libc::SYS_tgkill, process, libc::c_long::from(thread), signal) };
        let error = io::Error::last_os_error();
        if sent != 0 && error.raw_os_error() != Some(libc::ESRCH) {
            tracing::warn!("a vCPU thread cannot be signalled: {error}");
        }
    }

    /// Makes the running `KVM_RUN`, or the next one, return when it checks the flag.
    pub fn set(&self) {
        self.flag().store(1, Ordering::SeqCst);
    }

    /// Allows `KVM_RUN` to run again.
    pub fn clear(&self) {
        self.flag().store(0, Ordering::SeqCst);
    }

    /// Returns the bytes of one access of the vCPU's last exit, which must be a port exit. A string
    /// instruction has several accesses in one exit.
    pub fn port_width(&self) -> usize {
        self.byte(PORT_WIDTH_OFFSET).load(Ordering::Relaxed).into()
    }

    fn flag(&self) -> &AtomicU8 {
        self.byte(FLAG_OFFSET)
    }

    fn byte(&self, offset: usize) -> &AtomicU8 {
        assert!(offset < MAP_BYTES);
        // SAFETY: the byte lies inside the mapping, which lives as long as self.
        let byte = unsafe { self.map.start().as_ptr().add(offset) };
        // SAFETY: every byte is a valid AtomicU8, and this mapping is accessed in no other way.
        unsafe { AtomicU8::from_ptr(byte) }
    }
}

/// Installs the handler of the kick signal, once per process. The handler does nothing, but a
/// handled signal interrupts `KVM_RUN`.
pub fn register_kick_handler() -> Result<(), errno::Error> {
    extern "C" fn nothing(_: c_int, _: *mut siginfo_t, _: *mut c_void) {}
    static REGISTERED: OnceLock<Result<(), errno::Error>> = OnceLock::new();
    *REGISTERED.get_or_init(|| register_signal_handler(SIGRTMIN(), nothing))
}
