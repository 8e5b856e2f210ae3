//! Hand-overs on one host: the guest's memory is handed over, not copied.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::Duration;

use crate::common::{
    HostPair, LONG, Proxy, ProxyConnection, ProxyPlan, Receiver, Sender, exactly_one_runs,
    quick_send, raw, tag, within,
};
use driftline_dirty_tracker::{Gfn, Layout, PAGE_SIZE};
use driftline_format::{Header, MAGIC_STREAM, RecordHead, layout_hash};
use driftline_guest::testing::{MemoryConfig, MemoryGuest, Op};
use driftline_guest::{
    GuestContents, GuestError, GuestIdentity, HandOver, Lifecycle, NextHost, OfferedClaim,
    RunState, SharedGuest,
};
use driftline_migrate::{Cause, Compression, CopyDrives, SendOptions, SendTls};
use rustix::fs::{MemfdFlags, SealFlags};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend};

fn options(hosts: &HostPair) -> SendOptions {
    SendOptions { local: true, ..quick_send(hosts) }
}

fn receiver(hosts: &HostPair) -> Receiver {
    hosts.local_receiver(hosts.receive_options())
}

/// Returns the inode number of the file of the guest's first slot.
fn file_number(guest: &MemoryGuest) -> u64 {
    let first = guest.ram().iter().next().unwrap();
    first.file_offset().unwrap().file().metadata().unwrap().ino()
}

#[test]
fn guest_continues_in_the_same_memory() {
    let hosts = HostPair::new();
    let mut guest = hosts.start_in_files(MemoryConfig::small());
    let (file, bytes) = (file_number(&guest), guest.layout().frames() * PAGE_SIZE);
    for _ in 0..3 {
        let writes = guest.writes();
        within(LONG, "the guest writes", || guest.writes() > writes + 500);
        let there = receiver(&hosts);
        let sent = Sender::start(&guest, &there.to, &options(&hosts)).result().unwrap();
        assert_eq!((sent.normal_frames, sent.zero_frames), (0, 0));
        assert_eq!(sent.shared_memory_bytes, bytes);
        assert!(sent.transferred_bytes < 16 << 10, "{}", sent.transferred_bytes);
        assert_eq!(sent.converged, "its memory is handed over, not copied");
        assert_eq!(sent.passes.len(), 2);
        let arrived = there.guest();
        assert_eq!((guest.run_state(), file_number(&arrived.guest)), (RunState::Stopped, file));
        assert_eq!(arrived.report.normal_frames, 0);
        assert_eq!(arrived.guest.prefaulted(), 0, "holes would get pages");
        // The mapping at the source shows what the guest writes at the destination.
        let gfn = Gfn(0x400 + 723);
        arrived.guest.write(gfn, &[0x5a; 8]).unwrap();
        assert_eq!(
            guest.ram().read_obj::<u64>(GuestAddress(gfn.gpa())).unwrap(),
            0x5a5a_5a5a_5a5a_5a5a
        );
        arrived.guest.write(gfn, &[0; 8]).unwrap();
        arrived.guest.verify().unwrap();
        guest = arrived.guest;
    }
    assert_eq!(hosts.drive.most_running(), 1);
}

#[test]
fn untracked_guest_is_handed_over() {
    let hosts = HostPair::new();
    let guest = hosts.start_in_files(MemoryConfig::small());
    for op in [Op::Subscribe, Op::Collect] {
        hosts.here.fail_next(op, u32::MAX);
    }
    let there = receiver(&hosts);
    let sent = Sender::start(&guest, &there.to, &options(&hosts)).result();
    exactly_one_runs(&hosts, &guest, &sent, there, "its writes are not tracked");
    assert!(sent.is_ok());
}

/// No packet waits for a guest that does nothing, so none is sent after the guest.
#[test]
fn guest_without_packets_is_handed_over() {
    let hosts = HostPair::new();
    let guest = hosts.start_in_files(MemoryConfig::still());
    let there = receiver(&hosts);
    let proxy = Proxy::start(&there.to, ProxyPlan::default());
    Sender::start(&guest, &proxy.to, &options(&hosts)).result().unwrap();
    there.guest().guest.verify().unwrap();
    let sent = proxy.from_source.lock().unwrap().clone();
    assert!(sent.contains(&tag("COMMIT")) && !sent.contains(&tag("LATE")), "{sent:?}");
}

