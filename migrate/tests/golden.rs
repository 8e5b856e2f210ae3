//! Streams of released versions, which every later version must read.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use checkpoint::Guest;
use checkpoint::testing::MemoryConfig;
use common::{Host, Plan, Proxy, Sender, quick_send, tag};
use dirty_tracker::PAGE_SIZE;
use migrate::{StreamSummary, inspect};
use vm_memory::{Bytes, GuestAddress};

const V1: &[u8] = include_bytes!("golden/stream-v1.bin");
/// Of the same version, with LATE.
const V1_LATE: &[u8] = include_bytes!("golden/stream-v1-late.bin");

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
    assert_eq!(late_bytes, 0, "from before there was LATE");
}

#[test]
fn version_1_with_late_frames_is_read() {
    let summary = inspect(V1_LATE).unwrap();
    assert_eq!(summary.vm_id.to_string(), "8bf414be-5dc0-4cdf-8ca3-e1c2885fb2b4");
    assert_eq!((summary.passes, summary.normal_frames, summary.zero_frames), (2, 7, 2));
    assert_eq!((summary.content_crc, summary.state_digest), (0x301b_08bc, 0x89d5_a8ba));
    assert_eq!((summary.late_bytes, summary.committed), (8, true));
}

#[test]
fn every_flipped_byte_is_noticed() {
    every_flip_of(V1);
    every_flip_of(V1_LATE);
}

fn every_flip_of(stream: &[u8]) {
    let whole = inspect(stream).unwrap();
    let mut bytes = stream.to_vec();
    for at in 0..bytes.len() {
        bytes[at] ^= 1 << (at % 8);
        // What follows COMMIT is not read; COMMIT itself then does not count.
        let same = inspect(&bytes[..]).is_ok_and(|s| s == whole);
        let ended = stream.len() - 24 - 16;
        assert!(!same || at >= ended, "byte {at}");
        bytes[at] ^= 1 << (at % 8);
    }
}

#[test]
fn every_truncation_is_noticed() {
    for stream in [V1, V1_LATE] {
        let whole = inspect(stream).unwrap();
        let ended = stream.len() - 24 - 16;
        for length in 0..ended {
            assert!(!inspect(&stream[..length]).is_ok_and(|s| s == whole), "{length} bytes");
        }
    }
}

/// Records a stream of this version. Run it when the version changes, and keep the old files:
/// `GOLDEN=record cargo test -p migrate --test golden -- --ignored`, then set the constants.
#[test]
#[ignore = "writes a golden file"]
fn record_a_stream() {
    if std::env::var_os("GOLDEN").is_none_or(|v| v != "record") {
        return;
    }
    let host = Host::new();
    let config =
        MemoryConfig { writers: 1, working_set: 4, writes_per_s: 100, ..MemoryConfig::small() };
    let guest = host.start(config);
    // A frame of zeros that was written with content before.
    let at = GuestAddress(0x401 * PAGE_SIZE);
    guest.ram().write_slice(&[0xa5; PAGE_SIZE as usize], at).unwrap();
    std::thread::sleep(Duration::from_millis(60));
    let zero = {
        let guest = guest.clone();
        move || guest.ram().write_slice(&[0; PAGE_SIZE as usize], at).unwrap()
    };
    let there = host.receiver();
    let recorded = Arc::new(Mutex::new(Vec::new()));
    let proxy =
        Proxy::start(&there.to, Plan::record(&recorded).before_from_source(tag("PASS_END"), zero));
    Sender::start(&guest, &proxy.to, &quick_send(&host)).result().unwrap();
    there.guest();
    std::thread::sleep(Duration::from_millis(100));
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/stream-v1-late.bin");
    let bytes = recorded.lock().unwrap().clone();
    std::fs::write(path, &bytes).unwrap();
    println!("{:#x?}", inspect(&bytes[..]));
}

const VM: &str = "f150a699-65bf-43c9-a639-68e695f7ec01";
const TOKEN: &str = "7eaa9be4-49bd-4dae-a4bd-65ae069fc9a9";
const CONTENT_CRC: u32 = 0x8119_98dd;
const STATE_DIGEST: u32 = 0x0030_879d;
