//! A scripted device for tests of code that handles devices. It has one queue, from which it never
//! takes anything.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use driftline_guest::{GuestRam, NextHost};
use vmm_sys_util::epoll::EventSet;

use super::{
    Device, DeviceIo, DeviceKind, HandOverNeeds, QuiesceError, Transport, Violation, Watcher,
};
use crate::devices::error::{DeviceError, StateError};
use crate::devices::misfit::DeviceMisfit;

/// The script and the record of the device. Each flag may be changed at any time.
#[derive(Debug, Default)]
pub(crate) struct Script {
    /// Whether a request is in flight, which does not end.
    pub(crate) busy: AtomicBool,
    /// Whether a reset waits for the end of that request.
    pub(crate) resetting: AtomicBool,
    /// Whether a pause waits for the end of that request.
    pub(crate) quiescing: AtomicBool,
    /// Whether the device refuses to be released.
    pub(crate) refuses_release: AtomicBool,
    /// Whether the device refuses to be acquired.
    pub(crate) refuses_acquire: AtomicBool,
    /// Whether no acquire from [`NextHost::This`] fails.
    pub(crate) refuses_nothing_here: AtomicBool,
    /// Whether the thread gets stuck in the next request, or in the next look at the queue.
    pub(crate) stuck: AtomicBool,
    /// Whether the thread has been stuck.
    pub(crate) got_stuck: AtomicBool,
    /// Whether the device was acquired.
    pub(crate) acquired: AtomicBool,
    /// Whether the device was acquired when it was resumed last.
    pub(crate) resumed_acquired: AtomicBool,
    /// Whether the device was released.
    pub(crate) released: AtomicBool,
    /// Whether the device's peers are attached.
    pub(crate) attached: AtomicBool,
    /// Whether a hand-over needs nothing of the device. Read when its thread starts.
    pub(crate) holds_nothing: AtomicBool,
}

impl Script {
    pub(crate) fn set(flag: &AtomicBool, to: bool) {
        flag.store(to, Ordering::SeqCst);
    }

    pub(crate) fn is(flag: &AtomicBool) -> bool {
        flag.load(Ordering::SeqCst)
    }