#[test]
fn paused_guest_stays_paused() {
    let hosts = HostPair::new();
    let guest = hosts.start_in_files(MemoryConfig::small());
    guest.pause().unwrap();
    let there = receiver(&hosts);
    Sender::start(&guest, &there.to, &options(&hosts)).result().unwrap();
    let arrived = there.guest();
    assert_eq!(arrived.guest.run_state(), RunState::Paused);
    arrived.guest.resume().unwrap();
    arrived.guest.verify().unwrap();
}

#[test]
fn failed_local_hand_over_resumes_the_source() {
    let there = [Op::Create, Op::Restore, Op::Acquire, Op::Resume];
    let here = [Op::Pause, Op::Save, Op::Release, Op::Detach];
    for (op, is_there) in there.map(|op| (op, true)).into_iter().chain(here.map(|op| (op, false))) {
        let hosts = HostPair::new();
        let guest = hosts.start_in_files(MemoryConfig::small());
        if is_there { &hosts.there } else { &hosts.here }.fail_next(op, 1);
        let there = receiver(&hosts);
        let sent = Sender::start(&guest, &there.to, &options(&hosts)).result();
        assert!(sent.is_err(), "{op:?}");
        exactly_one_runs(&hosts, &guest, &sent, there, &format!("{op:?} fails"));
    }
}

#[test]
fn guest_with_private_memory_is_refused() {
    let hosts = HostPair::new();
    let guest = hosts.start(MemoryConfig::small());
    let there = receiver(&hosts);
    let refused = Sender::start(&guest, &there.to, &options(&hosts)).result().unwrap_err();
    let said = refused.to_string();
    assert!(said.contains("it is private to its process"), "{said}");
    assert!(said.ends_with("the guest continues here"), "{said}");
    // It was refused before the receiver was asked.
    assert_eq!(there.control.progress().refused, 0);
    there.control.cancel().unwrap();
    there.error();
}

#[test]
fn options_of_copies_are_refused() {
    let hosts = HostPair::new();
    let guest = hosts.start_in_files(MemoryConfig::still());
    let refusal = |to: &str, options: SendOptions| {
        let refused = Sender::start(&guest, to, &options).result().unwrap_err();
        assert!(matches!(refused.cause, Cause::NotLocal(_)), "{refused}");
        assert_eq!(guest.run_state(), RunState::Running);
        refused.to_string()
    };
    for to in ["tcp:127.0.0.1:1", "127.0.0.1:1", "fd:3", "nowhere"] {
        let said = refusal(to, options(&hosts));
        assert!(said.contains(&format!("which {to} does not name: give the unix:PATH")), "{said}");
    }
    let tls = Some(SendTls { dir: "/none".into(), peer: None });
    let base = || options(&hosts);
    for (options, named) in [
        (SendOptions { tls, ..base() }, "--tls-dir"),
        (SendOptions { copy_drives: CopyDrives::All, ..base() }, "--copy-disks"),
        (SendOptions { connections: 2, ..base() }, "--connections"),
        (SendOptions { compression: Compression::Lz4, ..base() }, "--compress"),
        (SendOptions { verify: true, ..base() }, "--verify"),
        (SendOptions { max_bandwidth: Some(1 << 30), ..base() }, "--max-bandwidth"),
    ] {
        let said = refusal("unix:/none/a", options);
        assert!(said.contains(named), "{said}");
    }
}

/// A guest that hands out other memory than its own.
struct SharesOther(Arc<MemoryGuest>, SharedGuest);

driftline_guest::delegate!(
    SharesOther as guest => *guest.0;
    GuestIdentity, GuestContents, driftline_guest::Populate, driftline_guest::DirtyLog,
    driftline_guest::WriteThrottle, Lifecycle, driftline_guest::Stateful,
);

impl HandOver for SharesOther {
    fn stay_awake(&self) {}
    fn share(&self) -> Result<SharedGuest, GuestError> {
        Ok(self.1.clone())
    }
    fn flush(&self, limit: Duration) -> Result<bool, GuestError> {
        self.0.flush(limit)
    }
    fn release(&self, next: NextHost) -> Result<(), GuestError> {
        self.0.release(next)
    }
    fn detach(&self, next: NextHost) -> Result<Vec<u8>, GuestError> {
        self.0.detach(next)
    }
    fn attach(&self, packets: &[u8]) {
        self.0.attach(packets);
    }
    fn acquire(&self) -> Result<(), GuestError> {
        self.0.acquire()
    }
}

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

