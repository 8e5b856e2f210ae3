//! Recorded streams, which every later version must read.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use crate::common::{
    DriveCopyFactory, GuestWithDrives, HostPair, LONG, Proxy, ProxyPlan, Sender,
    await_last_message, await_writes, quick_send, tag, within,
};
use driftline_dirty_tracker::PAGE_SIZE;
use driftline_guest::GuestContents;
use driftline_guest::testing::MemoryConfig;
use driftline_migrate::{Compression, CopyDrives, SendOptions, StreamSummary, inspect};
use vm_memory::{Bytes, GuestAddress};

const V1: &[u8] = include_bytes!("../golden/stream-v1.bin");
/// Same version, with LATE.
const V1_LATE: &[u8] = include_bytes!("../golden/stream-v1-late.bin");
/// Same version, with FRAMES and VERIFY.
const V1_FRAMES: &[u8] = include_bytes!("../golden/stream-v1-frames.bin");
/// Same version, with PACKED by LZ4.
const V1_LZ4: &[u8] = include_bytes!("../golden/stream-v1-lz4.bin");
/// Same version, with PACKED by Zstandard.
const V1_ZSTD: &[u8] = include_bytes!("../golden/stream-v1-zstd.bin");
/// Same version, with STATE before the last pass.
const V1_EARLY: &[u8] = include_bytes!("../golden/stream-v1-early.bin");
/// Same version, with STATE_WHOLE.
const V1_WHOLE: &[u8] = include_bytes!("../golden/stream-v1-whole.bin");
/// Same version, with copied disks.
const V1_DRIVES: &[u8] = include_bytes!("../golden/stream-v1-drives.bin");

#[test]
fn version_1_is_read() {
    let StreamSummary {
        vm_id,
        program,
        token,
        config_bytes,
        memory_frames,
        passes,
        normal_frames,
        zero_frames,
        drives,
        normal_blocks,
        zero_blocks,
        content_crc,
        sections,
        state_digest,
        was_running,
        late_bytes,
        committed,
    } = inspect(V1).unwrap();
    assert_eq!(vm_id.to_string(), VM);
    assert_eq!(token.to_string(), TOKEN);
    assert_eq!(program, "0.1.0");
    assert_eq!((config_bytes, memory_frames), (14, 1024));
    assert_eq!((passes, normal_frames, zero_frames), (2, 5, 3));
    assert_eq!((content_crc, state_digest), (CONTENT_CRC, STATE_DIGEST));
    assert_eq!((sections, was_running, committed), (1, true, true));
    assert_eq!(late_bytes, 0, "recorded without LATE");
    assert_eq!((drives, normal_blocks, zero_blocks), (0, 0, 0), "recorded without disks");
}

#[test]
fn version_1_with_late_packets_is_read() {
    let summary = inspect(V1_LATE).unwrap();
    assert_eq!(summary.vm_id.to_string(), "8bf414be-5dc0-4cdf-8ca3-e1c2885fb2b4");
    assert_eq!((summary.passes, summary.normal_frames, summary.zero_frames), (2, 7, 2));
    assert_eq!((summary.content_crc, summary.state_digest), (0x301b_08bc, 0x89d5_a8ba));
    assert_eq!((summary.late_bytes, summary.committed), (8, true));
}

#[test]
fn version_1_with_drives_is_read() {
    let summary = inspect(V1_DRIVES).unwrap();
    assert_eq!(summary.vm_id.to_string(), "27cb0f8e-4be7-4ec2-94a2-8ab77e7b4b8b");
    assert_eq!((summary.passes, summary.normal_frames), (2, 1));
    let drives = (summary.drives, summary.normal_blocks, summary.zero_blocks);
    assert_eq!(drives, (2, 12, 1));
    assert_eq!((summary.content_crc, summary.committed), (0x4d4e_db93, true));
}

#[test]
fn version_1_with_every_feature_is_read() {
    for (stream, counts, crc) in [
        (V1_EARLY, (2, 13, 3), 0xbd14_cbf7),
        (V1_WHOLE, (2, 13, 3), 0xbd14_cbf7),
        (V1_FRAMES, (2, 15, 2), 0x04e8_f41e),
        (V1_LZ4, (2, 13, 3), 0x1874_169e),
        (V1_ZSTD, (2, 15, 2), 0x5969_95a9),
    ] {
        let summary = inspect(stream).unwrap();
        assert_eq!((summary.passes, summary.normal_frames, summary.zero_frames), counts);
        assert_eq!((summary.content_crc, summary.committed), (crc, true));
    }
}

/// The content of FRAMES has no checksum, so a flip there shows only in the summary.
#[test]
fn every_flipped_byte_is_detected() {
    [V1, V1_LATE, V1_EARLY, V1_WHOLE, V1_FRAMES, V1_LZ4, V1_ZSTD, V1_DRIVES]
        .into_iter()
        .for_each(every_flip_of);
}

