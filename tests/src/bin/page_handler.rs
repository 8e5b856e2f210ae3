//! A page handler, as users of Firecracker write them: serves the memory of one guest from a
//! snapshot's memory file.
//!
//! `page_handler SOCKET MEMORY [--close] [--copy-all] [--exit-after N] [--hang-after N]`
//!
//! It listens on SOCKET, receives a userfaultfd and the guest's mappings, and answers faults with
//! the pages of MEMORY. Pages that were discarded are zero from then on. With `--close` it closes
//! the connection and receives nothing. With `--copy-all` it copies all pages and ends. With
//! `--exit-after` or `--hang-after` it answers N faults, and ends, or does nothing more, at the
//! next one. It prints what it has done.
#![allow(clippy::expect_used, clippy::panic, reason = "a test's program fails by saying why")]

use std::collections::VecDeque;
use std::ffi::c_void;
use std::fs::File;
use std::io::{self, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::ioctl::{Updater, ioctl, opcode};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde_json::Value;

/// `struct uffdio_copy`.
#[repr(C)]
struct UffdCopy {
    to: u64,
    from: u64,
    len: u64,
    mode: u64,
    copied: i64,
}

/// `struct uffdio_zeropage`.
#[repr(C)]
struct UffdZero {
    start: u64,
    len: u64,
    mode: u64,
    zeroed: i64,
}

/// `struct uffdio_range`.
#[repr(C)]
struct UffdRange {
    start: u64,
    len: u64,
}

const WAKE: u32 = opcode::read::<UffdRange>(0xaa, 0x02);
const COPY: u32 = opcode::read_write::<UffdCopy>(0xaa, 0x03);
const ZERO: u32 = opcode::read_write::<UffdZero>(0xaa, 0x04);

/// `struct uffd_msg`: its length, its events, and where their arguments are.
const MESSAGE: usize = 32;
const PAGE_FAULT: u8 = 0x12;
const REMOVE: u8 = 0x15;
const FAULT_ADDRESS: usize = 16;
const REMOVE_START: usize = 8;
const REMOVE_END: usize = 16;

/// Interval between two attempts to answer a deferred fault.
const RETRY_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };

/// What the program is asked to do.
#[derive(Debug)]
struct HandlerArguments {
    socket: PathBuf,
    memory: PathBuf,
    closes: bool,
    copies_all: bool,
    exit_after: Option<u64>,
    hang_after: Option<u64>,
}

impl HandlerArguments {
    fn parse() -> Option<Self> {
        let mut given = std::env::args().skip(1);
        let (socket, memory) = (given.next()?.into(), given.next()?.into());
        let mut parsed = Self {
            socket,
            memory,
            closes: false,
            copies_all: false,
            exit_after: None,
            hang_after: None,
        };
        while let Some(name) = given.next() {
            match name.as_str() {
                "--close" => parsed.closes = true,
                "--copy-all" => parsed.copies_all = true,
                "--exit-after" => parsed.exit_after = Some(given.next()?.parse().ok()?),
                "--hang-after" => parsed.hang_after = Some(given.next()?.parse().ok()?),
                _ => return None,
            }
        }
        Some(parsed)
    }
}

/// One mapping of the guest's memory.
#[derive(Debug)]
struct ServedMapping {
    start: u64,
    size: u64,
    /// Where it begins in the memory file.
    offset: u64,
    page_size: u64,
    /// Which of its pages were discarded.
    discarded: Vec<bool>,
}

/// A guest's memory, and what was done with it.
struct ServedMemory {
    arguments: HandlerArguments,
    memory: File,
    userfault: OwnedFd,
    mappings: Vec<ServedMapping>,
    /// Faults that are not answered yet.
    faults: VecDeque<u64>,
    copied: u64,
    zeroed: u64,
    discarded: u64,
    /// The line that was printed last.
    reported: String,
}

fn main() {
    let arguments = HandlerArguments::parse().expect("SOCKET MEMORY and options");
    let listener = UnixListener::bind(&arguments.socket).expect("a socket");
    println!("listens");
    let (connection, _) = listener.accept().expect("a connection");
    if arguments.closes {
        return;
    }
    let (userfault, mappings) = receive(&connection);
    let memory = File::open(&arguments.memory).expect("a memory file");
    let mut served = ServedMemory {
        arguments,
        memory,
        userfault,
        mappings,
        faults: VecDeque::new(),
        copied: 0,
        zeroed: 0,
        discarded: 0,
        reported: String::new(),
    };
    match served.arguments.copies_all {
        true => served.copy_all(),
        false => served.serve(),
    }
    drop(connection);
}

/// Receives the one message of a connection.
fn receive(connection: &UnixStream) -> (OwnedFd, Vec<ServedMapping>) {
    // As long as the buffers of handlers that are in use.
    let mut text = [0; 1024];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut text)];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let got = recvmsg(connection, &mut parts, &mut ancillary, flags).expect("a message");
    let mut descriptors = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    let [userfault] = <[OwnedFd; 1]>::try_from(descriptors).expect("one descriptor");
    let given: Vec<Value> = serde_json::from_slice(&text[..got.bytes]).expect("JSON");
    let mappings = given.iter().map(|given| {
        let number = |name: &str| given[name].as_u64().expect("a number");
        let (size, page_size) = (number("size"), number("page_size"));
        assert_eq!(number("page_size_kib"), page_size, "both are bytes");
        ServedMapping {
            start: number("base_host_virt_addr"),
            size,
            offset: number("offset"),
            page_size,
            discarded: vec![false; (size / page_size) as usize],
        }
    });
    (userfault, mappings.collect())
}

