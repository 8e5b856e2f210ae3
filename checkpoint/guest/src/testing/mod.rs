//! A guest without a hypervisor, for tests: host threads write pages that identify themselves.
//!
//! [`MemoryGuest`] is a [`Guest`](crate::Guest) in every respect that checkpoints and migration can
//! see: its writes mark the trees, it pauses between two writes, its state is a few sections. Every
//! page of its working set carries its frame number, a generation and a checksum.
//! [`MemoryGuest::verify`] computes what each page of memory must hold after the writes made so
//! far, without a record of them: a frame that was lost, torn or duplicated is found.
//!
//! [`Faults`] make its operations fail on request; [`ExclusiveDrive`] notices two hosts running one
//! guest.
//!
//! ```
//! use driftline_guest::Lifecycle;
//! use driftline_guest::testing::{MemoryConfig, MemoryGuest};
//! let guest = MemoryGuest::start(MemoryConfig::small())?;
//! std::thread::sleep(std::time::Duration::from_millis(5));
//! guest.pause()?;
//! guest.verify().expect("every page is as it was written last");
//! # Ok::<(), driftline_guest::GuestError>(())
//! ```

mod config;
mod device_file;
mod drives;
mod factory;
mod faults;
mod guest;
mod memory;
mod memory_loader;
mod pages;
mod threads;
mod write_protection;
mod writers;

pub use config::MemoryConfig;
pub use drives::TestDisk;
pub use factory::MemoryGuestFactory;
pub use faults::{ExclusiveDrive, Faults, Op};
pub use guest::{MemoryGuest, image};
pub use pages::{WrongFrame, WrongMemory, mix};
pub use threads::threads;

/// Returns the number of repetitions of a test: `full` with `DRIFTLINE_FULL=1`, else `short`.
pub fn repeats<T>(short: T, full: T) -> T {
    if std::env::var("DRIFTLINE_FULL").is_ok_and(|v| v == "1") { full } else { short }
}
