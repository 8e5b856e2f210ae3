//! All virtio devices of a machine: built from its configuration, connected to KVM, and paused,
//! saved and handed over together.

mod create;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use driftline_guest::{MAX_QUEUED_PACKET_BYTES, NextHost, VmId};
use kvm_ioctls::IoEventAddress;

use super::balloon::BalloonControl;
use super::block::{
    CurrentFlusher, DiskError, DiskFileControl, DriveSource, FileIdentity, flush_all,
};
use super::counts::MachineCounters;
use super::error::DeviceError;
use super::opener::Opener;
use super::placement::{device_at, placement};
use super::stats::StatsHandle;
use super::virtio::{
    Completion, PendingRequest, PendingRestore, QueuedPacketsError, REPLY_GRACE, RateLimitControl,
    RequestError, Transport, VirtioState,
};
use crate::codec;
use crate::config::{DeviceConfig, DiskIdentity, HostConfig, MachineConfig, disks_mut};
use crate::fail_point;
use crate::kvm::KvmVm;
use crate::memory::{Memory, ProtectedFrames};

/// Limit on how long a pause waits for requests in flight in the devices.
const STALL_LIMIT: Duration = Duration::from_secs(10);
/// Limit on how long all devices together, working in parallel, may take to make the guest's writes
/// durable and release their files. The same limit applies to acquiring the files, which drops
/// their cached pages. The guest is paused meanwhile. Storage that needs longer is too slow for a
/// hand-over now.
const RELEASE_LIMIT: Duration = Duration::from_secs(10);
/// Upper bound on acquiring the files of all devices, whether it succeeds or fails at a stuck
/// device.
pub const ACQUIRE_LIMIT: Duration = RELEASE_LIMIT.saturating_add(REPLY_GRACE);
/// Limit on any other request to one device. None of these requests waits for a backend.
const ASK_LIMIT: Duration = Duration::from_secs(5);
/// Bytes reserved per device for encoding its queued packets: device index, length, and the total
/// count.
const QUEUED_PACKETS_HEADER: usize = 8;
/// Offset of the `QueueNotify` register, where ioeventfds listen.
const QUEUE_NOTIFY: u64 = virtio_bindings::virtio_mmio::VIRTIO_MMIO_QUEUE_NOTIFY as u64;

/// A drive that the guest can write to.
#[derive(Clone, Debug)]
pub(crate) struct Drive(CurrentFlusher);

impl Drive {
    /// Makes the guest's writes to `drives` durable while the guest runs. Returns whether that was
    /// complete within `limit`; an unfinished flush continues in the background.
    ///
    /// # Errors
    ///
    /// Fails if a flush fails. The guest also gets this error at its next flush.
    pub(crate) fn flush(drives: &[Self], limit: Duration) -> Result<bool, DiskError> {
        let flushers: Vec<_> = drives.iter().map(|drive| drive.0.get()).collect();
        flush_all(flushers.iter(), limit)
    }
}

/// The devices of a machine. See the module documentation.
#[derive(Debug)]
pub(crate) struct DeviceSet {
    devices: Vec<Transport>,
    drives: Vec<Drive>,
    sources: Vec<DriveSource>,
    files: Vec<OpenFile>,
    stats_handles: Vec<StatsHandle>,
    rate_limits: Vec<RateLimitControl>,
    disk_files: Vec<DiskFileControl>,
    balloon: Option<BalloonControl>,
    counters: MachineCounters,
    opener: Option<Opener>,
    /// Frames that no device may change now.
    protected_frames: Arc<ProtectedFrames>,
    limits: DeviceLimits,
}

/// Time limits for all devices together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceLimits {
    /// Limit for requests in flight at a pause.
    pub(crate) stall: Duration,
    /// Limit for releasing or acquiring files. See [`RELEASE_LIMIT`].
    pub(crate) release: Duration,
    /// Limit for any other request to one device. See [`ASK_LIMIT`].
    pub(crate) ask: Duration,
}

impl Default for DeviceLimits {
    fn default() -> Self {
        Self { stall: STALL_LIMIT, release: RELEASE_LIMIT, ask: ASK_LIMIT }
    }
}

/// Open file of a disk.
#[derive(Debug)]
struct OpenFile {
    disk: String,
    file: FileIdentity,
    identity: Option<DiskIdentity>,
    readonly: bool,
}

impl DeviceSet {
    fn empty() -> Self {
        Self {
            devices: Vec::new(),
            drives: Vec::new(),
            sources: Vec::new(),
            files: Vec::new(),
            stats_handles: Vec::new(),
            rate_limits: Vec::new(),
            disk_files: Vec::new(),
            balloon: None,
            counters: MachineCounters::default(),
            opener: None,
            protected_frames: Arc::default(),
            limits: DeviceLimits::default(),
        }
    }

