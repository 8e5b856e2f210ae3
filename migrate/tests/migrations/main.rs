//! Migrations between two hosts in one process, whole and broken. One binary, because most of its
//! tests wait: for a limit that must pass, or for a writer.
//!
//! | module | shows |
//! | --- | --- |
//! | `loopback`, `options`, `drives`, `throttle` | what a migration does, with every option |
//! | `cuts`, `faults` | one guest runs, whatever is lost and whatever fails |
//! | `strangers` | callers that are not a source change nothing |
//! | `golden` | recorded streams are read |
//! | `tls` | peers without the right certificates change nothing |
//! | `local`, `local_claims` | memory is handed over on one host, not copied |
//! | `transports` | every kind of socket carries a migration |
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

mod common;
mod cuts;
mod drives;
mod faults;
mod golden;
mod local;
mod local_claims;
mod loopback;
mod options;
mod strangers;
mod throttle;
mod tls;
mod transports;
