//! Saving a guest in the middle of its work and continuing it in another machine.

use std::sync::Arc;
use std::time::Duration;

use driftline_dirty_tracker::{FrameRun, Gfn};
use driftline_guest::{
    Clock, DirtyLog, GuestContents, GuestFactory, GuestIdentity, Lifecycle, Paused, Section,
    SectionHead, SectionTag, Stateful,
};
use driftline_images::PayloadReport;
use driftline_machine::config::{DEFAULT_RING_ENTRIES, HostConfig, MachineConfig};
use driftline_machine::machine::{KvmMachine, MachineFactory};
use driftline_machine::testing::full;
use driftline_machine::tracking::TrackingMode;
use driftline_machine::vm::Vm;
use vm_memory::{Bytes, GuestAddress};

use crate::harness::*;

pub fn copy(from: &KvmMachine, to: &KvmMachine, runs: impl IntoIterator<Item = FrameRun>) {
    let mut buffer = vec![0; 1 << 20];
    for chunk in runs.into_iter().flat_map(|run| run.chunks(256)) {
        let at = GuestAddress(chunk.start.gpa());
        let buffer = &mut buffer[..chunk.bytes() as usize];
        from.ram().read_slice(buffer, at).unwrap();
        to.ram().write_slice(buffer, at).unwrap();
    }
}

/// Moves a running guest into a new machine: copies all memory while the guest runs, then the
/// changed frames while it is paused.
pub fn move_to_new(machine: &KvmMachine, console: &SerialLog, clock: Clock) -> Arc<KvmMachine> {
    move_to_new_on(machine, console.host(), clock)
}

/// Moves a guest as [`move_to_new`] does, into a machine with the options `host`.
pub fn move_to_new_on(machine: &KvmMachine, host: HostConfig, clock: Clock) -> Arc<KvmMachine> {
    let factory = MachineFactory::new(host);
    let new = factory.create(machine.vm_id(), &machine.config()).unwrap();
    let mut subscription = machine.subscribe("test").unwrap();
    copy(machine, &new, machine.populated().unwrap());
    for _ in 0..3 {
        machine.collect().unwrap();
        let epoch = subscription.drain();
        copy(machine, &new, epoch.runs());
        epoch.commit();
    }
    let paused = Paused::new(machine).unwrap();
    assert!(paused.was_running());
    let epoch = paused.drain(&mut subscription).unwrap();
    copy(machine, &new, epoch.runs());
    epoch.commit();
    let sections = paused.save_state().unwrap();
    paused.keep_paused();
    machine.stop("it is elsewhere now");
    new.restore_state(&sections, clock).unwrap();
    new
}

#[test]
fn writing_guest_continues_in_another_machine() {
    if !kvm_or_skip("writing_guest_continues_in_another_machine") {
        return;
    }
    let (smallest, modes) = (smallest_ring(&payload("payload,ws=16M")), crate::tracking::modes());
    for (tracking, ring_entries) in [
        (TrackingMode::DirtyRing, DEFAULT_RING_ENTRIES),
        (TrackingMode::DirtyRing, smallest),
        (TrackingMode::DirtyBitmap, DEFAULT_RING_ENTRIES),
        (TrackingMode::DirtyBitmapManual, DEFAULT_RING_ENTRIES),
        (TrackingMode::UserfaultWp, DEFAULT_RING_ENTRIES),
    ]
    .into_iter()
    .filter(|(mode, _)| modes.contains(mode))
    {
        // Overrun rings, where ring 0 is emulated; whole loops of the guest on every host.
        let ring = if ring_entries == smallest { 0 } else { 3 };
        for (vcpus, ws, rate) in [(1, "4M", "320M"), (2, "8M", "max")] {
            let console = SerialLog::new();
            let spec = format!("payload,ws={ws},rate={rate},pattern=random,ring={ring}");
            let config = MachineConfig { vcpus, tracking, ring_entries, ..payload(&spec) };
            let mut machine = launch(config, &console);
            machine.resume().unwrap();
            console.wait_for("start", |text| text.contains("payload ready"));
            for i in 0..if full() { 10 } else { 2 } {
                std::thread::sleep(Duration::from_millis(20 + 41 * i));
                let clock = if i % 2 == 0 { Clock::Advance } else { Clock::Continue };
                let new = move_to_new(&machine, &console, clock);
                new.resume().unwrap();
                machine = new;
            }
            let already = console.reports().iter().filter(|r| r.vcpu == 0).count();
            console.wait_for_reports(vcpus, already + 2);
            machine.stop("it has shown enough");
            console.assert_no_errors();
        }
    }
}

