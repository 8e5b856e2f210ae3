//! A proxy between the two processes of an upgrade that knows their messages, and acts before one
//! of them is passed on.

use std::io::{self, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::spawn;

use driftline_format::descriptors::{self, ReceivedDescriptors};
use driftline_format::{HEADER_LEN, RECORD_HEAD_LEN, RecordHead};
use driftline_migrate::Tag;
use parking_lot::Mutex;

/// Maximum number of descriptors with one byte; more than either process sends.
const SPACE: usize = rustix::cmsg_space!(ScmRights(64));

/// Position of the features in HELLO.
const FEATURES_AT: usize = 8;

/// A message of an upgrade.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UpgradeStep {
    pub to_next: bool,
    pub name: &'static str,
    /// Number of earlier messages of that name.
    pub nth: usize,
}

/// What becomes of the message after the action.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Then {
    /// It is passed on.
    Pass,
    /// The connection ends without it.
    End,
}

/// An action before a step.
pub struct StepAction {
    pub at: UpgradeStep,
    pub act: Box<dyn FnOnce() + Send>,
    pub then: Then,
}

/// The part of a connection's messages in one direction.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ProxySide {
    /// The offer, from the guest's process.
    Offer,
    /// Its answers.
    Answer,
    /// A side of the hand-over's connection.
    HandOver { to_next: bool },
}

/// The messages so far, and the planned action.
struct ProxyProgress {
    seen: Vec<UpgradeStep>,
    planned: Option<StepAction>,
    /// Feature bits of the next process that the other one does not learn of.
    hidden_features: u64,
}

type Shared = Arc<Mutex<ProxyProgress>>;

/// A running proxy.
pub struct UpgradeProxy(Shared);

impl UpgradeProxy {
    /// Listens at `at`. Passes the first connection on to `next` as that of the offer, and later
    /// ones as those of a hand-over.
    pub fn start(
        at: &Path,
        next: PathBuf,
        planned: Option<StepAction>,
        hidden_features: u64,
    ) -> Self {
        let listener = UnixListener::bind(at).unwrap();
        let progress = ProxyProgress { seen: Vec::new(), planned, hidden_features };
        let progress: Shared = Arc::new(Mutex::new(progress));
        let shared = progress.clone();
        spawn(move || {
            for (number, near) in listener.incoming().flatten().enumerate() {
                // The near end is closed if the next process has ended.
                let Ok(far) = UnixStream::connect(&next) else { continue };
                let sides = match number {
                    0 => [ProxySide::Offer, ProxySide::Answer],
                    _ => [true, false].map(|to_next| ProxySide::HandOver { to_next }),
                };
                let back = (far.try_clone().unwrap(), near.try_clone().unwrap());
                for ((from, to), side) in [(near, far), back].into_iter().zip(sides) {
                    let shared = shared.clone();
                    spawn(move || pass(from, to, side, &shared));
                }
            }
        });
        Self(progress)
    }

    /// Returns the messages that have arrived, in their order.
    pub fn steps(&self) -> Vec<UpgradeStep> {
        self.0.lock().seen.clone()
    }

    /// Returns whether the planned step has come.
    pub fn has_acted(&self) -> bool {
        self.0.lock().planned.is_none()
    }
}

