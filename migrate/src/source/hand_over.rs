//! The source's end of the hand-over: sends COMMIT, and asks the destination if no answer arrives.
//!
//! `crate::protocol::two_phase::Source` gives the orders; this module performs them.

use std::time::{Duration, Instant, SystemTime};

use driftline_dirty_tracker::PAGE_SIZE;
use driftline_guest::ClaimState;
use uuid::Uuid;

use super::channels::Channels;
use super::guest::Migratable;
use super::job::{SendFailed, SendJob};
use super::paused_guest::CommittedGuest;
use super::precopy::Stats;
use super::record::CommittedRecord;
use super::switch_over::{DeferredDrop, PreparedMigration};
use crate::control::Phase;
use crate::error::Cause;
use crate::protocol::decision::Verdict;
use crate::protocol::error::WireError;
use crate::protocol::ids::Secret;
use crate::protocol::message::{Counts, Purpose, WireMessage};
use crate::protocol::tag::Tag;
use crate::protocol::two_phase::{Source, SourceEvent, SourceOrder};
use crate::report::{SendReport, SendStatus, ms, per_second, unix_us};
use crate::transport::link::Link;
use crate::transport::wait;
use crate::transport::wire::Wire;

/// Upper bound on reading the reason of a destination that gives up before COMMIT.
const REASON_LIMIT: Duration = Duration::from_millis(500);

/// Upper bound on waiting until a destination on this host, which has found that the source keeps
/// the guest, releases the disks and taps that it has acquired.
const RELEASE_LIMIT: Duration = Duration::from_secs(5);

/// Upper bound on each step of a question: connecting, HELLO, and the answer.
const QUERY_LIMIT: Duration = Duration::from_secs(3);

/// A migration past the point of no return: the guest may be the destination's from here on.
pub(super) struct CommittedMigration<'a, G: Migratable + ?Sized> {
    committed_guest: CommittedGuest<'a, G>,
    record: CommittedRecord,
    state: Source,
    order: SourceOrder,
    paused_at: (Instant, SystemTime),
    figures: SendFigures,
    deferred: DeferredDrop<'a>,
}

/// Figures of all passes for the report.
struct SendFigures {
    stats: Stats,
    totals: Counts,
    drive_totals: Counts,
}

/// Times for the report.
struct SendTimes {
    paused_at: SystemTime,
    downtime: Duration,
    total: Duration,
}

/// What is known of the migration since COMMIT was sent.
enum AfterCommit {
    /// COMMIT is being sent, or was answered. No question was asked.
    Sent {
        /// When the destination took the guest over, if it has said so.
        ran_at: Option<Instant>,
    },
    /// The answer is missing, or leaves open which host has the guest.
    InDoubt {
        /// Why COMMIT was not answered.
        unanswered: Option<Box<WireError>>,
        /// The last answer to a question, or why there was none. Initially describes `unanswered`.
        doubt: String,
    },
    /// The operator has resolved the migration.
    Resolved,
}

impl AfterCommit {
    /// Records the answer to a question, or why there was none.
    fn set_doubt(&mut self, doubt: String) {
        let unanswered = match self {
            Self::InDoubt { unanswered, .. } => unanswered.take(),
            Self::Sent { .. } | Self::Resolved => None,
        };
        *self = Self::InDoubt { unanswered, doubt };
    }

    fn doubt(&self) -> Option<&str> {
        match self {
            Self::InDoubt { doubt, .. } => Some(doubt),
            Self::Sent { .. } | Self::Resolved => None,
        }
    }

    /// Returns when the destination took the guest over, if that is known.
    fn ran_at(&self) -> Option<Instant> {
        match self {
            Self::Sent { ran_at } => *ran_at,
            Self::InDoubt { .. } | Self::Resolved => None,
        }
    }

    /// Returns why the guest is resumed here.
    fn cause(self) -> Cause {
        match self {
            Self::Resolved => Cause::ResolvedRun,
            Self::InDoubt { unanswered, .. } => Cause::Discarded { unanswered },
            Self::Sent { .. } => Cause::Discarded { unanswered: None },
        }
    }

