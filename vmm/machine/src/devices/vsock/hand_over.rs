//! The connections of a guest that continues in another process of its host.
//!
//! ```text
//! this process                                              the next process
//! share     the listener, a channel, a memory file -------> has them before the pause
//! release   connections' state -> memory file
//!           connections' streams -> channel
//!                                                           acquire: receives both
//!                                                           resume: continues the connections
//! ```
//!
//! The streams stay open here until this process ends. If the guest stays, its connections do, too.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use driftline_format::descriptors::{receive, send};
use rustix::fs::MemfdFlags;
use serde::{Deserialize, Serialize};

use super::bounds::{MAX_CONNECTIONS, MAX_NEW_PROGRAMS};
use super::connection::{MovedConnection, ROOM};
use crate::codec;
use crate::config::HandedOverVsock;
use crate::exit::SocketFile;

/// Streams that travel with one byte: at most `SCM_MAX_FD`.
const STREAMS_AT_ONCE: usize = 250;
/// Bytes of control data for them.
const SPACE: usize = rustix::cmsg_space!(ScmRights(STREAMS_AT_ONCE));
/// Upper bound on the state: each connection may have a full buffer.
const MAX_STATE_BYTES: u64 = MAX_CONNECTIONS as u64 * (ROOM as u64 + 256) + (64 << 10);

/// State of a device's connections.
#[derive(Serialize, Deserialize)]
pub(super) struct MovedStreams {
    /// The listening socket's file, if the process that has the guest removes it.
    pub(super) socket: Option<SocketFile>,
    /// In the order of their streams.
    pub(super) connections: Vec<MovedConnection>,
    /// Number of programs that have not sent their greeting. Their streams come last.
    pub(super) new_programs: usize,
    /// Packets for the guest that say that a connection has ended.
    pub(super) refusals: Vec<Vec<u8>>,
    pub(super) next_port: u32,
}

/// How connections leave for the next process.
#[derive(Debug)]
pub(super) struct Departure {
    channel: UnixStream,
    state: File,
}

impl Departure {
    /// Returns the files, and those of the next process. Creates sockets, which a device's thread
    /// cannot.
    pub(super) fn begin() -> io::Result<(Self, [OwnedFd; 2])> {
        let (channel, there) = UnixStream::pair()?;
        channel.set_nonblocking(true)?;
        let state = rustix::fs::memfd_create("driftline-vsock", MemfdFlags::CLOEXEC)?;
        let state = File::from(state);
        let state_there = state.try_clone()?.into();
        Ok((Self { channel, state }, [there.into(), state_there]))
    }

    /// Sends connections and their streams.
    pub(super) fn send(&self, moved: &MovedStreams, streams: &[Arc<UnixStream>]) -> io::Result<()> {
        self.state.write_all_at(&codec::encode(moved).map_err(io::Error::other)?, 0)?;
        for some in streams.chunks(STREAMS_AT_ONCE) {
            let some: Vec<BorrowedFd<'_>> = some.iter().map(|stream| stream.as_fd()).collect();
            send(&self.channel, &some, &mut [MaybeUninit::uninit(); SPACE])?;
        }
        Ok(())
    }
}

/// Connections that have come from another process, and their streams: first those of connections.
pub(super) struct ArrivedStreams {
    pub(super) moved: MovedStreams,
    pub(super) streams: Vec<UnixStream>,
}

impl ArrivedStreams {
    /// Receives what [`Departure::send`] has sent. The files are hostile.
    pub(super) fn receive(files: &HandedOverVsock) -> io::Result<Self> {
        let invalid = |why| io::Error::new(io::ErrorKind::InvalidData, why);
        let bytes = files.state().metadata()?.len();
        if bytes > MAX_STATE_BYTES {
            return Err(invalid(format!("the state has {bytes} bytes, over {MAX_STATE_BYTES}")));
        }
        let mut state = vec![0; bytes as usize];
        files.state().read_exact_at(&mut state, 0)?;
        let moved: MovedStreams = codec::decode(&state).map_err(io::Error::other)?;
        if moved.connections.len() > MAX_CONNECTIONS || moved.new_programs > MAX_NEW_PROGRAMS {
            return Err(invalid("it has more connections than are possible".to_owned()));
        }
        let expected = moved.connections.len() + moved.new_programs;
        files.channel().set_nonblocking(true)?;
        let mut streams = Vec::with_capacity(expected);
        while streams.len() < expected {
            let received = receive(files.channel(), &mut [MaybeUninit::uninit(); SPACE])?;
            let received = received.filter(|some| !some.all.is_empty() && !some.truncated);
            let Some(received) = received else {
                let found = streams.len();
                return Err(invalid(format!("{found} streams of {expected} have come")));
            };
            streams.extend(received.all.into_iter().map(UnixStream::from));
        }
        streams.iter().try_for_each(|stream| stream.set_nonblocking(true))?;
        Ok(Self { moved, streams })
    }
}
