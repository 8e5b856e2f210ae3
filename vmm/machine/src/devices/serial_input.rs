//! Input of COM1: a thread reads standard input into the port's FIFO as far as it has room. No vCPU
//! ever waits for it.
//!
//! | standard input | what happens |
//! | --- | --- |
//! | a terminal, in the foreground | raw from the guest's first resume to the machine's end; Ctrl-A x ends the machine, Ctrl-A Ctrl-A sends one Ctrl-A |
//! | a pipe, stream socket or file | its bytes, once the guest has enabled the interrupt: drivers discard earlier input |
//! | anything else | not read |
//!
//! Input that the guest does not take waits: input from a pipe stays in the pipe, where the guest's
//! next process finds it, and input from a terminal goes to a small buffer. Keys that do not fit
//! into the buffer are lost.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, fstat};
use rustix::io::ioctl_fionread;
use rustix::net::SocketType;
use rustix::net::sockopt::socket_type;
use rustix::process::{Signal, getpgrp, getpid, kill_process};
use rustix::termios::{isatty, tcgetpgrp};

use super::bus::Bus;
use super::latched_event::LatchedEvent;
use super::serial::{PORT_BYTES, PortInput};
use crate::sandbox::{self, Class};
use crate::terminal::Stdin;
use crate::thread_end::join_until;

/// Bytes of terminal input that may wait for a guest.
const MAX_WAITING: usize = 4096;
/// Retry interval for a guest that does not read its input. A guest that reads all of it is noticed
/// immediately.
const RETRY: Duration = Duration::from_millis(50);

/// Upper bound on waiting for the thread's end: a read of a file on storage that hangs may never
/// return.
const END_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 3 } else { 10 });

const CTRL_A: u8 = 0x01;

/// Whether the next SIGTERM is the user's Ctrl-A x.
static CTRL_A_X: AtomicBool = AtomicBool::new(false);

/// Returns whether the SIGTERM that has just arrived was Ctrl-A x.
pub fn was_ctrl_a_x() -> bool {
    CTRL_A_X.swap(false, Ordering::AcqRel)
}

/// Kind of standard input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum InputKind {
    Terminal,
    Stream,
}

fn source(stdin: BorrowedFd) -> Option<InputKind> {
    if isatty(stdin) {
        // Reading from the background, or changing the terminal, would stop the process.
        let foreground = tcgetpgrp(stdin).is_ok_and(|group| group == getpgrp());
        return foreground.then_some(InputKind::Terminal);
    }
    let mode = fstat(stdin).ok()?.st_mode;
    match FileType::from_raw_mode(mode) {
        FileType::Fifo | FileType::RegularFile => Some(InputKind::Stream),
        // A read shorter than a packet would lose the rest of it.
        FileType::Socket => {
            let is_stream = socket_type(stdin).ok()? == SocketType::STREAM;
            is_stream.then_some(InputKind::Stream)
        }
        _ => None,
    }
}

/// Serial input of a machine. It starts with the guest's first resume. A guest that never runs,
/// such as one that was built but not received in time, leaves standard input to the guest that
/// does.
#[derive(Debug)]
pub(crate) struct SerialInput(Mutex<InputState>);

#[derive(Debug)]
enum InputState {
    /// Nothing has been read yet.
    Waiting(Weak<Bus>),
    /// `None` if standard input cannot be read, or not by this machine.
    Begun { _thread: Option<InputThread> },
}

impl SerialInput {
    /// Returns the input of COM1 of `bus`.
    pub(crate) fn new(bus: &Arc<Bus>) -> Self {
        Self(Mutex::new(InputState::Waiting(Arc::downgrade(bus))))
    }

    /// Starts reading on the first call. If standard input cannot be read, the guest, which runs
    /// already, continues without input.
    pub(crate) fn begin(&self) {
        let mut progress = self.0.lock();
        let InputState::Waiting(bus) = &*progress else { return };
        // The bus is dropped when the guest has ended.
        let started = bus.upgrade().map_or(Ok(None), InputThread::start);
        let thread = started.unwrap_or_else(|e| {
            tracing::warn!(
                "the guest's console takes no input: standard input cannot be read: {e}"
            );
            None
        });
        *progress = InputState::Begun { _thread: thread };
    }
}

