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
//! The streams stay open here until this process ends. If the guest stays, so do its connections,
//! even if the next process cannot continue them.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use driftline_format::descriptors::{receive, send};
use rustix::fs::{MemfdFlags, fcntl_get_seals};
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType};
use serde::{Deserialize, Serialize};

use super::bounds::{MAX_CONNECTIONS, MAX_NEW_PROGRAMS, MAX_REFUSALS};
use super::connection::{MovedConnection, ROOM};
use super::op;
use super::packet::PacketHeader;
use crate::codec;
use crate::config::HandedOverVsock;

/// Streams that travel with one byte: at most `SCM_MAX_FD`.
const STREAMS_AT_ONCE: usize = 250;
/// Bytes of control data for them.
const SPACE: usize = rustix::cmsg_space!(ScmRights(STREAMS_AT_ONCE));
/// Upper bound on a device's refusals: the limit, and one for each connection that was open when it
/// was reached.
const MAX_MOVED_REFUSALS: usize = MAX_REFUSALS + MAX_CONNECTIONS;
/// Upper bound on a connection's encoding without its buffer: fewer than 20 numbers of at most five
/// bytes, and flags.
const CONNECTION_BYTES: u64 = 256;
/// Upper bound on the encoding of everything but connections: refusals of at most 33 bytes, and a
/// few numbers.
const OTHER_BYTES: u64 = 64 << 10;
/// Upper bound on the state: each connection may have a full buffer.
const MAX_STATE_BYTES: u64 =
    MAX_CONNECTIONS as u64 * (ROOM as u64 + CONNECTION_BYTES) + OTHER_BYTES;

/// State of a device's connections. Its bytes are hostile.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct MovedStreams {
    /// Device and inode of the listening socket's file, if the process that has the guest removes
    /// it.
    pub(super) file: Option<(u64, u64)>,
    /// Whether a socket that is bound later keeps its file.
    pub(super) socket_stays: bool,
    /// In the order of their streams.
    #[serde(deserialize_with = "codec::at_most::<MAX_CONNECTIONS, _, _>")]
    pub(super) connections: Vec<MovedConnection>,
    /// Number of programs that have not sent their greeting. Their streams come last.
    pub(super) new_programs: usize,
    #[serde(deserialize_with = "codec::at_most::<MAX_MOVED_REFUSALS, _, _>")]
    pub(super) refusals: Vec<MovedRefusal>,
}

/// The header fields that differ between refusals. A refusal is a packet that tells the guest that
/// there is no such connection.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct MovedRefusal {
    cids: (u64, u64),
    ports: (u32, u32),
    kind: u16,
}

impl From<&PacketHeader> for MovedRefusal {
    fn from(packet: &PacketHeader) -> Self {
        Self {
            cids: (packet.src_cid.get(), packet.dst_cid.get()),
            ports: (packet.src_port.get(), packet.dst_port.get()),
            kind: packet.kind.get(),
        }
    }
}

impl From<&MovedRefusal> for PacketHeader {
    fn from(refusal: &MovedRefusal) -> Self {
        Self {
            src_cid: refusal.cids.0.into(),
            dst_cid: refusal.cids.1.into(),
            src_port: refusal.ports.0.into(),
            dst_port: refusal.ports.1.into(),
            kind: refusal.kind.into(),
            op: op::RST.into(),
            ..Self::default()
        }
    }
}

/// How connections leave for the next process.
#[derive(Debug)]
pub(super) struct Departure {
    channel: UnixStream,
    state: File,
}

impl Departure {
    /// Creates the files of both processes. Returns those of this one, and those of the next. A
    /// device's thread cannot call this, because it creates sockets.
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
        let state = codec::encode_versioned(moved).map_err(io::Error::other)?;
        self.state.write_all_at(&state, 0)?;
        for some in streams.chunks(STREAMS_AT_ONCE) {
            let some: Vec<BorrowedFd<'_>> = some.iter().map(|stream| stream.as_fd()).collect();
            send(&self.channel, &some, &mut [MaybeUninit::uninit(); SPACE])?;
        }
        Ok(())
    }
}

/// Connections that have come from another process, and their streams: those of connections first,
/// then those of programs without a greeting.
pub(super) struct ArrivedStreams {
    pub(super) moved: MovedStreams,
    pub(super) streams: Vec<Arc<UnixStream>>,
}

impl ArrivedStreams {
    /// Receives what [`Departure::send`] has sent, for a device of at most `most` connections. The
    /// files are hostile.
    pub(super) fn receive(files: &HandedOverVsock, most: usize) -> io::Result<Self> {
        let invalid = |why| io::Error::new(io::ErrorKind::InvalidData, why);
        // Only a memory file has seals, and only its reads cannot block.
        fcntl_get_seals(files.state())?;
        let bytes = files.state().metadata()?.len();
        if bytes > MAX_STATE_BYTES {
            return Err(invalid(format!("the state has {bytes} bytes, over {MAX_STATE_BYTES}")));
        }
        let mut state = vec![0; bytes as usize];
        files.state().read_exact_at(&mut state, 0)?;
        let moved: MovedStreams =
            codec::decode_versioned("the state of a vsock's connections", &state)
                .map_err(io::Error::other)?;
        let found = moved.connections.len();
        if found > most || moved.new_programs > MAX_NEW_PROGRAMS {
            let why =
                format!("it has {found} connections, and this process can have {most} (ulimit -n)");
            return Err(invalid(why));
        }
        let expected = moved.connections.len() + moved.new_programs;
        files.channel().set_nonblocking(true)?;
        let mut streams = Vec::with_capacity(expected);
        while streams.len() < expected {
            let received = receive(files.channel(), &mut [MaybeUninit::uninit(); SPACE])?;
            let received = received.filter(|some| {
                let left = expected - streams.len();
                (1..=left).contains(&some.all.len()) && !some.truncated
            });
            let Some(received) = received else {
                let found = streams.len();
                let why =
                    format!("{found} of {expected} streams have come, and then none or too many");
                return Err(invalid(why));
            };
            for stream in received.all {
                streams.push(Arc::new(checked_stream(stream)?));
            }
        }
        Ok(Self { moved, streams })
    }
}

/// Returns a stream that does not block, or refuses what is not one.
fn checked_stream(stream: OwnedFd) -> io::Result<UnixStream> {
    if (socket_domain(&stream)?, socket_type(&stream)?) != (AddressFamily::UNIX, SocketType::STREAM)
    {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is not a unix stream socket"));
    }
    let stream = UnixStream::from(stream);
    stream.set_nonblocking(true)?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn largest_state_is_within_its_bound() {
        let cids = (u64::MAX, u64::MAX);
        let refusal = MovedRefusal { cids, ports: (u32::MAX, u32::MAX), kind: u16::MAX };
        let length = |moved: &MovedStreams| codec::encode_versioned(moved).unwrap().len() as u64;
        let mut moved = MovedStreams {
            file: Some((u64::MAX, u64::MAX)),
            socket_stays: true,
            connections: Vec::new(),
            new_programs: usize::MAX,
            refusals: vec![refusal; MAX_MOVED_REFUSALS],
        };
        assert!(length(&moved) <= OTHER_BYTES);
        moved.connections = vec![MovedConnection::largest(); MAX_CONNECTIONS];
        assert!(length(&moved) <= MAX_STATE_BYTES);
    }
}
