//! The source of a migration: `send` and its phases.
//!
//! The caller's thread owns the connections, the subscription and the paused guest. Before COMMIT
//! every failure resumes the guest on this host. After COMMIT the guest is resumed or ended only
//! with a permit of the state machine (see `protocol::two_phase`).

mod announce;
mod channels;
mod drives;
mod frames;
mod guest;
mod hand_over;
mod job;
mod limit;
mod local;
mod options;
mod passes;
mod paused_guest;
mod precopy;
mod rate_limiter;
mod record;
mod run_table;
mod setup;
mod shared_guest;
mod storage_thread;
mod switch_over;
mod throttle;
mod verify;

use std::time::Instant;

use driftline_guest::RunState;

use crate::control::{Phase, SendControl};
use crate::error::{Cause, GuestPlace, SendError};
use crate::protocol::ids::Token;
use crate::report::SendReport;
pub use drives::{CopyDrives, InvalidDriveNames};
pub use guest::Migratable;
use job::{SendFailed, SendJob};
pub use options::{MIN_BANDWIDTH, SendOptions};

/// Moves `guest` to the destination that listens at `to`, an [`Address`](crate::Address) as text.
///
/// Blocks until the destination has the guest, or until it is certain that the guest stays here. In
/// the first case the guest here is ended by
/// [`Lifecycle::stop`](driftline_guest::Lifecycle::stop). While neither is known, the migration is
/// in doubt: `send` asks the destination, or reads the claim of memory that both have, until that
/// is known or [`SendControl::resolve`] is called. `control.progress()` shows the doubt.
///
/// Costs one bit of memory a frame for tracking (three with `verify`), and 512 KiB of buffers for
/// each connection (2 MiB with compression, 1 MiB with TLS). Copied disks cost one bit a block,
/// 512 KiB, and a thread.
///
/// # Errors
///
/// [`SendError`] has the phase that failed, the cause, and where the guest is.
pub fn send<G: Migratable + ?Sized>(
    guest: &G,
    to: &str,
    options: &SendOptions,
    control: &SendControl,
) -> Result<SendReport, SendError> {
    let begun = Instant::now();
    let job = SendJob { guest, to, options, control, token: Token::random(), begun };
    let result = migrate(&job).map_err(|failed| {
        let cause = match control.stop.is_cancelled() {
            true => Cause::Cancelled,
            false => failed.cause,
        };
        let phase = control.progress().phase;
        // A guest that powers itself off makes any phase fail, and never runs again.
        let place = match guest.run_state() {
            RunState::Stopped => GuestPlace::Ended,
            _ => failed.place,
        };
        SendError { peer: to.to_owned(), phase, cause, guest: place }
    });
    control.update(|p| p.phase = Phase::Finished);
    match &result {
        Ok(report) => tracing::info!(vm = %guest.vm_id(), to, ?report.status, "migration ended"),
        // The caller reports it.
        Err(e) => tracing::info!(vm = %guest.vm_id(), "{e}"),
    }
    result
}

/// Runs the migration, one phase a line. What a phase needs comes from the phase before it.
fn migrate<G: Migratable + ?Sized>(job: &SendJob<'_, G>) -> Result<SendReport, SendFailed> {
    let (mut channels, connected) = job.phase(Phase::Connect, || job.connect())?;
    let set_up = job.peer_phase(Phase::Setup, &mut channels, |to| job.set_up(to, connected))?;
    let copied = job.peer_phase(Phase::Precopy, &mut channels, |to| match job.options.local {
        true => job.prepare_local(to, set_up),
        false => job.precopy(to, set_up),
    })?;
    let ready =
        job.peer_phase(Phase::SwitchOver, &mut channels, |to| job.switch_over(to, copied))?;
    let committed = job.peer_phase(Phase::HandOver, &mut channels, |to| job.commit(to, ready))?;
    job.finish(channels, committed)
}
