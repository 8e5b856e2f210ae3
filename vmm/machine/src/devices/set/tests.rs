//! Tests of the set with disks and scripted devices.

use std::path::Path;

use driftline_dirty_tracker::{FrameRun, Gfn, PAGE_SIZE};
use driftline_guest::{CopyBeforeWriteError, FrozenBlocks, GuestDrive};

use super::*;
use crate::config::{BackendKind, DiskConfig};
use crate::devices::block::BlockDevice;
use crate::devices::virtio::Device;
use crate::devices::virtio::fake::{FakeDevice, Script};
use crate::testing::{payload_config, soon};

fn disk(dir: &Path, id: &str) -> DiskConfig {
    let path = dir.join(id);
    std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    crate::testing::disk(id, &path, 1 << 20)
}

/// Returns whether another guest could acquire the disk. Releases it again: a closed file may stay
/// locked for a moment, by a process that another test starts.
fn is_free(disk: &DiskConfig) -> bool {
    let opened = BlockDevice::open(disk, 1, VmId::random(), None);
    opened.is_ok_and(|mut block| {
        block.acquire(NextHost::Another).is_ok() && block.release(soon(), NextHost::Another).is_ok()
    })
}

fn memory() -> Memory {
    Memory::new(16 << 20, &Default::default()).unwrap()
}

fn spawn(id: &str, device: Box<dyn Device>, memory: &Memory) -> Transport {
    Transport::spawn(id, device, memory.ram().clone()).unwrap()
}

fn with_disks<const N: usize>(disks: [&DiskConfig; N], memory: &Memory) -> DeviceSet {
    let config = MachineConfig {
        devices: disks.into_iter().cloned().map(DeviceConfig::Disk).collect(),
        ..payload_config(BackendKind::Kvm)
    };
    DeviceSet::build(&config, memory, VmId::random(), false, &HostConfig::default()).unwrap()
}

