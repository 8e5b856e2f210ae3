//! The socket device as a virtio [`Device`]: its queues, and how it pauses, resumes and moves.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Instant;

use driftline_guest::NextHost;
use vmm_sys_util::epoll::EventSet;

use super::hand_over::Departure;
use super::host::VsockListener;
use super::{EVENT, LISTENER, QUEUE_SIZE, TIMER, TRANSMIT, Vsock, VsockError, VsockState};
use crate::devices::error::DeviceError;
use crate::devices::virtio::{
    Device, DeviceIo, DeviceKind, HandOverNeeds, QuiesceError, Violation, Watcher, decode_state,
    encode_state,
};

/// Number of the device's files: its listener, and two by which its connections move.
pub(in crate::devices) const SHARED_FILES: usize = 3;

impl Device for Vsock {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Vsock
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE; 3]
    }

    fn config_space(&self) -> Vec<u8> {
        u64::from(self.config.cid).to_le_bytes().to_vec()
    }

    fn write_config(&mut self, _: usize, _: &[u8], _: &mut DeviceIo<'_>) {}

    fn start(&mut self, watcher: &Watcher) -> io::Result<()> {
        watcher.watch(&self.timer, EventSet::IN, TIMER)?;
        self.watch_listener(watcher)
    }

    fn activate(&mut self, _: u64) {
        self.active = true;
    }

    fn reset(&mut self, _: &mut DeviceIo<'_>) {
        self.active = false;
        let next_port = self.state.next_port;
        self.state = VsockState { next_port, ..VsockState::default() };
        self.reset_deadline = None;
        self.clear();
    }

    fn process(&mut self, queue: usize, io: &mut DeviceIo<'_>) -> Result<(), Violation> {
        match queue {
            TRANSMIT => self.process_packets(io)?,
            EVENT => self.tell_reset(io)?,
            _ => {}
        }
        let given = self.give_packets(io);
        self.set_timer();
        given
    }

    fn backend_ready(
        &mut self,
        token: u32,
        events: EventSet,
        io: &mut DeviceIo<'_>,
    ) -> Result<(), Violation> {
        match token {
            LISTENER => self.accept_programs(io.watcher),
            TIMER => self.tick(io.watcher),
            stream if self.connections.contains_key(&stream) => {
                let hung_up = events.intersects(EventSet::HANG_UP | EventSet::ERROR);
                self.stream_ready(stream, hung_up);
            }
            caller => self.read_greeting(caller),
        }
        let given = if self.active { self.give_packets(io) } else { Ok(()) };
        self.set_timer();
        given
    }

    fn quiesce(&mut self, _: Instant, _: &mut DeviceIo<'_>) -> Result<(), QuiesceError> {
        // Between two calls, data in flight is in the streams and waits there.
        self.paused_at = Some(Instant::now());
        Ok(())
    }

    fn resume(&mut self, moved: bool, io: &mut DeviceIo<'_>) -> Result<(), Violation> {
        let continues = self.arrived.is_some();
        if let Some(arrival) = self.arrived.take() {
            self.continue_streams(arrival, io.watcher);
        }
        self.try_watch_listener(io.watcher);
        self.restart_answer_deadlines();
        // Edges that occurred while the device was paused may have been missed.
        let tokens: Vec<u32> = self.connections.keys().copied().collect();
        for token in tokens {
            let Some(connection) = self.connections.get(&token) else { continue };
            let hung_up = connection.is_hung_up();
            self.stream_ready(token, hung_up);
        }
        let new_programs: Vec<u32> = self.new_programs.iter().map(|(token, _)| *token).collect();
        new_programs.into_iter().for_each(|token| self.read_greeting(token));
        self.state.reset_due |= moved && self.active && !continues;
        self.resume_reset_deadline(moved);
        // The queues are processed after this call, and packets must not overtake the event.
        let told = self.tell_reset(io);
        self.set_timer();
        told
    }

    fn save(&self) -> Result<Vec<u8>, DeviceError> {
        Ok(encode_state(&self.state)?)
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), DeviceError> {
        self.state = decode_state(state)?;
        Ok(())
    }

    fn share(&mut self) -> io::Result<Vec<OwnedFd>> {
        let Some(listener) = &self.listener else { return Ok(Vec::new()) };
        let listener = listener.listener().try_clone()?;
        let (departure, [channel, state]) = self.opener.run(Departure::begin)??;
        self.departure = Some(departure);
        let files: [OwnedFd; SHARED_FILES] = [listener.into(), channel, state];
        Ok(files.into())
    }

    fn hand_over(&self) -> HandOverNeeds {
        HandOverNeeds { acquire: true, may_refuse_here: true, release: true, detach: false }
    }

    fn acquire(&mut self, _: NextHost) -> Result<(), DeviceError> {
        if let Some(files) = self.arrives_by.take() {
            self.arrive(files)?;
        }
        if let Some(listener) = &self.listener {
            // The next process has not taken the guest.
            listener.own_file(self.left_file.take());
            self.departure = None;
        } else {
            let uds = &self.config.uds;
            self.listener = Some(match self.opened.take() {
                Some(opened) => {
                    VsockListener::of_opened(&opened).map_err(|e| VsockError::system(uds, e))?
                }
                None => VsockListener::open(uds, self.socket_stays, &self.opener)?,
            });
            (self.listener_watched, self.accept_retry) = (false, None);
        }
        Ok(())
    }

    fn release(&mut self, _: Instant, next: NextHost) -> Result<(), DeviceError> {
        // Connections stay: if the guest continues on this host, so do they.
        if let Some(departure) = self.departure.take().filter(|_| next == NextHost::This) {
            return Ok(self.depart(departure)?);
        }
        if next == NextHost::This {
            // Undone: the other process has the guest, with its connections.
            self.arrived = None;
            self.listener.iter().for_each(|listener| drop(listener.leave_file()));
        }
        (self.listener, self.accept_retry) = (None, None);
        self.close_new_programs();
        Ok(())
    }
}
