//! A proxy between source and destination that reads records, and cuts, stalls or acts at a chosen
//! one.

use std::io::Read;
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use driftline_format::{HEADER_LEN, RECORD_HEAD_LEN};

use super::connection::{ProxyConnection, ProxyListener};

/// Where a connection is cut, relative to a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CutPoint {
    Before,
    Within,
    After,
    /// The proxy forwards no further bytes, and keeps the connection open.
    Stall,
}

/// A unit of a direction: by its number (0 is the header), or the first of a tag.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum At {
    Unit(usize),
    Tag(u16),
}

impl At {
    fn is(self, unit: usize, tag: u16) -> bool {
        match self {
            Self::Unit(n) => n == unit,
            Self::Tag(t) => t == tag,
        }
    }
}

type RecordAction = Box<dyn FnMut() + Send>;

/// Start of slow forwarding of the destination's bytes.
enum Trickle {
    /// At this unit.
    Unit(usize),
    /// At the first unit after the flag was set.
    Once(Arc<AtomicBool>),
}

impl Trickle {
    fn begun(&self, unit: usize) -> bool {
        match self {
            Self::Unit(first) => unit >= *first,
            Self::Once(begun) => begun.load(Ordering::SeqCst),
        }
    }
}

/// The proxy's actions on one connection; others pass unchanged.
#[derive(Default)]
pub struct ProxyPlan {
    /// Whether from the source, the unit, and the cut.
    cut: Option<(bool, At, CutPoint)>,
    /// An action before every record of a tag: whether from the source, and the tag.
    act: Option<(bool, u16, RecordAction)>,
    /// A bit to flip: whether from the source, the unit, and the byte (modulo its length).
    flip: Option<(bool, At, usize)>,
    /// From here on the destination's bytes are forwarded at one byte every 100 ms.
    trickle: Option<Trickle>,
    /// Whether connections after the first are dropped.
    only_first: bool,
    /// Receives all bytes from the source.
    record: Option<Arc<Mutex<Vec<u8>>>>,
}

impl ProxyPlan {
    pub fn cut(from_source: bool, at: At, cut: CutPoint) -> Self {
        Self { cut: Some((from_source, at, cut)), ..Self::default() }
    }

    pub fn flip(from_source: bool, at: At, byte: usize) -> Self {
        Self { flip: Some((from_source, at, byte)), ..Self::default() }
    }

    pub fn trickle(unit: usize) -> Self {
        Self { trickle: Some(Trickle::Unit(unit)), ..Self::default() }
    }

    /// Returns a plan that trickles once the source has sent this tag.
    pub fn trickle_once_sent(tag: u16) -> Self {
        let sent = Arc::new(AtomicBool::new(false));
        let seen = sent.clone();
        Self { trickle: Some(Trickle::Once(sent)), ..Self::default() }
            .before_from_source(tag, move || seen.store(true, Ordering::SeqCst))
    }

    /// Returns a plan that cuts the connection and forwards no other one.
    pub fn cut_for_good(from_source: bool, at: At, cut: CutPoint) -> Self {
        Self { only_first: true, ..Self::cut(from_source, at, cut) }
    }

    pub fn record(to: &Arc<Mutex<Vec<u8>>>) -> Self {
        Self { record: Some(to.clone()), ..Self::default() }
    }

    pub fn before_from_source(self, tag: u16, act: impl FnMut() + Send + 'static) -> Self {
        Self { act: Some((true, tag, Box::new(act))), ..self }
    }

    pub fn before_from_destination(self, tag: u16, act: impl FnMut() + Send + 'static) -> Self {
        Self { act: Some((false, tag, Box::new(act))), ..self }
    }
}

/// A running proxy. Dropping it ends all connections.
pub struct Proxy {
    pub to: String,
    /// Tags from the source (0 for a header) on the planned connection.
    pub from_source: Arc<Mutex<Vec<u16>>>,
    /// Tags from the destination.
    pub from_destination: Arc<Mutex<Vec<u16>>>,
    destination: Arc<Mutex<Option<String>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Forwards later connections to `destination`.
    pub fn redirect(&self, destination: &str) {
        *self.destination.lock().unwrap() = Some(destination.to_owned());
    }

    pub fn start(destination: &str, plan: ProxyPlan) -> Self {
        Self::nth(destination, 0, plan)
    }

