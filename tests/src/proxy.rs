//! A proxy for one migration connection that knows records well enough to count them.
//!
//! It stands between source and destination, passes bytes both ways unchanged, and does what the
//! test says when a certain record of a certain direction is about to pass; or it passes them late
//! and slowly.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use driftline_format::{HEADER_LEN, RECORD_HEAD_LEN, RecordHead};
use driftline_migrate::Tag;

/// Which way a record goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// Source to destination.
    ToDestination,
    /// Destination to source.
    ToSource,
}

/// What the proxy does when the record comes.
pub enum CutAction {
    /// Closes both connections before the record passes.
    Before,
    /// Calls this and then closes both connections before the record passes.
    Call(Box<dyn FnOnce() + Send>),
}

/// What happens to connections after the first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LaterConnections {
    /// They are refused.
    Refused,
    /// They pass untouched.
    Passed,
}

/// A running proxy.
pub struct MigrationProxy {
    address: String,
    cut: Arc<AtomicBool>,
}

impl MigrationProxy {
    /// Listens on a free loopback port and passes the first connection on to `to`
    /// (`tcp:HOST:PORT`), doing `cut` when the first record with `tag` goes `direction`.
    pub fn start(
        to: &str,
        direction: Direction,
        tag: Tag,
        cut: CutAction,
        later: LaterConnections,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = format!("tcp:{}", listener.local_addr().expect("bound"));
        let to = to.trim_start_matches("tcp:").to_owned();
        let cut_made = Arc::new(AtomicBool::new(false));
        let made = cut_made.clone();
        thread::spawn(move || {
            let (source, _) = listener.accept().expect("a source connects");
            if later == LaterConnections::Passed {
                let to = to.clone();
                thread::spawn(move || {
                    for source in listener.incoming().flatten() {
                        join(source, &to, None, None);
                    }
                });
            }
            let cut = Some(PlannedCut { tag: tag as u16, cut, made });
            match direction {
                Direction::ToDestination => join(source, &to, cut, None),
                Direction::ToSource => join(source, &to, None, cut),
            }
        });
        Self { address, cut: cut_made }
    }

    /// Listens on a free loopback port and passes every connection on to `to` (`tcp:HOST:PORT`),
    /// each way `delay` later and at most `rate` bytes a second: a long and thin line.
    pub fn slow(to: &str, delay: Duration, rate: u64) -> Self {
        Self::thin(to, SlowLink { delay, rate, slack: Duration::ZERO })
    }

    /// As [`slow`](Self::slow), without a delay and at `rate` on the whole: what the host keeps
    /// from it for a moment it makes up for.
    pub fn steady(to: &str, rate: u64) -> Self {
        Self::thin(to, SlowLink { delay: Duration::ZERO, rate, slack: Duration::from_millis(20) })
    }

    fn thin(to: &str, line: SlowLink) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = format!("tcp:{}", listener.local_addr().expect("bound"));
        let to = to.trim_start_matches("tcp:").to_owned();
        thread::spawn(move || {
            for source in listener.incoming().flatten() {
                let Ok(destination) = TcpStream::connect(&to) else { continue };
                if !line.slack.is_zero() {
                    // Small records do not wait for those before them to be acknowledged.
                    let _ = (source.set_nodelay(true), destination.set_nodelay(true));
                }
                let clones = (source.try_clone(), destination.try_clone());
                let (Ok(from_source), Ok(to_destination)) = clones else { continue };
                thread::spawn(move || pass_slowly(from_source, to_destination, line));
                thread::spawn(move || pass_slowly(destination, source, line));
            }
        });
        Self { address, cut: Arc::default() }
    }

    /// Whether the record has come and the cut was made.
    pub fn has_cut(&self) -> bool {
        self.cut.load(Ordering::SeqCst)
    }

    /// Where the source should connect, as `tcp:HOST:PORT`.
    pub fn address(&self) -> &str {
        &self.address
    }
}

/// A cut, the record that it waits for, and whether it was made.
struct PlannedCut {
    tag: u16,
    cut: CutAction,
    made: Arc<AtomicBool>,
}

/// Passes records both ways between `source` and a new connection to `to`.
fn join(source: TcpStream, to: &str, there: Option<PlannedCut>, back: Option<PlannedCut>) {
    let Ok(destination) = TcpStream::connect(to) else { return };
    let clones = (source.try_clone(), destination.try_clone());
    let (Ok(from_source), Ok(to_destination)) = clones else { return };
    thread::spawn(move || pass(from_source, to_destination, there));
    thread::spawn(move || pass(destination, source, back));
}

/// Passes a header and then records until the end, or until the cut; then closes both.
fn pass(mut from: TcpStream, mut to: TcpStream, cut: Option<PlannedCut>) {
    // However it ends, the test sees it in what the two processes say.
    let _ = pass_records(&mut from, &mut to, cut);
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

fn pass_records(
    from: &mut TcpStream,
    to: &mut TcpStream,
    mut cut: Option<PlannedCut>,
) -> io::Result<()> {
    let mut header = [0; HEADER_LEN];
    from.read_exact(&mut header)?;
    to.write_all(&header)?;
    for sequence in 0.. {
        let mut head = [0; RECORD_HEAD_LEN];
        from.read_exact(&mut head)?;
        let parsed = RecordHead::read_from(&head[..], sequence).map_err(io::Error::other)?;
        let mut record = vec![0; RECORD_HEAD_LEN + parsed.length as usize];
        record[..RECORD_HEAD_LEN].copy_from_slice(&head);
        from.read_exact(&mut record[RECORD_HEAD_LEN..])?;
        if let Some(planned) = cut.take_if(|planned| planned.tag == parsed.tag) {
            planned.made.store(true, Ordering::SeqCst);
            if let CutAction::Call(f) = planned.cut {
                f();
            }
            return Ok(());
        }
        to.write_all(&record)?;
    }
    Ok(())
}

/// How bytes are passed.
#[derive(Clone, Copy)]
struct SlowLink {
    delay: Duration,
    /// Bytes a second.
    rate: u64,
    /// How much of the time in which it stood the line makes up for.
    slack: Duration,
}

/// Passes bytes until the end, then closes that direction.
fn pass_slowly(mut from: TcpStream, mut to: TcpStream, line: SlowLink) {
    let SlowLink { delay, rate, slack } = line;
    // As much as is under way on the line, and some.
    let (sender, passing) = mpsc::sync_channel::<(Instant, Vec<u8>)>(64);
    let reader = thread::spawn(move || {
        let mut buffer = vec![0; 16 << 10];
        while let Ok(read @ 1..) = from.read(&mut buffer) {
            if sender.send((Instant::now() + delay, buffer[..read].to_vec())).is_err() {
                break;
            }
        }
    });
    let mut free = Instant::now();
    for (due, bytes) in passing {
        thread::sleep(due.max(free).saturating_duration_since(Instant::now()));
        let earliest = Instant::now().checked_sub(slack).unwrap_or(free);
        free = free.max(earliest) + Duration::from_secs_f64(bytes.len() as f64 / rate as f64);
        if to.write_all(&bytes).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
    let _ = reader.join();
}