    /// Returns a set of these devices with limits of their own.
    #[cfg(test)]
    pub(crate) fn of(devices: Vec<Transport>, limits: DeviceLimits) -> Self {
        let mut set = Self::empty();
        (set.devices, set.limits) = (devices, limits);
        set
    }

    /// Builds the devices of `config`, the configuration of `guest`. They start paused. With
    /// `acquire`, they acquire the resources that only one host may have. Without it, nothing else
    /// may have them, except the host that the guest comes from. The files of the disks in
    /// `created_here` are copies that were made for this guest.
    pub(crate) fn build(
        config: &MachineConfig,
        memory: &Memory,
        guest: VmId,
        acquire: bool,
        host: &HostConfig,
    ) -> Result<Self, DeviceError> {
        let mut set = Self::empty();
        set.protected_frames = memory.protected_frames().clone();
        for device in &config.devices {
            let id = device.id();
            let system = |cause| DeviceError::System { id: id.to_owned(), cause };
            fail_point::pass(id).map_err(system)?;
            let mut disk = None;
            let mut built = set.create(device, config.vcpus, guest, host, &mut disk)?;
            if acquire {
                built.acquire(NextHost::Another)?;
            }
            let limiters = built.limits().len();
            let device = Transport::spawn(id, built, memory.ram().clone()).map_err(system)?;
            set.rate_limits.extend((limiters > 0).then(|| device.rate_limits(id, limiters)));
            let served = disk.map(|parts| parts.served_by(device.backend_caller()));
            set.disk_files.extend(served);
            set.devices.push(device);
        }
        Ok(set)
    }

    /// Records the identities of the disks in `devices`, the devices of the configuration, so that
    /// the next host can check that it has the same disks.
    pub(crate) fn note_disks(&self, devices: &mut [DeviceConfig]) {
        for disk in disks_mut(devices) {
            if let Some(open) = self.files.iter().find(|open| open.disk == disk.id) {
                disk.identity.clone_from(&open.identity);
            }
        }
    }

    /// Connects interrupts and notifications to `vm`.
    pub(crate) fn connect(&self, vm: &KvmVm) -> io::Result<()> {
        for (i, device) in self.devices.iter().enumerate() {
            let place = placement(i).ok_or_else(|| io::Error::other("no interrupt is left"))?;
            fail_point::pass("irqfd")?;
            vm.fd().register_irqfd(device.line().descriptor(), place.irq)?;
            let notify = IoEventAddress::Mmio(place.base + QUEUE_NOTIFY);
            for (kick, queue) in device.kicks().zip(0u32..) {
                vm.fd().register_ioevent(kick.descriptor(), &notify, queue)?;
            }
        }
        Ok(())
    }

    /// Returns the drives that the guest can write to.
    pub(crate) fn drives(&self) -> &[Drive] {
        &self.drives
    }

    /// Returns all disks as sources for copying.
    pub(crate) fn sources(&self) -> &[DriveSource] {
        &self.sources
    }

    /// Returns the handles for reading device counters.
    pub(crate) fn stats_handles(&self) -> &[StatsHandle] {
        &self.stats_handles
    }

    /// Returns the handles for reading the counters of the other devices.
    pub(crate) fn counters(&self) -> &MachineCounters {
        &self.counters
    }

    /// Returns the handles for the rate limits of the devices that can have some.
    pub(crate) fn rate_limits(&self) -> &[RateLimitControl] {
        &self.rate_limits
    }

    /// Returns the handles by which the disks get other files.
    pub(crate) fn disk_files(&self) -> &[DiskFileControl] {
        &self.disk_files
    }

    /// Returns the balloon, if there is one.
    pub(crate) fn balloon(&self) -> Option<&BalloonControl> {
        self.balloon.as_ref()
    }

    /// Handles a guest's read of an address without memory. Reads as ones if no device is there.
    pub(crate) fn read(&self, addr: u64, data: &mut [u8]) {
        match self.at(addr) {
            Some((device, offset)) => device.read(offset, data),
            None => data.fill(0xff),
        }
    }

    /// Handles a guest's write to an address without memory. Returns whether a device still has
    /// work to do for it. If so, the value that `done` creates is dropped when the work is
    /// complete.
    pub(crate) fn write(&self, addr: u64, data: &[u8], done: impl FnOnce() -> Completion) -> bool {
        self.at(addr).is_some_and(|(device, offset)| device.write(offset, data, done))
    }

    fn at(&self, addr: u64) -> Option<(&Transport, u64)> {
        let (index, offset) = device_at(addr)?;
        Some((self.devices.get(index)?, offset))
    }