fn memory_file(bytes: u64, seals: SealFlags) -> File {
    named_memory_file("other", bytes, seals)
}

fn named_memory_file(name: &str, bytes: u64, seals: SealFlags) -> File {
    let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC;
    let file: File = rustix::fs::memfd_create(name, flags).unwrap().into();
    file.set_len(bytes).unwrap();
    rustix::fs::fcntl_add_seals(&file, seals).unwrap();
    file
}

#[test]
fn memory_that_may_vanish_is_refused() {
    let hosts = HostPair::new();
    let guest = hosts.start_in_files(MemoryConfig::small());
    let there = receiver(&hosts);
    let shared = guest.share().unwrap();
    let of = |slots: &[FileOffset]| SharedGuest::new(slots.to_vec(), shared.claim().clone());
    let second = |file: File| {
        let mut slots = shared.slots().to_vec();
        slots[1] = FileOffset::new(file, 0);
        of(&slots)
    };
    let needed = 724 * PAGE_SIZE;
    let plain = tempfile::tempfile().unwrap();
    plain.set_len(needed).unwrap();
    let read_only = {
        let file = memory_file(needed, SEALS);
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
        File::open(path).unwrap()
    };
    let no_claim = Arc::new(memory_file(2 * PAGE_SIZE, SEALS));
    let no_claim = OfferedClaim { file: no_claim, ..shared.claim().clone() };
    let no_claim = SharedGuest::new(shared.slots().to_vec(), no_claim);
    for (memory, why) in [
        (second(memory_file(needed - 1, SEALS)), "and the slot needs 2965504"),
        (second(memory_file(needed, SealFlags::SHRINK)), "slot 1 may still change its size"),
        (second(plain), "not a memory file"),
        (second(read_only), "mapping memory failed"),
        (of(&shared.slots()[..1]), "has 1 memory slots, and the guest has 2"),
        (no_claim, "the descriptor of the claim is not a sealed memory file"),
    ] {
        let other = Arc::new(SharesOther(guest.clone(), memory));
        let refused = Sender::start(&other, &there.to, &options(&hosts)).result().unwrap_err();
        let said = refused.to_string();
        assert!(said.contains(why) && said.ends_with("the guest continues here"), "{said}");
        assert_eq!(guest.run_state(), RunState::Running);
        within(LONG, "the receiver waits again", || there.waits_on());
    }
    let sent = Sender::start(&guest, &there.to, &options(&hosts)).result();
    assert!(sent.is_ok(), "{sent:?}");
    exactly_one_runs(&hosts, &guest, &sent, there, "after refusals");
}

/// A source that sends what a test wants.
struct RawSource {
    connection: ProxyConnection,
    guest: Arc<MemoryGuest>,
    sequence: u32,
    answered: u32,
}

impl RawSource {
    /// Exchanges HELLOs with a receiver.
    fn greet(to: &str, guest: &Arc<MemoryGuest>) -> Self {
        let mut connection = ProxyConnection::to(to).unwrap();
        let mut bytes = Vec::new();
        let header = Header::new(MAGIC_STREAM, guest.vm_id(), 0, layout_hash(guest.layout()));
        header.write_to(&mut bytes).unwrap();
        bytes.extend(raw::hello(raw::MOVE));
        connection.write_with(&bytes, &[]).unwrap();
        Header::read_from(&mut connection, MAGIC_STREAM).unwrap();
        let mut source = Self { connection, guest: guest.clone(), sequence: 1, answered: 0 };
        let (hello, features) = source.answer();
        assert_eq!((hello, features[8] & 128), (tag("HELLO"), 128), "MEMORY is offered");
        source
    }

    fn send(&mut self, name: &str, payload: &[u8], rest: &[u8], descriptors: &[OwnedFd]) {
        let length = (payload.len() + rest.len()) as u32;
        let record = raw::record(tag(name), self.sequence, length, payload);
        self.sequence += 1;
        // The receiver may have closed the connection already.
        let _ = self.connection.write_with(&[&record[..], rest].concat(), descriptors);
    }