/// Thread that reads standard input. Dropping it ends the thread and restores the terminal.
#[derive(Debug)]
struct InputThread {
    stop: Arc<LatchedEvent>,
    /// `None` once this is being dropped.
    running: Option<RunningInput>,
}

#[derive(Debug)]
struct RunningInput {
    thread: JoinHandle<()>,
    stdin: Stdin,
}

impl InputThread {
    /// Starts reading for COM1 of `bus`. Returns `None` if standard input is of a kind that is not
    /// read.
    fn start(bus: Arc<Bus>) -> io::Result<Option<Self>> {
        let Some(source) = source(io::stdin().as_fd()) else { return Ok(None) };
        let stdin = Stdin::take();
        let mut stdin = stdin.ok_or_else(|| io::Error::other("it is another guest's"))?;
        if source == InputKind::Terminal {
            stdin.make_raw()?;
        }
        let stop = Arc::new(LatchedEvent::new()?);
        let stopped = stop.clone();
        let run = move || {
            let reader = Reader { bus, source, waiting: Vec::new(), keys: EscapeKeys::default() };
            if let Err(e) = reader.run(&stopped) {
                tracing::warn!("serial input ends here: {e}");
            }
        };
        let thread = sandbox::spawn(Class::SerialInput, "serial-input", run)?;
        Ok(Some(Self { stop, running: Some(RunningInput { thread, stdin }) }))
    }
}

impl Drop for InputThread {
    fn drop(&mut self) {
        self.stop.signal();
        let Some(RunningInput { thread, stdin }) = self.running.take() else { return };
        match join_until(thread, Instant::now() + END_LIMIT) {
            Some(Ok(())) => {}
            Some(Err(_)) => tracing::error!("the thread that reads standard input has panicked"),
            None => {
                tracing::error!(
                    "standard input has not answered a read within {END_LIMIT:?}; the thread that \
                     reads it is left behind"
                );
                stdin.abandon();
            }
        }
    }
}

/// State of the thread.
struct Reader {
    bus: Arc<Bus>,
    source: InputKind,
    /// Bytes read from standard input and not yet taken by the guest.
    waiting: Vec<u8>,
    keys: EscapeKeys,
}

