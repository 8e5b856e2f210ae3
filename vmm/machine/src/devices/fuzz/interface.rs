//! A network interface, and sockets in the place of its taps.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;

use super::device::{FuzzedDevice, given};
use super::input::FuzzInput;
use super::memory::FuzzMemory;
use crate::config::{MacAddr, NetConfig, NetLimits};
use crate::devices::net::Net;
use crate::devices::virtio::{Device, DriverBuffer};

/// A network interface over sockets.
pub(super) struct FuzzedInterface {
    config: NetConfig,
    queue: usize,
    ours: Vec<UnixDatagram>,
    taps: Vec<File>,
    frame: Vec<u8>,
}

impl FuzzedInterface {
    pub(super) fn new(queue: usize, queues: u8) -> Self {
        let pair = |_| {
            let (ours, tap) = UnixDatagram::pair().unwrap();
            ours.set_nonblocking(true).unwrap();
            tap.set_nonblocking(true).unwrap();
            (ours, File::from(OwnedFd::from(tap)))
        };
        let (ours, taps) = (0..queues).map(pair).unzip();
        let mac = MacAddr([2, 0, 0, 0, 0, 1]);
        let (id, tap, limits) = ("n".to_owned(), "t".to_owned(), NetLimits::default());
        let config = NetConfig { id, tap, mac, queues, mtu: None, limits, metadata: None };
        Self { config, queue, ours, taps, frame: vec![0x5a; 70_000] }
    }
}

impl FuzzedDevice for FuzzedInterface {
    fn make(&mut self) -> Box<dyn Device> {
        let taps = self.taps.iter().map(|tap| tap.try_clone().unwrap()).collect();
        Box::new(Net::over_sockets(&self.config, taps).unwrap())
    }

    fn queue(&self) -> usize {
        self.queue
    }

    fn request(
        &mut self,
        queue: usize,
        from: &mut FuzzInput<'_>,
        guest: &mut FuzzMemory,
    ) -> Vec<DriverBuffer> {
        let control = 2 * self.ours.len();
        if queue == control || queue == 2 && from.flip() {
            let class = from.one_of(&[3, 4, 4, 4, 0]);
            let command = [class, from.u8() % 3, from.u8() % 10, from.u8() / 250];
            let mut pieces = given(&command, from, guest);
            pieces.push(DriverBuffer { addr: from.address(), len: 1, writable: from.u8() < 240 });
            return pieces;
        }
        if queue.is_multiple_of(2) {
            let mut pieces = from.pieces(true);
            if from.u8() < 200 {
                pieces.push(DriverBuffer { addr: from.address(), len: 1526, writable: true });
            }
            return pieces;
        }
        let len = from.u8();
        let frame = [&[0; 12][..], from.bytes(len.into())].concat();
        let mut pieces = given(&frame, from, guest);
        pieces.extend(from.pieces(false));
        pieces
    }

    fn cause_backend_event(&mut self, from: &mut FuzzInput<'_>) {
        let mut frame = [0; 2048];
        for socket in &self.ours {
            while socket.recv(&mut frame).is_ok() {}
        }
        for _ in 0..1 + from.u8() % 4 {
            let queue = usize::from(from.u8()) % self.ours.len();
            let len = match from.u8() % 4 {
                0..2 => 12 + usize::from(from.u8()),
                2 => 12 + usize::from(from.u16()) % 4096,
                _ => usize::from(from.u16()) + 4096,
            };
            // A frame that finds no room is lost, as on a network.
            let _ = self.ours[queue].send(&self.frame[..len.min(self.frame.len())]);
        }
    }
}
