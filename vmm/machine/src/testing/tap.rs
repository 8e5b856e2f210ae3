//! A tap on the host, for tests.

use std::io;
use std::process::Command;

/// A tap, identified by its name. Dropping it removes the tap.
pub struct TestTap(pub String);

impl TestTap {
    /// Creates a tap with one queue pair. `name` distinguishes the taps of one process.
    ///
    /// # Errors
    ///
    /// This user may not create taps.
    pub fn new(name: &str) -> io::Result<Self> {
        Self::make(name, &[])
    }

    /// Creates a tap as [`new`](Self::new) does, with several queue pairs.
    ///
    /// # Errors
    ///
    /// This user may not create taps.
    pub fn multi_queue(name: &str) -> io::Result<Self> {
        Self::make(name, &["multi_queue"])
    }

    fn make(name: &str, more: &[&str]) -> io::Result<Self> {
        let name = format!("dl{}{name}", std::process::id());
        let args = [&["tuntap", "add", "dev", &name, "mode", "tap"], more].concat();
        let out = Command::new("ip")
            .args(&args)
            .output()
            .map_err(|e| io::Error::new(e.kind(), format!("ip: {e}")))?;
        match out.status.success() {
            true => Ok(Self(name)),
            false => {
                let output = String::from_utf8_lossy(&out.stderr);
                Err(io::Error::other(format!("ip {}: {}", args.join(" "), output.trim())))
            }
        }
    }
}

impl Drop for TestTap {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["link", "del", &self.0]).status();
    }
}
