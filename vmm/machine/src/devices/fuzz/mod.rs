//! Hostile drivers controlled by a fuzzer's bytes: targets for the queues of each device, one for
//! frames of the metadata service, one for registers and one for saved states.
//!
//! ```text
//! bytes -> FuzzInput -> FuzzHarness (the driver) -- registers, rings, buffers --> ThreadlessDevice
//!                           |                                                         |
//!                           +-- checks after every step: FuzzMemory ------------------+
//!                                                        FuzzedDevice (its backend) --+
//! ```
//!
//! Whatever the driver does, these rules must hold:
//!
//! - The device does not panic and does not loop for ever.
//! - Every frame (and every block of a disk) whose content the device changes is in the tree.
//! - A driver that is no longer served is told.
//! - A saved state can be restored, and saving it again gives the same bytes.
#![allow(clippy::unwrap_used, reason = "a panic is what the fuzzer looks for")]

mod balloon;
mod device;
mod disk;
mod harness;
mod input;
mod interface;
mod memory;
mod metadata;
mod rng;
mod vsock;

use crate::memory::Backing;
use balloon::FuzzedBalloon;
use device::FuzzedDevice;
use disk::FuzzedDisk;
use harness::FuzzHarness;
use input::FuzzInput;
use interface::FuzzedInterface;
use metadata::FuzzedMetadata;
use rng::FuzzedRng;
use vsock::FuzzedVsock;

/// Function that runs one input of the fuzzer.
pub type FuzzTarget = fn(&[u8]);

/// All targets by name.
pub const TARGETS: [(&str, FuzzTarget); 15] = [
    ("block", block),
    ("block_uring", block_uring),
    ("net_receive", net_receive),
    ("net_transmit", net_transmit),
    ("net_control", net_control),
    ("metadata", metadata),
    ("vsock_receive", vsock_receive),
    ("vsock_transmit", vsock_transmit),
    ("rng", rng),
    ("balloon_inflate", balloon_inflate),
    ("balloon_statistics", balloon_statistics),
    ("balloon_hint", balloon_hint),
    ("balloon_report", balloon_report),
    ("registers", registers),
    ("device_state", device_state),
];

/// Queues of a disk that uses plain system calls.
pub fn block(bytes: &[u8]) {
    disk(bytes, false);
}

/// Queues of a disk that uses io_uring.
pub fn block_uring(bytes: &[u8]) {
    disk(bytes, true);
}

fn disk(bytes: &[u8], uring: bool) {
    let mut from = FuzzInput::new(bytes);
    let mut disk = FuzzedDisk::new(&mut from, uring);
    drive(&mut disk, from);
}

/// Receive queue of a network interface.
pub fn net_receive(bytes: &[u8]) {
    interface(0, bytes);
}

/// Transmit queue of a network interface.
pub fn net_transmit(bytes: &[u8]) {
    interface(1, bytes);
}

/// Control queue of a network interface.
pub fn net_control(bytes: &[u8]) {
    interface(4, bytes);
}

fn interface(queue: usize, bytes: &[u8]) {
    let mut from = FuzzInput::new(bytes);
    // The control queue is the last queue, after one or two pairs.
    let pairs = if queue == 4 || from.flip() { 2 } else { 1 };
    drive(&mut FuzzedInterface::new(queue, pairs), from);
}

/// Frames that a guest sends to the metadata service of a network interface.
pub fn metadata(bytes: &[u8]) {
    let mut from = FuzzInput::new(bytes);
    FuzzedMetadata::new(&mut from).run(&mut from);
}

/// Receive queue of the socket device, by which it sends packets to the guest.
pub fn vsock_receive(bytes: &[u8]) {
    drive(&mut FuzzedVsock::new(0), FuzzInput::new(bytes));
}

/// Transmit queue of the socket device, by which it takes packets from the guest.
pub fn vsock_transmit(bytes: &[u8]) {
    drive(&mut FuzzedVsock::new(1), FuzzInput::new(bytes));
}

