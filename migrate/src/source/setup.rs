//! The source until pre-copy: connects, and lets the destination build the machine.

use std::sync::Arc;
use std::time::{Duration, Instant};

use driftline_format::layout_hash;
use driftline_guest::{GuestDrive, GuestError, SharedGuest};

use super::channels::Channels;
use super::drives;
use super::guest::Migratable;
use super::job::{SendFailed, SendJob};
use super::record::StagedRecord;
use super::shared_guest;
use crate::error::{Cause, fits};
use crate::journal::Records;
use crate::protocol::features::{
    COPIES_DRIVES, FEATURES, LOCAL, MEMORY_DIGEST, PACKED_CONTENTS, SEVERAL_CONNECTIONS,
    STATE_HEADS,
};
use crate::protocol::ids::Secret;
use crate::protocol::limits::{MAX_CONFIG, MAX_CONNECTIONS, MAX_SECTIONS, MAX_SLOTS};
use crate::protocol::message::{Purpose, StateHeads, WireMessage, printable};
use crate::transport::address::InvalidAddress;
use crate::transport::compression::Compression;
use crate::transport::connect::ConnectLimits;
use crate::transport::link::Link;
use crate::transport::stop::StopFlag;
use crate::transport::wire::Wire;

/// Connections that are opened in parallel.
const JOINS_AT_ONCE: usize = 4;

/// A migration whose destination has answered HELLO.
pub(super) struct Connected {
    records: Records,
    /// Feature bits of the destination's HELLO.
    features: u64,
    /// Disks that are copied.
    drives: Vec<Box<dyn GuestDrive>>,
    /// What is handed over by descriptors, unless memory is copied.
    shared: Option<SharedGuest>,
}

/// A migration whose destination has built the machine, with all channels open.
pub(super) struct SetUp {
    /// Names the destination's site, from READY.
    pub(super) record: StagedRecord,
    pub(super) features: u64,
    pub(super) drives: Vec<Box<dyn GuestDrive>>,
}

