//! Whole guests in `driftline` processes. One binary, so that tests that wait run beside a test
//! that loads the machine. Of the latter one runs at a time.
//!
//! | module | shows |
//! | --- | --- |
//! | `migrate`, `restore`, `soak` | one guest moves, or is restored, again and again |
//! | `checkpoint`, `store` | checkpoints restore whole, whatever happens to their store |
//! | `faults` | one guest runs, whichever process dies at whichever message |
//! | `throttle`, `plan` | guests that outrun the link, and forecasts of migrations |
//! | `page_handler` | guests whose memory another process serves |
//! | `top` | what a watch shows |
//! | `openapi` | the description of the API and the server agree |
#![allow(clippy::expect_used, clippy::panic, reason = "a test fails by saying what it expected")]

mod checkpoint;
mod faults;
mod migrate;
#[path = "../openapi/mod.rs"]
mod openapi;
mod page_handler;
mod plan;
mod restore;
mod soak;
mod store;
mod throttle;
mod top;
