//! Failures of guests and disks, cancellations and resolutions by operators, in every phase.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::{
    At, CutPoint, HostPair, LONG, Proxy, ProxyPlan, Sender, each, exactly_one_runs, quick_send,
    tag, within,
};
use driftline_guest::testing::{MemoryConfig, Op};
use driftline_guest::{HandOver, Lifecycle, RunState};
use driftline_migrate::{Cause, ControlError, GuestPlace, Phase, Records, Resolution, SendStatus};

/// Returns options for one pass and the pause.
fn options(hosts: &HostPair) -> driftline_migrate::SendOptions {
    let mut options = quick_send(hosts);
    options.downtime = Duration::from_secs(60);
    options
}

#[test]
fn failure_at_the_destination_resumes_the_source() {
    for (op, word) in [
        (Op::Create, "building the guest"),
        (Op::Restore, "restor"),
        (Op::Acquire, "discarded"),
        (Op::Resume, "discarded"),
    ] {
        let hosts = HostPair::new();
        let guest = hosts.start(MemoryConfig::small());
        hosts.there.fail_next(op, 1);
        let there = hosts.receiver();
        let sent = Sender::start(&guest, &there.to, &options(&hosts)).result();
        let error = sent.as_ref().unwrap_err().to_string();
        assert!(error.contains(word), "{op:?}: {error}");
        assert!(!hosts.drive.is_held() || guest.run_state() == RunState::Running, "{op:?}");
        exactly_one_runs(&hosts, &guest, &sent, there, &format!("{op:?} fails there"));
    }
}

#[test]
fn failure_at_the_source_resumes_it() {
    for op in
        [Op::Pause, Op::Save, Op::Release, Op::Detach, Op::Subscribe, Op::Collect, Op::Populated]
    {
        let hosts = HostPair::new();
        let guest = hosts.start(MemoryConfig::small());
        hosts.here.fail_next(op, 1);
        let there = hosts.receiver();
        let sent = Sender::start(&guest, &there.to, &options(&hosts)).result();
        let cause = &sent.as_ref().unwrap_err().cause;
        assert!(matches!(cause, Cause::Guest(_)), "{op:?}: {cause}");
        exactly_one_runs(&hosts, &guest, &sent, there, &format!("{op:?} fails here"));
    }
}

#[test]
fn disks_are_flushed_after_each_pass() {
    for failing in [0, 1] {
        let hosts = HostPair::new();
        let guest = hosts.start(MemoryConfig::small());
        hosts.here.fail_next(Op::Flush, failing);
        let there = hosts.receiver();
        let sent = Sender::start(&guest, &there.to, &quick_send(&hosts)).result();
        // One flush after each pass except the last, and one before the pause. In the pause the
        // rest is flushed with the release.
        let passes = sent.as_ref().unwrap().passes.len() as u64 - 1;
        assert_eq!(hosts.drive.flushes(), passes + 1 - u64::from(failing));
        exactly_one_runs(&hosts, &guest, &sent, there, "a flush");
    }
}

#[test]
fn late_packets_arrive_and_fail_no_migration() {
    for failing in [0, 1] {
        let hosts = HostPair::new();
        let guest = hosts.start(MemoryConfig::small());
        hosts.there.fail_next(Op::Attach, failing);
        let there = hosts.receiver();
        Sender::start(&guest, &there.to, &quick_send(&hosts)).result().unwrap();
        let arrived = there.guest();
        assert_eq!(arrived.guest.run_state(), RunState::Running);
        let late = arrived.guest.received_packets();
        assert_eq!(late, if failing == 0 { guest.mark() } else { Vec::new() });
    }
}

#[test]
fn failed_resume_is_reported_as_paused_here() {
    for op in [Op::Acquire, Op::Resume] {
        let hosts = HostPair::new();
        let guest = hosts.start(MemoryConfig::small());
        // The first failure follows the release, so the disks have to be acquired again.
        hosts.here.fail_next(Op::Detach, 1);
        hosts.here.fail_next(op, 1);
        let there = hosts.receiver();
        let error = Sender::start(&guest, &there.to, &options(&hosts)).result().unwrap_err();
        assert!(matches!(error.guest, GuestPlace::PausedHere { .. }), "{op:?}: {error}");
        assert_eq!(guest.run_state(), RunState::Paused, "{op:?}");
        there.failure();
        guest.acquire().unwrap();
        guest.resume().unwrap();
        guest.verify().unwrap();
        assert_eq!(hosts.drive.most_running(), 1);
    }
}

