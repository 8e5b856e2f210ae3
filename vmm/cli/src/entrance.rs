//! Owns the socket at which a receiver waits.

use driftline_machine::socket::ListeningSocket;
use driftline_migrate::{Address, Listener};

use super::failure::Failure;

/// The socket at which a receiver waits, and the file of a unix socket.
pub(super) struct Entrance {
    pub(super) listener: Listener,
    /// Removes the file when the receiver ends.
    pub(super) _socket: Option<ListeningSocket>,
}

impl Entrance {
    /// Takes over a descriptor, if `address` is one. Called before the process enters its sandbox,
    /// in which no thread takes descriptors.
    pub(super) fn inherited(address: &Address) -> Result<Option<Self>, Failure> {
        let Address::Descriptor(number) = address else { return Ok(None) };
        let listener = Listener::inherited(*number)
            .map_err(|e| Failure::error(format_args!("cannot wait on {address}: {e}")))?;
        Ok(Some(Self { listener, _socket: None }))
    }

    /// Listens on `address`.
    pub(super) fn open(address: &Address) -> Result<Self, Failure> {
        match address {
            Address::Tcp(host_and_port) => {
                let listener = Listener::bind(host_and_port)
                    .map_err(|e| Failure::error(format_args!("cannot listen on {address}: {e}")))?;
                Ok(Self { listener, _socket: None })
            }
            Address::Unix(path) => {
                let socket = ListeningSocket::bind(path)?;
                let listener = Listener::unix(socket.listener()?, path);
                Ok(Self { listener, _socket: Some(socket) })
            }
            Address::Descriptor(_) => {
                Err(Failure::error(format_args!("{address} was not taken over at the start")))
            }
        }
    }
}