fn every_flip_of(stream: &[u8]) {
    let whole = inspect(stream).unwrap();
    let mut bytes = stream.to_vec();
    // Only some bytes of long streams, because each flip reads the whole stream.
    let step = if bytes.len() > 32 << 10 { 11 } else { 1 };
    for at in (0..bytes.len()).step_by(step) {
        bytes[at] ^= 1 << (at % 8);
        // `inspect` does not read past COMMIT.
        let same = inspect(&bytes[..]).is_ok_and(|s| s == whole);
        let ended = stream.len() - 24 - 16;
        assert!(!same || at >= ended, "byte {at}");
        bytes[at] ^= 1 << (at % 8);
    }
}

#[test]
fn every_truncation_is_detected() {
    for stream in [V1, V1_LATE, V1_LZ4, V1_ZSTD, V1_DRIVES] {
        let whole = inspect(stream).unwrap();
        let ended = stream.len() - 24 - 16;
        for length in 0..ended {
            assert!(!inspect(&stream[..length]).is_ok_and(|s| s == whole), "{length} bytes");
        }
    }
}

/// Records a stream with copied disks, see [`record_streams`].
#[test]
#[ignore = "writes a golden file"]
fn record_a_stream_with_drives() {
    if std::env::var_os("GOLDEN").is_none_or(|v| v != "record") {
        return;
    }
    let (hosts, dir) = (HostPair::new(), tempfile::tempdir().unwrap());
    let guest =
        GuestWithDrives::start(hosts.start(MemoryConfig::still()), dir.path(), &[20992, 1536], 7);
    guest.ram().write_slice(&[0xa5; PAGE_SIZE as usize], GuestAddress(PAGE_SIZE)).unwrap();
    let copies = tempfile::tempdir().unwrap();
    let there = hosts.receiver_of(DriveCopyFactory::new(&hosts, copies.path()));
    let recorded = Arc::new(Mutex::new(Vec::new()));
    let disked = guest.clone();
    let written = move || {
        await_writes(&*disked, || disked.writes.load(Ordering::SeqCst), 100);
    };
    let plan = ProxyPlan::record(&recorded).before_from_source(tag("PASS_END"), written);
    let proxy = Proxy::start(&there.to, plan);
    let options = SendOptions { copy_drives: CopyDrives::All, ..quick_send(&hosts) };
    Sender::start(&guest, &proxy.to, &options).result().unwrap();
    there.guest();
    (0..2).for_each(|i| guest.compare(i, &copies.path().join(format!("disk{i}"))));
    await_last_message(&proxy);
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/stream-v1-drives.bin");
    let bytes = recorded.lock().unwrap().clone();
    std::fs::write(path, &bytes).unwrap();
    println!("{:#x?}", inspect(&bytes[..]));
}

/// Records streams of this version. Run this when the version changes, keep the old files, and set
/// the constants. `GOLDEN=record` records all streams, `GOLDEN=NAME` only one:
/// `GOLDEN=record cargo test -p driftline-migrate --test migrations golden -- --ignored`
#[test]
#[ignore = "writes golden files"]
fn record_streams() {
    let wanted = std::env::var("GOLDEN").unwrap_or_default();
    for (name, compression, verify) in [
        ("whole", Compression::None, false),
        ("frames", Compression::None, true),
        ("lz4", Compression::Lz4, false),
        ("zstd", Compression::Zstd, false),
    ] {
        if wanted != "record" && wanted != name {
            continue;
        }
        let hosts = HostPair::new();
        let config =
            MemoryConfig { writers: 1, working_set: 4, writes_per_s: 100, ..MemoryConfig::small() };
        let guest = hosts.start(config);
        // A run that is long enough for FRAMES and packs well. One of its frames is zeroed later.
        let at = GuestAddress(0x401 * PAGE_SIZE);
        let content: Vec<u8> = (0..9 * PAGE_SIZE).map(|i| (i / 512) as u8 | 1).collect();
        guest.ram().write_slice(&content, at).unwrap();
        within(LONG, "some writes", || guest.writes() >= 6);
        let zero = {
            let guest = guest.clone();
            move || guest.ram().write_slice(&[0; PAGE_SIZE as usize], at).unwrap()
        };
        let there = hosts.receiver();
        let recorded = Arc::new(Mutex::new(Vec::new()));
        let plan = ProxyPlan::record(&recorded).before_from_source(tag("PASS_END"), zero);
        let proxy = Proxy::start(&there.to, plan);
        let mut options = quick_send(&hosts);
        (options.compression, options.verify) = (compression, verify);
        Sender::start(&guest, &proxy.to, &options).result().unwrap();
        there.guest();
        await_last_message(&proxy);
        let path = format!("{}/tests/golden/stream-v1-{name}.bin", env!("CARGO_MANIFEST_DIR"));
        let bytes = recorded.lock().unwrap().clone();
        std::fs::write(path, &bytes).unwrap();
        println!("{name}: {:#x?}", inspect(&bytes[..]));
    }
}

const VM: &str = "f150a699-65bf-43c9-a639-68e695f7ec01";
const TOKEN: &str = "7eaa9be4-49bd-4dae-a4bd-65ae069fc9a9";
const CONTENT_CRC: u32 = 0x8119_98dd;
const STATE_DIGEST: u32 = 0x0030_879d;
