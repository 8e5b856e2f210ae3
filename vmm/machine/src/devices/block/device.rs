//! The disk as a virtio [`Device`]: its features, and how it pauses, resumes and moves.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use driftline_guest::NextHost;
use virtio_bindings::virtio_blk::*;
use vmm_sys_util::epoll::EventSet;

use super::file_offer::{COMPLETIONS, EXCHANGE};
use super::request::{self, DiskRequest};
use super::{BlockDevice, BlockState, MAX_BYTES_IN_FLIGHT, QUEUE_SIZE, SEG_MAX};
use crate::config::{DiskCache, RateLimits};
use crate::devices::error::{DeviceError, StateError};
use crate::devices::misfit::DeviceMisfit;
use crate::devices::virtio::{
    Device, DeviceIo, DeviceKind, DeviceRing, HandOverNeeds, QuiesceError, Violation, Watcher,
    decode_state, encode_state,
};

/// Time for which the device works on one queue before it serves other events.
const MAX_ROUND: Duration = Duration::from_millis(10);
/// Upper bound on waiting for flushes under way before a file passes to another process. Nothing
/// has to be durable then, so a slow disk is no reason for a long pause.
const FLUSH_LIMIT: Duration = Duration::from_secs(2);
/// The disk's only rate limiter.
const LIMITER: usize = 0;

impl Device for BlockDevice {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Block
    }

    fn features(&self) -> u64 {
        let writable = [VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES];
        let mode: &[u32] = if self.disk.readonly { &[VIRTIO_BLK_F_RO] } else { &writable };
        let flush: &[u32] = match self.cache {
            DiskCache::Writeback => &[VIRTIO_BLK_F_FLUSH],
            DiskCache::Unsafe => &[],
        };
        let always =
            [VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_MQ];
        mode.iter().chain(flush).chain(&always).fold(0, |bits, bit| bits | 1 << bit)
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE; self.queues.into()]
    }

    fn limits(&self) -> Vec<RateLimits> {
        vec![self.disk.limits]
    }

    fn config_space(&self) -> Vec<u8> {
        request::config_space(&self.disk, self.queues, SEG_MAX)
    }

    fn write_config(&mut self, _: usize, _: &[u8], _: &mut DeviceIo<'_>) {}

    fn start(&mut self, watcher: &Watcher) -> io::Result<()> {
        self.has_run = self.locked;
        match self.engine.completion_event() {
            Some(fd) => watcher.watch(fd, EventSet::IN, COMPLETIONS),
            None => Ok(()),
        }
    }

    fn activate(&mut self, features: u64) {
        // Without this feature the driver has no flush request with which to ask for durability.
        let flushes = features & 1 << VIRTIO_BLK_F_FLUSH != 0;
        self.writes_through = self.cache == DiskCache::Writeback && !flushes;
    }

    fn reset(&mut self, io: &mut DeviceIo<'_>) {
        // The rings are torn down: a request that ends now cannot break their rules.
        let _ = self.drain(None, io);
    }

    fn process(&mut self, queue: usize, io: &mut DeviceIo<'_>) -> Result<(), Violation> {
        let end = Instant::now() + MAX_ROUND;
        while self.bytes_in_flight < MAX_BYTES_IN_FLIGHT {
            let Some(ring) = io.rings.get_mut(queue) else { return Ok(()) };
            let Some(chain) = ring.pop(io.ram)? else { return Ok(()) };
            let request = DiskRequest::read(queue as u16, &chain, &self.disk, io.ram)?;
            if !io.limiters.admit(LIMITER, queue, request.limited_bytes()) {
                ring.unpop();
                return Ok(());
            }
            self.start_request(queue, chain.head, request, io)?;
            if Instant::now() >= end {
                io.rings.get_mut(queue).into_iter().for_each(DeviceRing::yield_round);
                return Ok(());
            }
        }
        self.counters.stalls.add(1);
        self.stalled_queues |= 1 << queue;
        Ok(())
    }

    fn backend_ready(
        &mut self,
        token: u32,
        _: EventSet,
        io: &mut DeviceIo<'_>,
    ) -> Result<(), Violation> {
        match token {
            EXCHANGE => self.take_offer(io)?,
            _ => self.take_completions(io)?,
        }
        self.take_stalled_queues().try_for_each(|queue| self.process(queue, io))
    }

    fn quiesce(&mut self, deadline: Instant, io: &mut DeviceIo<'_>) -> Result<(), QuiesceError> {
        self.drain(Some(deadline), io)
    }

    fn resume(&mut self, _: bool, _: &mut DeviceIo<'_>) -> Result<(), Violation> {
        // From now on, if the device releases the file and acquires it again, the guest has run
        // nowhere else in between. This must not be set earlier: if another of the guest's devices
        // cannot be acquired, the guest resumes on its old host and writes there.
        self.has_run |= self.locked;
        Ok(())
    }

    fn save(&self) -> Result<Vec<u8>, DeviceError> {
        let lost = self.file.flusher().lost().is_some();
        Ok(encode_state(&BlockState { lost, ..self.state })?)
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), DeviceError> {
        self.state = decode_state(state)?;
        if std::mem::take(&mut self.state.lost) {
            self.file.flusher().note_lost(&io::Error::from_raw_os_error(libc::EIO));
        }
        Ok(())
    }

    fn share(&mut self) -> io::Result<Vec<OwnedFd>> {
        Ok(vec![self.file.file().try_clone()?.into()])
    }

    fn hand_over(&self) -> HandOverNeeds {
        HandOverNeeds { acquire: true, may_refuse_here: false, release: true, detach: false }
    }

    fn acquire(&mut self, from: NextHost) -> Result<(), DeviceError> {
        // The other process's lock is that of this open file, too. A failed attempt to set it would
        // release it for both.
        if from == NextHost::Another {
            self.file.lock()?;
        }
        self.locked = true;
        self.copy_before_write.acquire();
        // A read-only disk is locked against writers all the time, on this host or on the other.
        if !self.has_run && !self.disk.readonly && !self.is_of_this_host {
            self.file.drop_page_cache();
        }
        Ok(())
    }

    fn release(&mut self, deadline: Instant, next: NextHost) -> Result<(), DeviceError> {
        // The other host has the state that was saved before the exchange, and with it the first
        // file (I7).
        self.require_first_file()?;
        match next {
            NextHost::This => self.pass_file_on(deadline),
            NextHost::Another => self.release_file(deadline),
        }
    }

    fn undo_acquire(&mut self, deadline: Instant, next: NextHost) -> Result<(), DeviceError> {
        if self.has_run && next == NextHost::Another {
            return self.release_file(deadline);
        }
        self.copy_before_write.release();
        self.locked = false;
        match next {
            NextHost::This => Ok(()),
            NextHost::Another => Ok(self.file.unlock()?),
        }
    }
}

