//! The KVM machine on this host's KVM: booting, stopping and resuming, tracking, and refused
//! requests.
// A helper that fails makes its test fail.
#![allow(clippy::unwrap_used)]

mod balloon;
mod boot;
mod conformance;
mod harness;
mod lifecycle;
mod limits;
mod linux_protocol;
mod ports;
mod processor;
mod state;
mod template;
mod throttle;
mod tracking;
mod tsc;
