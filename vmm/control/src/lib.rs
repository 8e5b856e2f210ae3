//! What an operator asks of a guest: the jobs on it (checkpoints, migrations, looks at its writes),
//! and the API, HTTP over a unix socket, with its client.
//!
//! `model` (the JSON) <- `jobs` <- `api`.

pub mod api;
pub mod jobs;
pub mod model;