    fn wait_while_stuck(&self) {
        while Self::is(&self.stuck) {
            Self::set(&self.got_stuck, true);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn wait_until_idle(&self, deadline: Option<Instant>) -> bool {
        while Self::is(&self.busy) {
            if deadline.is_some_and(|d| Instant::now() >= d) {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }
}

/// A scripted device; see the module. Its kind is virtio-rng.
pub(crate) struct FakeDevice(pub(crate) Arc<Script>);

impl Device for FakeDevice {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Rng
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![8]
    }

    fn config_space(&self) -> Vec<u8> {
        Vec::new()
    }

    fn write_config(&mut self, _: usize, _: &[u8], _: &mut DeviceIo<'_>) {}

    fn start(&mut self, _: &Watcher) -> io::Result<()> {
        Ok(())
    }

    fn activate(&mut self, _: u64) {}

    fn reset(&mut self, _: &mut DeviceIo<'_>) {
        Script::set(&self.0.resetting, true);
        self.0.wait_until_idle(None);
        Script::set(&self.0.resetting, false);
    }

    fn process(&mut self, _: usize, _: &mut DeviceIo<'_>) -> Result<(), Violation> {
        self.0.wait_while_stuck();
        Ok(())
    }

    fn backend_ready(
        &mut self,
        _: u32,
        _: EventSet,
        _: &mut DeviceIo<'_>,
    ) -> Result<(), Violation> {
        Ok(())
    }

    fn quiesce(&mut self, deadline: Instant, _: &mut DeviceIo<'_>) -> Result<(), QuiesceError> {
        Script::set(&self.0.quiescing, true);
        let is_idle = self.0.wait_until_idle(Some(deadline));
        Script::set(&self.0.quiescing, false);
        if is_idle { Ok(()) } else { Err(QuiesceError::InFlight(1)) }
    }

    fn resume(&mut self, _: bool, _: &mut DeviceIo<'_>) -> Result<(), Violation> {
        Script::set(&self.0.resumed_acquired, Script::is(&self.0.acquired));
        Ok(())
    }

    fn save(&self) -> Result<Vec<u8>, DeviceError> {
        self.0.wait_while_stuck();
        Ok(Vec::new())
    }

    fn restore(&mut self, _: &[u8]) -> Result<(), DeviceError> {
        self.0.wait_while_stuck();
        Ok(())
    }

    fn hand_over(&self) -> HandOverNeeds {
        let needs = !Script::is(&self.0.holds_nothing);
        let may_refuse_here = needs && !Script::is(&self.0.refuses_nothing_here);
        HandOverNeeds { acquire: needs, may_refuse_here, release: needs, detach: needs }
    }

    fn detach(&mut self, _: usize, _: NextHost) -> Vec<u8> {
        self.0.wait_while_stuck();
        Script::set(&self.0.attached, false);
        Vec::new()
    }

    fn attach(&mut self, _: &[u8]) -> Result<(), DeviceError> {
        self.0.wait_while_stuck();
        Script::set(&self.0.attached, true);
        Ok(())
    }

    fn acquire(&mut self, _: NextHost) -> Result<(), DeviceError> {
        self.0.wait_while_stuck();
        if Script::is(&self.0.refuses_acquire) {
            return refusal();
        }
        Script::set(&self.0.acquired, true);
        Ok(())
    }

    fn release(&mut self, _: Instant, _: NextHost) -> Result<(), DeviceError> {
        self.0.wait_while_stuck();
        Script::set(&self.0.released, true);
        if Script::is(&self.0.refuses_release) { refusal() } else { Ok(()) }
    }
}

/// Any refusal of a device.
fn refusal() -> Result<(), DeviceError> {
    Err(StateError::from(DeviceMisfit::DiskExchanged { id: "fake".to_owned() }).into())
}

/// Starts the device on a thread of its own, like any device.
pub(crate) fn spawn(id: &str, device: Box<dyn Device>, ram: GuestRam) -> io::Result<Transport> {
    Transport::spawn(id, device, ram)
}

mod tests {
    use std::sync::mpsc;

    use virtio_bindings::virtio_mmio::{VIRTIO_MMIO_QUEUE_SEL, VIRTIO_MMIO_STATUS};

    use super::super::driver::Driver;
    use super::super::{Completion, Transport};
    use super::*;
    use crate::testing::soon;

    fn status(transport: &Transport) -> u32 {
        let mut bytes = [0; 4];
        transport.read(VIRTIO_MMIO_STATUS.into(), &mut bytes);
        u32::from_le_bytes(bytes)
    }

    #[test]
    fn long_reset_blocks_no_vcpu_and_is_visible() {
        let script = Arc::new(Script::default());
        let driver = Driver::started(Box::new(FakeDevice(script.clone())));
        Script::set(&script.busy, true);
        let (sender, done) = mpsc::channel();
        let reset = |sender: mpsc::Sender<()>| {
            let done = || Completion::new(move || sender.send(()).unwrap());
            driver.transport.write(VIRTIO_MMIO_STATUS.into(), &[0; 4], done)
        };
        assert!(reset(sender.clone()) && reset(sender));
        for _ in 0..20 {
            assert_ne!(status(&driver.transport), 0, "it is not done");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(done.try_recv(), Err(mpsc::TryRecvError::Empty));
        Script::set(&script.busy, false);
        done.recv().unwrap();
        done.recv().unwrap();
        assert_eq!(status(&driver.transport), 0);
        let select = VIRTIO_MMIO_QUEUE_SEL.into();
        assert!(!driver.transport.write(select, &[0; 4], || unreachable!()), "nothing to wait for");
    }

    /// The thread is busy outside of a job, so it finds all three jobs together. No later message
    /// wakes it for the last one.
    #[test]
    fn job_behind_a_pause_and_resume_runs() {
        let script = Arc::new(Script::default());
        let driver = Driver::started(Box::new(FakeDevice(script.clone())));
        Script::set(&script.stuck, true);
        driver.kick(0);
        let end = soon();
        while !Script::is(&script.got_stuck) {
            assert!(Instant::now() < end, "the device does not look at its queue");
            std::thread::sleep(Duration::from_millis(1));
        }
        let paused = driver.transport.begin_quiesce(soon());
        driver.transport.resume();
        let last = driver.transport.begin_release(soon(), NextHost::Another);
        Script::set(&script.stuck, false);
        paused.wait().unwrap();
        last.wait().unwrap();
        assert!(Script::is(&script.released));
    }
}
