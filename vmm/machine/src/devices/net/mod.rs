//! virtio-net: a network interface over a tap.
//!
//! ```text
//! receive queues  <- buffer first, then a frame is read <- tap   no buffer, or a rate limit:
//!                                                                frames stay in the tap
//! transmit queues -> one copy -> rate limit -> tap               frames the tap refuses are lost
//!                           +--> metadata service -> receive queue of the first pair
//! control queue   -> number of queue pairs, "announced"
//! ```
//!
//! Frames pass through a buffer of the device, which costs one copy more than necessary: changes
//! that the guest makes meanwhile then do no harm. One thread serves all queues.
//!
//! The device is attached to the tap while this host has the guest. The next host attaches as soon
//! as it has the device's state, so that during a move there is always a host where frames can
//! wait. Frames that wait at the old host are sent along. After a move the interface announces its
//! new place: by itself, so that switches learn it, and through its driver, which knows its IP
//! addresses.

mod announce;
mod control;
mod device;
mod frame;
mod mmds;
mod queued_frames;
mod tap;
#[cfg(test)]
mod tests;
mod tun;

use std::collections::BTreeMap;
#[cfg(any(test, fuzzing))]
use std::fs::File;
use std::io;
use std::sync::Arc;

use driftline_guest::{GuestRam, VmId};
use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_net::*;
use vmm_sys_util::epoll::EventSet;

use self::announce::Announcements;
use self::control::ControlRequest;
pub use self::frame::HEADER as NET_HEADER;
use self::frame::{HEADER, MAX_FRAME, NUM_BUFFERS};
use self::mmds::MmdsPort;
#[cfg(any(test, fuzzing))]
pub(super) use self::mmds::{MAX_CONNECTIONS, MAX_WAITING, MmdsStack};
use self::queued_frames::QueuedFrames;
use self::tap::Tap;
pub(super) use self::tap::{CLAIMS as TAP_CLAIMS, check_queue as check_tap_queue};
pub use self::tap::{TapError, open as open_tap};
use super::opener::Opener;
use super::stats::NetCounters;
use super::virtio::{Chain, Device, DeviceIo, DeviceRing, RequestDefect, Violation, Watcher};
use crate::config::{NetConfig, OpenedTap};
use crate::metadata::MetadataStore;

const QUEUE_SIZE: u16 = 256;
/// Most failed or too short reads of a tap in a row. After these the device stops reading until the
/// next event.
const MAX_BAD_FRAMES: u32 = 64;
/// Token of the announcement timer. Lower tokens are the tap's queues.
const ANNOUNCE: u32 = 1 << 16;
/// Token of the metadata service's timer.
const METADATA: u32 = ANNOUNCE + 1;
/// The rate limiter of the receive queues.
const RECEIVE_LIMITER: usize = 0;
/// The rate limiter of the transmit queues.
const TRANSMIT_LIMITER: usize = 1;

/// The device.
pub(super) struct Net {
    config: NetConfig,
    /// Opens and attaches the tap, for this number of queue pairs in use.
    open: Box<dyn FnMut(u8) -> Result<Tap, TapError> + Send>,
    /// The tap, while peers reach the guest through this host.
    tap: Option<Tap>,
    /// Whether the tap is that of the process from which the guest comes, until the guest runs: its
    /// peers reach it as before.
    keeps_place: bool,
    /// Whether the tap's files are watched.
    watched: bool,
    /// Whether the tap was attached since the device last ran.
    reattached: bool,
    announcements: Announcements,
    /// Frames that arrived after the save. The driver gets them before those in the tap.
    queued_frames: QueuedFrames,
    /// The metadata service, if the guest reaches it through this interface.
    metadata: Option<MmdsPort>,
    /// Features that the driver negotiated, if it is ready.
    features: Option<u64>,
    /// Buffer for one frame with its header.
    buffer: Box<[u8]>,
    /// Whether it has been logged that the tap lacks what the driver negotiated.
    tap_error_logged: bool,
    /// Number of frames that neither the driver nor the tap took.
    lost: u64,
    counters: Arc<NetCounters>,
    state: NetState,
}

/// State of the device that moves with the guest.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
struct NetState {
    /// Number of queue pairs that the driver uses.
    pairs: u8,
    /// Whether the driver was asked to announce itself and has not acknowledged that yet.
    announce: bool,
    /// For each queue pair, a frame with its header that was read from the tap but did not fit into
    /// the queue, or has to wait for the rate limit.
    waiting: BTreeMap<u8, Vec<u8>>,
}

