//! The I/O ports and the device registers in memory: which device gets a vCPU's access.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::boot_timer::{BOOT_TIMER, BootTimer};
use super::keyboard::{KEYBOARD_IRQ, Keyboard, KeyboardFull, KeyboardInterrupt};
use super::power::PowerManagement;
use super::serial::Com1;
use super::set::DeviceSet;
use super::virtio::Completion;
use crate::config::BootClock;
use crate::end_reason::EndReason;

const KEYBOARD_DATA: u16 = 0x60;
pub(crate) const KEYBOARD_COMMAND: u16 = 0x64;
pub(crate) const KEYBOARD_RESET: u8 = 0xfe;
pub(crate) const COM1_PORTS: std::ops::RangeInclusive<u16> = 0x3f8..=0x3ff;
pub(crate) const PVPANIC: u16 = 0x505;
/// PM1a event block: status, then enable.
pub(crate) const PM1A_EVENT: u16 = 0x600;
/// PM1a control block.
pub(crate) const PM1A_CONTROL: u16 = 0x604;
/// ACPI's own interrupt, at its usual number on a PC. Nothing here raises it.
pub(crate) const SCI: u8 = 9;
/// Interrupt of the generation ID's event device. On PCs it belongs to the external coprocessor,
/// which the guest does not have.
pub(crate) const GENERATION_EVENT: u8 = 13;

const PM1: std::ops::Range<u16> = PM1A_EVENT..PM1A_CONTROL + 2;
/// pvpanic events: a panic that ends the guest, and a panic after which the guest's crash kernel
/// runs.
const PANICKED: u8 = 1 << 0;
const CRASH_LOADED: u8 = 1 << 1;

/// The I/O ports and the device registers in memory, shared by all vCPUs.
#[derive(Debug)]
pub(crate) struct Bus {
    com1: Com1,
    power: PowerManagement,
    /// `None` in a machine without a keyboard.
    keyboard: Mutex<Option<Keyboard>>,
    /// Only in a machine that is to report its boot.
    boot_timer: Option<BootTimer>,
    virtio: DeviceSet,
    /// Whether the guest's crash kernel has already been logged.
    crash_logged: AtomicBool,
}

impl Bus {
    /// Returns a bus with these devices. `boot_clock`, if there is one, times the guest's boot.
    pub(crate) fn new(com1: Com1, virtio: DeviceSet, boot_clock: Option<BootClock>) -> Self {
        let power = PowerManagement::default();
        let (keyboard, crash_logged) = (Mutex::default(), AtomicBool::new(false));
        let boot_timer = boot_clock.map(BootTimer::new);
        Self { com1, power, keyboard, boot_timer, virtio, crash_logged }
    }

    /// Returns the virtio devices.
    pub(crate) fn virtio(&self) -> &DeviceSet {
        &self.virtio
    }

    /// Handles a guest's write to an address without memory. Returns whether a device still has
    /// work to do for it. If so, the device's thread drops the [`Completion`] that `done` creates
    /// when that work is complete; the caller then lets the guest continue.
    pub(crate) fn write_mmio(
        &self,
        addr: u64,
        data: &[u8],
        done: impl FnOnce() -> Completion,
    ) -> bool {
        if addr == BOOT_TIMER
            && let Some(timer) = &self.boot_timer
        {
            if let Some(line) = timer.write(data) {
                tracing::info!("{line}");
            }
            return false;
        }
        self.virtio.write(addr, data, done)
    }

    /// Handles a guest's read of an address without memory. Reads as ones if no device is there.
    pub(crate) fn read_mmio(&self, addr: u64, data: &mut [u8]) {
        self.virtio.read(addr, data);
    }

    /// Returns the first serial port.
    pub(crate) fn com1(&self) -> &Com1 {
        &self.com1
    }

    /// Returns ACPI's power management registers.
    pub(crate) fn power(&self) -> &PowerManagement {
        &self.power
    }

