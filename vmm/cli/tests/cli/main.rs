//! Tests of the `driftline` binary as its users see it: commands, messages, exit codes and the API
//! of real processes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod api_bounds;
// Tests start in the order of their names. Those that only wait are in several modules, so that
// other tests run beside them.
mod api_stuck;
mod basics;
mod checkpoint;
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
mod killed_upgrade;
mod large_disk;
mod local;
mod local_users;
mod log;
mod lost;
mod messages;
mod metrics;
mod migration;
mod migration_protection;
mod migration_sockets;
mod migration_stuck;
mod net;
mod notify;
mod plan;
mod proxied_upgrade;
mod receiving;
mod receiving_stuck;
mod refusals;
mod sandbox;
mod serve;
mod serve_cpu;
mod serve_devices;
mod serve_guest;
mod serve_metadata;
mod serve_snapshot;
mod serve_snapshot_create;
mod serve_snapshot_refusals;
mod shadow;
mod stuck;
mod terminal;
mod tls_refusals;
mod top;
mod upgrade;
mod waiting;