    /// Starts a proxy whose plan applies to the connection of this number, from 0.
    pub fn nth(destination: &str, which: usize, plan: ProxyPlan) -> Self {
        let listener = ProxyListener::like(destination);
        let to = listener.address.clone();
        let stop = Arc::new(AtomicBool::new(false));
        let (from_source, from_destination) = (Arc::default(), Arc::default());
        let seen = [Arc::clone(&from_source), Arc::clone(&from_destination)];
        let target = Arc::new(Mutex::new(Some(destination.to_owned())));
        let (destination, halt) = (target.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            let only_first = plan.only_first;
            let mut plan = Some(plan);
            let mut others = which;
            let mut open: Vec<ProxyConnection> = Vec::new();
            while !halt.load(Ordering::SeqCst) {
                let Some(near) = listener.accept() else {
                    std::thread::sleep(Duration::from_millis(2));
                    continue;
                };
                let to = destination.lock().unwrap().clone();
                let Some(Ok(far)) = to.map(|to| ProxyConnection::to(&to)) else { continue };
                if only_first && plan.is_some() {
                    destination.lock().unwrap().take();
                }
                open.extend([near.try_clone().unwrap(), far.try_clone().unwrap()]);
                if others > 0 {
                    others -= 1;
                    relay(near, far, ProxyPlan::default(), &Default::default());
                    continue;
                }
                match plan.take() {
                    Some(plan) => relay(near, far, plan, &seen),
                    None => relay(near, far, ProxyPlan::default(), &Default::default()),
                }
            }
            for connection in open {
                connection.shutdown(Shutdown::Both);
            }
        });
        let destination = target;
        Self { to, from_source, from_destination, destination, stop, thread: Some(thread) }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.take().unwrap().join().unwrap();
    }
}

fn relay(
    near: ProxyConnection,
    far: ProxyConnection,
    plan: ProxyPlan,
    seen: &[Arc<Mutex<Vec<u16>>>; 2],
) {
    near.set_nodelay();
    far.set_nodelay();
    let stalled = Arc::new(AtomicBool::new(false));
    let ProxyPlan { cut, act, flip, trickle, record, .. } = plan;
    let (mut act, mut trickle) = (act, trickle);
    for (from_source, from, to, seen) in
        [(true, &near, &far, &seen[0]), (false, &far, &near, &seen[1])]
    {
        let mut way = ProxyDirection {
            from: from.try_clone().unwrap(),
            to: to.try_clone().unwrap(),
            unit: AtomicUsize::new(0),
            cut: cut.filter(|c| c.0 == from_source).map(|c| (c.1, c.2)),
            made: false,
            flip: flip.filter(|f| f.0 == from_source).map(|f| (f.1, f.2)),
            trickle: if from_source { None } else { trickle.take() },
            act: act.take_if(|act| act.0 == from_source).map(|(_, tag, act)| (tag, act)),
            record: record.clone().filter(|_| from_source),
            seen: seen.clone(),
            stalled: stalled.clone(),
        };
        std::thread::spawn(move || {
            way.run();
            if !way.stalled.load(Ordering::SeqCst) {
                way.to.shutdown(Shutdown::Write);
                if way.made {
                    way.from.shutdown(Shutdown::Both);
                    way.to.shutdown(Shutdown::Both);
                }
                // A sender that has filled this buffer would otherwise wait in a write until its
                // limit: the connection is open until the proxy ends, so nothing resets it.
                let _ = std::io::copy(&mut way.from, &mut std::io::sink());
            }
        });
    }
}

struct ProxyDirection {
    from: ProxyConnection,
    to: ProxyConnection,
    unit: AtomicUsize,
    cut: Option<(At, CutPoint)>,
    /// Whether the cut was made.
    made: bool,
    flip: Option<(At, usize)>,
    trickle: Option<Trickle>,
    act: Option<(u16, RecordAction)>,
    record: Option<Arc<Mutex<Vec<u8>>>>,
    seen: Arc<Mutex<Vec<u16>>>,
    stalled: Arc<AtomicBool>,
}

impl ProxyDirection {
    /// Forwards unit by unit until the end, an error, or the cut.
    fn run(&mut self) {
        loop {
            let unit = self.unit.load(Ordering::SeqCst);
            let Some((tag, mut bytes)) = self.next(unit) else { return };
            // Closed unless they are passed on.
            let descriptors = self.from.take_descriptors();
            if let Some((at, act)) = &mut self.act
                && *at == tag
            {
                act();
            }
            if let Some(record) = &self.record {
                record.lock().unwrap().extend_from_slice(&bytes);
            }
            if let Some((at, byte)) = self.flip
                && at.is(unit, tag)
            {
                let byte = byte % bytes.len();
                bytes[byte] ^= 0x10;
            }
            let cut = self.cut.filter(|c| c.0.is(unit, tag)).map(|c| c.1);
            self.made = cut.is_some();
            match cut {
                None => {}
                Some(CutPoint::Before) => return,
                Some(CutPoint::Within) => {
                    let _ = self.to.write_with(&bytes[..bytes.len() / 2], &[]);
                    return;
                }
                Some(CutPoint::Stall) => {
                    self.stalled.store(true, Ordering::SeqCst);
                    return;
                }
                Some(CutPoint::After) => {
                    self.seen.lock().unwrap().push(tag);
                    let _ = self.to.write_with(&bytes, &descriptors);
                    // Gives the peer time to read the bytes before the connection is shut down.
                    std::thread::sleep(Duration::from_millis(20));
                    return;
                }
            }
            if self.trickle.as_ref().is_some_and(|t| t.begun(unit)) {
                let slow = |b: &u8| {
                    // The pace of a trickle.
                    std::thread::sleep(Duration::from_millis(100));
                    self.to.write_with(&[*b], &[]).is_ok()
                };
                if !bytes.iter().all(slow) {
                    return;
                }
                bytes.clear();
            }
            let stalled = self.stalled.load(Ordering::SeqCst);
            if stalled || self.to.write_with(&bytes, &descriptors).is_err() {
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