    /// Returns the state of the keyboard controller, if the machine has one.
    pub(crate) fn keyboard(&self) -> Option<Keyboard> {
        self.keyboard.lock().clone()
    }

    /// Gives the machine a keyboard controller in this state, or none.
    pub(crate) fn set_keyboard(&self, keyboard: Option<Keyboard>) {
        *self.keyboard.lock() = keyboard;
    }

    /// Presses Ctrl-Alt-Del. Returns `None` in a machine without a keyboard.
    pub(crate) fn press_ctrl_alt_del(&self) -> Option<Result<(), KeyboardFull>> {
        let mut keyboard = self.keyboard.lock();
        let pressed = keyboard.as_mut()?.press_ctrl_alt_del();
        Some(pressed.map(|interrupt| self.raise_if(interrupt)))
    }

    fn raise_if(&self, interrupt: KeyboardInterrupt) {
        if interrupt == KeyboardInterrupt::Raised {
            self.com1.raise(KEYBOARD_IRQ);
        }
    }

    /// Handles a guest's port write: one access of `width` bytes, or, from a string instruction,
    /// several accesses to the same port. Returns the reason if the write ends the machine.
    ///
    /// Except for PM1, the registers at these ports are one byte wide. As on a PC, a wider access
    /// writes one byte to each of as many consecutive ports.
    pub(crate) fn write(&self, port: u16, width: usize, data: &[u8]) -> Option<EndReason> {
        data.chunks(width.max(1)).find_map(|access| {
            if PM1.contains(&port) {
                let off = self.power.write(port - PM1.start, access);
                return off.then_some(EndReason::PowerOff);
            }
            (port..=u16::MAX).zip(access).find_map(|(port, byte)| self.write_byte(port, *byte))
        })
    }

    fn write_byte(&self, port: u16, byte: u8) -> Option<EndReason> {
        match port {
            PVPANIC if byte & PANICKED != 0 => return Some(EndReason::Panicked),
            // Logged once, because a guest can write this repeatedly.
            PVPANIC
                if byte & CRASH_LOADED != 0 && !self.crash_logged.swap(true, Ordering::Relaxed) =>
            {
                tracing::warn!("the guest has panicked, and its crash kernel runs");
            }
            KEYBOARD_COMMAND if byte == KEYBOARD_RESET => return Some(EndReason::Reset),
            KEYBOARD_COMMAND => {
                if let Some(keyboard) = self.keyboard.lock().as_mut() {
                    keyboard.command(byte);
                }
            }
            KEYBOARD_DATA => {
                if let Some(keyboard) = self.keyboard.lock().as_mut() {
                    self.raise_if(keyboard.write(byte));
                }
            }
            port if COM1_PORTS.contains(&port) => {
                self.com1.write((port - COM1_PORTS.start()) as u8, byte);
            }
            _ => {}
        }
        None
    }

    /// Handles a guest's port read, with accesses as for [`write`](Self::write). Reads as ones
    /// where no device is, as on a floating bus.
    pub(crate) fn read(&self, port: u16, width: usize, data: &mut [u8]) {
        for access in data.chunks_mut(width.max(1)) {
            if PM1.contains(&port) {
                self.power.read(port - PM1.start, access);
                continue;
            }
            access.fill(0xff);
            for (port, byte) in (port..=u16::MAX).zip(access) {
                *byte = self.read_byte(port);
            }
        }
    }

    fn read_byte(&self, port: u16) -> u8 {
        match port {
            port if COM1_PORTS.contains(&port) => self.com1.read((port - COM1_PORTS.start()) as u8),
            PVPANIC => PANICKED | CRASH_LOADED,
            // Without a keyboard both buffers are empty.
            KEYBOARD_COMMAND => self.keyboard.lock().as_ref().map_or(0, Keyboard::status),
            KEYBOARD_DATA => self.keyboard.lock().as_mut().map_or(0xff, |keyboard| {
                let (byte, interrupt) = keyboard.read();
                self.raise_if(interrupt);
                byte
            }),
            _ => 0xff,
        }
    }
}
