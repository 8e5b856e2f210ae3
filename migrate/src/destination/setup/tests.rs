//! Building the guest of a source: refusals, and the removal of copies.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use driftline_dirty_tracker::{Gfn, Slot, SlotId};
use driftline_format::{MAGIC_STREAM, layout_hash};
use driftline_guest::testing::{MemoryConfig, MemoryGuest, MemoryGuestFactory};
use driftline_guest::{DriveCopy, VmId};

use super::super::building::GuestBuilder;
use super::super::options::ReceiveOptions;
use super::super::session::Session;
use super::*;
use crate::control::ReceiveControl;
use crate::journal::Records;
use crate::transport::socket::Socket;

fn host<'a>(
    options: &'a ReceiveOptions,
    control: &'a ReceiveControl,
    incoming: Receiver<Incoming>,
) -> ReceiveHost<'a, MemoryGuestFactory> {
    host_of(Arc::default(), options, control, incoming)
}

/// Returns a wire to a source that sends nothing.
fn wire() -> (Wire<Link>, socket2::Socket) {
    let kind = socket2::Type::STREAM;
    let (socket, source) = socket2::Socket::pair(socket2::Domain::UNIX, kind, None).unwrap();
    let socket = Socket::new(socket.into()).unwrap();
    (Wire::new(Link::new(socket, SLICE, Arc::default())), source)
}

fn host_of<'a, F: GuestFactory + 'static>(
    factory: Arc<F>,
    options: &'a ReceiveOptions,
    control: &'a ReceiveControl,
    incoming: Receiver<Incoming>,
) -> ReceiveHost<'a, F> {
    let builder = GuestBuilder::new(factory, options.build_limit, options.disk_limit);
    let session = Arc::new(Session::new(Records::open(&options.records).unwrap()));
    ReceiveHost { builder, options, is_single: false, control, session, incoming }
}

#[test]
fn early_leave_ends_once_only_without_a_session() {
    let dir = tempfile::tempdir().unwrap();
    let options = ReceiveOptions { once: true, ..ReceiveOptions::new(dir.path()) };
    let control = ReceiveControl::new();
    let (sender, incoming) = std::sync::mpsc::channel();
    let host = host(&options, &control, incoming);
    let left = || {
        let cause = std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
        let cause = driftline_format::FormatError::Io(cause).into();
        sender.send(Incoming::Left { peer: "a source".into(), cause }).unwrap();
    };
    // Ends the wait after the queued connections.
    control.cancel().unwrap();
    host.session.claim(VmId::random(), Token::random(), || Ok(())).unwrap();
    left();
    let failed = host.welcome().err().unwrap();
    assert!(matches!(failed.cause, Cause::Cancelled), "{failed:?}");
    assert_eq!(control.progress().refused, 1);
    host.session.vacate();
    left();
    let failed = host.welcome().err().unwrap();
    assert!(matches!(failed.cause, Cause::SourceLeft { .. }), "{failed:?}");
}

/// Returns two different layouts with the same CRC32C hash.
fn layouts_of_one_hash() -> (Layout, Layout) {
    let mut seen = std::collections::HashMap::new();
    let mut random = 1u64;
    loop {
        // xorshift64
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let (base, frames) = (random >> 40, 1 + random % 4096);
        let slot = Slot { id: SlotId(0), base: Gfn(base), frames };
        let layout = Layout::new([slot]).unwrap();
        match seen.insert(layout_hash(&layout), layout.clone()) {
            Some(other) if other != layout => return (other, layout),
            _ => {}
        }
    }
}

#[test]
fn layouts_with_one_hash_are_distinguished() {
    let dir = tempfile::tempdir().unwrap();
    let (options, control) = (ReceiveOptions::new(dir.path()), ReceiveControl::new());
    let (_sender, incoming) = std::sync::mpsc::channel();
    let host = host(&options, &control, incoming);
    let (mut wire, _source) = wire();
    let (ours, theirs) = layouts_of_one_hash();
    assert_eq!(layout_hash(&ours), layout_hash(&theirs));
    let config = MemoryConfig { slots: ours.slots().copied().collect(), ..MemoryConfig::still() };
    let guest = MemoryGuest::new(VmId::random(), config).unwrap();
    let header = Header::new(MAGIC_STREAM, guest.vm_id(), 0, layout_hash(&theirs));
    let config = guest.config();
    let mut build = |layout: &Layout| {
        let machine = SourceMachine { layout, config: &config, drives: &[], memory: None };
        let built = host.build(&mut wire, &header, Token::random(), machine);
        built.map_err(|refused| refused.cause)
    };
    let cause = build(&theirs).err().expect("the layouts differ");
    assert!(matches!(cause, Cause::LayoutDiffers(LayoutDifference::Slot { nth: 0, .. })));
    let error = cause.to_string();
    assert!(error.contains("the first gfn of its memory slot 0 is 0x"), "{error}");
    assert!(build(&ours).is_ok());
}

/// A copy whose drop calls a function.
struct RemovalHookCopy(Arc<dyn Fn() + Send + Sync>);

