//! The interface as a virtio [`Device`]: its features, and how it pauses, resumes and moves.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Instant;

use driftline_guest::NextHost;
use virtio_bindings::virtio_net::*;
use vmm_sys_util::epoll::EventSet;

use super::frame::{HEADER, MAX_FRAME};
use super::mmds::MmdsPort;
use super::queued_frames::QueuedFrames;
use super::tap::{Tap, TapError};
use super::{ANNOUNCE, METADATA, Net, NetQueue, NetState, QUEUE_SIZE};
use crate::config::RateLimits;
use crate::devices::error::{DeviceError, StateError};
use crate::devices::misfit::DeviceMisfit;
use crate::devices::virtio::{
    Device, DeviceIo, DeviceKind, HandOverNeeds, QuiesceError, Violation, Watcher, decode_state,
    encode_state,
};

impl Device for Net {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Net
    }

    fn features(&self) -> u64 {
        let several = (self.config.queues > 1).then_some(VIRTIO_NET_F_MQ);
        let mtu = self.config.mtu.map(|_| VIRTIO_NET_F_MTU);
        let always = [
            VIRTIO_NET_F_CSUM,
            VIRTIO_NET_F_GUEST_CSUM,
            VIRTIO_NET_F_MAC,
            VIRTIO_NET_F_GUEST_TSO4,
            VIRTIO_NET_F_GUEST_TSO6,
            VIRTIO_NET_F_HOST_TSO4,
            VIRTIO_NET_F_HOST_TSO6,
            VIRTIO_NET_F_MRG_RXBUF,
            VIRTIO_NET_F_STATUS,
            VIRTIO_NET_F_CTRL_VQ,
            VIRTIO_NET_F_GUEST_ANNOUNCE,
        ];
        always.into_iter().chain(several).chain(mtu).fold(0, |bits, bit| bits | 1 << bit)
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE; 2 * usize::from(self.config.queues) + 1]
    }

    fn limits(&self) -> Vec<RateLimits> {
        vec![self.config.limits.receive, self.config.limits.transmit]
    }

    fn config_space(&self) -> Vec<u8> {
        let announce = if self.state.announce { VIRTIO_NET_S_ANNOUNCE } else { 0 };
        let status = (VIRTIO_NET_S_LINK_UP | announce) as u16;
        let pairs = u16::from(self.config.queues);
        let mtu = self.config.mtu.map(u16::to_le_bytes);
        let mtu = mtu.as_ref().map_or(&[][..], |mtu| mtu);
        [&self.config.mac.0[..], &status.to_le_bytes(), &pairs.to_le_bytes(), mtu].concat()
    }

    fn write_config(&mut self, _: usize, _: &[u8], _: &mut DeviceIo<'_>) {}

    fn start(&mut self, watcher: &Watcher) -> io::Result<()> {
        watcher.watch(self.announcements.timer(), EventSet::IN, ANNOUNCE)?;
        if let Some(metadata) = &self.metadata {
            watcher.watch(metadata.timer(), EventSet::IN, METADATA)?;
        }
        self.watch(watcher)
    }

    fn activate(&mut self, features: u64) {
        self.features = Some(features);
        // One pair until the driver asks for more. A restored state sets its own number afterwards.
        self.state.pairs = 1;
        self.state.waiting.retain(|pair, _| *pair == 0);
        self.try_configure_tap();
    }

    fn reset(&mut self, _: &mut DeviceIo<'_>) {
        self.features = None;
        self.announcements.end();
        self.queued_frames = QueuedFrames::default();
        if let Some(metadata) = &mut self.metadata {
            metadata.reset();
        }
        self.state = NetState { pairs: 1, ..NetState::default() };
        self.try_configure_tap();
    }

    fn process(&mut self, queue: usize, io: &mut DeviceIo<'_>) -> Result<(), Violation> {
        match self.role(queue) {
            Some(NetQueue::Receive(pair)) => self.receive(pair, io).map(drop),
            Some(NetQueue::Transmit(pair)) => self.transmit(pair, io),
            Some(NetQueue::Control) => self.handle_control(queue, io),
            None => Ok(()),
        }?;
        self.give_metadata(io)
    }

    fn backend_ready(
        &mut self,
        token: u32,
        _: EventSet,
        io: &mut DeviceIo<'_>,
    ) -> Result<(), Violation> {
        if let Ok(pair) = u8::try_from(token) {
            if !self.receive(pair, io)? {
                self.counters.stalls.add(1);
            }
            return self.give_metadata(io);
        }
        if token == METADATA {
            if let Some(metadata) = &mut self.metadata {
                metadata.tick();
            }
            return self.give_metadata(io);
        }
        match self.announcements.tick() {
            Ok(Some(ask_driver)) => self.announce(ask_driver, io),
            Ok(None) => {}
            Err(e) => {
                let id = &self.config.id;
                tracing::warn!("network interface \"{id}\": its announcements end early: {e}");
            }
        }
        Ok(())
    }

    fn quiesce(&mut self, _: Instant, _: &mut DeviceIo<'_>) -> Result<(), QuiesceError> {
        // Nothing is in flight between two calls: every frame is in the tap or with the driver.
        Ok(())
    }

    fn resume(&mut self, moved: bool, io: &mut DeviceIo<'_>) -> Result<(), Violation> {
        if let Err(e) = self.watch(io.watcher) {
            tracing::error!("tap \"{}\" cannot be watched: {e}", self.config.tap);
        }
        if let Some(metadata) = &mut self.metadata {
            metadata.resume();
        }
        let reattached = std::mem::take(&mut self.reattached);
        let keeps_place = std::mem::take(&mut self.keeps_place);
        if self.features.is_some() && (moved || reattached) && !keeps_place {
            self.announce(false, io);
            if let Err(e) = self.announcements.begin() {
                let id = &self.config.id;
                tracing::warn!("network interface \"{id}\" announces itself only once: {e}");
            }
        }
        Ok(())
    }

    fn save(&self) -> Result<Vec<u8>, DeviceError> {
        Ok(encode_state(&self.state)?)
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), DeviceError> {
        let state: NetState = decode_state(state)?;
        let misfit = |misfit: DeviceMisfit| Err(StateError::from(misfit).into());
        let NetState { pairs, ref waiting, .. } = state;
        // The features of a driver that has broken the rules are not known here. The limit is then
        // the number of pairs in the configuration.
        let many = self.features.is_none() || self.has(VIRTIO_NET_F_MQ);
        let most = if many { self.config.queues } else { 1 };
        if !(1..=most).contains(&pairs) {
            return misfit(DeviceMisfit::Pairs { pairs, most });
        }
        for (pair, frame) in waiting {
            if *pair >= pairs || !(HEADER..=MAX_FRAME).contains(&frame.len()) {
                let bytes = frame.len();
                return misfit(DeviceMisfit::WaitingFrame { bytes, pair: *pair, pairs });
            }
        }
        self.state = state;
        // This may be too early, because the guest comes from this same host. Then `acquire`
        // attaches the tap.
        if self.tap.is_none()
            && let Err(e) = self.attach_tap()
        {
            // The tap's files were handed over, and `acquire` cannot refuse the guest then.
            if self.keeps_place {
                return Err(e.into());
            }
            tracing::debug!("tap \"{}\" is not attached yet: {e}", self.config.tap);
        }
        self.try_configure_tap();
        Ok(())
    }

    fn share(&mut self) -> io::Result<Vec<OwnedFd>> {
        self.tap.as_ref().map_or_else(|| Ok(Vec::new()), Tap::share)
    }

    fn acquire(&mut self, _: NextHost) -> Result<(), DeviceError> {
        if self.tap.is_none() {
            self.attach_tap()?;
        }
        self.configure_tap().map_err(|cause| {
            self.tap = None;
            TapError::Features { name: self.config.tap.clone(), cause }.into()
        })
    }

    fn hand_over(&self) -> HandOverNeeds {
        // A release leaves the tap attached. Frames that arrive wait in it for the host that has
        // the guest then.
        HandOverNeeds { acquire: true, may_refuse_here: false, release: false, detach: true }
    }

    fn detach(&mut self, room: usize, next: NextHost) -> Vec<u8> {
        if next == NextHost::Another {
            self.announcements.end();
            self.leave_tap();
        }
        self.queued_frames.encode(room).unwrap_or_else(|why| {
            self.count_lost(&format!(
                "the packets that are queued for the guest cannot be encoded: {why}"
            ));
            Vec::new()
        })
    }

    fn attach(&mut self, queued_packets: &[u8]) -> Result<(), DeviceError> {
        // If there is no tap, the guest comes from this same host, which may want the tap back.
        // Then `acquire` attaches it.
        if self.features.is_some() && self.tap.is_some() && !self.keeps_place {
            self.send_announcement();
        }
        self.queued_frames = QueuedFrames::decode(queued_packets, self.state.pairs)?;
        Ok(())
    }
}

impl Net {
    /// Detaches from the tap, and keeps the frames that wait in it.
    fn leave_tap(&mut self) {
        self.watched = false;
        let Some(tap) = self.tap.take() else { return };
        if self.queued_frames.read_from(&tap, &mut self.buffer) {
            self.count_lost("more packets are queued for the guest than are kept");
        }
    }

    /// Gives the driver the frames of the metadata service, and sets the service's timer.
    fn give_metadata(&mut self, io: &mut DeviceIo<'_>) -> Result<(), Violation> {
        if self.metadata.as_ref().is_some_and(MmdsPort::has_frames) {
            self.receive(0, io)?;
        }
        if let Some(metadata) = &mut self.metadata
            && let Err(e) = metadata.schedule()
        {
            // The guest's next frame sets it again.
            tracing::warn!("the timer of the metadata service cannot be set: {e}");
        }
        Ok(())
    }
}