/// Waits until a write waits for room.
#[track_caller]
fn wait_for_write(frozen: &FrozenBlocks) {
    let end = soon();
    while frozen.waits().times == 0 {
        assert!(Instant::now() < end, "the write does not wait");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Nothing copies the disk's old content, and the guest overwrites more than the side buffer
/// holds.
#[test]
fn pause_cancels_disk_waits_for_an_epoch() {
    const BYTES: u64 = 8 << 20;
    let (dir, memory) = (tempfile::tempdir().unwrap(), memory());
    let config = DiskConfig { bytes: BYTES, ..disk(dir.path(), "a") };
    std::fs::File::create(&config.path).unwrap().set_len(BYTES).unwrap();
    let set = with_disks([&config], &memory);
    let source = &set.sources()[0];
    let (copy_before_write, file) =
        (source.copy_before_write().unwrap(), Arc::new(source.open().unwrap()));
    let all = FrameRun { start: Gfn(0), count: BYTES / PAGE_SIZE };
    let freeze =
        || copy_before_write.freeze(file.clone(), BYTES, [all].into_iter().collect()).unwrap();
    let mut frozen = freeze();
    set.resume();
    std::thread::scope(|scope| {
        // As the disk's device thread does.
        let writes = scope.spawn(|| copy_before_write.before_write(0, BYTES));
        wait_for_write(&frozen);
        // Before any vCPU is paused.
        set.cancel_disk_waits();
        writes.join().unwrap();
        set.quiesce().unwrap();
    });
    // The error is another one if the wait was not cancelled. The copies are large, because each
    // wakes the write once. On busy processors a wake takes milliseconds, and the write waits for
    // two seconds at most.
    let (mut runs, mut some) = (Vec::new(), vec![0; 1 << 20]);
    let error = frozen.next(&mut runs, &mut some).unwrap_err();
    assert!(matches!(error, CopyBeforeWriteError::Paused), "{error}");
    drop(frozen);
    // Writes wait again, whether the guest has resumed or never paused because a vCPU could not
    // be paused.
    for paused in [true, false] {
        let mut frozen = freeze();
        match paused {
            true => set.resume(),
            false => {
                set.cancel_disk_waits();
                set.allow_disk_waits();
            }
        }
        std::thread::scope(|scope| {
            scope.spawn(|| copy_before_write.before_write(0, BYTES));
            wait_for_write(&frozen);
            while frozen.next(&mut runs, &mut some).unwrap() > 0 {}
        });
    }
}

#[test]
fn failed_acquire_releases_all_devices() {
    let (dir, memory) = (tempfile::tempdir().unwrap(), memory());
    let (a, b) = (disk(dir.path(), "a"), disk(dir.path(), "b"));
    let set = with_disks([&a, &b], &memory);
    let mut other = BlockDevice::open(&b, 1, VmId::random(), None).unwrap();
    other.acquire(NextHost::Another).unwrap();
    let why = set.acquire(NextHost::Another).unwrap_err().to_string();
    assert!(why.contains("in use") && why.contains(&*b.path.to_string_lossy()), "{why}");
    assert!(is_free(&a), "what was acquired already is released");
    other.release(soon(), NextHost::Another).unwrap();
    set.acquire(NextHost::Another).unwrap();
    assert!(!is_free(&a) && !is_free(&b));
    set.release(NextHost::Another).unwrap();
    assert!(is_free(&a) && is_free(&b));
}

/// All devices share one time limit.
#[test]
fn devices_are_acquired_in_parallel() {
    let memory = memory();
    let scripts: [Arc<Script>; 2] = Default::default();
    let device =
        |(script, id): (&Arc<Script>, _)| spawn(id, Box::new(FakeDevice(script.clone())), &memory);
    let devices = scripts.iter().zip(["one", "other"]).map(device).collect();
    let set = DeviceSet::of(devices, DeviceLimits::default());
    scripts.iter().for_each(|script| Script::set(&script.stuck, true));
    std::thread::scope(|scope| {
        let acquiring = scope.spawn(|| set.acquire(NextHost::Another));
        let all_wait = || scripts.iter().all(|script| Script::is(&script.got_stuck));
        while !all_wait() && !acquiring.is_finished() {
            std::thread::sleep(Duration::from_millis(1));
        }
        scripts.iter().for_each(|script| Script::set(&script.stuck, false));
        acquiring.join().unwrap().unwrap();
    });
}

#[test]
fn failed_release_does_not_stop_the_others() {
    let (dir, memory) = (tempfile::tempdir().unwrap(), memory());
    let a = disk(dir.path(), "a");
    let script = Arc::new(Script::default());
    let block = BlockDevice::open(&a, 1, VmId::random(), None).unwrap();
    let devices = vec![
        spawn("first", Box::new(FakeDevice(script.clone())), &memory),
        spawn("a", Box::new(block), &memory),
    ];
    let set = DeviceSet::of(devices, DeviceLimits::default());
    set.acquire(NextHost::Another).unwrap();
    Script::set(&script.refuses_release, true);
    assert_eq!(
        set.release(NextHost::Another).unwrap_err().to_string(),
        "the file or size of disk \"fake\" was exchanged since the guest's start, so the guest \
         cannot be moved"
    );
    assert!(is_free(&a));
    // Acquired again, because the guest continues on this host.
    set.acquire(NextHost::Another).unwrap();
    assert!(!is_free(&a));
}

#[test]
fn failed_quiesce_names_device_and_resumes_others() {
    let memory = memory();
    let scripts: [Arc<Script>; 2] = Default::default();
    let device =
        |(script, id): (&Arc<Script>, _)| spawn(id, Box::new(FakeDevice(script.clone())), &memory);
    let devices = scripts.iter().zip(["done", "stuck"]).map(device).collect();
    let stall = Duration::from_millis(50);
    let set = DeviceSet::of(devices, DeviceLimits { stall, ..DeviceLimits::default() });
    set.resume();
    Script::set(&scripts[1].busy, true);
    let why = set.quiesce().unwrap_err().to_string();
    assert_eq!(why, "virtio-rng \"stuck\" still has 1 requests in flight");
    let why = set.devices[0].save().unwrap_err().to_string();
    assert!(why.contains("only a paused device"), "it was resumed: {why}");
    Script::set(&scripts[1].busy, false);
    set.quiesce().unwrap();
    set.save().unwrap();
}

/// Returns a set of one device whose thread gets stuck, with short limits.
fn stuck_set(memory: &Memory) -> (DeviceSet, Arc<Script>) {
    let script = Arc::new(Script::default());
    let devices = vec![spawn("stuck", Box::new(FakeDevice(script.clone())), memory)];
    // A thread that receives a request after its deadline drops it and does not get stuck.
    let limit = Duration::from_millis(300);
    let set = DeviceSet::of(devices, DeviceLimits { stall: limit, release: limit, ask: limit });
    Script::set(&script.stuck, true);
    (set, script)
}

/// The device's thread receives the request after the deadline and drops it.
#[test]
fn missed_deadline_does_not_end_the_device() {
    let device = spawn("d", Box::new(FakeDevice(Arc::default())), &memory());
    let why = device.finish_save(device.begin_save(Instant::now())).unwrap_err().to_string();
    assert!(why.contains("virtio-rng \"d\" did not save its state"), "{why}");
    device.save().unwrap();
}

#[test]
fn stuck_device_is_named_by_every_request() {
    type SetRequest = fn(&DeviceSet) -> Result<(), RequestError>;
    let requests: [SetRequest; 6] = [
        |set| set.acquire(NextHost::Another),
        |set| set.release(NextHost::Another),
        |set| set.save().map(drop),
        |set| {
            let state =
                spawn("ok", Box::new(FakeDevice(Arc::default())), &self::memory()).save()?;
            let restores = set.begin_restore(vec![state]);
            restores.and_then(|pending| set.finish_restore(pending)).map_err(|(_, why)| why)
        },
        |set| set.detach(NextHost::Another).map(drop),
        |set| set.attach(&[]),
    ];
    let check = |request: SetRequest| {
        let (set, script) = stuck_set(&memory());
        let why = request(&set).unwrap_err().to_string();
        assert!(why.contains("virtio-rng \"stuck\" did not "), "{why}");
        assert!(why.contains("its backend is stuck"), "{why}");
        // The next request waits behind it, but no longer than its own limit.
        let why = set.quiesce().unwrap_err().to_string();
        assert!(why.contains("virtio-rng \"stuck\""), "{why}");
        Script::set(&script.stuck, false);
    };
    // Each waits for its limit, so they all wait at the same time.
    std::thread::scope(|scope| {
        for request in requests {
            scope.spawn(move || check(request));
        }
    });
}

#[test]
fn stuck_device_leaves_the_others_their_time() {
    let memory = memory();
    let scripts: [Arc<Script>; 2] = Default::default();
    let device =
        |(script, id): (&Arc<Script>, _)| spawn(id, Box::new(FakeDevice(script.clone())), &memory);
    let devices = scripts.iter().zip(["stuck", "other"]).map(device).collect();
    // Long enough for a device that is not stuck, even on a busy host.
    let limit = Duration::from_millis(500);
    let set = DeviceSet::of(devices, DeviceLimits { stall: limit, release: limit, ask: limit });
    Script::set(&scripts[0].stuck, true);
    let why = set.attach(&[]).unwrap_err().to_string();
    assert!(why.contains("\"stuck\" did not attach"), "{why}");
    assert!(Script::is(&scripts[1].attached));
    let why = set.detach(NextHost::Another).unwrap_err().to_string();
    assert!(why.contains("\"stuck\" did not release its peers"), "{why}");
    assert!(!Script::is(&scripts[1].attached));
    Script::set(&scripts[0].stuck, false);
}

#[test]
fn device_that_holds_nothing_is_not_asked() {
    let script = Arc::<Script>::default();
    Script::set(&script.holds_nothing, true);
    let device = spawn("idle", Box::new(FakeDevice(script.clone())), &memory());
    let limit = Duration::from_millis(20);
    let set =
        DeviceSet::of(vec![device], DeviceLimits { stall: limit, release: limit, ask: limit });
    Script::set(&script.stuck, true);
    set.release(NextHost::Another).unwrap();
    assert!(set.detach(NextHost::Another).unwrap().is_empty());
    set.attach(&[]).unwrap();
    set.acquire(NextHost::Another).unwrap();
    set.save().unwrap_err();
    assert!(!Script::is(&script.released) && !Script::is(&script.attached));
    Script::set(&script.stuck, false);
}

/// Returns a device that refuses no acquire from this host, and its script.
fn unrefusing(memory: &Memory) -> (Transport, Arc<Script>) {
    let script = Arc::<Script>::default();
    Script::set(&script.refuses_nothing_here, true);
    (spawn("stuck", Box::new(FakeDevice(script.clone())), memory), script)
}

#[test]
fn acquire_that_cannot_fail_is_not_awaited() {
    let (device, script) = unrefusing(&memory());
    let limit = Duration::from_millis(20);
    let set =
        DeviceSet::of(vec![device], DeviceLimits { stall: limit, release: limit, ask: limit });
    Script::set(&script.stuck, true);
    set.acquire(NextHost::This).unwrap();
    set.resume();
    assert!(!Script::is(&script.acquired), "it is stuck");
    let why = set.acquire(NextHost::Another).unwrap_err().to_string();
    assert!(why.contains("\"stuck\" did not acquire its files"), "{why}");
    Script::set(&script.stuck, false);
    // Queued behind the acquires and the resume.
    set.devices[0].begin_quiesce(soon()).wait().unwrap();
    assert!(Script::is(&script.resumed_acquired), "the acquire precedes the resume");
}

#[test]
fn acquire_that_may_fail_here_is_awaited() {
    let (set, script) = stuck_set(&memory());
    let why = set.acquire(NextHost::This).unwrap_err().to_string();
    assert!(why.contains("\"stuck\" did not acquire its files"), "{why}");
    Script::set(&script.stuck, false);
}

#[test]
fn device_without_a_thread_cannot_be_acquired() {
    let (device, _) = unrefusing(&memory());
    device.quit();
    let set = DeviceSet::of(vec![device], DeviceLimits::default());
    let end = soon();
    // The thread takes its time to end.
    let why = loop {
        assert!(Instant::now() < end, "it is acquired");
        match set.acquire(NextHost::This) {
            Ok(()) => std::thread::sleep(Duration::from_millis(1)),
            Err(why) => break why.to_string(),
        }
    };
    assert_eq!(why, "virtio-rng \"stuck\"'s thread has ended");
}

/// The paused guest waits for the refusal, so the device that is stuck must not delay it.
#[test]
fn refusal_does_not_wait_for_an_unawaited_device() {
    let memory = memory();
    let (device, stuck) = unrefusing(&memory);
    let refuses = Arc::<Script>::default();
    Script::set(&refuses.refuses_acquire, true);
    let other = spawn("other", Box::new(FakeDevice(refuses)), &memory);
    // Longer than this test takes.
    let limit = Duration::from_secs(60);
    let limits = DeviceLimits { stall: limit, release: limit, ask: limit };
    let set = DeviceSet::of(vec![device, other], limits);
    Script::set(&stuck.stuck, true);
    let began = Instant::now();
    let why = set.acquire(NextHost::This).unwrap_err().to_string();
    assert!(why.contains("\"fake\""), "{why}");
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    Script::set(&stuck.stuck, false);
}

#[test]
fn device_that_acquires_late_releases_again() {
    let memory = memory();
    let (mut set, script) = stuck_set(&memory);
    // Longer than this test takes: the stuck device gets no other request.
    set.limits.ask = Duration::from_secs(60);
    let began = Instant::now();
    let why = set.acquire(NextHost::Another).unwrap_err().to_string();
    assert!(why.contains("\"stuck\" did not acquire its files"), "{why}");
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    Script::set(&script.attached, true);
    Script::set(&script.stuck, false);
    // Queued behind it in the channel.
    set.devices[0].save().unwrap();
    assert!(Script::is(&script.released));
    assert!(!Script::is(&script.attached));
}

/// After a failed hand-over the guest continues here, and so does its disk (I7).
#[test]
fn release_past_its_deadline_is_not_carried_out() {
    let memory = memory();
    let (set, script) = stuck_set(&memory);
    set.attach(&[]).unwrap_err();
    set.release(NextHost::Another).unwrap_err();
    Script::set(&script.stuck, false);
    // Queued behind both in the channel.
    set.devices[0].acquire().unwrap();
    assert!(!Script::is(&script.released));
}
