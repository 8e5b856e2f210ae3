//! Messages over a connection: compression of contents, framing with checksums, sockets with
//! limits.

pub(crate) mod address;
pub(crate) mod channels;
pub(crate) mod compression;
pub(crate) mod connect;
pub(crate) mod error;
pub(crate) mod link;
pub(crate) mod listener;
pub(crate) mod policy;
pub(crate) mod protection;
pub(crate) mod socket;
pub(crate) mod stop;
mod stream;
pub(crate) mod tls;
pub(crate) mod wait;
pub(crate) mod wire;