/// Purpose of an interface's queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum NetQueue {
    Receive(u8),
    Transmit(u8),
    Control,
}

/// Where a frame for the driver comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FrameSource {
    Tap,
    /// The metadata service, which has the frame until the driver has it.
    Service,
}

impl Net {
    /// Opens the interface of `config` for the guest `holder`. It attaches to its tap in
    /// [`Device::acquire`], or, if possible, already in [`Device::restore`]. The first time it
    /// takes the tap that is `opened` already, if there is one.
    ///
    /// # Errors
    ///
    /// Fails if the tap cannot be attached to. A tap that this host already uses for `holder` is
    /// accepted: the guest then comes from this host.
    pub(super) fn open(
        config: &NetConfig,
        holder: VmId,
        opened: Option<&OpenedTap>,
        metadata: &MetadataStore,
        opener: &Opener,
    ) -> Result<Self, TapError> {
        let NetConfig { tap: name, queues, .. } = config.clone();
        match opened.map_or_else(|| Tap::open(&name, queues, holder).map(drop), |_| Ok(())) {
            Ok(()) => {}
            Err(TapError::InUse { .. }) if tap::is_held_for(&name, holder) => {}
            Err(e) => return Err(e),
        }
        let cannot = |cause| TapError::System { name: name.clone(), what: "making a timer", cause };
        let announcements = Announcements::new().map_err(cannot)?;
        let metadata = MmdsPort::open(config, metadata).map_err(cannot)?;
        let keeps_place = opened.is_some_and(|tap| tap.is_handed_over);
        let (opener, mut opened) = (opener.clone(), opened.cloned());
        let open = move |enabled| {
            let failed = |what, cause| TapError::System { name: name.clone(), what, cause };
            if let Some(opened) = opened.take() {
                return Tap::of_opened(&opened, enabled)
                    .map_err(|e| failed("duplicating its file", e));
            }
            let tap = name.clone();
            let opened = opener.run(move || Tap::open(&tap, queues, holder));
            opened.map_err(|e| failed("asking the opener", e))?
        };
        Ok(Self { metadata, keeps_place, ..Self::new(config, announcements, Box::new(open)) })
    }

    /// Returns an interface over datagram sockets instead of a tap's queues.
    #[cfg(any(test, fuzzing))]
    pub(super) fn over_sockets(config: &NetConfig, taps: Vec<File>) -> io::Result<Self> {
        let open = move |_| {
            let taps = taps.iter().map(File::try_clone).collect::<io::Result<_>>();
            let (name, what) = ("sockets".to_owned(), "duplicating them");
            taps.map(Tap::of_sockets).map_err(|cause| TapError::System { name, what, cause })
        };
        let metadata = MmdsPort::open(config, &MetadataStore::default())?;
        Ok(Self { metadata, ..Self::new(config, Announcements::new()?, Box::new(open)) })
    }

    fn new(
        config: &NetConfig,
        announcements: Announcements,
        open: Box<dyn FnMut(u8) -> Result<Tap, TapError> + Send>,
    ) -> Self {
        Self {
            config: config.clone(),
            open,
            tap: None,
            keeps_place: false,
            watched: false,
            reattached: false,
            announcements,
            queued_frames: QueuedFrames::default(),
            metadata: None,
            features: None,
            buffer: vec![0; MAX_FRAME].into(),
            tap_error_logged: false,
            lost: 0,
            counters: Arc::default(),
            state: NetState { pairs: 1, ..NetState::default() },
        }
    }

    /// Returns the interface's counters.
    pub(super) fn counters(&self) -> &Arc<NetCounters> {
        &self.counters
    }

    fn attach_tap(&mut self) -> Result<(), TapError> {
        let tap = (self.open)(self.state.pairs)?;
        self.keeps_place = tap.is_handed_over();
        self.tap = Some(tap);
        (self.watched, self.reattached) = (false, true);
        Ok(())
    }

    fn has(&self, feature: u32) -> bool {
        self.features.is_some_and(|features| features & 1 << feature != 0)
    }

