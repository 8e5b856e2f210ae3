//! The few devices that the VMM itself emulates, and the ports at which the guest finds them.
//!
//! ```text
//! 0x064          keyboard controller: 0xfe resets
//! 0x3f8..0x3ff   COM1, interrupt 4
//! 0x604          power management: sleep enable ends the machine
//! ```
//!
//! Interrupt controllers, timer and local APICs are KVM's.

mod serial;
mod sink;

pub use serial::{Com1, SerialPortState};
pub use sink::{SinkError, SinkWriter};
pub(crate) use sink::{SinkThread, open as open_sink};

use crate::vm::EndReason;

const KEYBOARD_COMMAND: u16 = 0x64;
const KEYBOARD_RESET: u8 = 0xfe;
const COM1: std::ops::RangeInclusive<u16> = 0x3f8..=0x3ff;
const PM1A_CONTROL: u16 = 0x604;
/// `SLP_EN` of the PM1a control register.
const SLEEP_ENABLE: u16 = 1 << 13;

/// The port bus. Shared by all vCPUs.
#[derive(Debug)]
pub struct Bus {
    com1: Com1,
}

impl Bus {
    /// A bus with these devices.
    pub fn new(com1: Com1) -> Self {
        Self { com1 }
    }

    /// The first serial port.
    pub fn com1(&self) -> &Com1 {
        &self.com1
    }

    /// A guest's write: one access, or, from a string instruction, several of one byte each. Gives
    /// the reason if it ends the machine.
    pub fn write(&self, port: u16, data: &[u8]) -> Option<EndReason> {
        match (port, data) {
            (PM1A_CONTROL, &[low, high]) => {
                let sleep = u16::from_le_bytes([low, high]) & SLEEP_ENABLE != 0;
                return sleep.then_some(EndReason::PowerOff);
            }
            (KEYBOARD_COMMAND, bytes) if bytes.contains(&KEYBOARD_RESET) => {
                return Some(EndReason::Reset);
            }
            (port, bytes) if COM1.contains(&port) => {
                let register = (port - COM1.start()) as u8;
                bytes.iter().for_each(|byte| self.com1.write(register, *byte));
            }
            _ => {}
        }
        None
    }

    /// A guest's read, accesses as with [`write`](Self::write). Where nothing is, the bus floats:
    /// ones.
    pub fn read(&self, port: u16, data: &mut [u8]) {
        match port {
            port if COM1.contains(&port) => {
                let register = (port - COM1.start()) as u8;
                data.iter_mut().for_each(|byte| *byte = self.com1.read(register));
            }
            // Status of the keyboard controller: nothing in either buffer.
            KEYBOARD_COMMAND => data.fill(0),
            _ => data.fill(0xff),
        }
    }
}
