//! Whole migrations over loopback sockets, between guests that check their own memory.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::{
    HostPair, LONG, Proxy, ProxyPlan, Sender, await_writes, exactly_one_runs, quick_send, tag,
    within,
};
use driftline_dirty_tracker::PAGE_SIZE;
use driftline_guest::testing::{MemoryConfig, MemoryGuest, MemoryGuestFactory};
use driftline_guest::{
    Clock, DirtyLog, DriveHead, Guest, GuestContents, GuestError, GuestFactory, GuestIdentity,
    GuestWithCopies, HandOver, Lifecycle, Origin, Populate, RunState, SavedPause, SavedState,
    Section, SectionHead, SharedGuest, Stateful, VcpuPauses, VmId, WriteThrottle,
};
use driftline_migrate::{MIN_BANDWIDTH, Phase, SendControl, SendStatus, TimeoutStrategy, send};
use vm_memory::{Bytes, GuestAddress};

#[test]
fn twenty_migrations_in_a_row() {
    let hosts = HostPair::new();
    let mut guest = hosts.start(MemoryConfig::small());
    let mut writes = 0;
    for round in 0..20 {
        let there = hosts.receiver();
        let report = send(&*guest, &there.to, &quick_send(&hosts), &SendControl::new()).unwrap();
        let arrived = there.guest();
        assert_eq!(guest.run_state(), RunState::Stopped, "round {round}");
        assert_eq!(arrived.guest.run_state(), RunState::Running, "round {round}");
        assert_eq!(report.status, SendStatus::Completed);
        assert_eq!(report.vm_id, guest.vm_id());
        assert!(report.passes.len() >= 2 && report.downtime_ms > 0.0, "{report:?}");
        let frames: u64 = report.passes.iter().map(|p| p.frames).sum();
        assert_eq!(frames, report.normal_frames + report.zero_frames);
        assert_eq!(arrived.report.normal_frames, report.normal_frames);
        arrived.guest.verify().unwrap();
        guest = arrived.guest;
        let arrived_with = guest.writes();
        assert!(arrived_with > writes, "round {round}: no write is lost");
        within(LONG, "the guest continues to write", || guest.writes() > arrived_with);
        writes = arrived_with;
    }
    guest.pause().unwrap();
    guest.verify().unwrap();
    assert_eq!(hosts.drive.most_running(), 1, "I7");
    within(LONG, "every record is removed", || hosts.records_left().is_empty());
}

#[test]
fn bandwidth_limit_holds_while_the_guest_runs() {
    let hosts = HostPair::new();
    let guest = hosts.start(MemoryConfig::small());
    let there = hosts.receiver();
    let rate = MIN_BANDWIDTH;
    // The expected pause is computed with the limit, so the target must be long.
    let downtime = Duration::from_secs(60);
    let options = driftline_migrate::SendOptions {
        max_bandwidth: Some(rate),
        downtime,
        ..quick_send(&hosts)
    };
    let sent = Sender::start(&guest, &there.to, &options).result();
    let report = sent.as_ref().unwrap();
    // All but the last pass.
    let slow = &report.passes[..report.passes.len() - 1];
    let (bytes, ms) = slow.iter().fold((0, 0.0), |(b, ms), p| (b + p.bytes, ms + p.time_ms));
    assert!(bytes > rate / 8, "{report:?}");
    assert!(ms >= 900.0 * bytes as f64 / rate as f64, "{report:?}");
    exactly_one_runs(&hosts, &guest, &sent, there, "a bandwidth");
}

#[test]
fn paused_guest_stays_paused() {
    let hosts = HostPair::new();
    let guest = hosts.start(MemoryConfig::small());
    guest.pause().unwrap();
    let writes = guest.writes();
    let there = hosts.receiver();
    let report = send(&*guest, &there.to, &quick_send(&hosts), &SendControl::new()).unwrap();
    assert_eq!(report.passes.len(), 2, "memory, and an empty last pass");
    let arrived = there.guest();
    assert_eq!(arrived.guest.run_state(), RunState::Paused);
    assert!(!arrived.report.running);
    assert_eq!(arrived.guest.writes(), writes);
    arrived.guest.verify().unwrap();
    arrived.guest.resume().unwrap();
}

