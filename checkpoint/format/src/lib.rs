//! What the wire and the store have in common: the fixed header, the record, the limits of a
//! guest's state, durable names, locks on ranges of files and writes to them, descriptors that
//! travel over unix sockets, and TLS records that the kernel encrypts.
//!
//! `FORMAT.md` and `PROTOCOL.md` specify every byte of the formats built on them.
#![deny(unsafe_code)]

pub mod descriptors;
pub mod durable;
mod error;
mod header;
pub mod kernel_tls;
mod layout_hash;
mod limits;
pub mod range_lock;
pub mod range_write;
mod record;
mod zero;

pub use error::FormatError;
pub use header::{
    Header, MAGIC_ARCHIVE, MAGIC_LOG, MAGIC_PAGES, MAGIC_SNAPSHOT, MAGIC_STORE, MAGIC_STREAM,
    MAGIC_WORKING_SET, SNAPSHOT_VERSION, STREAM_VERSION,
};
pub use layout_hash::layout_hash;
pub use limits::{
    HEADER_LEN, MAX_CONFIG, MAX_SECTION, MAX_SECTIONS, MAX_SLOTS, MAX_STATE, RECORD_HEAD_LEN,
};
pub use record::{MUST_UNDERSTAND, RecordHead};
pub use zero::is_zero;
