//! Page handlers, played by threads, tested against the kernel.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::AtomicU64;
use std::thread;

use driftline_dirty_tracker::Gfn;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde_json::Value;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::memory::{Discarder, HugePages, Memory, MemoryError, MemoryOptions};
use crate::testing::skip;

const BYTES: u64 = (3 << 30) + (16 << 20);
const OPTIONS: MemoryOptions = MemoryOptions {
    backing: crate::memory::Backing::Anon,
    huge_pages: Some(HugePages::None),
    prefault: false,
};
const SOON: Duration = Duration::from_secs(20);

fn run(start: u64, count: u64) -> FrameRun {
    FrameRun { start: Gfn(start), count }
}

/// Returns the byte that fills the page at `offset` of the memory file.
fn content(offset: u64) -> u8 {
    (offset / PAGE_SIZE % 251) as u8 + 1
}

/// What a handler has received.
struct ReceivedMemory {
    connection: UnixStream,
    userfault: Userfault,
    mappings: Vec<Value>,
}

/// Accepts one connection and receives its message.
fn receive(listener: &UnixListener) -> ReceivedMemory {
    let (connection, _) = listener.accept().unwrap();
    let mut text = [0; 1024];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut text)];
    let got = recvmsg(&connection, &mut parts, &mut ancillary, RecvFlags::empty()).unwrap();
    let mut descriptors: Vec<OwnedFd> = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    let [userfault] = <[OwnedFd; 1]>::try_from(descriptors).unwrap();
    let mappings = serde_json::from_slice(&text[..got.bytes]).unwrap();
    ReceivedMemory { connection, userfault: Userfault::received(userfault), mappings }
}

impl ReceivedMemory {
    /// Returns the place of `address` in the memory file.
    fn offset(&self, address: u64) -> u64 {
        let number = |mapping: &Value, name: &str| mapping[name].as_u64().unwrap();
        let found = self.mappings.iter().find_map(|mapping| {
            let from = address.checked_sub(number(mapping, "base_host_virt_addr"))?;
            (from < number(mapping, "size")).then(|| number(mapping, "offset") + from)
        });
        found.unwrap()
    }

    /// Answers faults until `stop`, and counts them.
    fn serve(&self, stop: &AtomicBool, served: &AtomicU64) {
        let mut faults = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            self.userfault.faults(Duration::from_millis(5), &mut faults).unwrap();
            for address in faults.drain(..) {
                let start = address & !(PAGE_SIZE - 1);
                let page = vec![content(self.offset(start)); PAGE_SIZE as usize];
                match self.userfault.copy(start, &page) {
                    Err(e) if e.raw_os_error() == Some(libc::EEXIST) => {}
                    copied => copied.unwrap(),
                }
                served.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// Tells a handler to stop.
struct StopOnDrop<'s>(&'s AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Records that the guest has ended.
#[derive(Default)]
struct EndReports {
    lost: Arc<Mutex<Option<String>>>,
}

impl RestoreOwner for EndReports {
    fn lost(&self, why: String) {
        *self.lost.lock() = Some(why);
    }

    fn has_ended(&self) -> bool {
        false
    }

    fn restores_vcpus(&self) -> bool {
        // No thread of this process touches a missing page.
        self.lost.lock().is_some()
    }

    fn runs(&self) -> bool {
        true
    }
}

/// A guest's memory, its handler's end, and why the guest was ended.
struct HandedOver {
    memory: Memory,
    received: ReceivedMemory,
    lost: Arc<Mutex<Option<String>>>,
}

/// Hands memory of `bytes` bytes over. `None` if this host has no userfaultfd.
fn serve(test: &str, bytes: u64) -> Option<HandedOver> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("handler");
    let listener = UnixListener::bind(&path).unwrap();
    let receiving = thread::spawn(move || receive(&listener));
    let socket = PageHandlerSocket::connect(&path).unwrap();
    let (memory, lost) = hand_over(test, bytes, socket)?;
    Some(HandedOver { memory, received: receiving.join().unwrap(), lost })
}

/// Returns memory that was handed over to the handler at `socket`, and why the guest was ended.
fn hand_over(
    test: &str,
    bytes: u64,
    socket: PageHandlerSocket,
) -> Option<(Memory, Arc<Mutex<Option<String>>>)> {
    let memory = match Memory::of_handler(bytes, &OPTIONS, socket) {
        Err(MemoryError::Handler(e)) if e.step == HandlerStep::Open => {
            skip(test, &e.to_string());
            return None;
        }
        memory => memory.unwrap(),
    };
    let reports = EndReports::default();
    let lost = reports.lost.clone();
    memory.watch_handler(Box::new(reports)).unwrap();
    Some((memory, lost))
}

impl HandedOver {
    fn byte(&self, gfn: u64) -> u8 {
        self.memory.ram().read_obj(GuestAddress(Gfn(gfn).gpa() + 9)).unwrap()
    }

    /// Calls `act` while the handler answers. Returns how many faults it has answered.
    fn while_served(&self, act: impl FnOnce(&Self)) -> u64 {
        let (stop, served) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            scope.spawn(|| self.received.serve(&stop, &served));
            // Also if `act` panics, or the scope would wait for ever.
            let _stop = StopOnDrop(&stop);
            act(self);
        });
        served.load(Ordering::Relaxed)
    }
}