    /// Returns the purpose of `queue`. Without multiple pairs, the control queue follows the first
    /// pair.
    fn role(&self, queue: usize) -> Option<NetQueue> {
        let pairs = if self.has(VIRTIO_NET_F_MQ) { self.config.queues.into() } else { 1 };
        let pair = (queue / 2) as u8;
        match queue {
            _ if queue < 2 * pairs && queue.is_multiple_of(2) => Some(NetQueue::Receive(pair)),
            _ if queue < 2 * pairs => Some(NetQueue::Transmit(pair)),
            _ if queue == 2 * pairs && self.has(VIRTIO_NET_F_CTRL_VQ) => Some(NetQueue::Control),
            _ => None,
        }
    }

    /// Applies the driver's features and number of queue pairs to the tap.
    fn configure_tap(&mut self) -> io::Result<()> {
        // It is as the driver wants it, and the other process may still use it.
        if self.keeps_place {
            return Ok(());
        }
        let (features, pairs) = (self.features.unwrap_or(0), self.state.pairs);
        let Some(tap) = &mut self.tap else { return Ok(()) };
        tap.set_offloads(features)?;
        tap.enable(pairs)
    }

    fn try_configure_tap(&mut self) {
        if let Err(e) = self.configure_tap() {
            self.note_tap_error(&e);
        }
    }

    /// Logs the error at error level only once, because a driver can cause it repeatedly.
    fn note_tap_error(&mut self, e: &io::Error) {
        let name = &self.config.tap;
        match std::mem::replace(&mut self.tap_error_logged, true) {
            false => {
                tracing::error!("tap \"{name}\" lacks what the guest's driver negotiated: {e}");
            }
            true => tracing::debug!("tap \"{name}\" again: {e}"),
        }
    }

    /// Watches the tap if there is one and it is not watched yet. The watch is edge-triggered:
    /// after running out of buffers, the device reads again when the driver adds some.
    fn watch(&mut self, watcher: &Watcher) -> io::Result<()> {
        let Some(tap) = self.tap.as_ref().filter(|_| !self.watched) else { return Ok(()) };
        for (file, pair) in tap.files().iter().zip(0..) {
            watcher.watch(file, EventSet::IN | EventSet::EDGE_TRIGGERED, pair)?;
        }
        self.watched = true;
        Ok(())
    }

    /// Gives the driver frames from the tap as long as it has buffers. Returns whether it had
    /// enough buffers for a first frame.
    fn receive(&mut self, pair: u8, io: &mut DeviceIo<'_>) -> Result<bool, Violation> {
        let queue = 2 * usize::from(pair);
        let Some(ring) = io.rings.get_mut(queue).filter(|_| pair < self.state.pairs) else {
            return Ok(true);
        };
        if io.limiters.must_wait(RECEIVE_LIMITER, queue) {
            return Ok(true);
        }
        let mut had_buffers = false;
        // Take a buffer first: a frame without a buffer stays in the tap.
        while let Some(first) = ring.pop(io.ram)? {
            if first.writable.len() < HEADER as u32 {
                let (head, room) = (first.head, first.writable.len());
                let cause = RequestDefect::FrameBuffer { head, room };
                return Err(Violation::Malformed { queue: queue as u16, cause });
            }
            let Some((len, source)) = self.next_frame(pair) else {
                ring.unpop();
                return Ok(true);
            };
            let chains = self.buffers_for(len, first, ring, io.ram)?;
            if capacity(&chains) >= len as u64 {
                if !io.limiters.admit(RECEIVE_LIMITER, queue, len as u64) {
                    chains.iter().for_each(|_| ring.unpop());
                    self.keep(pair, len, source);
                    return Ok(true);
                }
                let given = self.write_frame(&chains, len, io.ram)?;
                ring.push_all(io.ram, &given)?;
                self.counters.received_frames.add(1);
                self.counters.received_bytes.add((len - HEADER) as u64);
                self.finish(source);
                had_buffers = true;
                continue;
            }
            chains.iter().for_each(|_| ring.unpop());
            if self.has(VIRTIO_NET_F_MRG_RXBUF) && chains.len() < usize::from(ring.size()) {
                // The driver will add more buffers.
                self.keep(pair, len, source);
                return Ok(had_buffers);
            }
            self.count_lost("a frame for the guest is larger than its driver's buffers");
            self.finish(source);
            had_buffers = true;
        }
        Ok(had_buffers)
    }

    /// Keeps the frame in the buffer until the driver can have it. A frame of the metadata service
    /// stays with the service: it must not become part of the saved state.
    fn keep(&mut self, pair: u8, len: usize, source: FrameSource) {
        if source == FrameSource::Tap {
            self.state.waiting.insert(pair, self.buffer[..len].to_vec());
        }
    }

