//! Tests of the `driftline` binary as its users see it: commands, messages, exit codes and the API
//! of real processes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod api_bounds;
mod basics;
mod checkpoint;
// Its longest test begins early: tests start in the order of their names.
mod client_timeouts;
mod common;
mod compare;
mod config_file;
mod copied;
mod damaged_store;
mod disks;
mod exit_codes;
mod firecracker;
mod firecracker_config;
mod firecracker_log;
mod firecracker_metrics;
mod firecracker_stuck;
mod hostile;
mod identity;
mod jail;
mod large_disk;
mod log;
mod lost;
mod messages;
mod metrics;
mod migration;
mod net;
mod notify;
mod plan;
mod receiving;
mod refusals;
mod sandbox;
mod serve;
mod serve_cpu;
mod serve_devices;
mod serve_guest;
mod serve_metadata;
mod serve_snapshot;
mod shadow;
mod stuck;
mod terminal;
mod top;
mod waiting;
