//! Owns the word to the host that its processors are not to sleep for a moment: while a guest
//! stands for a hand-over its threads wake each other a dozen times, and to wake a processor from
//! its sleep takes some ten microseconds, or hundreds from a deep one.
//!
//! The word is the kernel's `/dev/cpu_dma_latency` (PM QoS), which holds for all processors for as
//! long as it is kept, and which by default only root may open. A thread of its own gives it and
//! takes it back, so that a hand-over that hangs does not keep a host awake. Where the file can't
//! be opened hand-overs take longer, and that is all.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::sync::OnceLock;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use crate::sandbox::{self, Class};

/// What is opened.
pub const DEVICE: &str = "/dev/cpu_dma_latency";
/// For so long processors stay awake: a hand-over takes some milliseconds.
const LIMIT: Duration = Duration::from_millis(20);
/// No sleep at all, in microseconds.
const NONE: i32 = 0;
/// The kernel's `PM_QOS_DEFAULT_VALUE`: as if nothing had been said.
const ANY: i32 = -1;

/// The way to the thread, once there is one.
static THREAD: OnceLock<Sender<()>> = OnceLock::new();

/// Opens the file, which says nothing yet. Fails where it is missing, or not for this user.
pub fn open() -> io::Result<File> {
    OpenOptions::new().write(true).open(DEVICE)
}

/// Starts the thread that keeps processors awake by this `file` when a guest is handed over;
/// without it they may sleep. The first of a process stays.
pub fn start(file: File) -> io::Result<()> {
    let (tell, told) = mpsc::channel();
    sandbox::spawn(Class::Worker, "awake", move || obey(file, &told, LIMIT))?;
    // Another one's thread ends by itself.
    let _ = THREAD.set(tell);
    Ok(())
}

/// Keeps processors awake for some milliseconds from now on, if that was begun.
pub(crate) fn stay_awake() {
    if let Some(thread) = THREAD.get() {
        // One that has ended keeps nobody awake.
        let _ = thread.send(());
    }
}

/// Each time that it is told, keeps processors awake for `limit`.
fn obey(mut file: impl Write, told: &Receiver<()>, limit: Duration) {
    while told.recv().is_ok() {
        if let Err(e) = file.write_all(&NONE.to_ne_bytes()) {
            tracing::debug!("{DEVICE}: {e}: processors may sleep during a hand-over");
            continue;
        }
        while told.recv_timeout(limit).is_ok() {}
        if let Err(e) = file.write_all(&ANY.to_ne_bytes()) {
            tracing::warn!("{DEVICE}: {e}: this host's processors do not sleep while this runs");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    /// What a file is told, as numbers.
    struct Told(Sender<i32>);

    impl Write for Told {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.send(i32::from_ne_bytes(bytes.try_into().unwrap())).unwrap();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn processors_are_kept_awake_when_that_is_asked_for_and_sleep_again_by_themselves() {
        let (tell, told) = mpsc::channel();
        let (say, said) = mpsc::channel();
        let thread = thread::spawn(move || obey(Told(say), &told, Duration::from_millis(1)));
        let next = || said.recv_timeout(Duration::from_secs(10)).unwrap();
        for _ in 0..2 {
            tell.send(()).unwrap();
            assert_eq!((next(), next()), (NONE, ANY));
        }
        assert!(said.try_recv().is_err());
        drop(tell);
        thread.join().unwrap();
    }

    #[test]
    fn a_process_that_ends_while_they_are_awake_lets_them_sleep() {
        let (tell, told) = mpsc::channel();
        let (say, said) = mpsc::channel();
        tell.send(()).unwrap();
        tell.send(()).unwrap();
        drop(tell);
        obey(Told(say), &told, Duration::from_secs(600));
        assert_eq!(said.iter().collect::<Vec<_>>(), [NONE, ANY]);
    }

    #[test]
    fn a_file_that_takes_no_word_ends_nothing() {
        let (tell, told) = mpsc::channel();
        tell.send(()).unwrap();
        drop(tell);
        // It is open for reading alone.
        obey(File::open("/dev/null").unwrap(), &told, Duration::from_secs(600));
    }
}
