//! The payload's work and its checks: the page format, the patterns, the expected generations, the
//! pacing and the printed lines.
//!
//! This module is compiled twice: into the guest (by `#[path]`, without any crate) and into this
//! library, for a backend that runs the same loop on host threads. It therefore uses only `core`,
//! does not allocate, uses no floating point, and has its entire state in plain data.
//!
//! The *working set* is a run of pages numbered from 0, which [`WorkingSetPlacement`] places in
//! RAM. A *share* is the part of it that one vCPU owns and that only this vCPU writes. The
//! *generation* of a page is the number of times it has been written.
//!
//! A backend other than the guest provides memory, a clock and a console:
//!
//! ```
//! use std::time::{Duration, Instant};
//!
//! use driftline_images::workload::{TickOutcome, PAGE_WORDS, PageMemory, Runner};
//!
//! struct Pages(Vec<u64>);
//!
//! impl PageMemory for Pages {
//!     fn gfn(&self, page: u64) -> u64 {
//!         0x1000 + page
//!     }
//!     fn read_u64(&self, page: u64, word: usize) -> u64 {
//!         self.0[page as usize * PAGE_WORDS + word]
//!     }
//!     fn write_u64(&mut self, page: u64, word: usize, value: u64) {
//!         self.0[page as usize * PAGE_WORDS + word] = value;
//!     }
//! }
//!
//! let spec = "payload,ws=1M,rate=64M,pattern=zipf,passes=3";
//! let spec: driftline_images::PayloadSpec = spec.parse().unwrap();
//! let mut pages = Pages(vec![0; spec.ws_pages() as usize * PAGE_WORDS]);
//! let clock = Instant::now();
//! let mut runner = Runner::new(&spec, 1, 0, 0);
//! let mut table = vec![0; runner.workload().table_len()];
//! let mut print = |line: &[u8]| print!("{}", line.escape_ascii());
//! loop {
//!     let now_ns = clock.elapsed().as_nanos() as u64;
//!     match runner.tick(now_ns, &mut pages, &mut table, &mut print) {
//!         TickOutcome::TickAgain => {}
//!         TickOutcome::SleepUntil(wake_ns) => {
//!             std::thread::sleep(Duration::from_nanos(wake_ns - now_ns));
//!         }
//!         TickOutcome::Done => break,
//!     }
//! }
//! assert_eq!(runner.workload().errors(), 0);
//! ```
//!
//! A copy of the memory is consistent only between two ticks.

mod line;
mod pace;
mod page;
mod pattern;
mod place;
mod runner;
mod settings;
mod share;

pub use line::LineBuffer;
pub use pace::{Pacer, SLICE_NS, TickGap};
pub use page::{Mismatch, MismatchKind, PAGE_SIZE, PAGE_WORDS, PageHead, PageMemory, STAMP_WORD};
pub use pattern::{Pattern, SWEEP_EVERY, SWEEP_EVERY_PACED, generation_after};
pub use place::{PlacementError, Segment, TABLE_BASE, WS_BASE, WorkingSetPlacement};
pub use runner::{BATCH, ERROR_LINES, Runner, TickOutcome, ready_line};
pub use settings::{
    BodyFill, CheckMode, IdleMode, PayloadRing, PayloadSpec, SettingRefusal, WriteRate,
    parse_number,
};
pub use share::{Share, Workload};