impl BlockDevice {
    /// Fails if the disk's file or size was exchanged: another host may have the first file and
    /// size in the state that it has received.
    fn require_first_file(&self) -> Result<(), StateError> {
        if !self.is_exchanged.load(Ordering::Acquire) {
            return Ok(());
        }
        Err(DeviceMisfit::DiskExchanged { id: self.disk.id.clone() }.into())
    }

    /// Leaves the file and its lock to a process that has the same open file.
    fn pass_file_on(&mut self, deadline: Instant) -> Result<(), DeviceError> {
        self.copy_before_write.release();
        let passed = self.file.finish_flushes(deadline.min(Instant::now() + FLUSH_LIMIT));
        match &passed {
            Ok(()) => self.locked = false,
            Err(_) => self.copy_before_write.acquire(),
        }
        Ok(passed?)
    }

    /// Makes the guest's writes durable and gives up the lock on the file.
    fn release_file(&mut self, deadline: Instant) -> Result<(), DeviceError> {
        // This comes before another host can write to the disk: an epoch cannot have blocks that it
        // has not read by now.
        self.copy_before_write.release();
        let released = self.file.flush_and_unlock(deadline);
        match &released {
            Ok(()) => self.locked = false,
            Err(_) => self.copy_before_write.acquire(),
        }
        Ok(released?)
    }
}
