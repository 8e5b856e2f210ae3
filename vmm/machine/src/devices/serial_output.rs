//! Output of COM1: a bounded buffer, emptied by a thread of its own, so that a slow or stuck reader
//! never delays a vCPU. Output that does not fit, or that exceeds a rate limit, is dropped and
//! counted.
//!
//! Lines are written whole. An unfinished line, such as a prompt, is written once no byte has
//! followed for [`BYTE_TIMEOUT`], or [`FIRST_TIMEOUT`] after the first, and after [`LINE_TIMEOUT`]
//! in any case.

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use driftline_guest::LogLimit;
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::counts::SerialCounters;
use super::rate_limit::DeviceRateLimiter;
use super::serial_file::SerialFile;
use crate::config::{RateLimit, RateLimits, SerialSink};
use crate::sandbox::{self, Class};

/// Bytes that may wait for a slow reader. Further output is dropped.
const CAPACITY: usize = 256 << 10;
/// Longest time that an unfinished line waits for its end.
const LINE_TIMEOUT: Duration = Duration::from_millis(10);
/// Longest time that an unfinished line waits for its next byte, so that a prompt does not wait for
/// [`LINE_TIMEOUT`]. A line is split only if its vCPU does not run for longer than this, or for
/// longer than [`FIRST_TIMEOUT`] after its first byte.
const BYTE_TIMEOUT: Duration = Duration::from_millis(1);
/// Longest time that the first byte of a line waits for the second: a guest that shows by one byte
/// that it runs is heard 0.8 ms earlier. It costs this thread one wake for each line; as the time
/// for all bytes, it would double or triple the thread's processor time.
const FIRST_TIMEOUT: Duration = Duration::from_micros(200);
/// Longest time that [`SerialWriter::drain`] waits for the reader.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(100);
/// Longest time that a paused guest waits for the reader before its next process writes. A reader
/// that does not keep up may get the rest after what that process writes.
const HAND_OVER_TIMEOUT: Duration = Duration::from_millis(5);
/// Longest time that the end of a machine waits for the reader.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Why the serial output cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum SerialOutputError {
    /// The file cannot be opened.
    #[error(
        "the file of the serial output, \"{}\", cannot be opened for appending: {cause}",
        path.display()
    )]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        cause: io::Error,
    },
    /// The thread cannot be started.
    #[error("no thread can be started for the serial output: {0}")]
    Thread(io::Error),
}

#[derive(Debug, Default)]
struct OutputState {
    bytes: Vec<u8>,
    dropped: u64,
    limiter: Option<OutputLimiter>,
    /// Bytes that the rate limit has dropped.
    limited: u64,
    /// Whether unfinished lines are written without waiting for their end.
    flush_now: bool,
    /// Whether the thread is writing bytes that it has taken.
    writing: bool,
    /// Whether no more output will come.
    closed: bool,
    /// Whether the thread has ended.
    done: bool,
}

#[derive(Debug, Default)]
struct OutputBuffer {
    state: Mutex<OutputState>,
    changed: Condvar,
    counters: Arc<SerialCounters>,
}

impl OutputBuffer {
    fn lock(&self) -> MutexGuard<'_, OutputState> {
        self.state.lock()
    }
}

/// Limit of the output. Its clock runs while the guest is paused, too.
#[derive(Clone, Debug)]
struct OutputLimiter {
    rate: DeviceRateLimiter,
    began: Instant,
}

impl OutputLimiter {
    fn new(limit: RateLimit) -> Self {
        let limits = RateLimits { bandwidth: Some(limit), operations: None };
        Self { rate: DeviceRateLimiter::new(limits, 0), began: Instant::now() }
    }

    /// Returns the part of `bytes` that is not dropped: each byte needs a token of its own.
    fn admitted(&mut self, bytes: &[u8]) -> Vec<u8> {
        let now_ns = u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let admits = |_: &u8| self.rate.take(1, now_ns).is_ok();
        bytes.iter().copied().filter(admits).collect()
    }
}

/// Writing end of the buffer. A write never blocks.
#[derive(Clone, Debug)]
pub struct SerialWriter(Arc<OutputBuffer>);

impl SerialWriter {
    /// Returns the counters of the port whose output this is.
    pub(super) fn counters(&self) -> &Arc<SerialCounters> {
        &self.0.counters
    }

    /// Waits until all output so far is written, for 100 ms at most.
    pub fn drain(&self) {
        self.drain_within(DRAIN_TIMEOUT);
    }

