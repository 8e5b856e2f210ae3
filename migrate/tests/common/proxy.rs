//! A proxy between source and destination that reads records, and cuts, stalls or acts at one.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use checkpoint::format::{HEADER_LEN, RECORD_HEAD_LEN};

/// Where a connection is cut, relative to one record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cut {
    Before,
    Within,
    After,
    /// Forwards nothing more, and closes nothing.
    Stall,
}

type Act = Box<dyn FnMut() + Send>;

/// What the proxy does to the first connection; later ones pass untouched.
#[derive(Default)]
pub struct Plan {
    /// From the source (true) or the destination, at the n-th unit: 0 is the header.
    cut: Option<(bool, usize, Cut)>,
    /// Before every record of this tag from the source.
    act: Option<(u16, Act)>,
    /// Bytes changed: from the source, unit, byte within it.
    flip: Option<(bool, usize, usize)>,
}

impl Plan {
    pub fn cut(from_source: bool, unit: usize, cut: Cut) -> Self {
        Self { cut: Some((from_source, unit, cut)), ..Self::default() }
    }

    pub fn flip(from_source: bool, unit: usize, byte: usize) -> Self {
        Self { flip: Some((from_source, unit, byte)), ..Self::default() }
    }

    pub fn before_from_source(mut self, tag: u16, act: impl FnMut() + Send + 'static) -> Self {
        self.act = Some((tag, Box::new(act)));
        self
    }
}

/// A running proxy; dropping it ends it, with all connections.
pub struct Proxy {
    pub to: String,
    /// Tags (0 for a header) that the first connection carried, per direction.
    pub from_source: Arc<Mutex<Vec<u16>>>,
    pub from_destination: Arc<Mutex<Vec<u16>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    pub fn start(destination: &str, plan: Plan) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap().to_string();
        listener.set_nonblocking(true).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let (from_source, from_destination) = (Arc::default(), Arc::default());
        let seen = [Arc::clone(&from_source), Arc::clone(&from_destination)];
        let (destination, halt) = (destination.to_owned(), stop.clone());
        let thread = std::thread::spawn(move || {
            let mut plan = Some(plan);
            let mut open: Vec<TcpStream> = Vec::new();
            while !halt.load(Ordering::SeqCst) {
                let Ok((near, _)) = listener.accept() else {
                    std::thread::sleep(Duration::from_millis(2));
                    continue;
                };
                near.set_nonblocking(false).unwrap();
                let Ok(far) = TcpStream::connect(&destination) else { continue };
                open.extend([near.try_clone().unwrap(), far.try_clone().unwrap()]);
                match plan.take() {
                    Some(plan) => relay(near, far, plan, &seen),
                    None => relay(near, far, Plan::default(), &Default::default()),
                }
            }
            for stream in open {
                let _ = stream.shutdown(Shutdown::Both);
            }
        });
        Self { to, from_source, from_destination, stop, thread: Some(thread) }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.take().unwrap().join().unwrap();
    }
}

fn relay(near: TcpStream, far: TcpStream, plan: Plan, seen: &[Arc<Mutex<Vec<u16>>>; 2]) {
    near.set_nodelay(true).unwrap();
    far.set_nodelay(true).unwrap();
    let stalled = Arc::new(AtomicBool::new(false));
    let Plan { cut, act, flip } = plan;
    let mut act = act;
    for (from_source, from, to, seen) in
        [(true, &near, &far, &seen[0]), (false, &far, &near, &seen[1])]
    {
        let mut way = Way {
            from: from.try_clone().unwrap(),
            to: to.try_clone().unwrap(),
            unit: AtomicUsize::new(0),
            cut: cut.filter(|c| c.0 == from_source).map(|c| (c.1, c.2)),
            flip: flip.filter(|f| f.0 == from_source).map(|f| (f.1, f.2)),
            act: if from_source { act.take() } else { None },
            seen: seen.clone(),
            stalled: stalled.clone(),
        };
        std::thread::spawn(move || {
            way.run();
            if !way.stalled.load(Ordering::SeqCst) {
                let _ = way.to.shutdown(Shutdown::Write);
                if way.cut.is_some_and(|c| c.0 < way.unit.load(Ordering::SeqCst) + 1) {
                    let _ = way.from.shutdown(Shutdown::Both);
                    let _ = way.to.shutdown(Shutdown::Both);
                }
            }
        });
    }
}

struct Way {
    from: TcpStream,
    to: TcpStream,
    unit: AtomicUsize,
    cut: Option<(usize, Cut)>,
    flip: Option<(usize, usize)>,
    act: Option<(u16, Act)>,
    seen: Arc<Mutex<Vec<u16>>>,
    stalled: Arc<AtomicBool>,
}

impl Way {
    /// Forwards unit by unit until an end, an error, or the cut.
    fn run(&mut self) {
        loop {
            let unit = self.unit.load(Ordering::SeqCst);
            let Some((tag, mut bytes)) = self.next(unit) else { return };
            if let Some((at, act)) = &mut self.act
                && *at == tag
            {
                act();
            }
            if let Some((at, byte)) = self.flip
                && at == unit
            {
                let byte = byte % bytes.len();
                bytes[byte] ^= 0x10;
            }
            match self.cut.filter(|c| c.0 == unit).map(|c| c.1) {
                None => {}
                Some(Cut::Before) => return,
                Some(Cut::Within) => {
                    let _ = self.to.write_all(&bytes[..bytes.len() / 2]);
                    return;
                }
                Some(Cut::Stall) => {
                    self.stalled.store(true, Ordering::SeqCst);
                    return;
                }
                Some(Cut::After) => {
                    self.seen.lock().unwrap().push(tag);
                    let _ = self.to.write_all(&bytes);
                    // Shut down only after the bytes had time to be read: a cut after them.
                    std::thread::sleep(Duration::from_millis(20));
                    return;
                }
            }
            if self.stalled.load(Ordering::SeqCst) || self.to.write_all(&bytes).is_err() {
                return;
            }
            self.seen.lock().unwrap().push(tag);
            self.unit.store(unit + 1, Ordering::SeqCst);
        }
    }

    fn next(&mut self, unit: usize) -> Option<(u16, Vec<u8>)> {
        if unit == 0 {
            let mut header = vec![0; HEADER_LEN];
            self.from.read_exact(&mut header).ok()?;
            return Some((0, header));
        }
        let mut bytes = vec![0; RECORD_HEAD_LEN];
        self.from.read_exact(&mut bytes).ok()?;
        let tag = u16::from_le_bytes([bytes[0], bytes[1]]);
        let length = u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]) as usize;
        bytes.resize(RECORD_HEAD_LEN + length, 0);
        self.from.read_exact(&mut bytes[RECORD_HEAD_LEN..]).ok()?;
        Some((tag, bytes))
    }
}
