//! Moves the API and the metrics' address to another process while their guest changes its
//! process.
//!
//! ```text
//! job of the upgrade        this process                       the new process
//! hold                      requests wait, no connection is accepted
//! (the guest moves)                                            serves, with `Listeners::adopted`
//! move_to(channel)          answers what is under way
//!                           one byte a connection -----------> answers held requests
//!                           channel closes when none is left
//! ```
//!
//! A byte on the channel, a unix stream socket, has these descriptors (SCM_RIGHTS):
//!
//! | descriptor | is |
//! | --- | --- |
//! | first | the connection: to the API a unix stream socket, to the metrics' address a TCP socket |
//! | second, if bytes were read that are not answered | a memory file (memfd) with these bytes |
//!
//! The bytes are those of the request that has begun to arrive, and those behind it. Of a request
//! whose client was told to send the body, they lack the header `Expect`, so that the client is not
//! told again. Limits on a client's part of an exchange begin anew in the new process.
//!
//! | module | does |
//! | --- | --- |
//! | `gate` | says where requests are answered: here, nowhere for a while, or in another process |
//! | `channel` | sends and receives connections |

mod channel;
mod gate;
#[cfg(test)]
mod tests;

pub(super) use channel::{RelayReceiver, RelaySender, RelayedConnection};
pub use gate::Relay;
pub(super) use gate::RelayGate;
