//! The threads backend: runs the payload's workload on host threads over memory with a guest's
//! layout, behind the same traits as the KVM machine.
//!
//! It serves hosts without KVM, and tests. Each *worker* acts as one vCPU and runs that vCPU's
//! share of the workload. It stops only between two ticks of a few pages, when all its writes are
//! marked. Its writes go through [`TrackedBitmap`](driftline_dirty_tracker::TrackedBitmap), so
//! `collect` has nothing to harvest.

mod clock;
mod end;
mod error;
mod hand_over;
mod machine;
mod memory;
mod state;
mod worker;

pub use machine::ThreadMachine;
