//! Checks a recorded stream as a destination does, without a guest.

use std::io::Read;
use std::sync::Arc;

use driftline_dirty_tracker::Layout;
use driftline_format::{Header, layout_hash};
use driftline_guest::{DriveHead, Section, VmId};

use crate::protocol::description::{DescriptionState, DescriptionStep};
use crate::protocol::error::{WireError, same};
use crate::protocol::ids::Token;
use crate::protocol::message::{StateDigest, WireMessage, printable};
use crate::protocol::stream_state::{DriveStep, StreamState, StreamStep};
use crate::transport::compression::Unpacker;
use crate::transport::error::TransportError;
use crate::transport::wire::Wire;

/// Summary of a source's stream that was checked from header to state.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StreamSummary {
    /// The guest.
    pub vm_id: VmId,
    /// Version of the program that sent it.
    pub program: String,
    /// The migration.
    pub token: Token,
    /// Bytes of the guest's configuration.
    pub config_bytes: u64,
    /// Frames of the guest's memory.
    pub memory_frames: u64,
    /// Number of passes.
    pub passes: u32,
    /// Frames with content.
    pub normal_frames: u64,
    /// Frames of zeros.
    pub zero_frames: u64,
    /// Number of copied disks.
    pub drives: usize,
    /// Blocks of copied disks with content.
    pub normal_blocks: u64,
    /// Blocks of copied disks that are zeros; holes are not sent.
    pub zero_blocks: u64,
    /// CRC32C of all content, in the order of the stream.
    pub content_crc: u32,
    /// Number of state sections.
    pub sections: u32,
    /// The digest that a destination puts into PREPARED.
    pub state_digest: u32,
    /// Whether the guest ran at its source.
    pub was_running: bool,
    /// Bytes of packets in LATE.
    pub late_bytes: usize,
    /// Whether COMMIT follows.
    pub committed: bool,
}

/// Reads a source's stream and checks everything that a destination checks without a guest.
/// `stream` may be hostile input. For tools, tests and the fuzzer.
///
/// Holds at most one message and the state (at most 64 MiB) in memory.
///
/// # Errors
///
/// If the stream violates the protocol up to the end of the state. It may end there.
pub fn inspect(stream: impl Read) -> Result<StreamSummary, WireError> {
    let mut wire = Wire::new(stream);
    let Introduction { header, program, drives, shares_memory, token, layout, config_bytes } =
        introduction(&mut wire)?;
    let (memory_frames, drive_count) = (layout.frames(), drives.len());
    let stream = StreamState::new(layout, drives);
    let mut stream = if shares_memory { stream.with_shared_memory() } else { stream };
    let StreamContents { content_crc, sections, was_running } = contents(&mut wire, &mut stream)?;
    let (totals, blocks) = (stream.totals(), stream.drive_totals());
    // A stream may end here: COMMIT is sent only to a prepared destination.
    let mut late = None;
    let committed = loop {
        match wire.recv() {
            Ok(WireMessage::Late(bytes)) if late.is_none() => late = Some(bytes.len()),
            Ok(WireMessage::Commit { token: t }) => break t == token,
            _ => break false,
        }
    };
    Ok(StreamSummary {
        vm_id: header.vm_id(),
        program,
        token,
        config_bytes,
        memory_frames,
        passes: stream.passes(),
        normal_frames: totals.normal,
        zero_frames: totals.zero,
        drives: drive_count,
        normal_blocks: blocks.normal,
        zero_blocks: blocks.zero,
        content_crc,
        sections: sections.len() as u32,
        state_digest: StateDigest::of(&sections),
        was_running,
        late_bytes: late.unwrap_or(0),
        committed,
    })
}

/// The messages of a source up to CONFIG.
struct Introduction {
    header: Header,
    program: String,
    drives: Vec<DriveHead>,
    shares_memory: bool,
    token: Token,
    layout: Layout,
    config_bytes: u64,
}

fn introduction(wire: &mut Wire<impl Read>) -> Result<Introduction, WireError> {
    let header = wire.recv_header()?;
    let program = match wire.recv()? {
        WireMessage::Hello { version, .. } => printable(version),
        other => return Err(other.unexpected("HELLO")),
    };
    let mut described = DescriptionState::default();
    let (token, layout, config_bytes) = loop {
        match described.on(wire.recv()?)? {
            DescriptionStep::Noted => {}
            DescriptionStep::Memory(_) | DescriptionStep::Files(_) => {
                // The byte that carried the descriptors.
                wire.recv_content()?;
            }
            DescriptionStep::Complete { token, layout, config } => {
                break (token, layout, config.len() as u64);
            }
        }
    };
    let (shares_memory, drives) = (described.shares_memory(), described.into_drives());
    let (found, expected) = (header.layout_hash().into(), layout_hash(&layout).into());
    same("the layout's hash", found, expected)?;
    Ok(Introduction { header, program, drives, shares_memory, token, layout, config_bytes })
}

/// The contents and the state of a stream.
struct StreamContents {
    content_crc: u32,
    sections: Arc<[Section]>,
    was_running: bool,
}

fn contents(
    wire: &mut Wire<impl Read>,
    stream: &mut StreamState,
) -> Result<StreamContents, WireError> {
    let mut content_crc = 0;
    let mut unpacker = Unpacker::new();
    loop {
        match stream.on(wire.recv()?)? {
            StreamStep::Place { contents, .. }
            | StreamStep::Drive(DriveStep::Place { contents, .. }) => {
                content_crc = crc32c::crc32c_append(content_crc, contents);
            }
            StreamStep::Unpack { codec, runs, packed } => {
                let frames = runs.frames().unwrap_or(0);
                let contents = unpacker.unpack(codec, packed, frames).map_err(|e| match e {
                    TransportError::Wire(e) => e,
                    other => std::io::Error::other(other).into(),
                })?;
                content_crc = crc32c::crc32c_append(content_crc, contents);
            }
            StreamStep::Fetch { .. } => {
                content_crc = crc32c::crc32c_append(content_crc, wire.recv_content()?);
            }
            StreamStep::Complete { sections, was_running } => {
                return Ok(StreamContents { content_crc, sections, was_running });
            }
            StreamStep::Noted
            | StreamStep::Zero { .. }
            | StreamStep::Prefault { .. }
            | StreamStep::Join { .. }
            | StreamStep::CheckState { .. }
            | StreamStep::Digest
            | StreamStep::Restore { .. }
            | StreamStep::Drive(_)
            | StreamStep::Ack { .. } => {}
        }
    }
}