    /// Cancels the disks' waits for an epoch, until [`resume`](Self::resume). Call it before
    /// pausing any vCPU: a disk that waits for an epoch handles no request, and a vCPU that waits
    /// for that disk cannot be paused.
    pub(crate) fn cancel_disk_waits(&self) {
        self.sources.iter().for_each(DriveSource::cancel_waits);
    }

    /// Allows the disks' waits for an epoch again.
    fn allow_disk_waits(&self) {
        self.sources.iter().for_each(DriveSource::allow_waits);
    }

    /// Quiesces all devices in parallel. The vCPUs may run: what they ask of a device waits for
    /// [`resume`](Self::resume). If one device cannot be quiesced, the others resume.
    ///
    /// # Errors
    ///
    /// Fails with the name of the device that could not be quiesced and the reason.
    pub(crate) fn quiesce(&self) -> Result<(), RequestError> {
        let deadline = Instant::now() + self.limits.stall;
        self.cancel_disk_waits();
        let requests: Vec<_> = self.devices.iter().map(|d| d.begin_quiesce(deadline)).collect();
        let quiesced = requests.into_iter().map(PendingRequest::wait).fold(Ok(()), Result::and);
        if quiesced.is_err() {
            // This includes a device that is quiesced later: it then finds the resume in its
            // inbox.
            self.resume();
        }
        quiesced
    }

    /// Resumes all devices.
    pub(crate) fn resume(&self) {
        self.allow_disk_waits();
        self.devices.iter().rev().for_each(Transport::resume);
    }

    /// Returns the deadline for the next device alone, so that a stuck device does not use up the
    /// time of the others.
    fn ask_deadline(&self) -> Instant {
        Instant::now() + self.limits.ask
    }

    /// Acquires the resources that only one host may have. If one device fails, all devices release
    /// their resources, and no peer reaches the guest here. Exception: a disk of a guest that has
    /// run here stays locked if the guest's writes cannot be made durable. A stuck device releases
    /// its resources as soon as its backend responds; this function does not wait for it.
    ///
    /// From [`NextHost::This`], another process of this host may still run the guest with the same
    /// open files: their locks stay as they are, also if this fails. A device that cannot refuse
    /// then is not waited for. It acquires before it resumes.
    pub(crate) fn acquire(&self, from: NextHost) -> Result<(), RequestError> {
        let deadline = Instant::now() + self.limits.release;
        let is_awaited =
            |device: &Transport| from == NextHost::Another || device.hand_over().may_refuse_here;
        // In parallel, because each device may wait for its storage.
        let begin = |device: &Transport| match is_awaited(device) {
            true => Ok(Some(device.begin_acquire(deadline, from))),
            false => device.acquire_here().map(|()| None),
        };
        let requests: Vec<_> = self.acquiring().map(begin).collect();
        let (mut result, mut answered) = (Ok(()), Vec::with_capacity(requests.len()));
        for request in requests {
            let was_awaited = matches!(request, Ok(Some(_)));
            let answer = request.and_then(|pending| pending.map_or(Ok(()), PendingRequest::wait));
            answered.push(was_awaited && answer.as_ref().err().is_none_or(RequestError::is_answer));
            result = result.and(answer);
        }
        if result.is_err() {
            self.undo_acquire(&answered, from);
        }
        result
    }

    /// Returns the devices that acquire anything. No others attach anything.
    fn acquiring(&self) -> impl Iterator<Item = &Transport> {
        self.devices.iter().filter(|device| device.hand_over().acquire)
    }

    /// Makes all devices release their files and peers. Waits only for those that have `answered`.
    fn undo_acquire(&self, answered: &[bool], from: NextHost) {
        let deadline = Instant::now() + self.limits.release;
        let requests: Vec<_> =
            self.acquiring().map(|device| device.begin_undo(deadline, from)).collect();
        for (request, answered) in requests.into_iter().zip(answered) {
            if *answered && let Err(e) = request.wait() {
                tracing::error!("{e}");
            }
        }
    }

    /// Returns duplicates of the files through which the guest is connected to this host, for each
    /// device in order.
    pub(crate) fn share(&self) -> Result<Vec<Vec<OwnedFd>>, RequestError> {
        self.devices.iter().map(|device| device.share_by(self.ask_deadline())).collect()
    }

    /// Makes the guest's writes durable and releases the resources that only one host may have, for
    /// `next`. All devices are tried. If one fails, the caller must acquire again what the others
    /// have released.
    pub(crate) fn release(&self, next: NextHost) -> Result<(), RequestError> {
        let deadline = Instant::now() + self.limits.release;
        // In parallel, as in `acquire`.
        let releasing = self.devices.iter().filter(|device| device.hand_over().release);
        let requests: Vec<_> =
            releasing.map(|device| device.begin_release(deadline, next)).collect();
        requests.into_iter().map(PendingRequest::wait).fold(Ok(()), Result::and)
    }