/// Queue of the entropy device.
pub fn rng(bytes: &[u8]) {
    drive(&mut FuzzedRng, FuzzInput::new(bytes));
}

/// Inflate and deflate queues of a balloon.
pub fn balloon_inflate(bytes: &[u8]) {
    drive(&mut FuzzedBalloon::new(FuzzedBalloon::INFLATE), FuzzInput::new(bytes));
}

/// Statistics queue of a balloon.
pub fn balloon_statistics(bytes: &[u8]) {
    drive(&mut FuzzedBalloon::new(FuzzedBalloon::STATISTICS), FuzzInput::new(bytes));
}

/// Hinting queue of a balloon.
pub fn balloon_hint(bytes: &[u8]) {
    drive(&mut FuzzedBalloon::new(FuzzedBalloon::HINT), FuzzInput::new(bytes));
}

/// Reporting queue of a balloon.
pub fn balloon_report(bytes: &[u8]) {
    drive(&mut FuzzedBalloon::new(FuzzedBalloon::REPORT), FuzzInput::new(bytes));
}

/// Registers of any device.
pub fn registers(bytes: &[u8]) {
    let mut from = FuzzInput::new(bytes);
    let mut fuzzed = any(&mut from);
    FuzzHarness::new(&mut *fuzzed, Backing::Anon).run_registers(&mut from);
}

/// Saved state of any device.
pub fn device_state(bytes: &[u8]) {
    let mut from = FuzzInput::new(bytes);
    let mut fuzzed = any(&mut from);
    FuzzHarness::new(&mut *fuzzed, Backing::Anon).run_state(from.rest());
}

fn any(from: &mut FuzzInput<'_>) -> Box<dyn FuzzedDevice> {
    match from.u8() % 5 {
        0 => Box::new(FuzzedDisk::new(from, false)),
        1 => Box::new(FuzzedInterface::new(0, 2)),
        2 => Box::new(FuzzedVsock::new(0)),
        3 => Box::new(FuzzedBalloon::new(0)),
        _ => Box::new(FuzzedRng),
    }
}

fn drive(fuzzed: &mut dyn FuzzedDevice, mut from: FuzzInput<'_>) {
    let backing = from.one_of(&[Backing::Anon, Backing::Anon, Backing::Anon, Backing::Memfd]);
    FuzzHarness::new(fuzzed, backing).run(&mut from);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    /// The device holds a buffer in a queue that has no room for another one.
    #[test]
    fn statistics_queue_of_one_entry_becomes_idle() {
        // Memory; a start with all features and 5 queues of one entry; 16 rounds of a request and
        // of an event by which the buffer is given back.
        let start = [0, 0, 0, 0, 0, 0, 0, 0];
        let round = [[1; 8].as_slice(), &[13, 2, 1]].concat();
        super::balloon_statistics(&[&start[..], &round.repeat(16)].concat());
    }

    /// Shutting a stream down again makes it ready again.
    #[test]
    fn half_closed_connection_becomes_idle() {
        // Memory; a start with all features and 3 queues of 8 entries; packets of the guest to the
        // port at which a program listens.
        let start = [0, 0, 0, 3, 3, 3];
        let packet = |op, flags| [1, 0, 0, 0, 1, 0, 0, 0, 0, op, flags, 1, 0, 0, 255];
        let (request, shutdown) = (1, 4);
        for directions in 1..4 {
            let packets = [packet(request, 0), packet(shutdown, directions)].concat();
            super::vsock_transmit(&[&start[..], &packets].concat());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 24,
            max_shrink_iters: 200,
            ..ProptestConfig::default()
        })]

        /// A short run of what the fuzzer does for minutes. It mostly checks the harness.
        #[test]
        fn no_driver_breaks_a_device(
            which in 0..super::TARGETS.len(),
            bytes in proptest::collection::vec(any::<u8>(), 0..2000),
        ) {
            let (_, target) = super::TARGETS[which];
            target(&bytes);
            // An input that gets further because it begins with a start of the driver.
            target(&[&[0, 0, 0, 0, 8, 8, 8, 8, 8][..], &bytes].concat());
        }
    }
}
