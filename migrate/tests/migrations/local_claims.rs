//! Hand-overs on one host whose connection is lost after COMMIT: the claim says which process has
//! the guest, so the source asks no question.

use std::time::Duration;

use driftline_guest::testing::{MemoryConfig, Op};
use driftline_guest::{GuestContents, HandOver, Lifecycle, NextHost, RunState};
use driftline_migrate::{Phase, SendOptions};

use crate::common::{
    At, CutPoint, HostPair, LONG, Proxy, ProxyPlan, Sender, exactly_one_runs, quick_send, tag,
    within,
};

/// Cuts the connection at a message, and forwards no question after that.
fn cut_for_good(hosts: &HostPair, from_source: bool, message: &str, at: CutPoint) {
    let guest = hosts.start_in_files(MemoryConfig::small());
    let there = hosts.local_receiver(hosts.receive_options());
    let plan = ProxyPlan::cut_for_good(from_source, At::Tag(tag(message)), at);
    let proxy = Proxy::start(&there.to, plan);
    let options = SendOptions { local: true, ..quick_send(hosts) };
    let sender = Sender::start(&guest, &proxy.to, &options);
    let control = sender.control.clone();
    let sent = sender.result();
    assert_eq!(control.progress().doubt, None, "{message}, {at:?}");
    exactly_one_runs(hosts, &guest, &sent, there, &format!("{message}, {at:?}"));
}

#[test]
fn lost_commit_leaves_the_guest_at_the_source() {
    for at in [CutPoint::Before, CutPoint::Within] {
        cut_for_good(&HostPair::new(), true, "COMMIT", at);
    }
}

#[test]
fn lost_answer_ends_the_guest_at_the_source() {
    for at in [CutPoint::Before, CutPoint::Within] {
        cut_for_good(&HostPair::new(), false, "RUNNING", at);
    }
}

/// The destination is slow to take the guest, and finds that the source has kept it.
#[test]
fn late_destination_does_not_run_a_kept_guest() {
    let hosts = HostPair::new();
    let guest = hosts.start_in_files(MemoryConfig::small());
    let there = hosts.local_receiver(hosts.receive_options());
    let kept = guest.clone();
    let plan = ProxyPlan::default().before_from_source(tag("COMMIT"), move || {
        kept.memory_right().keep().unwrap();
    });
    let proxy = Proxy::start(&there.to, plan);
    let options = SendOptions { local: true, ..quick_send(&hosts) };
    let sent = Sender::start(&guest, &proxy.to, &options).result();
    let why = sent.as_ref().unwrap_err().to_string();
    assert_eq!(guest.run_state(), RunState::Running, "{why}");
    assert_eq!(guest.memory_right().offered(), None, "the offer is over");
    exactly_one_runs(&hosts, &guest, &sent, there, "the source has kept the guest");
}

/// A destination that cannot resume the guest gives it back.
#[test]
fn guest_that_does_not_resume_is_given_back() {
    let hosts = HostPair::new();
    let guest = hosts.start_in_files(MemoryConfig::small());
    hosts.there.fail_next(Op::Resume, 1);
    let there = hosts.local_receiver(hosts.receive_options());
    // The verdict is lost as well.
    let plan = ProxyPlan::cut_for_good(false, At::Tag(tag("ANSWER")), CutPoint::Before);
    let proxy = Proxy::start(&there.to, plan);
    let options = SendOptions { local: true, ..quick_send(&hosts) };
    let sent = Sender::start(&guest, &proxy.to, &options).result();
    assert!(sent.is_err());
    within(LONG, "the guest runs", || guest.run_state() == RunState::Running);
    assert_eq!(guest.memory_right().offered(), None, "the offer is over");
    exactly_one_runs(&hosts, &guest, &sent, there, "resuming fails");
}

/// The claim cannot tell whether a destination that hangs will run the guest. The source waits
/// until that is known.
#[test]
fn hanging_destination_leaves_the_source_in_doubt() {
    let hosts = HostPair::new();
    let guest = hosts.start_in_files(MemoryConfig::small());
    let gate = hosts.there.hold_next(Op::Resume);
    let there = hosts.local_receiver(hosts.receive_options());
    let mut options = SendOptions { local: true, ..quick_send(&hosts) };
    options.commit_timeout = Duration::from_secs(2);
    let sender = Sender::start(&guest, &there.to, &options);
    let control = sender.control.clone();
    let doubt = "its process has taken the guest, and has not confirmed that it runs";
    within(LONG, "a doubt", || control.progress().doubt.as_deref() == Some(doubt));
    assert_eq!(control.progress().phase, Phase::InDoubt);
    assert_eq!(guest.run_state(), RunState::Paused);
    drop(gate);
    let sent = sender.result();
    assert!(sent.is_ok(), "{sent:?}");
    exactly_one_runs(&hosts, &guest, &sent, there, "the destination is late");
}

/// A guest that arrives paused is the destination's as well, although it has not run there.
#[test]
fn paused_guest_belongs_to_its_destination() {
    let hosts = HostPair::new();
    let guest = hosts.start_in_files(MemoryConfig::small());
    guest.pause().unwrap();
    let there = hosts.local_receiver(hosts.receive_options());
    let plan = ProxyPlan::cut_for_good(false, At::Tag(tag("RUNNING")), CutPoint::Before);
    let proxy = Proxy::start(&there.to, plan);
    let options = SendOptions { local: true, ..quick_send(&hosts) };
    Sender::start(&guest, &proxy.to, &options).result().unwrap();
    assert_eq!(guest.run_state(), RunState::Stopped);
    let arrived = there.guest();
    arrived.guest.resume().unwrap();
    arrived.guest.verify().unwrap();
}

/// The claim decides, so the destination needs no records.
#[test]
fn lost_records_of_the_destination_hinder_nothing() {
    let hosts = HostPair::new();
    let guest = hosts.start_in_files(MemoryConfig::small());
    let there = hosts.local_receiver(hosts.receive_options());
    let (dir, gone) = (hosts.destination_records(), hosts.destination_records());
    let gone = gone.with_extension("gone");
    let plan = ProxyPlan::default().before_from_source(tag("COMMIT"), {
        let gone = gone.clone();
        move || std::fs::rename(&dir, &gone).unwrap()
    });
    let proxy = Proxy::start(&there.to, plan);
    let options = SendOptions { local: true, ..quick_send(&hosts) };
    Sender::start(&guest, &proxy.to, &options).result().unwrap();
    there.guest().guest.verify().unwrap();
    let left = std::fs::read_dir(gone).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(left.collect::<Vec<_>>(), ["site"]);
}

/// After a failed hand-over no operation bypasses the claim.
#[test]
fn taken_guest_neither_runs_nor_moves_on() {
    let hosts = HostPair::new();
    let guest = hosts.start_in_files(MemoryConfig::small());
    guest.pause().unwrap();
    guest.release(NextHost::This).unwrap();
    let taken = guest.share().unwrap().right().unwrap();
    taken.take().unwrap();
    let refused = guest.acquire().unwrap_err().to_string();
    assert!(refused.contains("another process has taken the guest"), "{refused}");
    let there = hosts.receiver();
    for local in [false, true] {
        let options = SendOptions { local, ..quick_send(&hosts) };
        let refused = Sender::start(&guest, &there.to, &options).result().unwrap_err();
        assert!(refused.to_string().contains("another process has taken"), "{refused}");
    }
    assert_eq!(there.control.progress().refused, 0);
    there.control.cancel().unwrap();
    there.error();
    taken.give_back();
    guest.acquire().unwrap();
}
