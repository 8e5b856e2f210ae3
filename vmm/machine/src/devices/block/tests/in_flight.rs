//! Tests of requests in flight: their number is bounded, and they end when the device is paused or
//! reset.

use virtio_bindings::virtio_mmio::VIRTIO_MMIO_CONFIG;

use super::engine::manual::ManualEngine;
use super::*;

/// The field `size_max` of the configuration space, after the capacity.
const CONFIG_SIZE_MAX: u32 = VIRTIO_MMIO_CONFIG + 8;

/// Returns a drive whose engine is `engine`, big enough for large requests, and its driver.
fn drive_on(engine: &ManualEngine, without: u64) -> (Disk, Driver) {
    let (disk, driver, _) = drive_with_flusher(engine, without);
    (disk, driver)
}

fn drive_with_flusher(engine: &ManualEngine, without: u64) -> (Disk, Driver, Arc<Flusher>) {
    let (disk, block) = block_on(engine);
    let flusher = block.flusher().get();
    let driver = Driver::started_without(Box::new(block), without);
    (disk, driver, flusher)
}

fn drive_with_stats(engine: &ManualEngine) -> (Disk, Driver, StatsHandle) {
    let (disk, block) = block_on(engine);
    let stats = StatsHandle::Disk("d".to_owned(), block.counters().clone());
    (disk, Driver::started(Box::new(block)), stats)
}

fn block_on(engine: &ManualEngine) -> (Disk, BlockDevice) {
    let mut disk = Disk::new();
    disk.config.bytes = 64 << 20;
    disk.file.as_file().set_len(disk.config.bytes).unwrap();
    let file = Arc::new(DiskFile::open(&disk.config, disk.guest).unwrap());
    let block = BlockDevice::new(&disk.config, 2, file, Engine::Manual(engine.clone())).unwrap();
    (disk, block)
}

/// Makes a write of 8 MiB available. Returns its queue, its head and the place of its status.
fn post_large(driver: &mut Driver, queue: usize) -> (usize, u16, DriverBuffer) {
    let status = driver.readable(&[0xff]);
    let status = DriverBuffer { writable: true, ..status };
    let data = DriverBuffer { addr: 0, len: 8 << 20, writable: false };
    let header = header(driver, VIRTIO_BLK_T_OUT, 0);
    (queue, driver.post(queue, &[header, data, status]), status)
}