/// Passes messages on until the end, or the action that ends both connections.
fn pass(mut from: UnixStream, mut to: UnixStream, side: ProxySide, shared: &Shared) {
    for number in 0.. {
        let Ok(mut message) = Message::read(&mut from, side, number) else { break };
        let planned = note(&message, side, shared);
        let then = planned.map(|planned| {
            (planned.act)();
            planned.then
        });
        if then == Some(Then::End) {
            let _ = from.shutdown(Shutdown::Both);
            break;
        }
        if message.name == "HELLO" && side == (ProxySide::HandOver { to_next: false }) {
            message.hide_features(shared.lock().hidden_features);
        }
        if message.write(&mut to).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

/// Adds the message to those that have arrived. Returns the action, if it is planned for now.
fn note(message: &Message, side: ProxySide, shared: &Shared) -> Option<StepAction> {
    let mut progress = shared.lock();
    let to_next = matches!(side, ProxySide::Offer | ProxySide::HandOver { to_next: true });
    let same = |step: &&UpgradeStep| (step.to_next, step.name) == (to_next, message.name);
    let nth = progress.seen.iter().filter(same).count();
    let step = UpgradeStep { to_next, name: message.name, nth };
    progress.seen.push(step);
    progress.planned.take_if(|planned| planned.at == step)
}

struct Message {
    name: &'static str,
    bytes: Vec<u8>,
    /// Those of a last byte, which is not in `bytes`.
    descriptors: Option<ReceivedDescriptors>,
}

impl Message {
    fn read(from: &mut UnixStream, side: ProxySide, number: u32) -> io::Result<Self> {
        match side {
            ProxySide::Offer | ProxySide::Answer => Self::read_of_offer(from, side, number),
            ProxySide::HandOver { .. } => Self::read_of_hand_over(from, number),
        }
    }

    fn read_of_offer(from: &mut UnixStream, side: ProxySide, number: u32) -> io::Result<Self> {
        let (name, bytes) = match (side, number) {
            (ProxySide::Offer, 0) => {
                let descriptors = Some(receive(from)?);
                return Ok(Self { name: "descriptors", bytes: Vec::new(), descriptors });
            }
            (ProxySide::Offer, 1) => ("offer", read_json(from)?),
            (ProxySide::Answer, 0) => ("answer", read_json(from)?),
            _ => ("serving", read(from, 1)?),
        };
        Ok(Self { name, bytes, descriptors: None })
    }

    fn read_of_hand_over(from: &mut UnixStream, number: u32) -> io::Result<Self> {
        let Some(sequence) = number.checked_sub(1) else {
            let bytes = read(from, HEADER_LEN)?;
            return Ok(Self { name: "header", bytes, descriptors: None });
        };
        let mut bytes = read(from, RECORD_HEAD_LEN)?;
        let head = RecordHead::read_from(&bytes[..], sequence).map_err(io::Error::other)?;
        let tag = Tag::from_number(head.tag).expect("a known tag");
        let carries = tag.carries_descriptors();
        bytes.extend(read(from, head.length as usize - usize::from(carries))?);
        let descriptors = if carries { Some(receive(from)?) } else { None };
        Ok(Self { name: tag.name(), bytes, descriptors })
    }

    /// Removes feature bits from a HELLO, which is the first message after the header.
    fn hide_features(&mut self, bits: u64) {
        let (head, payload) = self.bytes.split_at_mut(RECORD_HEAD_LEN);
        let mut read = RecordHead::read_from(&*head, 0).unwrap();
        for (offered, hidden) in payload[FEATURES_AT..].iter_mut().zip(bits.to_le_bytes()) {
            *offered &= !hidden;
        }
        read.payload_crc = crc32c::crc32c(payload);
        head.copy_from_slice(&read.to_bytes());
    }

    fn write(&self, to: &mut UnixStream) -> io::Result<()> {
        to.write_all(&self.bytes)?;
        let Some(descriptors) = &self.descriptors else { return Ok(()) };
        let all: Vec<_> = descriptors.all.iter().map(AsFd::as_fd).collect();
        descriptors::send(&*to, &all, &mut [MaybeUninit::uninit(); SPACE])
    }
}

fn receive(from: &UnixStream) -> io::Result<ReceivedDescriptors> {
    let received = descriptors::receive(from, &mut [MaybeUninit::uninit(); SPACE])?;
    received.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

fn read(from: &mut UnixStream, length: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Reads a length of four bytes and what follows it.
fn read_json(from: &mut UnixStream) -> io::Result<Vec<u8>> {
    let mut bytes = read(from, 4)?;
    let length = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    bytes.extend(read(from, length as usize)?);
    Ok(bytes)
}