impl Reader {
    fn run(mut self, stop: &LatchedEvent) -> io::Result<()> {
        let stdin = io::stdin();
        // `is_port_full`: whether standard input may have bytes for which the port has no room.
        let (mut ended, mut is_port_full) = (false, false);
        loop {
            let com1 = self.bus.com1();
            let only_if_enabled = self.source == InputKind::Stream;
            let taken = com1.feed(&self.waiting, only_if_enabled);
            self.waiting.drain(..taken);
            if ended && self.waiting.is_empty() {
                return Ok(());
            }
            // A terminal is always read, because its user may want to leave a guest that takes no
            // input.
            let has_room = !is_port_full && self.waiting.is_empty();
            let read = !ended && (self.source == InputKind::Terminal || has_room);
            // Borrowed anew in each iteration. The descriptors live as long as the port and the
            // process.
            let fds = [stop.as_fd(), com1.drained().as_fd(), stdin.as_fd()];
            let count = if read { 3 } else { 2 };
            let mut fds = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            let retry = (is_port_full || !self.waiting.is_empty()).then_some(RETRY);
            let retry = retry.and_then(|r| Timespec::try_from(r).ok());
            match poll(&mut fds[..count], retry.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
            let ready = fds.map(|fd| !fd.revents().is_empty());
            if ready[0] {
                return Ok(());
            }
            if ready[1] {
                com1.drained().clear();
            }
            is_port_full = false;
            if read && ready[2] {
                match self.source {
                    InputKind::Terminal => ended = !self.read_keys(stdin.as_fd())?,
                    InputKind::Stream => (ended, is_port_full) = self.read_stream(stdin.as_fd())?,
                }
            }
        }
    }

    /// Reads available input for which the port has room. Returns whether there is no more, and
    /// whether there may be some for which it has none.
    fn read_stream(&mut self, stdin: BorrowedFd) -> io::Result<(bool, bool)> {
        let mut buffer = [0; PORT_BYTES];
        let read = |room: &mut [u8]| Ok(rustix::io::read(stdin, room)?);
        Ok(match self.bus.com1().feed_from(&mut buffer, read)? {
            PortInput::Taken => (false, false),
            PortInput::Left(left) => {
                self.waiting.extend_from_slice(left);
                (false, false)
            }
            // Standard input has bytes, or has ended.
            PortInput::NoRoom => (ioctl_fionread(stdin).is_ok_and(|bytes| bytes == 0), true),
            PortInput::End => (true, false),
        })
    }

    /// Reads keys of a terminal. Returns whether there may be more later.
    fn read_keys(&mut self, stdin: BorrowedFd) -> io::Result<bool> {
        let mut buffer = [0; 512];
        let read = match rustix::io::read(stdin, &mut buffer) {
            Ok(read) => &buffer[..read],
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => return Ok(true),
            Err(e) => return Err(e.into()),
        };
        let leave = self.keys.pass(read, &mut self.waiting);
        self.waiting.truncate(MAX_WAITING);
        if leave {
            CTRL_A_X.store(true, Ordering::Release);
            // A SIGTERM as from any other sender, because a migration in progress handles it too.
            kill_process(getpid(), Signal::TERM)?;
        }
        Ok(!read.is_empty())
    }
}

/// Finds the escape keys in the user's input.
#[derive(Default)]
struct EscapeKeys {
    /// Whether the last key was Ctrl-A.
    escaped: bool,
}

impl EscapeKeys {
    /// Appends the guest's keys to `to`. Returns whether the user wants to leave.
    fn pass(&mut self, typed: &[u8], to: &mut Vec<u8>) -> bool {
        let mut leave = false;
        for &key in typed {
            match (std::mem::take(&mut self.escaped), key) {
                (false, CTRL_A) => self.escaped = true,
                (true, b'x' | b'X') => leave = true,
                // Ctrl-A twice sends one Ctrl-A. Before any other key, both keys go to the guest.
                (true, CTRL_A) | (false, _) => to.push(key),
                (true, _) => to.extend([CTRL_A, key]),
            }
        }
        leave
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::testing::run_in_child;

    #[test]
    fn escape_keys_are_not_sent_to_the_guest() {
        let mut keys = EscapeKeys::default();
        let mut to = Vec::new();
        assert!(!keys.pass(b"ls\x01", &mut to));
        assert!(!keys.pass(b"\x01-\x01b\x03", &mut to), "across reads");
        assert_eq!(to, b"ls\x01-\x01b\x03");
        assert!(keys.pass(b"ab\x01xcd", &mut to));
        assert!(to.ends_with(b"abcd"));
    }

    /// Runs in its own process, because standard input has an owner from then on.
    #[test]
    fn hanging_input_delays_no_end() {
        const CHILD: &str = "HANGS_ON_INPUT";
        if std::env::var_os(CHILD).is_none() {
            let null = std::fs::File::open("/dev/null").unwrap();
            let test = "devices::serial_input::tests::hanging_input_delays_no_end";
            return run_in_child(test, CHILD, "1", null);
        }
        let (_storage, answer) = mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            let _ = answer.recv();
        });
        let stdin = Stdin::take().unwrap();
        let stop = Arc::new(LatchedEvent::new().unwrap());
        drop(InputThread { stop, running: Some(RunningInput { thread, stdin }) });
        assert!(Stdin::take().is_none(), "the thread may still read it");
    }

    #[test]
    fn only_terminals_and_streams_are_read() {
        let null = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(source(null.as_fd()), None);
        let (reader, _writer) = std::io::pipe().unwrap();
        assert_eq!(source(reader.as_fd()), Some(InputKind::Stream));
        assert_eq!(
            source(std::fs::File::open("Cargo.toml").unwrap().as_fd()),
            Some(InputKind::Stream)
        );
    }
}