#[track_caller]
fn wait_for_pending(engine: &ManualEngine, count: usize) {
    let end = Instant::now() + Duration::from_secs(20);
    while engine.pending() < count {
        assert!(Instant::now() < end, "{} of {count}", engine.pending());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn bytes_in_flight_are_bounded() {
    let engine = ManualEngine::new();
    let (_disk, mut driver, stats) = drive_with_stats(&engine);
    let mut sent: Vec<_> = (0..6).map(|n| post_large(&mut driver, n % 2)).collect();
    driver.kick(0);
    driver.kick(1);
    // The device counts a stall when it starts no more requests.
    let end = Instant::now() + Duration::from_secs(20);
    while !matches!(stats.read(), DeviceStats::Disk { stalls: 1.., .. }) {
        assert!(Instant::now() < end, "{:?}", stats.read());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(engine.pending(), (MAX_BYTES_IN_FLIGHT >> 23) as usize);
    // A pause is refused in time, with the reason.
    let began = Instant::now();
    let refused = driver.transport.begin_quiesce(began + Duration::from_millis(50)).wait();
    assert!(refused.unwrap_err().to_string().contains("still has 4 requests in flight"));
    assert!(began.elapsed() < Duration::from_secs(5));
    // The waiting chains are taken when there is room, even if a pause makes that room.
    let quiescing = driver.transport.begin_quiesce(began + Duration::from_secs(20));
    engine.complete_all();
    quiescing.wait().unwrap();
    assert_eq!(engine.pending(), 0);
    driver.transport.resume();
    sent.extend((0..6).map(|n| post_large(&mut driver, n % 2)));
    driver.kick(0);
    driver.kick(1);
    for (queue, head, status) in sent {
        driver.wait_used(queue, head);
        assert_eq!(driver.bytes(status), [OK]);
    }
    assert_eq!(engine.submitted().len(), 12);
}

#[test]
fn oversized_request_fails_alone() {
    for with in engines() {
        let mut disk = Disk::new();
        disk.config.bytes = 64 << 20;
        disk.file.as_file().set_len(disk.config.bytes).unwrap();
        let (mut driver, _) = disk.driver(with);
        let piece = DriverBuffer { addr: 0, len: 11 << 20, writable: false };
        assert_eq!(request(&mut driver, VIRTIO_BLK_T_OUT, 0, &[piece; 3]), IOERR);
        assert_eq!(request(&mut driver, VIRTIO_BLK_T_OUT, 0, &[piece; 2]), OK);
        assert_ne!(driver.offered() & 1 << VIRTIO_BLK_F_SIZE_MAX, 0);
        let size_max = driver.read(CONFIG_SIZE_MAX);
        assert!(u64::from(size_max) * u64::from(SEG_MAX) <= 32 << 20);
    }
}

#[test]
fn busy_device_is_quiesced_between_requests() {
    let engine = ManualEngine::slow(Duration::from_millis(20));
    engine.block(true);
    let (_disk, mut driver) = drive_on(&engine, 0);
    let count: usize = 60;
    let mut heads = Vec::new();
    for _ in 0..count {
        let status = driver.writable(1);
        let flush = header(&mut driver, VIRTIO_BLK_T_FLUSH, 0);
        heads.push(driver.post(0, &[flush, status]));
    }
    driver.kick(0);
    let end = Instant::now() + Duration::from_secs(20);
    while engine.submitted().is_empty() {
        assert!(Instant::now() < end, "no request is started");
        std::thread::sleep(Duration::from_millis(1));
    }
    let quiescing = driver.transport.begin_quiesce(end);
    engine.block(false);
    quiescing.wait().unwrap();
    assert!(engine.submitted().len() < count, "all requests came first");
    driver.transport.resume();
    for head in heads {
        driver.wait_used(0, head);
    }
    assert_eq!(engine.submitted().len(), count);
}

#[test]
fn writes_without_flush_feature_are_durable() {
    let ask = |driver: &mut Driver| {
        assert_eq!(write(driver, 0, &pattern(1, 4096)), OK);
        assert_eq!(read(driver, 0, 512).0, OK);
        for kind in [VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES] {
            let ranges = driver.readable(&range(64, 8, 0));
            assert_eq!(request(driver, kind, 0, &[ranges]), OK);
        }
    };
    let flush = 1 << VIRTIO_BLK_F_FLUSH;
    for (without, durable) in [(0, false), (flush, true)] {
        let engine = ManualEngine::slow(Duration::ZERO);
        let (_disk, mut driver) = drive_on(&engine, without);
        ask(&mut driver);
        assert_eq!(engine.submitted().len(), 4);
        assert!(engine.submitted().iter().all(|operation| operation.durable == durable));
        // A new negotiation counts.
        driver.start(!(flush ^ without));
        ask(&mut driver);
        assert!(engine.submitted()[4..].iter().all(|operation| operation.durable != durable));
    }
    for with in engines() {
        let disk = Disk::new();
        let mut driver = Driver::started_without(Box::new(disk.block(with)), flush);
        ask(&mut driver);
        assert_eq!(disk.contents(0, 4096), pattern(1, 4096));
    }
}

/// Makes a flush available, which the engine keeps pending.
fn post_flush(driver: &mut Driver, engine: &ManualEngine) {
    let status = driver.writable(1);
    let flush = header(driver, VIRTIO_BLK_T_FLUSH, 0);
    driver.post(0, &[flush, status]);
    driver.kick(0);
    wait_for_pending(engine, 1);
}

#[test]
fn undelivered_loss_is_reported_to_the_next_driver() {
    let flush = |driver: &mut Driver| request(driver, VIRTIO_BLK_T_FLUSH, 0, &[]);
    for breaks_a_rule in [false, true] {
        let engine = ManualEngine::new();
        let (_disk, mut driver, flusher) = drive_with_flusher(&engine, 0);
        post_flush(&mut driver, &engine);
        flusher.note_lost(&io::Error::from_raw_os_error(libc::EIO));
        if breaks_a_rule {
            // A request without room for a status.
            let half = driver.readable(&[0; 15]);
            driver.post(1, &[half]);
            driver.kick(1);
            driver.wait_stopped("a malformed request");
            engine.complete_all();
        } else {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let end = Instant::now() + Duration::from_secs(20);
                    while !engine.is_waited_for() && Instant::now() < end {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    engine.complete_all();
                });
                driver.write(VIRTIO_MMIO_STATUS, 0);
            });
        }
        driver.start(!0);
        assert_eq!(flush(&mut driver), IOERR, "breaks a rule: {breaks_a_rule}");
        assert_eq!(flush(&mut driver), OK);
    }
}