#[test]
fn message_names_each_mapping_and_its_place() {
    let Some(served) = serve("message_names_each_mapping_and_its_place", BYTES) else { return };
    let regions = served.memory.ram().iter().map(|region| (region.as_ptr() as u64, region.len()));
    let expected = regions.zip([0, 3u64 << 30]).map(|((start, size), offset)| {
        serde_json::json!({ "base_host_virt_addr": start, "size": size, "offset": offset,
            "page_size": 4096, "page_size_kib": 4096 })
    });
    assert_eq!(served.received.mappings, expected.collect::<Vec<_>>());
}

#[test]
fn handler_serves_faults_and_required_frames() {
    let Some(served) = serve("handler_serves_faults_and_required_frames", BYTES) else { return };
    let faults = served.while_served(|served| {
        assert_eq!(served.byte(7), content(7 * PAGE_SIZE));
        // The second mapping begins where the first ends in the file.
        assert_eq!(served.byte(0x10_0003), content((3 << 30) + 3 * PAGE_SIZE));
        served.memory.require(Gfn(9), SOON).unwrap();
        served.memory.fetch(&[run(7, 2), run(0x10_0003, 2)]).unwrap();
        assert_eq!(served.byte(9), content(9 * PAGE_SIZE));
    });
    assert_eq!(faults, 5);
    assert!(served.memory.memory_loader().is_none(), "it has one userfaultfd");
    assert_eq!(*served.lost.lock(), None);
}

#[test]
fn discarded_frame_is_marked_and_served_again() {
    let Some(served) = serve("discarded_frame_is_marked_and_served_again", BYTES) else {
        return;
    };
    let mut writes = served.memory.tracker().subscribe("test").unwrap();
    let mut discarder = Discarder::open(served.memory.protected_frames().clone()).unwrap();
    let faults = served.while_served(|served| {
        assert_eq!(served.byte(20), content(20 * PAGE_SIZE));
        // Whether or not it has been served: the handler has content for it.
        assert_eq!(discarder.discard(served.memory.ram(), run(20, 4)).unwrap(), 4);
        assert_eq!(writes.drain().runs().collect::<Vec<_>>(), [run(20, 4)]);
        // This handler does not answer with zeros, which shows that it is asked.
        assert_eq!(served.byte(20), content(20 * PAGE_SIZE));
    });
    assert_eq!(faults, 2);
}

#[test]
fn fetched_memory_needs_no_handler() {
    let Some(served) = serve("fetched_memory_needs_no_handler", 16 << 20) else { return };
    let mut discarder = Discarder::open(served.memory.protected_frames().clone()).unwrap();
    let faults = served.while_served(|served| {
        assert_eq!(served.memory.resident().unwrap(), [run(0, 4096)]);
    });
    assert_eq!(faults, 4096);
    // From here on no thread answers faults.
    assert_eq!(discarder.discard(served.memory.ram(), run(5, 2)).unwrap(), 2);
    assert_eq!(served.memory.resident().unwrap(), [run(0, 5), run(7, 4089)]);
    assert_eq!([4, 5, 6].map(|gfn| served.byte(gfn)), [content(4 * PAGE_SIZE), 0, 0]);
    if let Some(protection) = served.memory.write_protection().unwrap() {
        protection.protect(&[run(4, 1)]).unwrap();
        protection.unprotect(run(4, 1)).unwrap();
    }
}

