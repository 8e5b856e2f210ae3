//! HTTP/1 as the API's unix socket and the metrics' address speak it.
//!
//! A codec of its own serves them because a client of Firecracker needs what a general HTTP server
//! does not do. In Firecracker's dialect, a connection of HTTP/1.0 stays open, each reply is one
//! write in Firecracker's form, errors in a request have Firecracker's texts, and a line has at
//! most 1024 bytes. The grammar is also not that of a general parser: lines end in CRLF, and a
//! request line is refused before its headers arrive. A second reason: a connection can move to
//! another process between two requests, with the bytes of the next one that have arrived.
//!
//! | module | does |
//! | --- | --- |
//! | `dialect` | the two dialects, their limits, and the reasons for refusing a request |
//! | `decode` | bytes to requests, without I/O |
//! | `reply` | replies to bytes, without I/O |
//! | `session` | reads, answers and writes on a connection; each wait for a client has a limit |
//! | `serve` | begins and ends the sessions |

mod decode;
mod dialect;
mod reply;
mod serve;
mod session;
#[cfg(test)]
mod tests;

pub(super) use serve::{ServedSocket, ServedSockets, serve};
pub(super) use session::ApiService;
