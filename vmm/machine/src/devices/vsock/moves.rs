//! The device of a guest that changes its process on this host: sends its connections, and
//! continues those that it has received.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use super::connection::Connection;
use super::hand_over::{ArrivedStreams, Departure, MovedRefusal, MovedStreams};
use super::host::VsockListener;
use super::packet::PacketHeader;
use super::{Vsock, VsockError};
use crate::config::HandedOverVsock;
use crate::devices::virtio::Watcher;
use crate::exit::SocketFile;

impl Vsock {
    /// Sends the connections to the next process. They stay here, in case the guest does.
    pub(super) fn depart(&mut self, departure: Departure) -> Result<(), VsockError> {
        self.left_file = self.listener.as_ref().and_then(VsockListener::leave_file);
        let (mut moved, streams) = match &self.arrived {
            // The guest has not run here.
            Some(ArrivedStreams { moved, streams }) => (moved.clone(), streams.clone()),
            None => self.moved(),
        };
        moved.file = self.left_file.as_ref().map(|file| file.identity);
        let sent = self.opener.run(move || departure.send(&moved, &streams));
        sent.flatten().map_err(VsockError::HandOver)
    }

    fn moved(&self) -> (MovedStreams, Vec<Arc<UnixStream>>) {
        let (connections, mut streams): (Vec<_>, Vec<_>) =
            self.connections.values().map(Connection::moved).unzip();
        streams.extend(self.new_programs.iter().map(|(_, stream)| stream.clone()));
        let moved = MovedStreams {
            file: None,
            socket_stays: self.socket_stays,
            connections,
            new_programs: self.new_programs.len(),
            refusals: self.refusals.iter().map(MovedRefusal::from).collect(),
        };
        (moved, streams)
    }

    /// Receives the socket and the connections of the process that had the guest before. If that
    /// fails, the guest stays there.
    pub(super) fn arrive(&mut self, files: HandedOverVsock) -> Result<(), VsockError> {
        let (opener, uds, most) =
            (self.opener.clone(), self.config.uds.clone(), self.max_connections);
        let arrive = move || {
            let arrived = ArrivedStreams::receive(&files, most)?;
            // Another file may be there by now, and the other process chooses no path.
            let file =
                SocketFile::at(&uds)?.filter(|file| arrived.moved.file == Some(file.identity));
            Ok((files.listener().try_clone()?, arrived, file))
        };
        let arrived: io::Result<_> = self.opener.run(arrive).flatten();
        let (listener, arrived, file) = arrived.map_err(VsockError::HandOver)?;
        let listener = VsockListener::of_other_process(listener, &opener)?;
        listener.own_file(file);
        self.socket_stays = arrived.moved.socket_stays;
        self.listener = Some(listener);
        (self.listener_watched, self.accept_retry) = (false, None);
        self.arrived = Some(arrived);
        Ok(())
    }

    /// Continues connections of another process, because the guest runs here now.
    pub(super) fn continue_streams(&mut self, arrived: ArrivedStreams, watcher: &Watcher) {
        let ArrivedStreams { moved, streams } = arrived;
        self.refusals.extend(moved.refusals.iter().map(PacketHeader::from));
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
                self.new_programs.push_back((token, stream));
            }
        }
    }
}
