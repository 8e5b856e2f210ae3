//! The KVM machine on this host's KVM: booting, stopping and going on, tracking, and what it
//! refuses.
// A helper that fails fails its test.
#![allow(clippy::unwrap_used)]

mod balloon;
mod boot;
mod conformance;
mod harness;
mod lifecycle;
mod linux_protocol;
mod ports;
mod processor;
mod state;
mod throttle;
mod tracking;
mod tsc;
