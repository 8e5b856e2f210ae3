//! The KVM machine on this host's KVM: booting, stopping and going on, tracking, and what it refuses.

mod boot;
mod elf;
mod harness;
mod lifecycle;
mod state;
mod tracking;