    /// Ends the frame in the buffer, which the driver has or cannot have.
    fn finish(&mut self, source: FrameSource) {
        if source == FrameSource::Service
            && let Some(metadata) = &mut self.metadata
        {
            metadata.next_frame();
        }
    }

    /// Reads the next frame for the driver into the buffer. Returns its length with the header.
    fn next_frame(&mut self, pair: u8) -> Option<(usize, FrameSource)> {
        if let Some(frame) = self.state.waiting.remove(&pair) {
            // Its length was checked when it was restored.
            self.buffer[..frame.len()].copy_from_slice(&frame);
            return Some((frame.len(), FrameSource::Tap));
        }
        if let Some(frame) = self.queued_frames.pop(pair) {
            // Its length was checked when it was decoded, or it was read into this buffer.
            self.buffer[..frame.len()].copy_from_slice(&frame);
            return Some((frame.len(), FrameSource::Tap));
        }
        if let Some(frame) =
            self.metadata.as_ref().filter(|_| pair == 0).and_then(MmdsPort::first_frame)
        {
            // Without offloads: its checksums are complete.
            self.buffer[..HEADER].fill(0);
            self.buffer[HEADER..HEADER + frame.len()].copy_from_slice(frame);
            return Some((HEADER + frame.len(), FrameSource::Service));
        }
        // Continues past bad frames, because the edge-triggered watch does not report the frames
        // after them again.
        for _ in 0..MAX_BAD_FRAMES {
            match self.tap.as_ref()?.read(pair, &mut self.buffer).transpose()? {
                Ok(len) if len >= HEADER => return Some((len, FrameSource::Tap)),
                Ok(len) => {
                    self.count_lost(&format!(
                        "the tap has a frame of {len} bytes, less than its header"
                    ));
                }
                // The kernel has dropped the frame, or the tap was removed.
                Err(e) => self.count_lost(&format!("reading the tap fails: {e}")),
            }
        }
        None
    }

    /// Returns buffers, starting with `first`, that have room for a frame of `len` bytes. Returns
    /// fewer if the driver has no more.
    fn buffers_for(
        &self,
        len: usize,
        first: Chain,
        ring: &mut DeviceRing,
        ram: &GuestRam,
    ) -> Result<Vec<Chain>, Violation> {
        let mut chains = vec![first];
        while self.has(VIRTIO_NET_F_MRG_RXBUF) && capacity(&chains) < len as u64 {
            match ring.pop(ram)? {
                Some(chain) => chains.push(chain),
                None => break,
            }
        }
        Ok(chains)
    }

    /// Writes the frame in the buffer to `chains`, which must have room for it. Returns the bytes
    /// written to each chain.
    fn write_frame(
        &mut self,
        chains: &[Chain],
        len: usize,
        ram: &GuestRam,
    ) -> Result<Vec<(u16, u32)>, Violation> {
        self.buffer[NUM_BUFFERS].copy_from_slice(&(chains.len() as u16).to_le_bytes());
        let mut rest = &self.buffer[..len];
        let mut given = Vec::with_capacity(chains.len());
        for chain in chains {
            let written = chain.writable.write(ram, 0, rest)?;
            given.push((chain.head, written as u32));
            rest = &rest[written..];
        }
        Ok(given)
    }

    /// Sends the driver's frames to the tap.
    fn transmit(&mut self, pair: u8, io: &mut DeviceIo<'_>) -> Result<(), Violation> {
        let queue = 2 * usize::from(pair) + 1;
        let Some(ring) = io.rings.get_mut(queue) else { return Ok(()) };
        while let Some(chain) = ring.pop(io.ram)? {
            let len = chain.readable.len() as usize;
            if len < HEADER {
                let cause = RequestDefect::Frame { head: chain.head, bytes: len };
                return Err(Violation::Malformed { queue: queue as u16, cause });
            }
            let fits = len <= self.buffer.len();
            if fits {
                chain.readable.read(io.ram, 0, &mut self.buffer[..len])?;
                let frame = &self.buffer[HEADER..len];
                // No limit applies to frames that leave the guest, but not for the tap.
                if self.metadata.as_mut().is_some_and(|metadata| metadata.take(frame)) {
                    ring.push(io.ram, chain.head, 0)?;
                    continue;
                }
            }
            if !io.limiters.admit(TRANSMIT_LIMITER, queue, len as u64) {
                ring.unpop();
                return Ok(());
            }
            if fits {
                self.send(pair, len);
            } else {
                self.count_lost(&format!(
                    "a frame of the guest has {len} bytes, more than {MAX_FRAME}"
                ));
            }
            ring.push(io.ram, chain.head, 0)?;
        }
        Ok(())
    }

