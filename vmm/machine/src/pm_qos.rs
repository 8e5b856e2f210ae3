//! Keeps the host's processors out of their sleep states for a moment. While a guest is paused for
//! a hand-over, its threads wake each other a dozen times. Waking a sleeping processor takes some
//! ten microseconds, or hundreds from a deep sleep state. The benefit is a shorter downtime for an
//! idle guest: the row "4 GiB, mostly idle" of `cargo bench -p tests --bench migrate_vs_qemu` shows
//! it, run as root and as a user that may not open the file.
//!
//! The request goes through the kernel's `/dev/cpu_dma_latency` (PM QoS). It applies to all
//! processors until it is withdrawn, and by default only root may open the file. A separate thread
//! makes and withdraws the request, so that a hand-over that hangs does not keep the host awake.
//! Where the file cannot be opened, hand-overs take longer, with no other effect.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::sync::OnceLock;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use crate::sandbox::{self, Class};

/// Path of the kernel's file.
pub const DEVICE: &str = "/dev/cpu_dma_latency";
/// Time for which processors stay awake: a hand-over takes some milliseconds.
const AWAKE_TIME: Duration = Duration::from_millis(20);
/// Latency in microseconds that permits no sleep state.
const NONE: i32 = 0;
/// The kernel's `PM_QOS_DEFAULT_VALUE`: no request.
const ANY: i32 = -1;

/// The channel to the thread, once it runs.
static THREAD: OnceLock<Sender<()>> = OnceLock::new();

/// Opens the file. This requests nothing yet.
///
/// # Errors
///
/// The file is missing, or this user may not open it.
pub fn open() -> io::Result<File> {
    OpenOptions::new().write(true).open(DEVICE)
}

/// Starts the thread that keeps processors awake through `file` when a guest is handed over.
/// Without it they may sleep. Only the first call of a process takes effect.
///
/// # Errors
///
/// The thread cannot be started.
pub fn start(file: File) -> io::Result<()> {
    let (sender, requests) = mpsc::channel();
    sandbox::spawn(Class::Worker, "awake", move || serve(file, &requests, AWAKE_TIME))?;
    // If there is a thread already, the new one ends by itself.
    let _ = THREAD.set(sender);
    Ok(())
}

/// Keeps processors awake for some milliseconds from now on, if the thread was started.
pub(crate) fn stay_awake() {
    if let Some(thread) = THREAD.get() {
        // A thread that has ended keeps no processor awake.
        let _ = thread.send(());
    }
}

/// Keeps processors awake for `limit` after each message.
fn serve(mut file: impl Write, requests: &Receiver<()>, limit: Duration) {
    while requests.recv().is_ok() {
        if let Err(e) = file.write_all(&NONE.to_ne_bytes()) {
            tracing::debug!("{DEVICE}: {e}: processors may sleep during a hand-over");
            continue;
        }
        while requests.recv_timeout(limit).is_ok() {}
        if let Err(e) = file.write_all(&ANY.to_ne_bytes()) {
            tracing::warn!(
                "{DEVICE}: {e}: this host's processors do not sleep until this process ends"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    /// A file that reports the numbers written to it.
    struct RecordedWrites(Sender<i32>);

    impl Write for RecordedWrites {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.send(i32::from_ne_bytes(bytes.try_into().unwrap())).unwrap();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn processors_sleep_again_after_the_limit() {
        let (sender, requests) = mpsc::channel();
        let (writes, written) = mpsc::channel();
        let thread = thread::spawn(move || {
            serve(RecordedWrites(writes), &requests, Duration::from_millis(1))
        });
        let next = || written.recv_timeout(Duration::from_secs(10)).unwrap();
        for _ in 0..2 {
            sender.send(()).unwrap();
            assert_eq!((next(), next()), (NONE, ANY));
        }
        assert!(written.try_recv().is_err());
        drop(sender);
        thread.join().unwrap();
    }

    #[test]
    fn ending_thread_lets_processors_sleep() {
        let (sender, requests) = mpsc::channel();
        let (writes, written) = mpsc::channel();
        sender.send(()).unwrap();
        sender.send(()).unwrap();
        drop(sender);
        serve(RecordedWrites(writes), &requests, Duration::from_secs(600));
        assert_eq!(written.iter().collect::<Vec<_>>(), [NONE, ANY]);
    }

    #[test]
    fn unwritable_file_ends_nothing() {
        let (sender, requests) = mpsc::channel();
        sender.send(()).unwrap();
        drop(sender);
        // The file is open for reading only.
        serve(File::open("/dev/null").unwrap(), &requests, Duration::from_secs(600));
    }
}