    /// Returns the status of the migration to `to`, after which the guest ends here, and why it
    /// ends.
    fn end(&self, to: &str) -> (SendStatus, String) {
        match self {
            Self::Resolved => {
                let why = format!("the operator discarded it: its move to {to} was in doubt");
                (SendStatus::ResolvedDiscarded, why)
            }
            Self::Sent { .. } | Self::InDoubt { .. } => {
                (SendStatus::Completed, format!("it has moved to {to}"))
            }
        }
    }
}

impl<'a, G: Migratable + ?Sized> SendJob<'a, G> {
    /// Passes the point of no return. This is the last step whose failure resumes the guest here.
    pub(super) fn commit(
        &self,
        channels: &mut Channels,
        ready: PreparedMigration<'a, G>,
    ) -> Result<CommittedMigration<'a, G>, SendFailed> {
        let PreparedMigration { paused, record, stats, totals, drive_totals, deferred } = ready;
        // If the destination died or gave up since PREPARED, the guest resumes here without doubt.
        if let Some(cause) = early_end(&mut channels.first) {
            return Err(paused.give_up(cause));
        }
        if !self.control.stop.commit() {
            return Err(paused.give_up(Cause::Cancelled));
        }
        let paused_at = (paused.since(), paused.since_by_clock());
        let (record, state, order) = record.commit();
        let committed_guest = paused.commit(&record);
        let figures = SendFigures { stats, totals, drive_totals };
        Ok(CommittedMigration {
            committed_guest,
            record,
            state,
            order,
            paused_at,
            figures,
            deferred,
        })
    }

    /// Sends COMMIT, and asks the destination until it is known which host has the guest.
    pub(super) fn finish(
        &self,
        mut channels: Channels,
        committed: CommittedMigration<'a, G>,
    ) -> Result<SendReport, SendFailed> {
        let CommittedMigration {
            committed_guest,
            record,
            mut state,
            mut order,
            paused_at,
            figures,
            deferred,
        } = committed;
        let mut deferred = Some(deferred);
        let mut sent_bytes = channels.sent_bytes();
        let mut known = AfterCommit::Sent { ran_at: None };
        loop {
            let event = match order {
                SourceOrder::Commit => {
                    let event = self.send_commit(&mut channels.first, &mut known);
                    sent_bytes = channels.sent_bytes();
                    event
                }
                SourceOrder::Ask | SourceOrder::Wait | SourceOrder::Record => {
                    // Freed here, because a doubt may last for days. Freeing takes little time
                    // compared with the interval between questions.
                    drop(deferred.take());
                    match self.decided_by_claim() {
                        Some(verdict) => SourceEvent::Answer(verdict),
                        None => {
                            self.show_doubt(known.doubt());
                            self.ask(record.question(), &mut channels.first, &mut known)
                        }
                    }
                }
                SourceOrder::TakeBack(permit) => {
                    let limit = if self.options.local { RELEASE_LIMIT } else { Duration::ZERO };
                    let failed = committed_guest.take_back(permit, known.cause(), limit);
                    self.forget(record, &mut channels.first);
                    return Err(failed);
                }
                SourceOrder::End(permit) => {
                    // Measured before the guest ends, which takes time.
                    let times = self.times(paused_at, known.ran_at());
                    let (status, why) = known.end(self.to);
                    committed_guest.end(permit, &why);
                    self.forget(record, &mut channels.first);
                    return Ok(self.report(status, times, sent_bytes, figures));
                }
            };
            (state, order) = state.on(event);
        }
    }

    /// Returns the times of a migration that was paused at `paused_at` and whose guest was taken
    /// over at `ran_at`; now, if that is not known.
    fn times(&self, paused_at: (Instant, SystemTime), ran_at: Option<Instant>) -> SendTimes {
        let (now, (asked, paused_at)) = (Instant::now(), paused_at);
        let downtime = ran_at.unwrap_or(now).saturating_duration_since(asked);
        SendTimes { paused_at, downtime, total: now.duration_since(self.begun) }
    }

    /// Sends COMMIT and waits for the answer.
    fn send_commit(&self, wire: &mut Wire<Link>, known: &mut AfterCommit) -> SourceEvent {
        wire.stream_mut().set_deadline(Some(Instant::now() + self.options.commit_timeout));
        wire.stream_mut().set_progress_timeout(self.options.commit_timeout);
        let answer = (|| {
            let (sent_at, sent_at_clock) = (Instant::now(), SystemTime::now());
            wire.send(&WireMessage::Commit { token: self.token })?;
            match wire.recv()? {
                WireMessage::Running { token, took_us } => {
                    self.check_token(Tag::Running, token)?;
                    let (waited, took) = (sent_at.elapsed(), Duration::from_micros(took_us));
                    let until_resumed = match self.guest.memory_right().resumed_there() {
                        // By the clock that both processes have.
                        Some(at) => at.duration_since(sent_at_clock).unwrap_or_default(),
                        None => waited.saturating_sub(waited.saturating_sub(took) / 2),
                    };
                    // A wrong figure of the peer cannot exceed the time that this side has waited.
                    let ran_at = Some(sent_at + until_resumed.min(waited));
                    *known = AfterCommit::Sent { ran_at };
                    Ok(SourceEvent::Running)
                }
                WireMessage::Answer { token, verdict } => {
                    self.check_token(Tag::Answer, token)?;
                    Ok(SourceEvent::Answer(verdict))
                }
                other => Err(other.unexpected("RUNNING or ANSWER")),
            }
        })();
        answer.unwrap_or_else(|e: WireError| {
            let doubt = e.to_string();
            *known = AfterCommit::InDoubt { unanswered: Some(e.into()), doubt };
            // Closed, so that a destination that has not read COMMIT yet does not wait for it.
            wire.stream().close();
            SourceEvent::Lost
        })
    }

    /// Returns which process has a guest whose memory both have. If the destination has not taken
    /// it, this side keeps it. `None` if memory was copied, or the destination has taken the guest
    /// and not yet run it.
    fn decided_by_claim(&self) -> Option<Verdict> {
        if !self.options.local {
            return None;
        }
        let right = self.guest.memory_right();
        match right.offered() {
            Some(ClaimState::Running) => Some(Verdict::Running),
            // The guest may have run there, and has ended with its process.
            Some(ClaimState::Starting) if right.receiver_has_ended() => Some(Verdict::Running),
            Some(ClaimState::Starting) => None,
            Some(ClaimState::Taken) if !right.receiver_has_ended() => None,
            Some(ClaimState::Offered | ClaimState::Kept | ClaimState::Taken) | None => {
                right.keep().is_ok().then_some(Verdict::Discarded)
            }
        }
    }

    /// Shows the doubt once in the log, and every time in the progress.
    fn show_doubt(&self, doubt: Option<&str>) {
        if self.control.progress().phase != Phase::InDoubt {
            let (vm, token, why) = (self.guest.vm_id(), self.token, doubt.unwrap_or(""));
            tracing::error!(
                %vm, %token, why,
                "in doubt: {} may be running the guest, until it is known or the operator \
                 resolves the migration", self.to
            );
        }
        self.control.update(|p| {
            p.phase = Phase::InDoubt;
            p.doubt = doubt.map(str::to_owned);
        });
    }

    /// Waits for the interval, then asks the destination once, unless the claim decides. The
    /// operator's resolution takes precedence.
    fn ask(
        &self,
        question: (Uuid, Secret),
        wire: &mut Wire<Link>,
        known: &mut AfterCommit,
    ) -> SourceEvent {
        let next = Instant::now() + self.options.ask_interval;
        if let Some(how) = wait::sleep_until(next, || self.control.resolution()) {
            let vm = self.guest.vm_id();
            tracing::warn!(%vm, token = %self.token, ?how, "resolved by the operator");
            *known = AfterCommit::Resolved;
            return SourceEvent::Operator(how);
        }
        if self.options.local {
            // Read again by the caller.
            let doubt = "its process has taken the guest, and has not confirmed that it runs";
            known.set_doubt(doubt.to_owned());
            return SourceEvent::Lost;
        }
        let (verdict, asked) = match self.query(question) {
            Ok(answered) => answered,
            Err(e) => {
                // If the operator's resolution has interrupted the question, the next call returns
                // it.
                if self.control.resolution().is_none() {
                    known.set_doubt(e.to_string());
                }
                return SourceEvent::Lost;
            }
        };
        let doubt = match verdict {
            Verdict::Undecided => "it has not decided yet",
            Verdict::Committed => {
                "it has decided to run the guest, but has not confirmed that it runs"
            }
            Verdict::Unknown => "it does not know of this migration",
            Verdict::Running | Verdict::Discarded => {
                // The connection that gave this verdict waits for ENDED.
                *wire = asked;
                return SourceEvent::Answer(verdict);
            }
        };
        known.set_doubt(doubt.to_owned());
        SourceEvent::Answer(verdict)
    }

    fn query(&self, (site, secret): (Uuid, Secret)) -> Result<(Verdict, Wire<Link>), Cause> {
        let limit = self.options.connect_timeout.min(QUERY_LIMIT);
        let resolved = self.control.resolved.clone();
        let (mut wire, _) = self.introduce(Purpose::Query, limit, resolved)?;
        wire.stream_mut().set_deadline(Some(Instant::now() + QUERY_LIMIT));
        wire.send(&WireMessage::Query { token: self.token, site, secret })?;
        match wire.recv()? {
            WireMessage::Answer { token, verdict } => {
                self.check_token(Tag::Answer, token)?;
                Ok((verdict, wire))
            }
            other => Err(other.unexpected("ANSWER").into()),
        }
    }

    /// Removes the record, because the outcome is known, and lets the destination remove its own.
    fn forget(&self, record: CommittedRecord, wire: &mut Wire<Link>) {
        match record.remove() {
            // A destination that does not receive ENDED keeps a small file.
            Ok(()) => {
                // Ignores stop requests: ENDED is sent even if the operator has resolved meanwhile.
                wire.stream_mut().begin_closing();
                let _ = wire.send(&WireMessage::Ended { token: self.token });
            }
            Err(e) => tracing::warn!("the record of a finished migration stays: {e}"),
        }
    }

    fn report(
        &self,
        status: SendStatus,
        times: SendTimes,
        transferred_bytes: u64,
        figures: SendFigures,
    ) -> SendReport {
        let SendFigures { stats, totals, drive_totals } = figures;
        let SendTimes { paused_at, downtime, total } = times;
        SendReport {
            status,
            vm_id: self.guest.vm_id(),
            total_time_ms: ms(total),
            downtime_ms: ms(downtime),
            paused_at_unix_us: unix_us(paused_at),
            setup_time_ms: ms(stats.setup),
            transferred_bytes,
            zero_frames: totals.zero,
            normal_frames: totals.normal,
            shared_memory_bytes: match self.options.local {
                true => self.guest.layout().frames().saturating_mul(PAGE_SIZE),
                false => 0,
            },
            disk_bytes: drive_totals.normal.saturating_mul(PAGE_SIZE),
            disk_zero_bytes: drive_totals.zero.saturating_mul(PAGE_SIZE),
            throughput_bytes_per_s: per_second(
                transferred_bytes,
                total.saturating_sub(stats.setup),
            ),
            converged: stats.reason.to_string(),
            passes: stats.passes,
            throttle: stats.throttle,
        }
    }
}

/// Returns why a destination has stopped waiting for COMMIT, if it has.
fn early_end(wire: &mut Wire<Link>) -> Option<WireError> {
    if !wire.stream_mut().has_incoming() {
        return None;
    }
    // The guest is paused, so the message must not trickle in.
    wire.stream_mut().set_deadline(Some(Instant::now() + REASON_LIMIT));
    let cause = match wire.recv() {
        Ok(other) => other.unexpected("no message before COMMIT"),
        Err(e) => e,
    };
    wire.stream_mut().set_deadline(None);
    Some(cause)
}
