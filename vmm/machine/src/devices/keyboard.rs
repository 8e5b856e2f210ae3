//! A keyboard controller (8042) whose only key is Ctrl-Alt-Del, for a guest that a client of
//! Firecracker's API starts. Other guests have only the controller's reset, which needs no state.
//!
//! ```text
//! 0x64  read: status             write: command
//! 0x60  read: the oldest byte    write: a command's argument, or a byte to the keyboard
//! ```
//!
//! The keyboard acknowledges each byte and does nothing else. There is no mouse.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::error::StateError;

/// ISA interrupt of the keyboard.
pub(super) const KEYBOARD_IRQ: u32 = 1;

/// Bytes that may wait for the guest.
const CAPACITY: usize = 16;

/// Status: a byte waits for the guest.
const DATA: u8 = 1 << 0;
/// Status: the last write was a command, whose argument follows.
const COMMAND: u8 = 1 << 3;
/// Status: the keyboard is not locked.
const UNLOCKED: u8 = 1 << 4;

/// Configuration: interrupt for the keyboard's bytes.
const INTERRUPT: u8 = 1 << 0;
/// Configuration: the self-test has passed.
const PASSED: u8 = 1 << 2;

/// Output port: the processor is not held in reset.
const NO_RESET: u8 = 1 << 0;

const READ_CONFIGURATION: u8 = 0x20;
const WRITE_CONFIGURATION: u8 = 0x60;
const READ_OUTPUT_PORT: u8 = 0xd0;
const WRITE_OUTPUT_PORT: u8 = 0xd1;

/// The keyboard's answer to a byte.
const ACKNOWLEDGE: u8 = 0xfa;
/// Keys that go down: Ctrl, Alt and Del, in scan code set 2.
const CTRL_ALT_DEL: [u8; 4] = [0x14, 0x11, 0xe0, 0x71];

/// Ctrl-Alt-Del does not fit, because the guest has not read what came before.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("i8042 internal buffer full.")]
pub struct KeyboardFull;

/// The controller's registers and the bytes that wait for the guest.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Keyboard {
    configuration: u8,
    output_port: u8,
    /// The command that waits for its argument.
    command: Option<u8>,
    bytes: VecDeque<u8>,
}

impl Default for Keyboard {
    fn default() -> Self {
        let (configuration, output_port) = (INTERRUPT | PASSED, NO_RESET);
        Self { configuration, output_port, command: None, bytes: VecDeque::new() }
    }
}

/// Whether the keyboard's interrupt is to be raised.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum KeyboardInterrupt {
    Raised,
    Silent,
}

impl Keyboard {
    /// Handles a read of the status.
    pub(super) fn status(&self) -> u8 {
        let data = if self.bytes.is_empty() { 0 } else { DATA };
        let command = if self.command.is_some() { COMMAND } else { 0 };
        UNLOCKED | data | command
    }

    /// Handles a read of the oldest byte. Without one, it reads as 0.
    pub(super) fn read(&mut self) -> (u8, KeyboardInterrupt) {
        let byte = self.bytes.pop_front().unwrap_or(0);
        // The next byte has an interrupt of its own.
        let more = !self.bytes.is_empty();
        (byte, if more { self.interrupt() } else { KeyboardInterrupt::Silent })
    }

    /// Handles a command other than the reset.
    pub(super) fn command(&mut self, command: u8) {
        self.command = None;
        match command {
            READ_CONFIGURATION => self.answer(self.configuration),
            READ_OUTPUT_PORT => self.answer(self.output_port),
            WRITE_CONFIGURATION | WRITE_OUTPUT_PORT => self.command = Some(command),
            _ => {}
        }
    }

    /// Handles a command's argument, or a byte to the keyboard.
    pub(super) fn write(&mut self, byte: u8) -> KeyboardInterrupt {
        match self.command.take() {
            Some(WRITE_CONFIGURATION) => self.configuration = byte,
            Some(_) => self.output_port = byte,
            None => {
                self.answer(ACKNOWLEDGE);
                return self.interrupt();
            }
        }
        KeyboardInterrupt::Silent
    }

    /// Presses Ctrl-Alt-Del.
    ///
    /// # Errors
    ///
    /// The keys do not fit beside the bytes that the guest has not read.
    pub(super) fn press_ctrl_alt_del(&mut self) -> Result<KeyboardInterrupt, KeyboardFull> {
        if self.bytes.len() + CTRL_ALT_DEL.len() > CAPACITY {
            return Err(KeyboardFull);
        }
        self.bytes.extend(CTRL_ALT_DEL);
        Ok(self.interrupt())
    }