impl DriveCopy for RemovalHookCopy {
    fn write(&self, _: u64, _: &[u8]) -> std::io::Result<()> {
        Ok(())
    }
    fn zero(&self, _: u64, _: u64) -> std::io::Result<()> {
        Ok(())
    }
    fn make_durable(&self) -> std::io::Result<()> {
        Ok(())
    }
    fn yield_to_guest(&self) -> std::io::Result<()> {
        Ok(())
    }
    fn keep(&self) {}
}

impl Drop for RemovalHookCopy {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Builds guests with one copy whose drop calls a function.
struct HookedCopyFactory(MemoryGuestFactory, Arc<dyn Fn() + Send + Sync>);

impl GuestFactory for HookedCopyFactory {
    type Guest = MemoryGuest;

    fn create_with_copies(
        &self,
        vm_id: VmId,
        config: &[u8],
        _: &[DriveHead],
    ) -> Result<driftline_guest::GuestWithCopies<MemoryGuest>, driftline_guest::GuestError> {
        Ok((self.0.create(vm_id, config)?, vec![Box::new(RemovalHookCopy(self.1.clone()))]))
    }

    fn create_on(
        &self,
        vm_id: VmId,
        config: &[u8],
        memory: &driftline_guest::SharedGuest,
    ) -> Result<Arc<MemoryGuest>, driftline_guest::GuestError> {
        self.0.create_on(vm_id, config, memory)
    }

    fn create_with_drives(
        &self,
        from: &driftline_guest::Origin,
        config: &[u8],
        drives: &[DriveHead],
    ) -> Result<driftline_guest::GuestWithCopies<MemoryGuest>, driftline_guest::GuestError> {
        self.0.create_with_drives(from, config, drives)
    }
}

/// Returns a source with one copied disk, whose layout differs from that of its guest.
fn source_with_wrong_layout(wire: Wire<Link>) -> AcceptedSource {
    let guest = MemoryGuest::new(VmId::random(), MemoryConfig::still()).unwrap();
    let layout = Layout::new([Slot { id: SlotId(7), base: Gfn(0), frames: 1 }]).unwrap();
    let header = Header::new(MAGIC_STREAM, guest.vm_id(), 0, layout_hash(&layout));
    let drives = vec![DriveHead { id: "d".into(), bytes: 4096, readonly: false }];
    let (token, config, since) = (Token::random(), guest.config(), Instant::now());
    AcceptedSource { wire, header, token, drives, memory: None, layout, config, since }
}

#[test]
fn refusal_does_not_wait_for_hanging_copies() {
    let dir = tempfile::tempdir().unwrap();
    let (options, control) = (ReceiveOptions::new(dir.path()), ReceiveControl::new());
    let (_sender, incoming) = std::sync::mpsc::channel();
    let released = Arc::new(AtomicBool::new(false));
    let removal = released.clone();
    let until = Instant::now() + Duration::from_secs(60);
    let removing = move || {
        while !removal.load(Ordering::SeqCst) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        removal.store(true, Ordering::SeqCst);
    };
    let factory = Arc::new(HookedCopyFactory(MemoryGuestFactory::default(), Arc::new(removing)));
    let host = host_of(factory, &options, &control, incoming);
    let (wire, source) = wire();
    source.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(host.admit(source_with_wrong_layout(wire)).unwrap().is_none());
    assert!(!released.swap(true, Ordering::SeqCst), "the refusal came before the removal ended");
    let error = control.progress().last_refusal.unwrap();
    assert!(error.contains("memory slot"), "{error}");
}

#[test]
fn refusal_precedes_removal_of_copies() {
    let dir = tempfile::tempdir().unwrap();
    let (options, control) = (ReceiveOptions::new(dir.path()), ReceiveControl::new());
    let (_sender, incoming) = std::sync::mpsc::channel();
    let (wire, source) = wire();
    source.shutdown(std::net::Shutdown::Write).unwrap();
    source.set_nonblocking(true).unwrap();
    let session: Arc<OnceLock<Arc<Session>>> = Arc::default();
    let (seen, watched) = (Arc::new(Mutex::new(Vec::new())), session.clone());
    let sender = seen.clone();
    let removing = move || {
        let refused = source.peek(&mut [MaybeUninit::uninit()]).is_ok_and(|bytes| bytes > 0);
        let taken = watched.get().is_some_and(|session| session.vacant().is_err());
        sender.lock().unwrap().push((refused, taken));
    };
    let factory = Arc::new(HookedCopyFactory(MemoryGuestFactory::default(), Arc::new(removing)));
    let host = host_of(factory, &options, &control, incoming);
    session.set(host.session.clone()).unwrap();
    let caller = source_with_wrong_layout(wire);
    host.session.claim(caller.header.vm_id(), caller.token, || Ok(())).unwrap();
    assert!(host.admit(caller).unwrap().is_none());
    assert_eq!(*seen.lock().unwrap(), [(true, true)]);
    host.session.vacant().unwrap();
}