    /// Sends MEMORY that announces `announced` descriptors, all slots in the first.
    fn memory(&mut self, announced: u32, descriptors: &[OwnedFd]) {
        let slots = self.guest.layout().slots().len() as u32;
        let mut payload = [slots.to_le_bytes(), announced.to_le_bytes()].concat();
        let mut offset = 0;
        for slot in self.guest.layout().slots() {
            payload.extend(u64::to_le_bytes(offset));
            payload.extend([0; 8]);
            offset += slot.run().bytes();
        }
        self.send("MEMORY", &payload, &[0], descriptors);
    }

    fn config(&mut self) {
        let config = self.guest.config();
        let layout: &Layout = self.guest.layout();
        let counts = [layout.slots().len() as u32, config.len() as u32].map(u32::to_le_bytes);
        let mut payload = [&[7; 16], counts.as_flattened()].concat();
        for slot in layout.slots() {
            payload.extend(u64::from(slot.id.0).to_le_bytes());
            payload.extend(slot.base.0.to_le_bytes());
            payload.extend(slot.frames.to_le_bytes());
        }
        payload.extend(config);
        self.send("CONFIG", &payload, &[], &[]);
    }

    fn answer(&mut self) -> (u16, Vec<u8>) {
        let head = RecordHead::read_from(&mut self.connection, self.answered).unwrap();
        self.answered += 1;
        let mut payload = vec![0; head.length as usize];
        self.connection.read_exact(&mut payload).unwrap();
        (head.tag, payload)
    }

    /// Returns the reason of a receiver that gives up, and whether READY came before.
    fn reason(&mut self) -> (String, bool) {
        let mut was_ready = false;
        loop {
            let (found, payload) = self.answer();
            match found {
                n if n == tag("READY") => was_ready = true,
                n if [tag("REFUSED"), tag("ABORT")].contains(&n) => {
                    return (String::from_utf8(payload).unwrap(), was_ready);
                }
                n => panic!("tag {n}"),
            }
        }
    }
}

/// Returns a file for all memory of `guest`.
fn whole_memory(name: &str, guest: &MemoryGuest) -> OwnedFd {
    named_memory_file(name, guest.layout().frames() * PAGE_SIZE, SEALS).into()
}

/// Returns the descriptors of MEMORY.
fn descriptors(name: &str, guest: &MemoryGuest) -> [OwnedFd; 3] {
    let alive = named_memory_file(name, 0, SealFlags::empty());
    [whole_memory(name, guest), named_memory_file(name, PAGE_SIZE, SEALS).into(), alive.into()]
}

/// Returns how many of this process's descriptors are memory files of this name.
fn open_files(name: &str) -> usize {
    let files = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let targets = files.filter_map(|file| std::fs::read_link(file.path()).ok());
    targets.filter(|to| to.to_string_lossy().contains(&format!("memfd:{name}"))).count()
}

#[test]
fn descriptors_must_be_those_announced() {
    let hosts = HostPair::new();
    let guest = hosts.start_in_files(MemoryConfig::small());
    let there = receiver(&hosts);
    for (announced, sent, why) in [
        (3, 0, "the number of descriptors is 3 by the peer's count and 0"),
        (4, 1, "the number of descriptors is 4 by the peer's count and 1"),
        (3, 4, "the number of descriptors is 3 by the peer's count and 4"),
        (16, 40, "the number of descriptors is 16 by the peer's count and 40"),
        (17, 17, "it has fewer than three descriptors, or too many"),
    ] {
        let files: Vec<OwnedFd> = (0..sent).map(|_| whole_memory("other", &guest)).collect();
        let mut source = RawSource::greet(&there.to, &guest);
        source.memory(announced, &files);
        let (reason, was_ready) = source.reason();
        assert!(reason.contains(why) && !was_ready, "{announced}, {sent}: {reason}");
    }
    let sent = Sender::start(&guest, &there.to, &options(&hosts)).result();
    assert!(sent.is_ok(), "{sent:?}");
    exactly_one_runs(&hosts, &guest, &sent, there, "after refusals");
}

