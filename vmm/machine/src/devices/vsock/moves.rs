//! The device of a guest that changes its process on this host: sends its connections, and
//! continues those that it has received.

use std::sync::Arc;

use zerocopy::{FromBytes, IntoBytes};

use super::bounds::MAX_REFUSALS;
use super::connection::Connection;
use super::hand_over::{ArrivedStreams, Departure, MovedStreams};
use super::host::VsockListener;
use super::packet::PacketHeader;
use super::{FIRST_PORT, Vsock, VsockError};
use crate::config::HandedOverVsock;
use crate::devices::virtio::Watcher;
use crate::socket::SocketError;

impl Vsock {
    /// Sends the connections to the next process. They stay here, in case the guest does.
    pub(super) fn depart(&mut self, departure: Departure) -> Result<(), VsockError> {
        let (connections, mut streams): (Vec<_>, Vec<_>) =
            self.connections.values().map(Connection::moved).unzip();
        streams.extend(self.new_programs.iter().map(|(_, stream)| stream.clone()));
        let moved = MovedStreams {
            socket: self.listener.as_ref().and_then(VsockListener::leave_file),
            connections,
            new_programs: self.new_programs.len(),
            refusals: self.refusals.iter().map(|refusal| refusal.as_bytes().to_vec()).collect(),
            next_port: self.next_port,
        };
        self.left_file.clone_from(&moved.socket);
        let sent = self.opener.run(move || departure.send(&moved, &streams));
        sent.flatten().map_err(|cause| VsockError::system(&self.config.uds, cause))
    }

    /// Receives the socket and the connections of the process that had the guest before. Without
    /// its connections, the guest is told that they are closed.
    pub(super) fn arrive(&mut self, files: HandedOverVsock) -> Result<(), VsockError> {
        let system = |cause| VsockError::system(&self.config.uds, cause);
        let opener = self.opener.clone();
        let (listener, arrival) = self
            .opener
            .run(move || {
                let listener = files.listener().try_clone().map_err(SocketError::NotAListener)?;
                let listener = VsockListener::of_other_process(listener, &opener)?;
                Ok::<_, VsockError>((listener, ArrivedStreams::receive(&files)))
            })
            .map_err(system)??;
        self.listener = Some(listener);
        (self.listener_watched, self.accept_retry) = (false, None);
        match arrival {
            Ok(arrival) => self.arrived = Some(arrival),
            Err(e) => tracing::warn!("the vsock's connections are closed by the hand-over: {e}"),
        }
        Ok(())
    }

    /// Continues connections of another process, because the guest runs here now.
    pub(super) fn continue_streams(&mut self, arrival: ArrivedStreams, watcher: &Watcher) {
        let ArrivedStreams { moved, streams } = arrival;
        if let Some(listener) = &self.listener {
            listener.own_file(moved.socket);
        }
        self.next_port = moved.next_port.max(FIRST_PORT);
        for refusal in moved.refusals.iter().take(MAX_REFUSALS) {
            if let Ok(refusal) = PacketHeader::read_from_bytes(refusal) {
                self.refusals.push_back(PacketHeader { len: 0.into(), ..refusal });
            }
        }
        let mut streams = streams.into_iter();
        for (connection, stream) in moved.connections.into_iter().zip(&mut streams) {
            let ports = connection.ports();
            let token = self.watch(&stream, watcher).ok();
            let arrived = Connection::arrived(connection, self.config.cid, stream)
                .filter(|_| !self.tokens.contains_key(&ports));
            match token.zip(arrived) {
                Some((token, connection)) => self.insert(token, connection),
                None => self.refuse(ports),
            }
        }
        for stream in streams {
            if let Ok(token) = self.watch(&stream, watcher) {
                self.new_programs.push_back((token, Arc::new(stream)));
            }
        }
    }
}
