//! Messages over a connection: compression of contents, framing with checksums, TCP with limits.

pub(crate) mod channels;
pub(crate) mod compression;
pub(crate) mod error;
pub(crate) mod link;
pub(crate) mod stop;
pub(crate) mod wait;
pub(crate) mod wire;