impl ServedMemory {
    fn serve(&mut self) {
        loop {
            self.await_events();
            for _ in 0..self.faults.len() {
                let Some(address) = self.faults.pop_front() else { break };
                let answered = self.copied + self.zeroed;
                if self.arguments.exit_after.is_some_and(|after| answered >= after) {
                    self.report();
                    return;
                }
                while self.arguments.hang_after.is_some_and(|after| answered >= after) {
                    self.report();
                    std::thread::sleep(Duration::from_secs(3600));
                }
                self.answer(address);
            }
            self.report();
        }
    }

    /// Answers a fault at each page, whether or not there was one.
    fn copy_all(&mut self) {
        let pages = self.mappings.iter().flat_map(|mapping| {
            let end = mapping.start + mapping.size;
            (mapping.start..end).step_by(mapping.page_size as usize)
        });
        for address in pages.collect::<Vec<_>>() {
            self.answer(address);
        }
        while !self.faults.is_empty() {
            self.await_events();
            for address in std::mem::take(&mut self.faults) {
                self.answer(address);
            }
        }
        self.report();
    }

    /// Reads all events once there are any. The kernel sends no event when a deferred fault can be
    /// answered, so while there is one the wait ends after [`RETRY_INTERVAL`].
    fn await_events(&mut self) {
        let mut wait = [PollFd::new(&self.userfault, PollFlags::IN)];
        let limit = (!self.faults.is_empty()).then_some(RETRY_INTERVAL);
        poll(&mut wait, limit.as_ref()).expect("events");
        self.read();
    }

    /// Reads all events that there are. A discard precedes the faults of the same read: its pages
    /// are zero by now.
    fn read(&mut self) {
        let mut messages = [0u8; 32 * MESSAGE];
        loop {
            let read = match rustix::io::read(&self.userfault, &mut messages[..]) {
                Ok(read) => read,
                Err(Errno::AGAIN) => return,
                Err(e) => panic!("events cannot be read: {e}"),
            };
            for message in messages[..read].chunks_exact(MESSAGE) {
                let argument =
                    |at: usize| u64::from_ne_bytes(std::array::from_fn(|i| message[at + i]));
                match message[0] {
                    PAGE_FAULT => self.faults.push_back(argument(FAULT_ADDRESS)),
                    REMOVE => self.remove(argument(REMOVE_START), argument(REMOVE_END)),
                    other => panic!("event {other:#x}"),
                }
            }
        }
    }

    fn remove(&mut self, start: u64, end: u64) {
        let mapping = mapping_of(&mut self.mappings, start);
        let pages = (start - mapping.start) / mapping.page_size
            ..(end - mapping.start).div_ceil(mapping.page_size);
        self.discarded += pages.end - pages.start;
        mapping.discarded[pages.start as usize..pages.end as usize].fill(true);
    }

    /// Answers the fault at `address`, or keeps it for later.
    fn answer(&mut self, address: u64) {
        let mapping = mapping_of(&mut self.mappings, address);
        let len = mapping.page_size;
        let start = address & !(len - 1);
        let page = (start - mapping.start) / len;
        let is_discarded = mapping.discarded[page as usize];
        let result = if is_discarded {
            let mut zero = UffdZero { start, len, mode: 0, zeroed: 0 };
            call::<ZERO, _>(&self.userfault, &mut zero)
        } else {
            let mut content = vec![0u8; len as usize];
            let read = self.memory.read_exact_at(&mut content, mapping.offset + page * len);
            read.expect("a page of the memory file");
            let from = content.as_ptr().cast::<c_void>() as u64;
            let mut copy = UffdCopy { to: start, from, len, mode: 0, copied: 0 };
            call::<COPY, _>(&self.userfault, &mut copy)
        };
        match result {
            Ok(()) if is_discarded => self.zeroed += 1,
            Ok(()) => self.copied += 1,
            // A discard is in progress: its event has not been read, or the thread that discards
            // has not run again since it was.
            Err(Errno::AGAIN) => self.faults.push_back(address),
            // It is there: another fault was for the same page.
            Err(Errno::EXIST) => {
                let mut range = UffdRange { start, len };
                let woken = call::<WAKE, _>(&self.userfault, &mut range);
                woken.expect("a wake");
            }
            // The guest does not need its handler any more, or is gone.
            Err(Errno::NOENT | Errno::SRCH) => {}
            Err(e) => panic!("the fault at {address:#x} cannot be answered: {e}"),
        }
    }

    /// Prints the counts if they have changed.
    fn report(&mut self) {
        let Self { copied, zeroed, discarded, .. } = self;
        let line = format!("counts {copied} {zeroed} {discarded}");
        if line != self.reported {
            writeln!(io::stdout(), "{line}").expect("it can be written");
            self.reported = line;
        }
    }
}

/// Makes a request whose argument is `argument`: the structure from which `REQUEST` is made.
fn call<const REQUEST: u32, T>(userfault: &OwnedFd, argument: &mut T) -> rustix::io::Result<()> {
    // SAFETY: the kernel reads and writes a structure of this type for this request.
    let updater = unsafe { Updater::<REQUEST, T>::new(argument) };
    // SAFETY: the kernel reads pages that the caller keeps, and changes only the guest's memory.
    unsafe { ioctl(userfault, updater) }
}

fn mapping_of(mappings: &mut [ServedMapping], address: u64) -> &mut ServedMapping {
    let found = mappings
        .iter_mut()
        .find(|mapping| address.checked_sub(mapping.start).is_some_and(|from| from < mapping.size));
    found.expect("an address in the guest's memory")
}
