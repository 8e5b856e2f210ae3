//! Owns the word to the host that its processors are not to sleep for a moment: while a guest stands for a hand-over its threads
//! wake each other a dozen times, and to wake a processor from its sleep takes some ten microseconds, or hundreds from a deep one.
//!
//! The word is the kernel's `/dev/cpu_dma_latency` (PM QoS), which holds for all processors for as long as it is kept, and which by
//! default only root may open. Where it can't be opened, hand-overs take longer, and that is all.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// What is opened.
pub const DEVICE: &str = "/dev/cpu_dma_latency";
/// No sleep at all, in microseconds.
const NONE: i32 = 0;
/// The kernel's `PM_QOS_DEFAULT_VALUE`: as if nothing had been said.
const ANY: i32 = -1;

/// The file of this process, while it is open.
static OPENED: OnceLock<Word> = OnceLock::new();

#[derive(Debug)]
struct Word {
    file: File,
    /// Those who want processors to stay awake.
    holders: Mutex<u32>,
}

/// Processors stay awake until this is dropped.
#[must_use = "dropping this lets processors sleep again"]
#[derive(Debug)]
pub(crate) struct Awake(&'static Word);

/// Opens the file, which says nothing yet: to be called while the process may open files. Whether it can be.
pub fn open() -> io::Result<()> {
    if OPENED.get().is_none() {
        let file = OpenOptions::new().write(true).open(DEVICE)?;
        // Whoever was first has the same file.
        let _ = OPENED.set(Word { file, holders: Mutex::new(0) });
    }
    Ok(())
}

/// Keeps processors awake, if the file is open and takes it.
pub(crate) fn stay_awake() -> Option<Awake> {
    let word = OPENED.get()?;
    let mut holders = word.lock();
    if *holders == 0
        && let Err(e) = word.say(NONE)
    {
        tracing::debug!("{DEVICE}: {e}: processors may sleep during a hand-over");
        return None;
    }
    *holders += 1;
    Some(Awake(word))
}

impl Word {
    fn lock(&self) -> MutexGuard<'_, u32> {
        self.holders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn say(&self, us: i32) -> io::Result<()> {
        (&self.file).write_all(&us.to_ne_bytes())
    }
}

impl Drop for Awake {
    fn drop(&mut self) {
        let mut holders = self.0.lock();
        *holders -= 1;
        if *holders == 0
            && let Err(e) = self.0.say(ANY)
        {
            tracing::warn!("{DEVICE}: {e}: this host's processors do not sleep while this runs");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_stay_awake_until_the_last_lets_go() {
        if let Err(e) = open() {
            assert!(stay_awake().is_none(), "nothing is open");
            let why = format!("{DEVICE}: {e}");
            crate::testing::skip("processors_stay_awake_until_the_last_lets_go", &why);
            return;
        }
        let (first, second) = (stay_awake().unwrap(), stay_awake().unwrap());
        drop(first);
        assert_eq!(*second.0.lock(), 1);
        drop(second);
        assert_eq!(*OPENED.get().unwrap().lock(), 0);
        assert!(stay_awake().is_some(), "and can be told so again");
    }
}
