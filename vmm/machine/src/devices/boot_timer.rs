//! A register by which a guest of Firecracker's API reports that it has booted. The time since the
//! start was requested is logged, once: a guest can write as often as it likes.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::config::BootClock;

/// Address of the register, which is Firecracker's. It is the first byte of the memory hole.
pub(super) const BOOT_TIMER: u64 = 0xc000_0000;
/// What a booted guest writes.
const BOOTED: u8 = 123;

/// The register.
#[derive(Debug)]
pub(super) struct BootTimer {
    clock: BootClock,
    is_logged: AtomicBool,
}

impl BootTimer {
    pub(super) fn new(clock: BootClock) -> Self {
        Self { clock, is_logged: AtomicBool::new(false) }
    }

    /// Handles a guest's write. Returns the line to log, if the guest has just booted.
    pub(super) fn write(&self, data: &[u8]) -> Option<String> {
        if data != [BOOTED] || self.is_logged.swap(true, Ordering::Relaxed) {
            return None;
        }
        let (wall, cpu) = self.clock.elapsed();
        Some(format!(
            "Guest-boot-time = {:>6} us {} ms, {:>6} CPU us {} CPU ms",
            wall.as_micros(),
            wall.as_millis(),
            cpu.as_micros(),
            cpu.as_millis()
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boot_is_reported_once() {
        let timer = BootTimer::new(BootClock::start());
        for data in [&[0][..], &[BOOTED, 0], &[]] {
            assert_eq!(timer.write(data), None);
        }
        let line = timer.write(&[BOOTED]).unwrap();
        assert!(line.starts_with("Guest-boot-time = ") && line.ends_with(" CPU ms"), "{line}");
        assert_eq!(timer.write(&[BOOTED]), None);
    }
}
