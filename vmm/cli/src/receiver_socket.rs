//! Owns the socket at which a receiver waits.

use std::fmt;

use driftline_machine::inherited;
use driftline_machine::socket::ListeningSocket;
use driftline_migrate::{Address, Listener};

use super::failure::Failure;

/// The socket at which a receiver waits, and the file of a unix socket.
pub(super) struct ReceiverSocket {
    pub(super) listener: Listener,
    /// Removes the file when the receiver ends.
    pub(super) _socket: Option<ListeningSocket>,
}

impl ReceiverSocket {
    /// Takes a descriptor that the process was started with, if `address` is one. Called before
    /// the process opens files that can get its number.
    pub(super) fn inherited(address: &Address) -> Result<Option<Self>, Failure> {
        let Address::Descriptor(number) = address else { return Ok(None) };
        let refused =
            |e: &dyn fmt::Display| Failure::error(format_args!("cannot wait on {address}: {e}"));
        let fd = inherited::take(*number).map_err(|e| refused(&e))?;
        let listener = Listener::inherited(fd).map_err(|e| refused(&e))?;
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
                Err(Failure::error(format_args!("{address} was not taken at the start")))
            }
        }
    }
}
