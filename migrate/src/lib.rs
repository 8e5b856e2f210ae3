//! Guest state, streamed: live migration of a [`driftline_checkpoint::Guest`] over TCP, with a hand-over that
//! cannot run two guests.
//!
//! [`send`] moves a guest to the host where [`receive`] waits: passes over memory while the guest
//! runs, a pause for what is left, and a hand-over in which at every moment at most one side may
//! let the guest run (I7), whatever fails and whenever. PROTOCOL.md has the messages byte by byte,
//! both state machines, and what each failure leads to.
//!
//! ```text
//! source        send, a phase a line; passes; the held guest; its end of the hand-over
//! destination   receive; the door (who calls); inbound (what may come when); its end
//! handover      both ends' decisions as pure state machines, checked against each other
//! convergence   when to stop copying: a pure function of the passes measured
//! throttle      how fast vCPUs may write meanwhile: another one
//! records       what must survive a crash: the hand-over record, the decision
//! message, wire, link   payloads; records with checksums; TCP with limits
//! ```
//!
//! ```
//! use std::net::TcpListener;
//! use std::sync::Arc;
//! use driftline_checkpoint::testing::{MemoryConfig, MemoryGuest, MemoryGuestFactory};
//! use driftline_checkpoint::{Guest, RunState};
//! use driftline_migrate::{ReceiveControl, ReceiveOptions, SendControl, SendOptions, receive, send};
//!
//! let records = tempfile::tempdir()?;
//! let guest = MemoryGuest::start(MemoryConfig::small())?;
//! let listener = TcpListener::bind("127.0.0.1:0")?;
//! let to = listener.local_addr()?.to_string();
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

mod compression;
mod control;
pub mod convergence;
mod destination;
mod digest;
mod error;
pub mod forecast;
mod handover;
mod heap;
mod link;
mod log_limit;
mod message;
mod records;
mod report;
mod source;
pub mod throttle;
mod wire;

pub use compression::{Compression, UnknownCompression};
pub use control::{ControlError, Phase, Progress, ReceiveControl, Resolution, SendControl};
pub use convergence::{TimeoutStrategy, UnknownStrategy};
pub use destination::{
    ReceiveOptions, Received, Responder, StreamSummary, YIELD_LIMIT, inspect, receive,
};
pub use error::{
    Cause, GuestPlace, LayoutDifference, MemoryDigests, ReceiveError, SendError, WireError,
};
pub use message::{MAX_CONNECTIONS, Tag, Token, Verdict};
pub use records::{Pending, Records, RecordsError, SourceRecord};
pub use report::{PassReport, ReceiveReport, SendReport, SendStatus, VcpuThrottle};
pub use source::{CopyDrives, MIN_BANDWIDTH, SendOptions, send};
