//! The API: HTTP/1.1 with JSON over a unix socket that only its owner may connect to.
//!
//! Paths and JSON are Firecracker's where it has the same thing (`/`, `/version`,
//! `/machine-config`, `/vm`, `/vm/config`, `/actions`, `/balloon`, `/drives/{id}`,
//! `/network-interfaces/{id}`, `/vsock`). Those below `/v1`, and `GET /metrics`, are Driftline's
//! own. The server answers a request with 200 and JSON, with 204, or with a refusal that has a
//! `fault_message`. A process that is configured over the API (`driftline serve`) answers
//! Firecracker's paths as Firecracker does, in Firecracker's form of HTTP.

mod app;
mod balloon;
mod client;
mod configuring;
mod connections;
mod devices;
mod dirty_watch;
mod event;
mod fault;
mod handler;
mod http;
mod metrics;
pub mod plan;
mod process_line;
mod relay;
mod request_class;
mod routes;
mod server;
mod termination;
mod transport;
mod upgrade;

pub use app::{App, Arriving};
pub use client::{Client, ClientError};
pub use event::{ApiEvent, Caller};
pub use process_line::{NoProcessLine, ProcessLine};
pub use relay::Relay;
pub use server::{ControlThread, Listeners, Server};
pub use termination::Termination;
pub use upgrade::{GuestOffer, OfferError, OfferedFiles, TakenOffer, notify_socket, receive_run};
