//! COM1: vm-superio's 16550 with its interrupt line, its output and its input.

use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};
use vm_superio::Trigger;
use vm_superio::serial::{Serial, SerialEvents, SerialState};

use super::counts::SerialCounters;
use super::error::StateError;
use super::latched_event::LatchedEvent;
use super::misfit::DeviceMisfit;
use super::serial_output::SerialWriter;
use crate::kvm::KvmVm;

/// ISA interrupt of COM1.
pub(crate) const IRQ: u32 = 4;

/// Bit of the interrupt enable register: interrupt on received data.
const RECEIVED_DATA: u8 = 1 << 0;
/// Bit of the modem control register: the port receives its own output, and no input.
const LOOPBACK: u8 = 1 << 4;

/// Upper bound on how long a pause waits for a read in progress. Only a file on storage that hangs
/// takes so long.
const READ_LIMIT: Duration = Duration::from_millis(if cfg!(test) { 60_000 } else { 1000 });

/// Room of an empty port, in bytes.
pub(crate) const PORT_BYTES: usize = 64;

/// Raises the interrupt through the VM, immediately. An event file descriptor would raise it some
/// time later, perhaps after the interrupt controllers were saved.
#[derive(Debug)]
pub(crate) struct IrqPulse(Arc<KvmVm>);

impl Trigger for IrqPulse {
    type E = kvm_ioctls::Error;

    fn trigger(&self) -> Result<(), Self::E> {
        self.0.pulse_irq(IRQ)
    }
}

/// Counts bytes, and signals an event when the guest has read all input in the port.
#[derive(Clone, Debug)]
pub(crate) struct PortEvents {
    drained: Arc<LatchedEvent>,
    counters: Arc<SerialCounters>,
}

impl SerialEvents for PortEvents {
    fn buffer_read(&self) {
        self.counters.read_bytes.add(1);
    }

    fn out_byte(&self) {
        self.counters.written_bytes.add(1);
    }

    // The output's own thread counts these.
    fn tx_lost_byte(&self) {}

    fn in_buffer_empty(&self) {
        self.drained.signal();
    }
}

type Uart = Serial<IrqPulse, PortEvents, SerialWriter>;

/// The port, shared by the vCPUs.
#[derive(Debug)]
pub(crate) struct Com1 {
    uart: Mutex<Uart>,
    vm: Arc<KvmVm>,
    sink: SerialWriter,
    events: PortEvents,
    /// Whether input may enter the port. False while the guest is paused, because its state must
    /// not change then.
    takes_input: AtomicBool,
    /// Held while input is read for the port, so that a paused guest's port has all that was read.
    reading: Mutex<()>,
    /// Whether a pause has waited in vain for the read in progress, whose bytes the port then
    /// refuses.
    is_read_late: AtomicBool,
}

/// Result of one attempt to read input.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum PortInput<'b> {
    /// It is in the port, or its source has none now.
    Taken,
    /// The port has no room now, and nothing was read.
    NoRoom,
    /// It was read, and the port has not taken this part of it.
    Left(&'b [u8]),
    /// There is no more.
    End,
}

impl Com1 {
    /// Returns a port in its reset state that writes to `sink`. It takes no input before
    /// `take_input`.
    pub(crate) fn new(vm: Arc<KvmVm>, sink: SerialWriter) -> io::Result<Self> {
        let drained = Arc::new(LatchedEvent::new()?);
        let events = PortEvents { drained, counters: sink.counters().clone() };
        let uart = Serial::with_events(IrqPulse(vm.clone()), events.clone(), sink.clone());
        let takes_input = AtomicBool::new(false);
        let reading = Mutex::new(());
        let is_read_late = AtomicBool::new(false);
        Ok(Self { uart: Mutex::new(uart), vm, sink, events, takes_input, reading, is_read_late })
    }

    /// Returns the port's counters.
    pub(crate) fn counters(&self) -> &Arc<SerialCounters> {
        &self.events.counters
    }

    /// Lets input in if `yes` is true, or stops it. After a stop, a read in progress may still
    /// bring some: see [`await_read`](Self::await_read).
    pub(crate) fn take_input(&self, yes: bool) {
        let _uart = self.uart();
        self.takes_input.store(yes, Ordering::Relaxed);
        if yes {
            self.events.in_buffer_empty();
        }
    }

