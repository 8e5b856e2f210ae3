//! The way of a log line to stderr or to a file. A reader that has stopped must not stop the
//! threads that log.
//!
//! A pipe whose reader has stopped takes 64 KiB, and then blocks whoever writes to it. So a process
//! that has a guest writes from the `log` thread: other threads append to a bounded queue. A line
//! that finds the queue full is dropped and counted, and the count is written once there is room
//! again.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Bytes of lines that may wait: some thousands of lines. As many again may be on their way out.
const QUEUE_BYTES: usize = 1 << 20;
/// How long the end of the process waits for a slow reader.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);

/// Where this process logs to; set once.
static OUTPUTS: OnceLock<Vec<Arc<LogOutput>>> = OnceLock::new();

/// Writes a line.
type WriteLine = dyn Fn(&[u8]) -> io::Result<()> + Send + Sync;

/// One place that lines are written to.
pub struct LogOutput {
    queue: Mutex<Queue>,
    changed: Condvar,
    write: Box<WriteLine>,
    /// The line that says how many were dropped.
    dropped_line: fn(u64) -> Vec<u8>,
}

#[derive(Default)]
struct Queue {
    lines: VecDeque<Vec<u8>>,
    bytes: usize,
    dropped: u64,
    /// Lines are left to the `log` thread.
    in_background: bool,
    /// That thread is writing what it has taken.
    writing: bool,
}

impl LogOutput {
    /// An output whose lines are written by `write`, at first by the threads that log.
    pub fn new(
        write: impl Fn(&[u8]) -> io::Result<()> + Send + Sync + 'static,
        dropped_line: fn(u64) -> Vec<u8>,
    ) -> Arc<Self> {
        Arc::new(Self {
            queue: Mutex::default(),
            changed: Condvar::new(),
            write: Box::new(write),
            dropped_line,
        })
    }

    /// Writes one line, or leaves it to the `log` thread.
    pub fn line(&self, line: &[u8]) {
        let mut queue = self.lock();
        if !queue.in_background {
            // There is nowhere to say that the log cannot be written.
            let _ = (self.write)(line);
        } else if queue.bytes + line.len() > QUEUE_BYTES {
            queue.dropped += 1;
        } else {
            queue.bytes += line.len();
            queue.lines.push_back(line.to_vec());
            self.changed.notify_all();
        }
    }

    /// Leaves all lines from now on to the thread that calls
    /// [`write_for_ever`](Self::write_for_ever).
    pub(crate) fn leave_to_thread(&self) {
        self.lock().in_background = true;
    }

    /// Writes lines as they come; never returns.
    pub(crate) fn write_for_ever(&self) -> ! {
        loop {
            let queue = self.lock();
            let mut queue = self
                .changed
                .wait_while(queue, |q| q.lines.is_empty())
                .unwrap_or_else(PoisonError::into_inner);
            let lines = std::mem::take(&mut queue.lines);
            queue.bytes = 0;
            let dropped = std::mem::take(&mut queue.dropped);
            queue.writing = true;
            drop(queue);
            for line in lines {
                let _ = (self.write)(&line);
            }
            if dropped > 0 {
                let _ = (self.write)(&(self.dropped_line)(dropped));
            }
            self.lock().writing = false;
            self.changed.notify_all();
        }
    }

    /// Waits until all lines are written, at most `limit`.
    fn flush(&self, limit: Duration) {
        let waits = |q: &mut Queue| !q.lines.is_empty() || q.writing;
        drop(self.changed.wait_timeout_while(self.lock(), limit, waits));
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes `outputs` those of the process, which the functions below are about.
pub fn set_outputs(outputs: Vec<Arc<LogOutput>>) {
    // A second log would be the first one's.
    let _ = OUTPUTS.set(outputs);
}

/// The places that this process logs to.
pub(crate) fn outputs() -> impl Iterator<Item = &'static Arc<LogOutput>> {
    OUTPUTS.get().into_iter().flatten()
}

/// Starts a thread that logs for the guest for which its starter does.
pub fn spawn<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let span = tracing::Span::current();
    std::thread::Builder::new().name(name.to_owned()).spawn(move || span.in_scope(work))
}

/// Waits until the log is written, at most a second.
pub fn flush() {
    outputs().for_each(|output| output.flush(FLUSH_LIMIT));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    fn dropped(n: u64) -> Vec<u8> {
        format!("{n} dropped\n").into_bytes()
    }

    #[test]
    fn a_stuck_reader_costs_lines_and_blocks_nobody() {
        let (release, released) = mpsc::channel::<()>();
        let (wrote, written) = mpsc::channel();
        let released = Mutex::new(released);
        let output = LogOutput::new(
            move |line| {
                // Until the sender is gone.
                let _ = released.lock().unwrap().recv();
                let _ = wrote.send(line.to_vec());
                Ok(())
            },
            dropped,
        );
        let writer = output.clone();
        std::thread::spawn(move || writer.write_for_ever());
        output.leave_to_thread();
        let line = vec![b'x'; 1 << 16];
        output.line(&line);
        // The thread has begun, and is stuck.
        while !output.lock().writing {
            std::thread::yield_now();
        }
        for _ in 1..100 {
            output.line(&line);
        }
        let lost = output.lock().dropped;
        assert_eq!(lost, 100 - 1 - 16);
        output.flush(Duration::from_millis(1));
        drop(release);
        output.flush(Duration::from_secs(60));
        let lines: Vec<_> = written.try_iter().collect();
        assert_eq!(lines.len() as u64, 100 - lost + 1, "the rest, and how many were dropped");
        assert!(lines.contains(&dropped(lost)));
    }
}
