//! The hand-over as two pure state machines: what each side does at each event, without any I/O.
//!
//! `source` and `destination` perform what the machines order; the permits in the orders cannot be
//! made anywhere else, so no code can let a guest run, or end it, that the machines did not.
//! `model` runs the two machines against each other through every interleaving of lost messages,
//! crashes, failing disks and operators, and checks I7.

mod destination;
#[cfg(test)]
mod model;
mod source;

pub(crate) use destination::{Destination, DestinationEvent, DestinationOrder, MayRun};
pub(crate) use source::{MayEnd, MayRunHere, Source, SourceEvent, SourceOrder};
