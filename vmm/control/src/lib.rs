//! Serves an operator's requests to a guest: the jobs on the guest (checkpoints, migrations,
//! watches of its writes), and the API (HTTP over a unix socket) with its client.
//!
//! `model` (the JSON) <- `jobs` <- `metrics`, `firecracker` <- `api`.

pub mod api;
mod descriptors;
pub mod firecracker;
pub mod jobs;
mod metrics;
pub mod model;