#[test]
fn files_must_be_those_announced() {
    let hosts = HostPair::new();
    let guest = hosts.start_in_files(MemoryConfig::small());
    let there = receiver(&hosts);
    let named = |count: u32, name: &str| {
        let mut file = (name.len() as u32).to_le_bytes().to_vec();
        file.extend_from_slice(name.as_bytes());
        file.resize(84, 0);
        [&count.to_le_bytes()[..], &[0; 4], &file.repeat(count as usize)].concat()
    };
    for (payload, sent, has_memory, why) in [
        (named(1, "disk/d"), 1, false, "FILES came where CONFIG was expected"),
        (named(2, "disk/d"), 1, true, "the number of descriptors is 2 by the peer's count and 1"),
        (named(1, "disk/d"), 3, true, "the number of descriptors is 1 by the peer's count and 3"),
        (named(1, "\u{7}"), 1, true, "empty, too long or not printable"),
        (named(0, ""), 1, true, "it has no files, or too many"),
        (named(254, "disk/d"), 1, true, "more than the 21261 allowed"),
    ] {
        let files: Vec<OwnedFd> = (0..sent).map(|_| whole_memory("file", &guest)).collect();
        let mut source = RawSource::greet(&there.to, &guest);
        if has_memory {
            source.memory(3, &descriptors("file", &guest));
        }
        source.send("FILES", &payload, &[0], &files);
        let (reason, was_ready) = source.reason();
        assert!(reason.contains(why) && !was_ready, "{why}: {reason}");
    }
    let mut twice = RawSource::greet(&there.to, &guest);
    twice.memory(3, &descriptors("file", &guest));
    for _ in 0..2 {
        let files = [whole_memory("file", &guest)];
        twice.send("FILES", &named(1, "disk/d"), &[0], &files);
    }
    assert!(twice.reason().0.contains("FILES came where CONFIG was expected"));
    drop(twice);
    within(LONG, "all are closed", || open_files("file") == 0);
    let sent = Sender::start(&guest, &there.to, &options(&hosts)).result();
    assert!(sent.is_ok(), "{sent:?}");
    exactly_one_runs(&hosts, &guest, &sent, there, "after refusals");
}

#[test]
fn shared_memory_takes_no_frames() {
    let hosts = HostPair::new();
    let guest = hosts.start_in_files(MemoryConfig::small());
    let there = receiver(&hosts);
    let run = [1u64.to_le_bytes(), 0u64.to_le_bytes(), 1u64.to_le_bytes()].concat();
    for (name, payload, why) in [
        ("PASS_BEGIN", [0u64.to_le_bytes(), 1u64.to_le_bytes()].concat(), "1 frames in a pass"),
        ("EXPECT", run, "1 expected frames"),
        ("CONNECTIONS", 1u64.to_le_bytes().to_vec(), "CONNECTIONS came where"),
    ] {
        let mut source = RawSource::greet(&there.to, &guest);
        source.memory(3, &descriptors("other", &guest));
        source.config();
        source.send(name, &payload, &[], &[]);
        let (reason, was_ready) = source.reason();
        assert!(reason.contains(why) && was_ready, "{name}: {reason}");
        drop(source);
        within(LONG, "the receiver waits", || there.waits_on());
    }
    let mut twice = RawSource::greet(&there.to, &guest);
    twice.memory(3, &descriptors("other", &guest));
    twice.memory(3, &descriptors("other", &guest));
    let (reason, _) = twice.reason();
    assert!(reason.contains("MEMORY came where CONFIG was expected"), "{reason}");
    drop(twice);
    let sent = Sender::start(&guest, &there.to, &options(&hosts)).result();
    assert!(sent.is_ok(), "{sent:?}");
    exactly_one_runs(&hosts, &guest, &sent, there, "after refusals");
}

#[test]
fn descriptors_of_refused_sources_are_closed() {
    let hosts = HostPair::new();
    let guest = hosts.start_in_files(MemoryConfig::small());
    let there = receiver(&hosts);
    // Leaves after MEMORY, and sends descriptors with a message that has none.
    let mut source = RawSource::greet(&there.to, &guest);
    source.memory(3, &descriptors("refused", &guest));
    drop(source);
    let mut source = RawSource::greet(&there.to, &guest);
    source.send("ENDED", &[7; 16], &[], &descriptors("refused", &guest));
    source.reason();
    drop(source);
    within(LONG, "both are refused", || there.control.progress().refused == 2);
    within(LONG, "all are closed", || open_files("refused") == 0);
    there.control.cancel().unwrap();
    there.error();
}