#[test]
fn fast_writer_is_given_up_or_paused() {
    let hosts = HostPair::new();
    let config = MemoryConfig { writes_per_s: 0, ..MemoryConfig::small() };
    let guest = hosts.start(config);
    let mut options = quick_send(&hosts);
    options.downtime = Duration::ZERO;
    options.max_passes = 4;
    // Also on a busy machine the guest writes during each pass.
    let slow = |to: &str| {
        let writer = guest.clone();
        let written = move || await_writes(&*writer, || writer.writes(), 1000);
        Proxy::start(to, ProxyPlan::default().before_from_source(tag("PASS_END"), written))
    };
    let there = hosts.receiver();
    let proxy = slow(&there.to);
    let error = send(&*guest, &proxy.to, &options, &SendControl::new()).unwrap_err();
    assert_eq!(error.phase, Phase::Precopy);
    assert!(error.to_string().contains("outruns the link"), "{error}");
    assert!(error.to_string().ends_with("the guest continues here"), "{error}");
    assert_eq!(guest.run_state(), RunState::Running);
    let refusal = there.failure();
    assert!(refusal.contains("outruns the link"), "the destination has the reason: {refusal}");

    options.timeout_strategy = TimeoutStrategy::Switchover;
    let there = hosts.receiver();
    let proxy = slow(&there.to);
    let report = send(&*guest, &proxy.to, &options, &SendControl::new()).unwrap();
    assert_eq!(report.passes.len(), 5);
    assert!(report.converged.contains("outruns the link"), "{}", report.converged);
    there.guest().guest.verify().unwrap();
    assert_eq!(hosts.drive.most_running(), 1, "I7");
}

#[test]
fn guests_of_trait_objects_move_too() {
    let hosts = HostPair::new();
    let concrete = hosts.start(MemoryConfig::still());
    let guest: Arc<dyn Guest> = concrete.clone();
    let there = hosts.receiver();
    send(&*guest, &there.to, &quick_send(&hosts), &SendControl::new()).unwrap();
    there.guest().guest.verify().unwrap();
}

#[test]
fn zero_frames_overwrite_older_content() {
    let hosts = HostPair::new();
    let guest = MemoryGuest::new(VmId::random(), MemoryConfig::still()).unwrap();
    let at = GuestAddress(5 * PAGE_SIZE);
    guest.ram().write_slice(&[7; PAGE_SIZE as usize], at).unwrap();
    // Zeroed after pass 0 has sent the content.
    let zeroed = guest.clone();
    let zero = move || zeroed.ram().write_slice(&[0; PAGE_SIZE as usize], at).unwrap();
    let there = hosts.receiver();
    let plan = ProxyPlan::default().before_from_source(tag("PASS_END"), zero);
    let proxy = Proxy::start(&there.to, plan);
    let report = send(&*guest, &proxy.to, &quick_send(&hosts), &SendControl::new()).unwrap();
    assert_eq!((report.normal_frames, report.zero_frames), (1, 1), "{report:?}");
    let arrived = there.guest();
    let mut page = [1; PAGE_SIZE as usize];
    arrived.guest.ram().read_slice(&mut page, at).unwrap();
    assert_eq!(page, [0; PAGE_SIZE as usize]);
}

#[test]
fn memory_is_preallocated_before_it_arrives() {
    const FRAMES: u64 = 256;
    let hosts = HostPair::new();
    let guest = MemoryGuest::new(VmId::random(), MemoryConfig::still()).unwrap();
    for frame in 0..FRAMES {
        guest.ram().write_slice(&[7; 8], GuestAddress(frame * PAGE_SIZE)).unwrap();
    }
    let built = Arc::default();
    let there = hosts.receiver_of(ShowsGuest(hosts.factory(), Arc::clone(&built)));
    // Pass 0 arrives after the destination has preallocated its frames.
    let preallocated = move || {
        within(LONG, "all frames are preallocated", || {
            built
                .lock()
                .unwrap()
                .as_ref()
                .is_some_and(|g: &Arc<MemoryGuest>| g.prefaulted() >= FRAMES)
        });
    };
    let plan = ProxyPlan::default().before_from_source(tag("PASS_BEGIN"), preallocated);
    let proxy = Proxy::start(&there.to, plan);
    send(&*guest, &proxy.to, &quick_send(&hosts), &SendControl::new()).unwrap();
    let arrived = there.guest();
    // Once after EXPECT, once when the frames arrive.
    assert_eq!(arrived.guest.prefaulted(), 2 * FRAMES);
}