#[test]
fn silent_handler_is_not_waited_for_ever() {
    let Some(served) = serve("silent_handler_is_not_waited_for_ever", BYTES) else { return };
    let fetch = || served.memory.fetch(&[run(3, 1)]).unwrap_err().to_string();
    assert!(fetch().contains("has not served the 4 KiB from page 0x3 on within 3s"));
    // The first one is still waited for.
    assert!(served.memory.resident().unwrap_err().to_string().contains("from page 0x0 on"));
    assert!(served.memory.write_protection().is_err());
    served.while_served(|served| served.memory.fetch(&[run(3, 1)]).unwrap());
    assert_eq!(served.byte(3), content(3 * PAGE_SIZE));
}

#[test]
fn abandoned_memory_frees_what_waits() {
    let Some(served) = serve("abandoned_memory_frees_what_waits", BYTES) else { return };
    // The thread that touches the page still waits.
    assert!(served.memory.fetch(&[run(3, 1)]).is_err());
    served.memory.abandon();
    let e = served.memory.require(Gfn(3), SOON).unwrap_err().to_string();
    assert!(e.starts_with("fetching frames failed: "), "{e}");
}

#[test]
fn discards_do_not_wait_for_abandoned_memory() {
    let test = "discards_do_not_wait_for_abandoned_memory";
    let Some(served) = serve(test, BYTES) else { return };
    let ram = served.memory.ram().clone();
    let mut discarder = Discarder::open(served.memory.protected_frames().clone()).unwrap();
    // No thread reads the messages about them.
    let discards = thread::spawn(move || {
        (0..9).for_each(|i| assert!(discarder.discard(&ram, run(2 * i, 1)).is_ok()));
    });
    let mut wait = [PollFd::new(&served.received.userfault, PollFlags::IN)];
    assert_eq!(poll(&mut wait, Some(&SOON.try_into().unwrap())).unwrap(), 1);
    served.memory.abandon();
    assert!(join_until(discards, Instant::now() + SOON).unwrap().is_ok());
    assert!(served.memory.require(Gfn(1), SOON).is_err());
}

#[test]
fn handler_that_takes_nothing_ends_the_guest() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("handler");
    let listener = UnixListener::bind(&path).unwrap();
    let socket = PageHandlerSocket::connect(&path).unwrap();
    let (connection, _) = listener.accept().unwrap();
    let handed = hand_over("handler_that_takes_nothing_ends_the_guest", BYTES, socket);
    let Some((memory, lost)) = handed else { return };
    drop(connection);
    let until = Instant::now() + SOON;
    while lost.lock().is_none() && Instant::now() < until {
        thread::sleep(Duration::from_millis(1));
    }
    let why = lost.lock().clone().unwrap();
    let place = path.display();
    let expected =
        format!("the page handler at {place} has closed its connection without taking the memory");
    assert_eq!(why, expected);
    assert_eq!(memory.fetch(&[run(0, 1)]).unwrap_err().to_string(), why);
}

#[test]
fn handler_may_close_its_connection_while_it_runs() {
    let test = "handler_may_close_its_connection_while_it_runs";
    let Some(served) = serve(test, BYTES) else { return };
    served.received.connection.shutdown(std::net::Shutdown::Both).unwrap();
    served.while_served(|served| assert_eq!(served.byte(1), content(PAGE_SIZE)));
    assert_eq!(*served.lost.lock(), None);
}

#[test]
fn socket_without_a_listener_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |name: &str| {
        let e = PageHandlerSocket::connect(&dir.path().join(name)).unwrap_err();
        (e.step, e.cause.raw_os_error())
    };
    assert_eq!(refused("none"), (HandlerStep::Connect, Some(libc::ENOENT)));
    drop(UnixListener::bind(dir.path().join("left")).unwrap());
    assert_eq!(refused("left"), (HandlerStep::Connect, Some(libc::ECONNREFUSED)));
    let too_long = refused(&"x".repeat(200));
    assert_eq!(too_long.0, HandlerStep::Connect);
}

#[test]
fn handler_that_accepts_nothing_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("handler");
    let listener = UnixListener::bind(&path).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    // Fills the queue of connections that wait to be accepted.
    let _first = UnixStream::connect(&path).unwrap();
    let e = PageHandlerSocket::connect(&path).unwrap_err();
    assert_eq!((e.step, e.cause.raw_os_error()), (HandlerStep::Connect, Some(libc::EAGAIN)));
}
