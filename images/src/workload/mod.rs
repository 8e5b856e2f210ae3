//! Owns what the payload does and how it checks itself: the page format, the patterns, the expected generations,
//! the pacing and the lines it prints.
//!
//! This module is compiled twice: into the guest (by `#[path]`, without any crate) and into this library, for the
//! back end that runs the same loop on host threads. So it is `core` only, allocates nothing, uses no floating point,
//! and all of its state is plain data.
//!
//! Words used here: the *working set* is a run of pages numbered from 0, placed in RAM by [`Placement`]; a *share* is
//! the part of it that one vCPU owns and alone writes; a page's *generation* says how often it has been written.

mod line;
mod pace;
mod page;
mod pattern;
mod place;
mod runner;
mod settings;
mod share;

pub use line::Line;
pub use pace::{Gap, Pacer, SLICE_NS};
pub use page::{Head, Kind, Mismatch, PAGE_SIZE, PAGE_WORDS, PageMemory, STAMP_WORD};
pub use pattern::{Pattern, SWEEP_EVERY, SWEEP_EVERY_PACED, generation_after};
pub use place::{PlaceError, Placement, Segment, TABLE_BASE, WS_BASE};
pub use runner::{BATCH, ERROR_LINES, Next, Runner, ready_line};
pub use settings::{Fill, PayloadSpec, Rate, Reason, Ring, parse_number, parse_size};
pub use share::{Share, Workload};