    /// Waits for a read in progress. After that, no more input enters a port that takes none.
    pub(crate) fn await_read(&self) {
        let limit = match self.is_read_late.load(Ordering::Relaxed) {
            true => Duration::ZERO,
            false => READ_LIMIT,
        };
        if self.reading.try_lock_for(limit).is_none() {
            let _uart = self.uart();
            if !self.is_read_late.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    "standard input has not answered a read within {READ_LIMIT:?}; if the guest \
                     moves, what that read brings is lost"
                );
            }
        }
    }

    /// Gives the guest as much of `input` as fits into the port and returns the number of bytes.
    /// With `only_if_enabled`, gives nothing before the guest has enabled the interrupt for
    /// received data.
    pub(crate) fn feed(&self, input: &[u8], only_if_enabled: bool) -> usize {
        let mut uart = self.uart();
        let is_enabled = || uart.state().interrupt_enable & RECEIVED_DATA != 0;
        if input.is_empty()
            || !self.takes_input.load(Ordering::Relaxed)
            || only_if_enabled && !is_enabled()
        {
            return 0;
        }
        // A full port is not an error: `PortEvents` reports when the guest has read everything.
        if uart.fifo_capacity() == 0 {
            return 0;
        }
        enqueue(&mut uart, input)
    }

    /// Lets `read` read as much input as the port has room for, and gives it to the guest. Reads
    /// nothing while the guest takes none. Bytes are read to `buffer`.
    ///
    /// # Errors
    ///
    /// Those of `read`.
    pub(crate) fn feed_from<'b>(
        &self,
        buffer: &'b mut [u8; PORT_BYTES],
        read: impl FnOnce(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<PortInput<'b>> {
        let _reading = self.reading.lock();
        self.is_read_late.store(false, Ordering::Relaxed);
        let room = self.room().min(buffer.len());
        if room == 0 {
            return Ok(PortInput::NoRoom);
        }
        let input = match read(&mut buffer[..room]) {
            Ok(0) => return Ok(PortInput::End),
            Ok(read) => &buffer[..read],
            Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {
                return Ok(PortInput::Taken);
            }
            Err(e) => return Err(e),
        };
        let mut uart = self.uart();
        let taken = match self.is_read_late.load(Ordering::Relaxed) {
            true => 0,
            false => enqueue(&mut uart, input),
        };
        Ok(match &input[taken..] {
            [] => PortInput::Taken,
            left => PortInput::Left(left),
        })
    }

    /// Returns how many bytes of input a guest whose driver takes input has room for.
    fn room(&self) -> usize {
        let uart = self.uart();
        let registers = uart.state();
        let is_enabled = registers.interrupt_enable & RECEIVED_DATA != 0
            && registers.modem_control & LOOPBACK == 0;
        match is_enabled && self.takes_input.load(Ordering::Relaxed) {
            true => uart.fifo_capacity(),
            false => 0,
        }
    }

    /// Returns the event that is signaled when the guest has read all its input.
    pub(super) fn drained(&self) -> &LatchedEvent {
        &self.events.drained
    }

    fn uart(&self) -> MutexGuard<'_, Uart> {
        self.uart.lock()
    }

    /// Raises an interrupt for another device on the same bus.
    pub(super) fn raise(&self, irq: u32) {
        if let Err(e) = self.vm.pulse_irq(irq) {
            tracing::debug!("interrupt {irq}: {e}");
        }
    }

    pub(super) fn write(&self, register: u8, value: u8) {
        if let Err(e) = self.uart().write(register, value) {
            self.events.counters.errors.add(1);
            tracing::debug!("COM1 register {register}: {e}");
        }
    }

    pub(super) fn read(&self, register: u8) -> u8 {
        self.uart().read(register)
    }

    /// Waits until all output so far is written, for a limited time.
    pub(crate) fn drain(&self) {
        self.sink.drain();
    }

    /// Returns the port's registers.
    pub(crate) fn state(&self) -> SerialPortState {
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

    /// Restores saved registers into the port. This may raise its interrupt, which a driver ignores
    /// as spurious.
    ///
    /// # Errors
    ///
    /// Fails if `state` is not a valid state of a port.
    pub(crate) fn restore(&self, state: SerialPortState) -> Result<(), StateError> {
        let irq = IrqPulse(self.vm.clone());
        let uart = Serial::from_state(&state.into(), irq, self.events.clone(), self.sink.clone());
        *self.uart() = uart.map_err(DeviceMisfit::from)?;
        Ok(())
    }
}

/// Gives the port as much of `input` as it has room for. Returns the number of bytes.
fn enqueue(uart: &mut Uart, input: &[u8]) -> usize {
    uart.enqueue_raw_bytes(input).unwrap_or_else(|e| {
        tracing::debug!("COM1 input: {e}");
        0
    })
}

/// Registers of a 16550.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct SerialPortState {
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

impl From<SerialPortState> for SerialState {
    fn from(state: SerialPortState) -> Self {
        let [baud_divisor_low, baud_divisor_high] = state.baud_divisor.to_le_bytes();
        Self {
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
        }
    }
}

/// Runs a port from the hostile `state`, with a driver that uses every register.
#[cfg(any(test, fuzzing))]
pub(crate) fn fuzz(state: SerialPortState) {
    struct NoInterrupt;
    impl Trigger for NoInterrupt {
        type E = io::Error;
        fn trigger(&self) -> io::Result<()> {
            Ok(())
        }
    }
    let uart =
        Serial::from_state(&state.into(), NoInterrupt, vm_superio::serial::NoEvents, io::sink());
    let Ok(mut uart) = uart else { return };
    for register in 0..8 {
        uart.read(register);
        // An error does not stop the port.
        let _ = uart.write(register, 0xa5);
        let _ = uart.enqueue_raw_bytes(&[register; 9]);
        uart.read(register);
    }
}

#[cfg(test)]
impl SerialPortState {
    /// Returns a state whose fields all differ.
    pub(crate) fn example() -> Self {
        Self {
            baud_divisor: 0x1234,
            interrupt_enable: 1,
            interrupt_identification: 2,
            line_control: 3,
            line_status: 4,
            modem_control: 5,
            modem_status: 6,
            scratch: 7,
            in_buffer: b"typed".to_vec(),
        }
    }

    /// Returns how many bytes of input the guest has not read.
    pub(crate) fn unread(&self) -> usize {
        self.in_buffer.len()
    }
}