/// Where a test leaves the control of its migration for the proxy's action.
type ControlSlot = Arc<Mutex<Option<Arc<driftline_migrate::SendControl>>>>;

fn await_control(slot: &ControlSlot) -> Arc<driftline_migrate::SendControl> {
    within(LONG, "the migration's control", || slot.lock().unwrap().is_some());
    slot.lock().unwrap().clone().unwrap()
}

#[test]
fn cancel_works_in_every_phase_before_commit() {
    let phases = [
        ("CONFIG", Phase::Setup),
        ("PASS_BEGIN", Phase::Precopy),
        ("PASS_END", Phase::Precopy),
        ("STATE", Phase::SwitchOver),
        ("STATE_WHOLE", Phase::SwitchOver),
        ("STATE_END", Phase::SwitchOver),
    ];
    each(phases.into(), 6, |(at, phase)| {
        let hosts = HostPair::new();
        let guest = hosts.start(MemoryConfig::small());
        let there = hosts.receiver();
        let control: ControlSlot = Arc::default();
        let handle = control.clone();
        let cancel = move || {
            let control = await_control(&handle);
            control.cancel().unwrap();
            // Later messages are forwarded once the source has noticed the cancellation.
            within(LONG, "the source ends", || control.progress().phase == Phase::Finished);
        };
        let plan = ProxyPlan::default().before_from_source(tag(at), cancel);
        let proxy = Proxy::start(&there.to, plan);
        let mut sending = options(&hosts);
        // A target of 0 needs several passes, so that PASS_END is that of pass 0.
        sending.downtime = Duration::ZERO;
        if phase == Phase::SwitchOver {
            sending.downtime = Duration::from_secs(60);
        }
        let sender = Sender::start(&guest, &proxy.to, &sending);
        *control.lock().unwrap() = Some(sender.control.clone());
        let sent = sender.result();
        let error = sent.as_ref().unwrap_err();
        assert!(matches!(error.cause, Cause::Cancelled), "{at}: {error}");
        assert_eq!(error.phase, phase, "{at}: {error}");
        exactly_one_runs(&hosts, &guest, &sent, there, &format!("cancelled at {at}"));
    });
}

#[test]
fn cancel_is_refused_once_commit_is_sent() {
    let hosts = HostPair::new();
    let guest = hosts.start(MemoryConfig::small());
    let there = hosts.receiver();
    let (answers, seen) = (Arc::new(Mutex::new(Vec::new())), ControlSlot::default());
    let (recorded, handle) = (answers.clone(), seen.clone());
    let plan = ProxyPlan::default().before_from_source(tag("COMMIT"), move || {
        recorded.lock().unwrap().push(await_control(&handle).cancel());
    });
    let proxy = Proxy::start(&there.to, plan);
    let sender = Sender::start(&guest, &proxy.to, &options(&hosts));
    *seen.lock().unwrap() = Some(sender.control.clone());
    let sent = sender.result();
    assert_eq!(*answers.lock().unwrap(), [Err(ControlError::TooLate)]);
    assert!(sent.is_ok());
    exactly_one_runs(&hosts, &guest, &sent, there, "cancelled too late");
}

#[test]
fn waiting_receiver_can_be_cancelled() {
    let hosts = HostPair::new();
    let there = hosts.receiver();
    within(LONG, "it waits", || there.control.progress().phase == Phase::Waiting);
    there.control.cancel().unwrap();
    assert!(matches!(there.error().cause, Cause::Cancelled));
}

#[test]
fn source_without_a_record_keeps_the_guest() {
    let hosts = HostPair::new();
    let guest = hosts.start(MemoryConfig::small());
    let there = hosts.receiver();
    let dir = hosts.source_records();
    // The source waits for the acknowledgement of this message before it makes the record.
    let plan = ProxyPlan::default().before_from_source(tag("PASS_END"), move || {
        let _ = std::fs::remove_dir_all(&dir);
    });
    let proxy = Proxy::start(&there.to, plan);
    let sent = Sender::start(&guest, &proxy.to, &options(&hosts)).result();
    assert!(matches!(sent.as_ref().unwrap_err().cause, Cause::Records(_)));
    exactly_one_runs(&hosts, &guest, &sent, there, "no room for the source's record");
}

