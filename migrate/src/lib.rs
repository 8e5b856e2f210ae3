//! Live migration of a [`driftline_guest::Guest`] over TCP or unix sockets, with a hand-over
//! that never lets both hosts run the guest.
//!
//! [`send`] moves a guest to the host where [`receive`] waits. It copies memory in passes while the
//! guest runs, pauses the guest for the rest, and hands it over. At every moment at most one side
//! may run the guest (I7), whichever step fails. PROTOCOL.md specifies the messages byte by byte,
//! both state machines, and the result of each failure.
//!
//! ```text
//! protocol     messages and their bytes, their order, the hand-over as two pure state machines
//!              that are checked against each other; no I/O
//! transport    records with checksums over sockets with limits; compression
//! policy       pure functions of measured passes: when to stop copying, how far to throttle
//! journal      durable records: the hand-over record, the decision
//! source       send: connect, set up, pre-copy, switch over, hand over
//! destination  receive: the listener and its session, memory and state, the take-over
//!
//! Imports point one way: protocol <- transport <- policy <- source, destination. The journal and
//! the error, report and control types lie between the protocol and both ends.
//! ```
//!
//! ```
//! use std::sync::Arc;
//! use driftline_guest::testing::{MemoryConfig, MemoryGuest, MemoryGuestFactory};
//! use driftline_guest::{Lifecycle, RunState};
//! use driftline_migrate::{Listener, ReceiveControl, ReceiveOptions, receive};
//! use driftline_migrate::{SendControl, SendOptions, send};
//!
//! let records = tempfile::tempdir()?;
//! let guest = MemoryGuest::start(MemoryConfig::small())?;
//! let listener = Listener::bind("127.0.0.1:0")?;
//! let to = listener.address().to_owned();
//! let options = ReceiveOptions::new(records.path());
//! let there = std::thread::spawn(move || {
//!     receive(listener, Arc::new(MemoryGuestFactory::default()), &options, &ReceiveControl::new())
//! });
//! let report = send(&*guest, &to, &SendOptions::new(records.path()), &SendControl::new())?;
//! let received = there.join().expect("no panic")?;
//! assert_eq!(guest.run_state(), RunState::Stopped);
//! assert_eq!(received.guest.run_state(), RunState::Running);
//! received.guest.verify()?;
//! assert!(report.downtime_ms <= report.total_time_ms);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod control;
mod destination;
mod error;
mod heap;
mod journal;
mod policy;
mod protocol;
mod report;
mod source;
mod transport;

pub use control::{ControlError, Phase, Progress, ReceiveControl, SendControl};
pub use destination::{
    ReceiveOptions, Received, Responder, StreamSummary, YIELD_LIMIT, inspect, receive,
};
pub use error::{
    BuildFailure, Cause, DriveFailure, GuestPlace, LocalConflict, PrecopyLimit, ReceiveError,
    SendError, ThrottleEffect, ThrottledVcpu,
};
pub use journal::{Pending, Records, RecordsError, SourceRecord};
pub use policy::convergence::{Goals, LimitReached, TimeoutStrategy, UnknownStrategy};
pub use policy::forecast;
pub use protocol::decision::Resolution;
pub use protocol::digest::MemoryDigests;
pub use protocol::error::WireError;
pub use protocol::ids::Token;
pub use protocol::layout::LayoutDifference;
pub use protocol::limits::MAX_CONNECTIONS;
pub use protocol::tag::Tag;
pub use report::{PassReport, ReceiveReport, SendReport, SendStatus, VcpuThrottle};
pub use source::{CopyDrives, InvalidDriveNames, MIN_BANDWIDTH, Migratable, SendOptions, send};
pub use transport::address::{Address, InvalidAddress};
pub use transport::compression::{Compression, UnknownCompression};
pub use transport::listener::{DescriptorError, Listener};
pub use transport::policy::UnprotectedAddress;
pub use transport::protection::{ReceiveTls, SendTls};
pub use transport::tls::{InvalidPeerName, PeerName, TlsError, TlsFileError};
