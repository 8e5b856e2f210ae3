//! COM1: vm-superio's 16550 with its interrupt line and its output.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use vm_superio::Trigger;
use vm_superio::serial::{NoEvents, Serial, SerialState};

use super::SinkWriter;
use crate::kvm::KvmVm;

/// ISA interrupt of COM1.
const IRQ: u32 = 4;

/// Raises the interrupt through the VM, at once: an event file descriptor would raise it some time
/// later, perhaps after the interrupt controllers were saved.
#[derive(Debug)]
pub(crate) struct IrqPulse(Arc<KvmVm>);

impl Trigger for IrqPulse {
    type E = kvm_ioctls::Error;

    fn trigger(&self) -> Result<(), Self::E> {
        self.0.fd().set_irq_line(IRQ, true)?;
        self.0.fd().set_irq_line(IRQ, false)
    }
}

type Uart = Serial<IrqPulse, NoEvents, SinkWriter>;

/// The port, shared by the vCPUs.
#[derive(Debug)]
pub struct Com1 {
    uart: Mutex<Uart>,
    vm: Arc<KvmVm>,
    sink: SinkWriter,
}

impl Com1 {
    /// A port as it is after a reset, which writes to `sink`.
    pub fn new(vm: Arc<KvmVm>, sink: SinkWriter) -> Self {
        let uart = Serial::new(IrqPulse(vm.clone()), sink.clone());
        Self { uart: Mutex::new(uart), vm, sink }
    }

    fn uart(&self) -> MutexGuard<'_, Uart> {
        self.uart.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn write(&self, register: u8, value: u8) {
        if let Err(e) = self.uart().write(register, value) {
            tracing::debug!("COM1 register {register}: {e}");
        }
    }

    pub(super) fn read(&self, register: u8) -> u8 {
        self.uart().read(register)
    }

    /// Waits, a moment at most, until all output so far is written.
    pub(crate) fn settle(&self) {
        self.sink.settle();
    }

    /// The port's registers.
    pub fn state(&self) -> SerialPortState {
        let s = self.uart().state();
        SerialPortState {
            baud_divisor: u16::from_le_bytes([s.baud_divisor_low, s.baud_divisor_high]),
            interrupt_enable: s.interrupt_enable,
            interrupt_identification: s.interrupt_identification,
            line_control: s.line_control,
            line_status: s.line_status,
            modem_control: s.modem_control,
            modem_status: s.modem_status,
            scratch: s.scratch,
            in_buffer: s.in_buffer,
        }
    }

    /// Puts saved registers into the port. May raise its interrupt, which a driver takes as
    /// spurious.
    pub fn restore(&self, state: SerialPortState) -> Result<(), String> {
        let [baud_divisor_low, baud_divisor_high] = state.baud_divisor.to_le_bytes();
        let state = SerialState {
            baud_divisor_low,
            baud_divisor_high,
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            line_status: state.line_status,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            in_buffer: state.in_buffer,
        };
        let irq = IrqPulse(self.vm.clone());
        let uart = Serial::from_state(&state, irq, NoEvents, self.sink.clone());
        *self.uart() = uart.map_err(|e| e.to_string())?;
        Ok(())
    }
}

/// A 16550's registers.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SerialPortState {
    baud_divisor: u16,
    interrupt_enable: u8,
    interrupt_identification: u8,
    line_control: u8,
    line_status: u8,
    modem_control: u8,
    modem_status: u8,
    scratch: u8,
    in_buffer: Vec<u8>,
}