    /// Waits until all output so far is written, for `limit` at most.
    fn drain_within(&self, limit: Duration) {
        let mut state = self.0.lock();
        if !state.writing && state.bytes.is_empty() {
            return;
        }
        state.flush_now = true;
        self.0.changed.notify_all();
        let busy = |p: &mut OutputState| p.writing || !p.bytes.is_empty();
        self.0.changed.wait_while_for(&mut state, busy, limit);
        state.flush_now = false;
    }
}

impl Write for SerialWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut state = self.0.lock();
        let admitted = state.limiter.as_mut().map(|limiter| limiter.admitted(bytes));
        let output = admitted.as_deref().unwrap_or(bytes);
        let limited = (bytes.len() - output.len()) as u64;
        state.limited += limited;
        self.0.counters.limited_bytes.add(limited);
        if state.bytes.len() + output.len() > CAPACITY {
            state.dropped += output.len() as u64;
            self.0.counters.lost_bytes.add(output.len() as u64);
            return Ok(bytes.len());
        }
        let wake = !output.is_empty() && (state.bytes.is_empty() || output.contains(&b'\n'));
        state.bytes.extend_from_slice(output);
        drop(state);
        if wake {
            self.0.changed.notify_all();
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Thread that empties the buffer of a [`SerialWriter`]. Dropping it writes the remaining output.
#[derive(Debug)]
pub struct SerialOutputThread {
    shared: Arc<OutputBuffer>,
    thread: Option<JoinHandle<()>>,
}

impl SerialOutputThread {
    /// Waits until all output so far is written, for a limited time. The guest is paused, and
    /// another process will write its next byte.
    pub(crate) fn drain_for_next_process(&self) {
        SerialWriter(self.shared.clone()).drain_within(HAND_OVER_TIMEOUT);
    }
}

/// Opens `sink` and starts its thread. Output beyond `limit` is dropped.
///
/// # Errors
///
/// Fails if the file cannot be opened or the thread cannot be started.
pub fn open(
    sink: &SerialSink,
    limit: Option<RateLimit>,
) -> Result<(SerialWriter, SerialOutputThread), SerialOutputError> {
    let shared = Arc::new(OutputBuffer::default());
    let to: Box<dyn Write + Send> = match sink {
        SerialSink::Stdio => Box::new(io::stdout()),
        SerialSink::Null => Box::new(io::sink()),
        SerialSink::File(path) => {
            let failed = |cause| SerialOutputError::Open { path: path.clone(), cause };
            Box::new(SerialFile::open(path, shared.counters.clone()).map_err(failed)?)
        }
    };
    shared.lock().limiter = limit.map(OutputLimiter::new);
    let buffer = shared.clone();
    let run = move || {
        write_out(&buffer, to);
        buffer.lock().done = true;
        buffer.changed.notify_all();
    };
    let thread = sandbox::spawn(Class::Serial, "serial", run);
    let thread = Some(thread.map_err(SerialOutputError::Thread)?);
    Ok((SerialWriter(shared.clone()), SerialOutputThread { shared, thread }))
}

/// Writes output until the sink is closed and empty.
fn write_out(shared: &OutputBuffer, mut to: Box<dyn Write + Send>) {
    let (mut broken, losses) = (false, LogLimit::new());
    loop {
        let PendingOutput { bytes, dropped, limited, is_last } = next(shared);
        let dropped = losses.add(dropped).or_else(|| is_last.then(|| losses.take()));
        if let Some(dropped) = dropped.filter(|dropped| *dropped > 0) {
            tracing::warn!(
                "{dropped} bytes of serial output were dropped: its reader does not keep up"
            );
        }
        if limited > 0 {
            tracing::debug!("{limited} bytes of serial output were dropped: they exceed its limit");
        }
        if broken {
            shared.counters.lost_bytes.add(bytes.len() as u64);
        } else if let Err(e) = to.write_all(&bytes).and_then(|()| to.flush()) {
            tracing::warn!("serial output is lost from here on: {e}");
            broken = true;
        }
        shared.lock().writing = false;
        shared.changed.notify_all();
        if is_last {
            return;
        }
    }
}

/// Output for the thread.
struct PendingOutput {
    bytes: Vec<u8>,
    /// Bytes that did not fit.
    dropped: u64,
    /// Bytes that the rate limit has dropped.
    limited: u64,
    /// Whether no more output will come.
    is_last: bool,
}

/// Waits for bytes and returns them: whole lines, or whatever is buffered when a time limit ends.
fn next(shared: &OutputBuffer) -> PendingOutput {
    let mut state = shared.lock();
    while state.bytes.is_empty() && !state.closed {
        shared.changed.wait(&mut state);
    }
    let unfinished =
        |p: &mut OutputState| !p.closed && !p.flush_now && p.bytes.last() != Some(&b'\n');
    let end = Instant::now() + LINE_TIMEOUT;
    // Bytes within a line do not wake this thread: that would cost more than the bytes.
    let mut limit = FIRST_TIMEOUT;
    loop {
        let buffered = state.bytes.len();
        let until = end.min(Instant::now() + limit);
        limit = BYTE_TIMEOUT;
        let waited = shared.changed.wait_while_until(&mut state, unfinished, until);
        if !waited.timed_out() || until == end || state.bytes.len() == buffered {
            break;
        }
    }
    state.writing = true;
    PendingOutput {
        bytes: std::mem::take(&mut state.bytes),
        dropped: std::mem::take(&mut state.dropped),
        limited: std::mem::take(&mut state.limited),
        is_last: state.closed,
    }
}

impl Drop for SerialOutputThread {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.closed = true;
        self.shared.changed.notify_all();
        let Some(thread) = self.thread.take() else { return };
        // A reader that is stuck may block the thread for ever, but not the machine.
        self.shared.changed.wait_while_for(&mut state, |p| !p.done, CLOSE_TIMEOUT);
        let done = state.done;
        drop(state);
        if done {
            let _ = thread.join();
        } else {
            tracing::warn!("some serial output is not written: its reader is stuck");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::log_capture::warnings;

    #[test]
    fn output_is_written_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("serial");
        let (mut writer, thread) = open(&SerialSink::File(path.clone()), None).unwrap();
        for i in 0..1000 {
            write!(writer, "line {i}\npart").unwrap();
        }
        drop(thread);
        let text = std::fs::read_to_string(path).unwrap();
        let want: String = (0..1000).map(|i| format!("line {i}\npart")).collect();
        assert_eq!(text, want);
    }

    #[test]
    fn unfinished_line_is_written_soon() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("serial");
        let (mut writer, _thread) = open(&SerialSink::File(path.clone()), None).unwrap();
        write!(writer, "login: ").unwrap();
        let end = std::time::Instant::now() + Duration::from_secs(5);
        while std::fs::read(&path).unwrap() != b"login: " {
            assert!(std::time::Instant::now() < end, "the prompt never came");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    #[test]
    fn stuck_reader_costs_output_not_time() {
        let shared = Arc::new(OutputBuffer::default());
        let mut writer = SerialWriter(shared.clone());
        for _ in 0..CAPACITY + 100 {
            writer.write_all(b"x").unwrap();
        }
        assert_eq!(shared.lock().bytes.len(), CAPACITY);
        assert_eq!(shared.lock().dropped, 100);
        assert_eq!(shared.counters.lost_bytes.get(), 100);
    }

    /// A reader that does not keep up: output is dropped during each of three writes.
    struct SlowReader {
        shared: Arc<OutputBuffer>,
        writes: u32,
    }

    impl Write for SlowReader {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.writes += 1;
            let mut state = self.shared.lock();
            state.bytes.push(b'\n');
            state.dropped += 1;
            state.closed = self.writes >= 3;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn dropped_output_is_logged_together() {
        let shared = Arc::new(OutputBuffer::default());
        shared.lock().bytes.push(b'\n');
        let reader = SlowReader { shared: shared.clone(), writes: 0 };
        let begun = Instant::now();
        let logged = warnings(|| write_out(&shared, Box::new(reader)));
        // The first line, one a second, and what is left at the end.
        assert!(logged.len() as u64 <= begun.elapsed().as_secs() + 2, "{logged:?}");
        let bytes = |line: &String| -> u64 {
            let before = line.split(" bytes of serial output").next().unwrap();
            before.rsplit(' ').next().unwrap().parse().unwrap()
        };
        assert_eq!(logged.iter().map(bytes).sum::<u64>(), 3, "{logged:?}");
    }

    #[test]
    fn output_beyond_the_limit_is_dropped() {
        let shared = Arc::new(OutputBuffer::default());
        // A bucket that stays empty, for as long as a test may last.
        let limit = RateLimit { size: 3, refill_ms: 1 << 40, one_time_burst: 2 };
        shared.lock().limiter = Some(OutputLimiter::new(limit));
        let mut writer = SerialWriter(shared.clone());
        writer.write_all(b"abc").unwrap();
        writer.write_all(b"defg").unwrap();
        let state = shared.lock();
        assert_eq!(state.bytes, b"abcde");
        assert_eq!((state.limited, state.dropped), (2, 0));
        assert_eq!(shared.counters.limited_bytes.get(), 2);
    }
}