#[test]
fn unstored_decision_leaves_the_source_in_doubt() {
    let hosts = HostPair::new();
    let guest = hosts.start(MemoryConfig::small());
    let there = hosts.receiver();
    let dir = hosts.destination_records();
    let plan = ProxyPlan::default().before_from_source(tag("COMMIT"), {
        let dir = dir.clone();
        move || std::fs::rename(&dir, dir.with_extension("gone")).unwrap()
    });
    let proxy = Proxy::start(&there.to, plan);
    let sender = Sender::start(&guest, &proxy.to, &options(&hosts));
    within(LONG, "the source is in doubt", || sender.control.progress().phase == Phase::InDoubt);
    let undecided = |doubt: String| doubt.contains("has not decided yet");
    within(LONG, "the destination answers", || {
        sender.control.progress().doubt.is_some_and(undecided)
    });
    assert_eq!(sender.control.progress().phase, Phase::InDoubt, "no decision is durable");
    assert_eq!(guest.run_state(), RunState::Paused);
    assert_eq!(Records::open(hosts.source_records()).unwrap().pending().unwrap().records.len(), 1);
    std::fs::rename(dir.with_extension("gone"), &dir).unwrap();
    let sent = sender.result();
    let error = sent.as_ref().unwrap_err();
    assert!(matches!(error.cause, Cause::Discarded { .. }));
    assert!(!error.to_string().contains("has not decided yet"), "an earlier answer: {error}");
    assert!(Records::open(hosts.source_records()).unwrap().pending().unwrap().records.is_empty());
    exactly_one_runs(&hosts, &guest, &sent, there, "no room for the decision, for a while");
    assert!(hosts.records_left().is_empty(), "{:?}", hosts.records_left());
}

/// Loses RUNNING and all later messages. Returns when the source is in doubt.
fn in_doubt(
    hosts: &HostPair,
) -> (Arc<driftline_guest::testing::MemoryGuest>, crate::common::Receiver, Proxy, Sender) {
    let guest = hosts.start(MemoryConfig::small());
    let there = hosts.receiver();
    let proxy = Proxy::start(
        &there.to,
        ProxyPlan::cut_for_good(false, At::Tag(tag("RUNNING")), CutPoint::Before),
    );
    let sender = Sender::start(&guest, &proxy.to, &options(hosts));
    within(LONG, "the source is in doubt", || sender.control.progress().phase == Phase::InDoubt);
    (guest, there, proxy, sender)
}

#[test]
fn operator_discards_the_guest_in_doubt() {
    let hosts = HostPair::new();
    let (guest, there, _proxy, sender) = in_doubt(&hosts);
    within(LONG, "a question fails", || sender.control.progress().doubt.is_some());
    assert_eq!(guest.run_state(), RunState::Paused, "a source in doubt never resumes its guest");
    assert_eq!(guest.tracker().stats().subscribers, 0, "a source in doubt keeps no tree");
    sender.control.resolve(Resolution::Discard).unwrap();
    let sent = sender.result();
    assert_eq!(sent.as_ref().unwrap().status, SendStatus::ResolvedDiscarded);
    exactly_one_runs(&hosts, &guest, &sent, there, "resolved: discard");
}

#[test]
fn operator_runs_the_guest_in_doubt() {
    let hosts = HostPair::new();
    let (guest, there, _proxy, sender) = in_doubt(&hosts);
    // The destination dies with its guest, and the operator knows it.
    there.guest().guest.stop("its host died");
    sender.control.resolve(Resolution::Run).unwrap();
    let error = sender.result().unwrap_err();
    assert!(matches!(error.cause, Cause::ResolvedRun), "{error}");
    assert!(matches!(error.guest, GuestPlace::Here), "{error}");
    assert_eq!(guest.run_state(), RunState::Running);
    guest.verify().unwrap();
    assert_eq!(hosts.drive.most_running(), 1);
    assert!(hosts.records_left().iter().all(|p| !p.to_string_lossy().contains(".source.")));
}

#[test]
fn new_receiver_of_the_site_answers_discarded() {
    let hosts = HostPair::new();
    let guest = hosts.start(MemoryConfig::small());
    let mut receiving = hosts.receive_options();
    receiving.answer_timeout = Duration::ZERO;
    let there = hosts.receiver_with(receiving);
    // COMMIT never arrives, and the first receiver's decision is lost with its process.
    let plan = ProxyPlan::cut_for_good(true, At::Tag(tag("COMMIT")), CutPoint::Before);
    let proxy = Proxy::start(&there.to, plan);
    let sender = Sender::start(&guest, &proxy.to, &options(&hosts));
    within(LONG, "the source is in doubt", || sender.control.progress().phase == Phase::InDoubt);
    assert!(there.error().was_prepared);
    for left in hosts.records_left() {
        if left.to_string_lossy().contains(".destination.") {
            std::fs::remove_file(left).unwrap();
        }
    }
    // A receiver of another site does not know the migration.
    let stranger = HostPair::new();
    let elsewhere = stranger.receiver();
    proxy.redirect(&elsewhere.to);
    within(LONG, "another site answers", || {
        sender.control.progress().doubt.is_some_and(|d| d.contains("does not know"))
    });
    let second = hosts.receiver();
    proxy.redirect(&second.to);
    let sent = sender.result();
    let error = sent.as_ref().unwrap_err();
    assert!(matches!(error.cause, Cause::Discarded { .. }), "{error}");
    // After a question the receiver waits for a source. A refused connection lets the test see
    // that.
    drop(std::net::TcpStream::connect(&second.to).unwrap());
    exactly_one_runs(&hosts, &guest, &sent, second, "a new receiver answered");
    elsewhere.control.cancel().unwrap();
    elsewhere.error();
}

