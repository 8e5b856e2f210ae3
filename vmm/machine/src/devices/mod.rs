//! Devices that the VMM emulates itself, and the ports where the guest finds them.
//!
//! ```text
//! 0x060, 0x064   keyboard controller: 0xfe resets; also ACPI's reset register. Only some guests
//!                have more of it, with interrupt 1
//! 0x3f8..0x3ff   COM1, interrupt 4
//! 0x505          pvpanic: the guest reports its panic, which ends the machine
//! 0x600..0x605   ACPI's PM1 registers: sleep enable ends the machine; interrupt 9, never raised
//! ```
//!
//! The registers of virtio devices start at 0xd000_0000, in the memory hole, one page per device.
//! A guest of Firecracker's API may have a boot timer at 0xc000_0000. Interrupt 13 tells an ACPI
//! guest that its generation ID has changed.
//!
//! KVM emulates the interrupt controllers, the timer and the local APICs.

mod balloon;
mod block;
mod boot_timer;
mod bus;
mod counts;
mod error;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod handed_over;
mod keyboard;
mod latched_event;
#[cfg(test)]
mod log_capture;
mod misfit;
mod net;
mod opener;
mod placement;
mod power;
mod rate_limit;
mod rng;
mod serial;
mod serial_file;
mod serial_input;
mod serial_output;
mod set;
mod stats;
mod timer;
mod virtio;
mod vsock;

pub use balloon::{
    BalloonControl, BalloonCounts, BalloonStats, DiscardCounts, HintingError, HintingStatus,
    MemoryStatistics, StatisticsError,
};
pub use block::{
    CopyRefusal, DiskError, DiskFileControl, ExchangeError, file_serial, probe as probe_disk,
    probe_opened as probe_opened_disk,
};
pub(crate) use block::{DriveSource, ParentGuest, make_copies, open_drives};
pub(crate) use bus::{
    Bus, COM1_PORTS, GENERATION_EVENT, KEYBOARD_COMMAND, KEYBOARD_RESET, PM1A_CONTROL, PM1A_EVENT,
    PVPANIC, SCI,
};
pub(crate) use counts::MachineCounters;
pub use counts::{MachineCounts, RngCounts, SerialCounts, VsockCounts};
pub use error::{DeviceError, StateError};
pub(crate) use handed_over::{device_files, opened_files};
pub(crate) use keyboard::Keyboard;
pub use keyboard::KeyboardFull;
pub use net::{NET_HEADER, TapError, open_tap};
pub(crate) use placement::{DevicePlacement, placement};
pub(crate) use power::PowerState;
#[cfg(any(test, fuzzing))]
pub(crate) use serial::fuzz as fuzz_serial;
pub(crate) use serial::{Com1, IRQ as COM1_IRQ, SerialPortState};
#[cfg(test)]
pub(crate) use serial::{PORT_BYTES, PortInput};
pub(crate) use serial_input::SerialInput;
pub use serial_input::was_ctrl_a_x;
pub use serial_output::{
    SerialOutputError, SerialOutputThread, SerialWriter, open as open_serial_output,
};
pub use set::ACQUIRE_LIMIT;
#[cfg(test)]
pub(crate) use set::DeviceLimits;
pub(crate) use set::{DeviceSet, Drive};
pub use stats::DeviceStats;
pub(crate) use stats::StatsHandle;
#[cfg(test)]
pub(crate) use virtio::fake;
pub(crate) use virtio::{Completion, REGISTERS_LEN, RequestError, VirtioState};
pub use virtio::{RateLimitControl, RateLimitError};
pub use vsock::VsockError;
