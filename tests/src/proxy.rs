//! A proxy for one migration connection that parses record heads.
//!
//! It passes bytes both ways unchanged. It either cuts the connection when a given record is about
//! to pass in a given direction, or passes the bytes with a delay and a limited rate.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use driftline_format::{HEADER_LEN, RECORD_HEAD_LEN, RecordHead};
use driftline_migrate::Tag;

/// The direction of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// Source to destination.
    ToDestination,
    /// Destination to source.
    ToSource,
}

/// The action of the proxy when the record arrives.
pub enum CutAction {
    /// Closes both connections before the record passes.
    Before,
    /// Calls the closure, then closes both connections before the record passes.
    Call(Box<dyn FnOnce() + Send>),
}

/// The treatment of connections after the first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LaterConnections {
    /// The proxy refuses them.
    Refused,
    /// The proxy passes them unchanged.
    Passed,
}

/// A running proxy.
pub struct MigrationProxy {
    address: String,
    cut: Arc<AtomicBool>,
    /// Bytes a second of a slow link.
    rate: Arc<AtomicU64>,
}

impl MigrationProxy {
    /// Listens on a free loopback port and passes the first connection on to `to`
    /// (`tcp:HOST:PORT`). Performs `cut` at the first record with `tag` in `direction`.
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
        Self { address, cut: cut_made, rate: Arc::default() }
    }

    /// Listens on a free loopback port and passes every connection on to `to` (`tcp:HOST:PORT`),
    /// in each direction `delay` later and with at most `rate` bytes a second.
    pub fn slow(to: &str, delay: Duration, rate: u64) -> Self {
        Self::limited(to, rate, SlowLink { delay, slack: Duration::ZERO })
    }

    /// As [`slow`](Self::slow), without a delay and with an average of `rate`: the link makes up
    /// for short times in which the host does not run the proxy.
    pub fn steady(to: &str, rate: u64) -> Self {
        let slack = Duration::from_millis(20);
        Self::limited(to, rate, SlowLink { delay: Duration::ZERO, slack })
    }

    fn limited(to: &str, rate: u64, link: SlowLink) -> Self {
        let rate = Arc::new(AtomicU64::new(rate));
        let current_rate = rate.clone();
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = format!("tcp:{}", listener.local_addr().expect("bound"));
        let to = to.trim_start_matches("tcp:").to_owned();
        thread::spawn(move || {
            for source in listener.incoming().flatten() {
                let Ok(destination) = TcpStream::connect(&to) else { continue };
                if !link.slack.is_zero() {
                    // Small records do not wait until earlier ones are acknowledged.
                    let _ = (source.set_nodelay(true), destination.set_nodelay(true));
                }
                let clones = (source.try_clone(), destination.try_clone());
                let (Ok(from_source), Ok(to_destination)) = clones else { continue };
                let (there, back) = (current_rate.clone(), current_rate.clone());
                thread::spawn(move || pass_slowly(from_source, to_destination, &there, link));
                thread::spawn(move || pass_slowly(destination, source, &back, link));
            }
        });
        Self { address, cut: Arc::default(), rate }
    }

    /// Changes the rate of a slow link, in bytes a second.
    pub fn set_rate(&self, rate: u64) {
        self.rate.store(rate, Ordering::Relaxed);
    }

    /// Returns whether the record has arrived and the cut was made.
    pub fn has_cut(&self) -> bool {
        self.cut.load(Ordering::SeqCst)
    }

    /// Returns the address for the source, as `tcp:HOST:PORT`.
    pub fn address(&self) -> &str {
        &self.address
    }
}

/// A cut, the tag of its record, and whether it was made.
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

/// Passes a header, then records until the end or the cut, then closes both connections.
fn pass(mut from: TcpStream, mut to: TcpStream, cut: Option<PlannedCut>) {
    // The test sees an error in the output of the two processes.
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

/// Delay and slack of a link.
#[derive(Clone, Copy)]
struct SlowLink {
    delay: Duration,
    /// Longest time without progress for which the link makes up.
    slack: Duration,
}

/// Passes bytes until the end, at most `rate` a second, then closes that direction.
fn pass_slowly(mut from: TcpStream, mut to: TcpStream, rate: &AtomicU64, link: SlowLink) {
    let SlowLink { delay, slack } = link;
    // Bounds the bytes in flight on the link.
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
        let rate = rate.load(Ordering::Relaxed) as f64;
        free = free.max(earliest) + Duration::from_secs_f64(bytes.len() as f64 / rate);
        if to.write_all(&bytes).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
    let _ = reader.join();
}