#[test]
fn only_a_migration_shows_in_the_guests_clock() {
    if !kvm_or_skip("only_a_migration_shows_in_the_guests_clock") {
        return;
    }
    for (clock, shows) in
        [(Clock::Advance, true), (Clock::AdvanceAnyTime, true), (Clock::Continue, false)]
    {
        let console = SerialLog::new();
        let machine = launch(payload("payload,ws=1M,rate=1M,burst=8"), &console);
        machine.resume().unwrap();
        console.wait_for_reports(1, 1);
        machine.pause().unwrap();
        let sections = machine.save_state().unwrap();
        let factory = MachineFactory::new(console.host());
        let new = factory.create(machine.vm_id(), &machine.config()).unwrap();
        copy(&machine, &new, machine.populated().unwrap());
        let away = Duration::from_secs(1);
        std::thread::sleep(away);
        let already = console.reports().len();
        let shown_ms = console.reports().last().map_or(0, |report| report.t_ms);
        new.restore_state(&sections, clock).unwrap();
        new.resume().unwrap();
        // The wall clock measures how long the guest was away. It may be slewed: the gap by the
        // guest's own clock may be a little less than `away`.
        let is_long = |report: PayloadReport| report.gap_us > away.as_micros() as u64 * 9 / 10;
        // The first reports are those that the guest had not printed when it was paused.
        let is_later = |report: PayloadReport| report.t_ms > shown_ms + 1500;
        console.wait_for("report after the move", |text| match clock {
            Clock::Advance | Clock::AdvanceAnyTime => {
                PayloadReport::all_of(text).skip(already).any(is_long)
            }
            Clock::Continue => PayloadReport::all_of(text).any(is_later),
        });
        let reports = console.reports().split_off(already);
        assert_eq!(reports.iter().copied().any(is_long), shows, "{clock:?}: {reports:?}");
        console.assert_no_errors();
    }
}

#[test]
fn save_and_restore_need_a_paused_guest() {
    if !kvm_or_skip("save_and_restore_need_a_paused_guest") {
        return;
    }
    let machine = launch(payload("payload,ws=1M"), &SerialLog::new());
    let sections = machine.save_state().unwrap();
    assert_eq!(sections.len(), 4);
    machine.restore_state(&sections, Clock::Continue).unwrap();
    machine.resume().unwrap();
    let running = machine.save_state().unwrap_err();
    assert_eq!(running.to_string(), "cannot save a guest that is running");
    assert!(machine.restore_state(&sections, Clock::Continue).is_err());
    machine.pause().unwrap();
    let has_run = machine.restore_state(&sections, Clock::Continue).unwrap_err();
    assert!(has_run.to_string().contains("never run"), "{has_run}");
}

#[test]
fn hostile_sections_are_refused() {
    if !kvm_or_skip("hostile_sections_are_refused") {
        return;
    }
    let host = MachineConfig { vcpus: 2, ..payload("payload,ws=1M") };
    let machine = launch(host, &SerialLog::new());
    let good = machine.save_state().unwrap();
    let refused = |sections: &[Section]| {
        machine.restore_state(sections, Clock::Continue).unwrap_err().to_string()
    };
    let heads = machine.state_heads();
    let saved = good.iter().map(|s| (s.tag, s.instance, s.must_understand));
    assert!(heads.iter().map(|h| (h.tag, h.instance, h.must_understand)).eq(saved));
    machine.check_state_heads(&heads).unwrap();
    let refused_head = |change: fn(&mut SectionHead)| {
        let mut heads = heads.clone();
        change(&mut heads[1]);
        machine.check_state_heads(&heads).unwrap_err().to_string()
    };
    assert!(refused_head(|head| head.version = 2).contains("vCPU state (instance 0)"));
    assert!(refused_head(|head| head.version = 2).contains("version 2"));
    assert!(refused_head(|head| head.instance = 2).contains("no such part"));
    assert!(refused_head(|head| head.tag = SectionTag(0x7fff)).contains("unknown section 32767"));
    assert!(refused(&[]).contains("missing"));
    assert!(refused(&good[..2]).contains("vCPU state (instance 1) is malformed: it is missing"));
    let mut twice = good.clone();
    twice.push(good[0].clone());
    assert!(refused(&twice).contains("twice"));
    let mut unknown = good.clone();
    unknown.push(Section::new(SectionTag::THREAD_WORKER, 0, Vec::new()));
    assert!(refused(&unknown).contains("worker state"));
    unknown.last_mut().unwrap().must_understand = false;
    machine.restore_state(&unknown, Clock::Continue).unwrap();
    let mut third = good.clone();
    third.push(Section { instance: 2, ..good[1].clone() });
    assert!(refused(&third).contains("2 vCPUs and 0 virtio devices has no such part"));
    let mut version = good.clone();
    version[0].bytes[0] = 2;
    assert!(refused(&version).contains("version 2"));

    // Any flipped or cut byte yields an answer, not a panic, and the machine still exists.
    let mut seeded = SeededRandom(1);
    let mut random = |below: usize| seeded.below(below as u64) as usize;
    for _ in 0..300 {
        let mut bad = good.clone();
        let which = random(bad.len());
        let bytes = &mut bad[which].bytes;
        let len = bytes.len();
        match random(3) {
            0 => bytes.truncate(random(len)),
            1 => bytes[random(len)] ^= 1 << random(8),
            _ => (0..20).for_each(|_| bytes[random(len)] = random(256) as u8),
        }
        let _ = machine.restore_state(&bad, Clock::Continue);
    }
    let mut half = good.clone();
    half.last_mut().unwrap().bytes.clear();
    refused(&half);
    machine.restore_state(&good, Clock::Continue).unwrap();
    machine.resume().unwrap();
    assert_eq!(machine.info().vcpus, 2);
}