    /// Sends the frame in the buffer to the tap.
    fn send(&mut self, pair: u8, len: usize) {
        let Some(tap) = &self.tap else { return };
        // The kernel accepts no frames on a queue that is not enabled.
        let pair = pair.min(tap.enabled() - 1);
        match tap.write(pair, &self.buffer[..len]) {
            Ok(()) => {
                self.counters.sent_frames.add(1);
                self.counters.sent_bytes.add((len - HEADER) as u64);
            }
            Err(e) => self.count_lost(&format!("the tap does not take a frame of the guest: {e}")),
        }
    }

    /// Counts a lost frame, which is normal on a network. Only the first loss is logged as a
    /// warning.
    fn count_lost(&mut self, why: &str) {
        self.lost += 1;
        self.counters.lost_frames.add(1);
        let id = &self.config.id;
        match self.lost {
            1 => tracing::warn!("network interface \"{id}\": {why}; more are only counted"),
            n => tracing::debug!("network interface \"{id}\": {n} frames lost: {why}"),
        }
    }

    fn handle_control(&mut self, queue: usize, io: &mut DeviceIo<'_>) -> Result<(), Violation> {
        while let Some(chain) = match io.rings.get_mut(queue) {
            Some(ring) => ring.pop(io.ram)?,
            None => None,
        } {
            let done = match ControlRequest::read(&chain, queue as u16, io.ram)? {
                ControlRequest::Pairs(pairs) => self.use_pairs(pairs, io)?,
                ControlRequest::Announced => {
                    self.state.announce = false;
                    // The driver already knows this change of the configuration space.
                    io.shared.put_config(self.config_space());
                    true
                }
                ControlRequest::Unknown { class, command } => {
                    let id = &self.config.id;
                    tracing::debug!("network interface \"{id}\": no command {class}, {command}");
                    false
                }
            };
            let answer = if done { VIRTIO_NET_OK } else { VIRTIO_NET_ERR };
            chain.writable.write(io.ram, 0, &[answer as u8])?;
            if let Some(ring) = io.rings.get_mut(queue) {
                ring.push(io.ram, chain.head, 1)?;
            }
        }
        Ok(())
    }

    /// Sets the number of queue pairs in use. Returns whether that succeeded.
    fn use_pairs(&mut self, pairs: u16, io: &mut DeviceIo<'_>) -> Result<bool, Violation> {
        let most = if self.has(VIRTIO_NET_F_MQ) { self.config.queues } else { 1 };
        let Some(pairs) = u8::try_from(pairs).ok().filter(|pairs| (1..=most).contains(pairs))
        else {
            return Ok(false);
        };
        let before = std::mem::replace(&mut self.state.pairs, pairs);
        if let Err(e) = self.configure_tap() {
            self.note_tap_error(&e);
            self.state.pairs = before;
            return Ok(false);
        }
        self.state.waiting.retain(|pair, _| *pair < pairs);
        self.queued_frames.retain_pairs(pairs);
        // Frames that the kernel queued on these pairs before they were in use cause no new edge.
        (0..pairs).try_for_each(|pair| self.receive(pair, io).map(drop))?;
        Ok(true)
    }

    fn send_announcement(&mut self) {
        let frame = frame::announcement(self.config.mac);
        self.buffer[..frame.len()].copy_from_slice(&frame);
        self.send(0, frame.len());
    }

    /// Announces the interface's place: to switches directly, and with `ask_driver` also through
    /// the driver if it supports this.
    fn announce(&mut self, ask_driver: bool, io: &mut DeviceIo<'_>) {
        self.send_announcement();
        if ask_driver && self.has(VIRTIO_NET_F_GUEST_ANNOUNCE) {
            self.state.announce = true;
            io.shared.change_config(self.config_space());
        }
    }
}

/// Returns the number of bytes that `chains` have room for.
fn capacity(chains: &[Chain]) -> u64 {
    chains.iter().map(|chain| u64::from(chain.writable.len())).sum()
}