#[test]
fn trickling_peer_does_not_prolong_the_pause() {
    let hosts = HostPair::new();
    let guest = hosts.start(MemoryConfig::small());
    let there = hosts.receiver();
    // Messages before the pause are not delayed.
    let proxy = Proxy::start(&there.to, ProxyPlan::trickle_once_sent(tag("STATE")));
    let mut sending = options(&hosts);
    sending.switch_over_limit = Some(Duration::from_millis(500));
    let sent = Sender::start(&guest, &proxy.to, &sending).result();
    let error = sent.as_ref().unwrap_err();
    assert!(matches!(error.cause, Cause::PauseTooLong { .. }), "{error}");
    assert!(error.to_string().contains("limit of 0.5 s"), "{error}");
    assert_eq!(error.phase, Phase::SwitchOver, "{error}");
    exactly_one_runs(&hosts, &guest, &sent, there, "a trickling peer in the pause");
}

#[test]
fn trickling_peer_does_not_prolong_the_setup() {
    let hosts = HostPair::new();
    let guest = hosts.start(MemoryConfig::small());
    let there = hosts.receiver();
    // READY trickles: 72 bytes in seven seconds.
    let proxy = Proxy::start(&there.to, ProxyPlan::trickle(2));
    let mut sending = options(&hosts);
    sending.setup_timeout = Duration::from_millis(500);
    let sent = Sender::start(&guest, &proxy.to, &sending).result();
    let error = sent.as_ref().unwrap_err();
    assert_eq!(error.phase, Phase::Setup, "{error}");
    assert!(error.to_string().contains("sent nothing for"), "{error}");
    exactly_one_runs(&hosts, &guest, &sent, there, "a trickling peer in the setup");
}

#[test]
fn trickling_peer_does_not_prolong_precopy() {
    let hosts = HostPair::new();
    let guest = hosts.start(MemoryConfig::small());
    let there = hosts.receiver();
    // The acknowledgement of pass 0 trickles.
    let proxy = Proxy::start(&there.to, ProxyPlan::trickle(3));
    let mut sending = options(&hosts);
    sending.timeout = Duration::from_millis(500);
    let sent = Sender::start(&guest, &proxy.to, &sending).result();
    let error = sent.as_ref().unwrap_err();
    assert!(matches!(error.cause, Cause::NotConverging { .. }), "{error}");
    assert!(error.to_string().contains("longer than its 0.5 s"), "{error}");
    assert_eq!(error.phase, Phase::Precopy, "{error}");
    exactly_one_runs(&hosts, &guest, &sent, there, "a trickling peer in pre-copy");
}

#[test]
fn operator_resolves_during_an_unanswered_question() {
    let hosts = HostPair::new();
    let (guest, there, proxy, sender) = in_doubt(&hosts);
    // A listener that accepts connections and sends nothing.
    let mute = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    proxy.redirect(&mute.local_addr().unwrap().to_string());
    let (_asking, _) = mute.accept().unwrap();
    sender.control.resolve(Resolution::Discard).unwrap();
    let sent = sender.result();
    assert_eq!(sent.as_ref().unwrap().status, SendStatus::ResolvedDiscarded);
    exactly_one_runs(&hosts, &guest, &sent, there, "resolved while asking");
}

#[test]
fn answered_doubt_leaves_no_record() {
    let hosts = HostPair::new();
    let (guest, there, proxy, sender) = in_doubt(&hosts);
    proxy.redirect(&there.to);
    let sent = sender.result();
    assert_eq!(sent.as_ref().unwrap().status, SendStatus::Completed);
    within(LONG, "the decision is forgotten", || hosts.records_left().is_empty());
    exactly_one_runs(&hosts, &guest, &sent, there, "in doubt, then answered");
}
