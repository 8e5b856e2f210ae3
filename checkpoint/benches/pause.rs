//! The length of an epoch's pause, by the number of frames that changed since the epoch before.
//!
//! `cargo bench -p driftline-checkpoint --bench pause [-- DIR]`; DIR is the place of the store, by
//! default a temporary directory. Frames are scattered so that every run is one frame long, the
//! worst case.
#![allow(clippy::print_stdout, clippy::unwrap_used)]

use std::path::PathBuf;

use driftline_checkpoint::{Checkpointer, EpochReport, restore};
use driftline_dirty_tracker::{Gfn, PAGE_SIZE, Slot, SlotId};
use driftline_guest::testing::{MemoryConfig, MemoryGuest, MemoryGuestFactory};
use driftline_guest::{Clock, GuestContents, Lifecycle, VmId};
use driftline_store::Store;
use vm_memory::{Bytes, GuestAddress};

const FRAMES: u64 = 1 << 18;
const EPOCHS: u64 = 25;

fn percentile(reports: &[EpochReport], of: impl Fn(&EpochReport) -> f64, p: f64) -> f64 {
    let mut values: Vec<f64> = reports.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * p).round() as usize]
}

fn main() {
    let given = std::env::args().skip(1).find(|a| !a.starts_with("--")).map(PathBuf::from);
    println!("   frames  pause p50 us  pause p99 us  durable p50 ms    bytes/epoch   restore MB/s");
    for dirty in [0, 16, 256, 4096, 65536] {
        let dir = match &given {
            Some(dir) => tempfile::tempdir_in(dir).unwrap(),
            None => tempfile::tempdir().unwrap(),
        };
        let slots = vec![Slot { id: SlotId(0), base: Gfn(0), frames: FRAMES }];
        let config = MemoryConfig { slots, writers: 0, working_set: 0, writes_per_s: 0, seed: 0 };
        let guest = MemoryGuest::new(VmId::random(), config).unwrap();
        guest.resume().unwrap();
        let store = Store::create_or_open(dir.path()).unwrap();
        let mut checkpointer = Checkpointer::new(guest.clone(), store).unwrap();
        checkpointer.take().unwrap();
        let mut page = [7u8; PAGE_SIZE as usize];
        let mut reports = Vec::new();
        for round in 0..EPOCHS {
            page[0] = round as u8;
            for n in 0..dirty {
                let gfn = n * (FRAMES / 65536);
                guest.ram().write_slice(&page, GuestAddress(gfn * PAGE_SIZE)).unwrap();
            }
            reports.push(checkpointer.take().unwrap());
        }
        // The first epoch has to grow the staging area.
        reports.remove(0);
        let store = Store::open(dir.path()).unwrap();
        let factory = MemoryGuestFactory::default();
        let (_, restored) = restore(&store, None, &factory, Clock::Continue).unwrap();
        println!(
            "{dirty:9} {:13.0} {:13.0} {:15.2} {:14} {:14.0}",
            percentile(&reports, |r| r.pause_us as f64, 0.5),
            percentile(&reports, |r| r.pause_us as f64, 0.99),
            percentile(&reports, |r| r.write_ms, 0.5),
            reports[0].written_bytes,
            restored.read_bytes as f64 / 1e3 / restored.time_ms,
        );
        guest.stop("done");
    }
}