/// A factory that shows the guest that it has built.
struct ShowsGuest(MemoryGuestFactory, Arc<Mutex<Option<Arc<MemoryGuest>>>>);

impl GuestFactory for ShowsGuest {
    type Guest = MemoryGuest;

    fn create_with_copies(
        &self,
        vm_id: VmId,
        config: &[u8],
        drives: &[DriveHead],
    ) -> Result<GuestWithCopies<MemoryGuest>, GuestError> {
        let (guest, copies) = self.0.create_with_copies(vm_id, config, drives)?;
        *self.1.lock().unwrap() = Some(guest.clone());
        Ok((guest, copies))
    }

    fn create_on(
        &self,
        vm_id: VmId,
        config: &[u8],
        shared: &SharedGuest,
    ) -> Result<Arc<MemoryGuest>, GuestError> {
        self.0.create_on(vm_id, config, shared)
    }

    fn create_with_drives(
        &self,
        from: &Origin,
        config: &[u8],
        drives: &[DriveHead],
    ) -> Result<GuestWithCopies<MemoryGuest>, GuestError> {
        self.0.create_with_drives(from, config, drives)
    }
}

/// A guest whose memory is written while its state is saved, as KVM does with clock pages.
struct WritesWhenSaved(Arc<MemoryGuest>);

const LATE: u64 = 7;

driftline_guest::delegate!(
    WritesWhenSaved as guest => *guest.0;
    GuestIdentity, GuestContents, Populate, DirtyLog, WriteThrottle, HandOver,
);

impl Lifecycle for WritesWhenSaved {
    fn run_state(&self) -> RunState {
        self.0.run_state()
    }
    fn pause(&self) -> Result<RunState, GuestError> {
        self.0.pause()
    }
    fn pause_and_save(&self) -> Result<SavedPause, GuestError> {
        let since = Instant::now();
        let before = self.pause()?;
        Ok(SavedPause { before, since, saved: self.save_state() })
    }
    fn resume(&self) -> Result<(), GuestError> {
        self.0.resume()
    }
    fn stop(&self, why: &str) {
        self.0.stop(why);
    }
    fn vcpu_pauses(&self) -> Vec<VcpuPauses> {
        self.0.vcpu_pauses()
    }
}

impl Stateful for WritesWhenSaved {
    fn save_state(&self) -> SavedState {
        let at = GuestAddress(LATE * PAGE_SIZE);
        self.ram().write_slice(&[9; PAGE_SIZE as usize], at).unwrap();
        self.0.save_state()
    }
    fn restore_state(&self, sections: &[Section], clock: Clock) -> Result<(), GuestError> {
        self.0.restore_state(sections, clock)
    }
    fn state_heads(&self) -> Vec<SectionHead> {
        self.0.state_heads()
    }
    fn check_state_heads(&self, heads: &[SectionHead]) -> Result<(), GuestError> {
        self.0.check_state_heads(heads)
    }
}

#[test]
fn memory_written_by_saving_state_arrives() {
    let hosts = HostPair::new();
    let guest = WritesWhenSaved(hosts.start(MemoryConfig::still()));
    let there = hosts.receiver();
    send(&guest, &there.to, &quick_send(&hosts), &SendControl::new()).unwrap();
    let arrived = there.guest();
    let mut page = [0; PAGE_SIZE as usize];
    arrived.guest.ram().read_slice(&mut page, GuestAddress(LATE * PAGE_SIZE)).unwrap();
    assert_eq!(page, [9; PAGE_SIZE as usize]);
}