    /// Replaces what waits for the guest.
    fn answer(&mut self, byte: u8) {
        self.bytes.clear();
        self.bytes.push_back(byte);
    }

    fn interrupt(&self) -> KeyboardInterrupt {
        match self.configuration & INTERRUPT != 0 {
            true => KeyboardInterrupt::Raised,
            false => KeyboardInterrupt::Silent,
        }
    }

    /// Checks a state from elsewhere.
    ///
    /// # Errors
    ///
    /// No guest can bring the controller into this state.
    pub(crate) fn check(&self) -> Result<(), StateError> {
        let is_possible_command =
            self.command.is_none_or(|c| [WRITE_CONFIGURATION, WRITE_OUTPUT_PORT].contains(&c));
        match is_possible_command && self.bytes.len() <= CAPACITY {
            true => Ok(()),
            false => Err(StateError::Keyboard),
        }
    }
}

#[cfg(test)]
impl Keyboard {
    /// Returns a state whose fields differ.
    pub(crate) fn example() -> Self {
        let bytes = CTRL_ALT_DEL.into();
        let command = Some(WRITE_CONFIGURATION);
        Self { configuration: 5, output_port: 3, command, bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_all(keyboard: &mut Keyboard) -> Vec<u8> {
        let mut bytes = Vec::new();
        while keyboard.status() & DATA != 0 {
            bytes.push(keyboard.read().0);
        }
        bytes
    }

    #[test]
    fn registers_are_read_and_written_by_commands() {
        let mut keyboard = Keyboard::default();
        assert_eq!((keyboard.status(), keyboard.read().0), (UNLOCKED, 0));
        for (write, read, first, next) in [(0x60, 0x20, 0x05, 0x44), (0xd1, 0xd0, 0x01, 0x03)] {
            keyboard.command(read);
            assert_eq!(keyboard.status(), UNLOCKED | DATA);
            assert_eq!(read_all(&mut keyboard), [first]);
            keyboard.command(write);
            assert_eq!(keyboard.status(), UNLOCKED | COMMAND);
            assert_eq!(keyboard.write(next), KeyboardInterrupt::Silent);
            keyboard.command(read);
            assert_eq!(read_all(&mut keyboard), [next]);
        }
        // Another command instead of the argument.
        keyboard.command(0x60);
        keyboard.command(0xaa);
        assert_eq!(keyboard.status(), UNLOCKED);
    }

    #[test]
    fn keyboard_acknowledges_each_byte() {
        let mut keyboard = Keyboard::default();
        assert_eq!(keyboard.write(0xed), KeyboardInterrupt::Raised);
        assert_eq!(read_all(&mut keyboard), [0xfa]);
        keyboard.command(0x60);
        let _ = keyboard.write(0);
        assert_eq!(keyboard.write(0xed), KeyboardInterrupt::Silent);
    }

    #[test]
    fn each_key_has_an_interrupt() {
        let mut keyboard = Keyboard::default();
        assert_eq!(keyboard.press_ctrl_alt_del(), Ok(KeyboardInterrupt::Raised));
        let reads: Vec<_> = (0..4).map(|_| keyboard.read()).collect();
        let (raised, silent) = (KeyboardInterrupt::Raised, KeyboardInterrupt::Silent);
        assert_eq!(reads, [(0x14, raised), (0x11, raised), (0xe0, raised), (0x71, silent)]);
    }

    #[test]
    fn unread_keys_are_bounded() {
        let mut keyboard = Keyboard::default();
        for _ in 0..4 {
            assert!(keyboard.press_ctrl_alt_del().is_ok());
        }
        assert_eq!(keyboard.press_ctrl_alt_del(), Err(KeyboardFull));
        assert_eq!(read_all(&mut keyboard).len(), CAPACITY);
    }

    #[test]
    fn impossible_state_is_refused() {
        let keyboard = Keyboard::default();
        assert!(keyboard.check().is_ok());
        assert!(Keyboard { command: Some(0x20), ..keyboard.clone() }.check().is_err());
        let bytes = VecDeque::from([0; CAPACITY + 1]);
        assert!(Keyboard { bytes, ..keyboard }.check().is_err());
    }
}
