//! Writes log lines to stderr or to a file. A reader that has stopped must not stop the threads
//! that log.
//!
//! A pipe whose reader has stopped takes 64 KiB, and then blocks the writer. So in a process that
//! has a guest only the `log` thread writes: other threads append to a bounded queue. A line that
//! finds the queue full is dropped and counted. The count is written once there is room again. A
//! line that its destination took in part is finished as soon as it takes more.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

/// Maximum bytes of queued lines: some thousands of lines. The same amount may be being written.
const QUEUE_BYTES: usize = 1 << 20;
/// Limit on waiting for a slow reader at the end of the process.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);
/// Interval of the attempts to finish a line that was written in part.
const FINISH_INTERVAL: Duration = Duration::from_millis(100);

/// The outputs of this process's log; set once.
static OUTPUTS: OnceLock<Vec<Arc<LogOutput>>> = OnceLock::new();

/// Where lines go. A function that writes a line as a whole is a sink.
pub trait LineSink: Send + Sync {
    /// Writes a whole line, or its beginning: [`finish`](Self::finish) then writes the rest.
    ///
    /// # Errors
    ///
    /// The line is lost.
    fn write_line(&self, line: &[u8]) -> io::Result<()>;

    /// Writes what there is room for of the rest of a line. Returns whether nothing of it is left.
    fn finish(&self) -> bool;
}

impl<F: Fn(&[u8]) -> io::Result<()> + Send + Sync> LineSink for F {
    fn write_line(&self, line: &[u8]) -> io::Result<()> {
        self(line)
    }

    fn finish(&self) -> bool {
        true
    }
}

/// One destination of log lines.
pub struct LogOutput {
    queue: Mutex<LineQueue>,
    changed: Condvar,
    sink: Box<dyn LineSink>,
    /// Returns the line that reports the number of dropped lines.
    dropped_line: fn(u64) -> Vec<u8>,
}

#[derive(Default)]
struct LineQueue {
    lines: VecDeque<Vec<u8>>,
    bytes: usize,
    dropped: u64,
    /// Whether the `log` thread writes the lines.
    in_background: bool,
    /// Whether that thread is writing the lines that it has taken, or the rest of one.
    writing: bool,
}

impl LogOutput {
    /// Returns an output whose lines go to `sink`, at first on the threads that log.
    pub fn new(sink: impl LineSink + 'static, dropped_line: fn(u64) -> Vec<u8>) -> Arc<Self> {
        Arc::new(Self {
            queue: Mutex::default(),
            changed: Condvar::new(),
            sink: Box::new(sink),
            dropped_line,
        })
    }

    /// Writes one line, or queues it for the `log` thread.
    pub fn line(&self, line: &[u8]) {
        let mut queue = self.lock();
        if !queue.in_background {
            // There is no place to report that the log cannot be written.
            let _ = self.sink.write_line(line);
        } else if queue.bytes + line.len() > QUEUE_BYTES {
            queue.dropped += 1;
        } else {
            queue.bytes += line.len();
            queue.lines.push_back(line.to_vec());
            self.changed.notify_all();
        }
    }

    /// From now on queues all lines for the thread that calls
    /// [`write_for_ever`](Self::write_for_ever).
    pub(crate) fn leave_to_thread(&self) {
        self.lock().in_background = true;
    }

    /// Writes lines as they arrive. Never returns.
    pub(crate) fn write_for_ever(&self) -> ! {
        loop {
            let mut queue = self.lock();
            self.changed.wait_while(&mut queue, |q| q.lines.is_empty());
            let lines = std::mem::take(&mut queue.lines);
            queue.bytes = 0;
            let dropped = std::mem::take(&mut queue.dropped);
            queue.writing = true;
            drop(queue);
            for line in lines {
                let _ = self.sink.write_line(&line);
            }
            if dropped > 0 {
                let _ = self.sink.write_line(&(self.dropped_line)(dropped));
            }
            self.finish_line();
            self.lock().writing = false;
            self.changed.notify_all();
        }
    }

