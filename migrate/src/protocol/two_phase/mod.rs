//! The hand-over as two pure state machines, without I/O: what each end does at each event.
//!
//! `source` and `destination` perform the machines' orders. The permits in the orders cannot be
//! made anywhere else, so no code can run or end a guest without the machines. `model` runs the two
//! machines against each other through every interleaving of lost messages, crashes, failing disks
//! and operators, and checks I7.

mod destination;
#[cfg(test)]
mod model;
mod source;

pub(crate) use destination::{Destination, DestinationEvent, DestinationOrder, MayRun};
pub(crate) use source::{MayEnd, MayRunHere, Source, SourceEvent, SourceOrder};