impl<G: Migratable + ?Sized> SendJob<'_, G> {
    /// Connects to the destination and exchanges HELLOs.
    pub(super) fn connect(&self) -> Result<(Channels, Connected), SendFailed> {
        // Opened now, so that an unusable directory fails the migration before the pause.
        let records = Records::open(&self.options.records)?;
        let stop = self.control.stop.clone();
        self.guest.memory_right().check().map_err(GuestError::from)?;
        let shared = self.local_guest()?;
        let drives = drives::chosen(self.guest, &self.options.copy_drives)?;
        let limit = self.options.connect_timeout;
        let (first, features) = self.introduce(Purpose::Move, limit, stop)?;
        let channels = Channels { first, joined: Vec::new() };
        Ok((channels, Connected { records, features, drives, shared }))
    }

    /// Opens a connection within `limit`, and exchanges HELLOs within the same time again, unless
    /// `stop` is set.
    pub(super) fn introduce(
        &self,
        purpose: Purpose,
        limit: Duration,
        stop: Arc<StopFlag>,
    ) -> Result<(Wire<Link>, u64), Cause> {
        let unreached = |cause| Cause::Connect { peer: self.to.to_owned(), cause };
        let address = self.to.parse().map_err(|e| unreached(InvalidAddress::into(e)))?;
        let limits = ConnectLimits {
            timeout: limit,
            progress_timeout: self.options.progress_timeout,
            only_here: !self.options.insecure && self.options.tls.is_none(),
        };
        let session = self.options.tls.as_ref().map(|tls| tls.session(&address, self.bytes()));
        let session = session.transpose();
        let session = session.map_err(|e| Cause::Tls(e.into()))?;
        let mut link = Link::connect(&address, limits, stop).map_err(unreached)?;
        link.set_deadline(Some(Instant::now() + limit));
        if let Some(session) = session {
            let failed = |cause| Cause::Handshake { peer: self.to.to_owned(), cause };
            link.secure(session).map_err(failed)?;
            if purpose == Purpose::Move {
                link.log_encryption();
            }
        } else if purpose == Purpose::Move && !link.stays_here() {
            let to = self.to;
            tracing::warn!(to, "insecure: every host on the way can read and change the guest");
        }
        let mut wire = Wire::new(link);
        wire.send_header(Some((self.guest.vm_id(), layout_hash(self.guest.layout()))))?;
        let version = env!("CARGO_PKG_VERSION");
        wire.send(&WireMessage::Hello { purpose, features: FEATURES, version })?;
        wire.recv_header()?;
        let features = match wire.recv()? {
            WireMessage::Hello { version, features, .. } => {
                let version = printable(version);
                tracing::debug!(to = self.to, version, features, "connected");
                features
            }
            other => return Err(other.unexpected("HELLO").into()),
        };
        wire.stream_mut().set_deadline(None);
        Ok((wire, features))
    }

    /// Returns the bytes of memory and of the copied disks. Any channel may carry most of them. A
    /// choice of disks that is not valid has failed before.
    fn bytes(&self) -> u64 {
        let layout = self.guest.layout();
        let memory = layout.frames() * layout.page_size().bytes();
        let drives = drives::chosen(self.guest, &self.options.copy_drives).unwrap_or_default();
        let drives: u64 = drives.iter().map(|drive| drive.head().bytes).sum();
        memory + drives
    }

    /// Lets the destination build the machine, and opens the other channels.
    pub(super) fn set_up(
        &self,
        channels: &mut Channels,
        connected: Connected,
    ) -> Result<SetUp, SendFailed> {
        let Connected { records, features, drives, shared } = connected;
        self.check_features(features, !drives.is_empty())?;
        let config = self.guest.config();
        fits("the guest's configuration", config.len() as u64, MAX_CONFIG.into(), "bytes")?;
        let layout = self.guest.layout().clone();
        let slots = layout.slots().len() as u64;
        fits("the guest's memory layout", slots, MAX_SLOTS.into(), "slots")?;
        let wire = &mut channels.first;
        drives::announce(wire, &drives)?;
        if let Some(shared) = &shared {
            shared_guest::send(wire, shared, features)?;
        }
        wire.send(&WireMessage::Config { token: self.token, layout, config: &config })?;
        // No bytes arrive while the machine is built. The deadline is for a peer that sends slowly.
        wire.stream_mut().set_progress_timeout(self.options.setup_timeout);
        wire.stream_mut().set_deadline(Instant::now().checked_add(self.options.setup_timeout));
        let (site, secret) = match wire.recv()? {
            WireMessage::Ready { site, secret } => (site, secret),
            other => return Err(other.unexpected("READY").into()),
        };
        wire.stream_mut().set_deadline(None);
        let staged = records.stage_source(self.token, self.guest.vm_id(), self.to, site)?;
        let record = StagedRecord::new(records, staged, secret);
        wire.stream_mut().set_progress_timeout(self.options.progress_timeout);
        self.join(channels, secret)?;
        self.send_state_heads(&mut channels.first, features)?;
        Ok(SetUp { record, features, drives })
    }

    /// Lets the destination refuse the state before the pause, if the guest can describe it now.
    fn send_state_heads(&self, wire: &mut Wire<Link>, features: u64) -> Result<(), Cause> {
        let heads = self.guest.state_heads();
        if features & STATE_HEADS == 0 || heads.is_empty() {
            return Ok(());
        }
        fits("the guest's state", heads.len() as u64, MAX_SECTIONS.into(), "sections")?;
        Ok(wire.send(&WireMessage::StateHeads(StateHeads(heads)))?)
    }

    /// Checks that the destination offers the features that the options need.
    fn check_features(&self, features: u64, copies_drives: bool) -> Result<(), Cause> {
        let asked = [
            (self.options.verify, MEMORY_DIGEST, "a digest of memory (--verify)"),
            (
                self.options.compression != Compression::None,
                PACKED_CONTENTS,
                "compressed contents (--compress)",
            ),
            (
                self.options.connections > 1,
                SEVERAL_CONNECTIONS,
                "several connections (--connections)",
            ),
            (copies_drives, COPIES_DRIVES, "copies of disks (--copy-disks)"),
            (self.options.local, LOCAL, "a hand-over on one host (--local)"),
        ];
        match asked.into_iter().find(|(is, bit, _)| *is && features & bit == 0) {
            Some((.., feature)) => Err(Cause::NotOffered { feature }),
            None => Ok(()),
        }
    }

    /// Opens the other channels, [`JOINS_AT_ONCE`] in parallel.
    fn join(&self, channels: &mut Channels, secret: Secret) -> Result<(), SendFailed> {
        let more = self.options.connections.clamp(1, MAX_CONNECTIONS) - 1;
        if more == 0 {
            return Ok(());
        }
        let numbers: Vec<u32> = (2..more + 2).collect();
        // The destination's listener serves a bounded number of connections at a time.
        for batch in numbers.chunks(JOINS_AT_ONCE) {
            channels.joined.extend(self.join_batch(batch, more + 1, secret)?);
        }
        Ok(channels.first.send(&WireMessage::Connections { joined: more })?)
    }

    /// Opens the channels with these numbers in parallel. There are `of` channels in total.
    fn join_batch(
        &self,
        numbers: &[u32],
        of: u32,
        secret: Secret,
    ) -> Result<Vec<Wire<Link>>, Cause> {
        std::thread::scope(|scope| {
            let start = || {
                let span = tracing::Span::current();
                let thread = std::thread::Builder::new().name("migrate-join".into());
                thread.spawn_scoped(scope, move || span.in_scope(|| self.join_one(secret)))
            };
            let threads: Vec<_> = numbers.iter().map(|which| (*which, start())).collect();
            let joined = threads.into_iter().map(|(which, thread)| {
                let thread =
                    thread.map_err(|cause| Cause::System { what: "starting a thread", cause })?;
                let joined = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                joined.map_err(|cause| Cause::Connection { which, of, cause: Box::new(cause) })
            });
            joined.collect()
        })
    }

    fn join_one(&self, secret: Secret) -> Result<Wire<Link>, Cause> {
        let (limit, stop) = (self.options.connect_timeout, self.control.stop.clone());
        let (mut wire, _) = self.introduce(Purpose::Join, limit, stop)?;
        wire.stream_mut().set_deadline(Some(Instant::now() + limit));
        wire.send(&WireMessage::Join { token: self.token, secret })?;
        match wire.recv()? {
            WireMessage::Ready { .. } => {}
            other => return Err(other.unexpected("READY").into()),
        }
        wire.stream_mut().set_deadline(None);
        Ok(wire)
    }
}
