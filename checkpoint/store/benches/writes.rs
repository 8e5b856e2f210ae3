//! The cost of writing an epoch's pages to the disk: by `pwrite` and by io_uring, each through the
//! page cache and directly.
//!
//! `cargo bench -p driftline-store --bench writes [-- EPOCHS]`. Each epoch writes FRAMES pages to a
//! preallocated file of 256 MiB and syncs its data. A piece has at most 64 pages that are adjacent
//! in the file; the pieces are in no particular order. The methods take turns. Prints the time
//! until an epoch is durable, and the processor time that the process spent on it, in milliseconds.
//! `DRIFTLINE_BENCH_STORE` names another directory.
#![allow(clippy::print_stdout, clippy::unwrap_used)]

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use driftline_guest::PAGE_BYTES;
use io_uring::{IoUring, opcode, types};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

const SLOTS: u64 = 65_536;
const FRAMES: [usize; 4] = [16, 256, 1024, 16_384];
const PIECE: usize = 64;

#[derive(Clone, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
struct AlignedPage([u8; PAGE_BYTES]);

/// A piece: where its bytes are, and where they go.
struct WritePiece {
    from: usize,
    len: usize,
    to: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum WriteMethod {
    Pwrite,
    /// By this many threads, which live for as long as an epoch is written.
    Threads(usize),
    Uring,
}

struct BenchFile {
    file: File,
    method: WriteMethod,
    ring: IoUring,
    name: &'static str,
    taken: Vec<(Duration, Duration)>,
}

impl BenchFile {
    fn new(
        dir: &Path,
        name: &'static str,
        method: WriteMethod,
        flags: i32,
    ) -> std::io::Result<Self> {
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).custom_flags(flags);
        let path = dir.join(name.replace(' ', "-"));
        let file = options.open(&path)?;
        // Written once, like slots that an earlier epoch had.
        let plain = OpenOptions::new().write(true).open(&path)?;
        for at in 0..SLOTS / 256 {
            plain.write_all_at(&vec![1; 256 * PAGE_BYTES], at * 256 * PAGE_BYTES as u64)?;
        }
        plain.sync_all()?;
        Ok(Self { file, method, ring: IoUring::new(1024)?, name, taken: Vec::new() })
    }

    fn epoch(&mut self, bytes: &[u8], pieces: &[WritePiece]) {
        let (begun, cpu) = (Instant::now(), spent());
        match self.method {
            WriteMethod::Pwrite => write(&self.file, bytes, pieces),
            WriteMethod::Threads(count) => std::thread::scope(|scope| {
                let (file, share) = (&self.file, pieces.len().div_ceil(count));
                for pieces in pieces.chunks(share) {
                    scope.spawn(move || write(file, bytes, pieces));
                }
            }),
            WriteMethod::Uring => self.submit(bytes, pieces),
        }
        self.file.sync_data().unwrap();
        self.taken.push((begun.elapsed(), spent() - cpu));
    }

    fn submit(&mut self, bytes: &[u8], pieces: &[WritePiece]) {
        let fd = types::Fd(self.file.as_raw_fd());
        for batch in pieces.chunks(1024) {
            for piece in batch {
                let bytes = &bytes[piece.from..piece.from + piece.len];
                let write = opcode::Write::new(fd, bytes.as_ptr(), bytes.len() as u32);
                let write = write.offset(piece.to).build();
                // SAFETY: the bytes and the file outlive the wait for all of the batch below.
                unsafe { self.ring.submission().push(&write) }.unwrap();
            }
            self.ring.submit_and_wait(batch.len()).unwrap();
            let written: usize = self.ring.completion().map(|c| c.result().max(0) as usize).sum();
            assert_eq!(written, batch.iter().map(|p| p.len).sum::<usize>(), "{}", self.name);
        }
    }
}

fn write(file: &File, bytes: &[u8], pieces: &[WritePiece]) {
    for piece in pieces {
        file.write_all_at(&bytes[piece.from..piece.from + piece.len], piece.to).unwrap();
    }
}

/// Returns the processor time that this process has used.
fn spent() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock fills the time that it is given.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn main() {
    let epochs: usize = std::env::args().skip(1).find_map(|a| a.parse().ok()).unwrap_or(60);
    let place = std::env::var_os("DRIFTLINE_BENCH_STORE").unwrap_or_else(|| ".".into());
    let dir = tempfile::tempdir_in(place).unwrap();
    let methods = [
        ("pwrite", WriteMethod::Pwrite, 0),
        ("io_uring", WriteMethod::Uring, 0),
        ("pwrite direct", WriteMethod::Pwrite, libc::O_DIRECT),
        ("4 threads direct", WriteMethod::Threads(4), libc::O_DIRECT),
        ("io_uring direct", WriteMethod::Uring, libc::O_DIRECT),
    ];
    let disk = |(name, method, flags)| BenchFile::new(dir.path(), name, method, flags);
    let mut disks: Vec<BenchFile> = match methods.map(disk).into_iter().collect() {
        Ok(disks) => disks,
        Err(e) => return println!("not measured: {e}"),
    };
    let most = FRAMES.into_iter().max().unwrap();
    let mut pages = AlignedPage::new_vec_zeroed(most).unwrap();
    println!("| pages | method | until durable p50, ms | p90 | p99 | processor p50, ms |");
    println!("| ---: | --- | ---: | ---: | ---: | ---: |");
    let mut seed = 1u64;
    let mut random = move |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    };
    for frames in FRAMES {
        for epoch in 0..epochs {
            pages
                .iter_mut()
                .for_each(|page| page.0[..8].copy_from_slice(&(epoch + 1).to_ne_bytes()));
            let piece = |at| {
                let count = PIECE.min(frames - at);
                let to = random(SLOTS / PIECE as u64) * (PIECE * PAGE_BYTES) as u64;
                WritePiece { from: at * PAGE_BYTES, len: count * PAGE_BYTES, to }
            };
            let pieces: Vec<WritePiece> = (0..frames).step_by(PIECE).map(piece).collect();
            for disk in &mut disks {
                disk.epoch(pages.as_bytes(), &pieces);
            }
        }
        for disk in &mut disks {
            let mut wall: Vec<f64> = disk.taken.iter().map(|t| t.0.as_secs_f64() * 1e3).collect();
            let mut cpu: Vec<f64> = disk.taken.iter().map(|t| t.1.as_secs_f64() * 1e3).collect();
            disk.taken.clear();
            wall.sort_by(f64::total_cmp);
            cpu.sort_by(f64::total_cmp);
            let at = |of: &[f64], part: usize| of[(of.len() * part / 100).min(of.len() - 1)];
            println!(
                "| {frames} | {} | {:.2} | {:.2} | {:.2} | {:.3} |",
                disk.name,
                at(&wall, 50),
                at(&wall, 90),
                at(&wall, 99),
                at(&cpu, 50)
            );
        }
    }
}
