//! The migration protocol without I/O: messages and their bytes, their order, the digest of memory,
//! and the hand-over as two state machines.

pub(crate) mod codec;
pub(crate) mod decision;
pub(crate) mod description;
pub(crate) mod digest;
pub(crate) mod error;
pub(crate) mod features;
pub(crate) mod ids;
pub(crate) mod layout;
pub(crate) mod limits;
pub(crate) mod message;
pub(crate) mod stream_state;
pub(crate) mod tag;
pub(crate) mod two_phase;