    /// Waits until no line is written in part, or until there are further lines.
    fn finish_line(&self) {
        while !self.sink.finish() {
            let mut queue = self.lock();
            let waits = |q: &mut LineQueue| q.lines.is_empty();
            if !self.changed.wait_while_for(&mut queue, waits, FINISH_INTERVAL).timed_out() {
                return;
            }
        }
    }

    /// Waits until all lines are written to their ends, but at most for `limit`. Returns whether
    /// they are.
    pub fn flush(&self, limit: Duration) -> bool {
        let mut queue = self.lock();
        if !queue.in_background {
            return self.sink.finish();
        }
        let waits = |q: &mut LineQueue| !q.lines.is_empty() || q.writing;
        !self.changed.wait_while_for(&mut queue, waits, limit).timed_out()
    }

    fn lock(&self) -> MutexGuard<'_, LineQueue> {
        self.queue.lock()
    }
}

/// Sets the outputs of the process, which the functions below use.
pub fn set_outputs(outputs: Vec<Arc<LogOutput>>) {
    // Only the first call takes effect.
    let _ = OUTPUTS.set(outputs);
}

/// Returns the outputs of this process's log.
pub(crate) fn outputs() -> impl Iterator<Item = &'static Arc<LogOutput>> {
    OUTPUTS.get().into_iter().flatten()
}

/// Starts a thread that logs for the same guest as the thread that starts it.
///
/// # Errors
///
/// The thread cannot be started.
pub fn spawn<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let span = tracing::Span::current();
    std::thread::Builder::new().name(name.to_owned()).spawn(move || span.in_scope(work))
}

/// Waits until the log is written, but at most for a second.
pub fn flush() {
    outputs().for_each(|output| _ = output.flush(FLUSH_LIMIT));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;

    fn dropped(n: u64) -> Vec<u8> {
        format!("{n} dropped\n").into_bytes()
    }

    #[test]
    fn stuck_reader_costs_lines_and_blocks_no_thread() {
        let (release, released) = mpsc::channel::<()>();
        let (wrote, written) = mpsc::channel();
        let released = Mutex::new(released);
        let output = LogOutput::new(
            move |line: &[u8]| {
                // Blocks until the sender is dropped.
                let _ = released.lock().recv();
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
        // The thread has begun to write, and is stuck.
        while !output.lock().writing {
            std::thread::yield_now();
        }
        for _ in 1..100 {
            output.line(&line);
        }
        let lost = output.lock().dropped;
        assert_eq!(lost, 100 - 1 - 16);
        assert!(!output.flush(Duration::from_millis(1)));
        drop(release);
        assert!(output.flush(Duration::from_secs(60)));
        let lines: Vec<_> = written.try_iter().collect();
        assert_eq!(lines.len() as u64, 100 - lost + 1, "the rest, and how many were dropped");
        assert!(lines.contains(&dropped(lost)));
    }

    /// A sink that takes the rest of its line once it is allowed to.
    struct PartialSink(Arc<AtomicBool>);

    impl LineSink for PartialSink {
        fn write_line(&self, _: &[u8]) -> io::Result<()> {
            Ok(())
        }

        fn finish(&self) -> bool {
            self.0.load(Ordering::Acquire)
        }
    }

    #[test]
    fn line_is_written_once_its_rest_is() {
        let is_taken = Arc::<AtomicBool>::default();
        let output = LogOutput::new(PartialSink(is_taken.clone()), dropped);
        output.line(b"a\n");
        assert!(!output.flush(Duration::ZERO), "written by the thread that logs");
        let writer = output.clone();
        std::thread::spawn(move || writer.write_for_ever());
        output.leave_to_thread();
        output.line(b"b\n");
        assert!(!output.flush(Duration::from_millis(1)));
        is_taken.store(true, Ordering::Release);
        // No further line is needed.
        assert!(output.flush(Duration::from_secs(60)));
    }
}