/// Returns the offset of `what` in `bytes`, where it occurs once.
#[track_caller]
fn place_of(what: &[u8], bytes: &[u8]) -> usize {
    let mut found = (0..bytes.len()).filter(|i| bytes[*i..].starts_with(what));
    let place = found.next().unwrap();
    assert_eq!(found.next(), None, "there is one only");
    place
}

#[test]
fn unsupported_state_is_refused_by_name() {
    if !kvm_or_skip("unsupported_state_is_refused_by_name") {
        return;
    }
    let machine = launch(payload("payload,ws=1M"), &SerialLog::new());
    let good = machine.save_state().unwrap();
    let refused = |change: &dyn Fn(&mut [u8])| {
        let mut bad = good.clone();
        let vcpu = bad.iter_mut().find(|s| s.tag == SectionTag::KVM_VCPU).unwrap();
        change(&mut vcpu.bytes);
        machine.restore_state(&bad, Clock::Continue).unwrap_err().to_string()
    };
    // Replaces STAR, which every host has, with an MSR that no host has. An entry is its length,
    // 16, and then its bytes.
    let msr = |index: u32| {
        let mut bytes = vec![16];
        bytes.extend(index.to_le_bytes());
        bytes.extend([0; 4]);
        bytes
    };
    let error = refused(&|bytes| {
        let at = place_of(&msr(0xc000_0081), bytes);
        bytes[at..at + 9].copy_from_slice(&msr(0x1234));
        bytes[at + 9..at + 17].copy_from_slice(&0x77u64.to_le_bytes());
    });
    assert!(error.contains("this host does not take MSR 0x1234 = 0x77"), "{error}");
    // EFER is at offset 264 of the special registers, which have 312 bytes. Bit 12 is SVM's.
    let error = refused(&|bytes| {
        let holds = |at: usize, what: &[u8]| bytes.get(at..).is_some_and(|b| b.starts_with(what));
        // The general registers before them have 144 bytes.
        let sregs: Vec<usize> = (0..bytes.len())
            .filter(|i| holds(*i, &[0x90, 0x01]) && holds(i + 146, &[0xb8, 0x02]))
            .map(|i| i + 148)
            .collect();
        assert_eq!(sregs.len(), 1);
        bytes[sregs[0] + 264 + 1] |= 1 << 4;
    });
    assert!(error.contains("bit 12 of its EFER") && error.contains("no feature"), "{error}");
    machine.restore_state(&good, Clock::Continue).unwrap();
}

#[test]
fn only_a_restore_renews_the_generation_id() {
    if !kvm_or_skip("only_a_restore_renews_the_generation_id") {
        return;
    }
    let console = SerialLog::new();
    let machine = launch(payload("payload,ws=1M,rate=1M,burst=8"), &console);
    let sections = machine.save_state().unwrap();
    let id = |machine: &KvmMachine| {
        let mut id = [0; 16];
        machine.ram().read_slice(&mut id, GuestAddress(0xf_f000)).unwrap();
        id
    };
    let factory = MachineFactory::new(console.host());
    let restored = |clock| {
        let new = factory.create(machine.vm_id(), &machine.config()).unwrap();
        copy(&machine, &new, machine.populated().unwrap());
        let mut subscription = new.subscribe("test").unwrap();
        new.restore_state(&sections, clock).unwrap();
        let dirty = subscription.drain().runs().any(|r| (r.start..r.end()).contains(&Gfn(0xff)));
        (id(&new), dirty)
    };
    assert_ne!(id(&machine), [0; 16]);
    assert_eq!(restored(Clock::Advance), (id(&machine), false));
    let (first, second) = (restored(Clock::Continue), restored(Clock::Continue));
    assert!(first.0 != id(&machine) && first.0 != second.0);
    assert!(first.1, "the write is in the next epoch");
}