    /// Detaches the guest's peers (taps, sockets), for `next`. Returns the packets that are queued
    /// for the guest since the save, by device, encoded in at most [`MAX_QUEUED_PACKET_BYTES`]
    /// bytes; empty if there are none. All devices are tried; the error is the first one.
    pub(crate) fn detach(&self, next: NextHost) -> Result<Vec<u8>, RequestError> {
        let mut room = MAX_QUEUED_PACKET_BYTES - QUEUED_PACKETS_HEADER * self.devices.len();
        let mut queued_packets = BTreeMap::new();
        let mut result = Ok(());
        for (device, i) in self.devices.iter().zip(0u16..).filter(|(d, _)| d.hand_over().detach) {
            match device.detach_by(room, next, self.ask_deadline()) {
                Ok(bytes) if bytes.is_empty() => {}
                Ok(bytes) => {
                    room = room.saturating_sub(bytes.len());
                    queued_packets.insert(i, bytes);
                }
                Err(why) => result = result.and(Err(why)),
            }
        }
        result?;
        match queued_packets.is_empty() {
            true => Ok(Vec::new()),
            false => Ok(codec::encode(&queued_packets).map_err(QueuedPacketsError::Encode)?),
        }
    }

    /// Attaches the guest's peers on this host and takes the data that [`detach`](Self::detach)
    /// returned on the previous host. All devices are tried, even if that data is malformed.
    pub(crate) fn attach(&self, queued_packets: &[u8]) -> Result<(), RequestError> {
        let decoded = match queued_packets.is_empty() {
            true => Ok(BTreeMap::new()),
            false => codec::decode::<BTreeMap<u16, Vec<u8>>>(queued_packets),
        };
        let (mut queued_packets, mut result) = match decoded {
            Ok(queued_packets) => (queued_packets, Ok(())),
            Err(e) => (BTreeMap::new(), Err(QueuedPacketsError::Decode(e).into())),
        };
        for (device, i) in self.devices.iter().zip(0..).filter(|(d, _)| d.hand_over().detach) {
            let queued_packets = queued_packets.remove(&i).unwrap_or_default();
            result = result.and(device.attach_by(queued_packets, self.ask_deadline()));
        }
        if let Some((device, _)) = queued_packets.first_key_value() {
            result = result.and(Err(QueuedPacketsError::NoDevice(*device).into()));
        }
        result
    }

    /// Saves the states of all devices, which must be quiesced.
    pub(crate) fn save(&self) -> Result<Vec<VirtioState>, RequestError> {
        let by = self.ask_deadline();
        let saves: Vec<_> = self.devices.iter().map(|device| device.begin_save(by)).collect();
        let all = self.devices.iter().zip(saves);
        all.map(|(device, pending)| device.finish_save(pending)).collect()
    }

    /// Begins to restore saved states into devices that have never run. The error contains the
    /// device's index.
    pub(crate) fn begin_restore(
        &self,
        states: Vec<VirtioState>,
    ) -> Result<Vec<PendingRestore>, (usize, RequestError)> {
        let by = self.ask_deadline();
        let begin = |(i, (device, state)): (usize, (&Transport, VirtioState))| {
            device.begin_restore(state, by).map_err(|why| (i, why))
        };
        self.devices.iter().zip(states).enumerate().map(begin).collect()
    }

    /// Waits until the states are restored that [`begin_restore`](Self::begin_restore) restores.
    pub(crate) fn finish_restore(
        &self,
        restores: Vec<PendingRestore>,
    ) -> Result<(), (usize, RequestError)> {
        for (i, (device, pending)) in self.devices.iter().zip(restores).enumerate() {
            device.finish_restore(pending).map_err(|why| (i, why))?;
        }
        Ok(())
    }

    /// Raises the interrupt again of each device whose driver has not acknowledged its last one. An
    /// interrupt through an irqfd takes some time to arrive. If the interrupt controllers are saved
    /// in that time, it is in no saved state. Drivers ignore an extra interrupt as spurious.
    pub(crate) fn interrupt_again(&self, vm: &KvmVm) -> io::Result<()> {
        for (i, device) in self.devices.iter().enumerate() {
            if let Some(place) = placement(i).filter(|_| device.interrupt_pending()) {
                tracing::trace!("{} interrupts again", device.label());
                vm.pulse_irq(place.irq)?;
            }
        }
        Ok(())
    }
}

impl Drop for DeviceSet {
    fn drop(&mut self) {
        // Tell all devices first: dropping them waits for each in turn, and several may be stuck.
        self.devices.iter().for_each(Transport::quit);
    }
}
