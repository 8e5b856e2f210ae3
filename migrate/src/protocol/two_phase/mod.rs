//! The hand-over as two pure state machines, without I/O: each returns orders for events.
//!
//! `crate::source` and `crate::destination` perform the orders. Only these machines can make the
//! permits in the orders. So no other code can run the guest at the destination, or resume or end
//! it at the source after COMMIT. `model` runs the two machines against each other through every
//! interleaving of lost messages, crashes, failing disks and operators, and checks I7.

mod destination;
#[cfg(test)]
mod model;
mod source;

pub(crate) use destination::{Destination, DestinationEvent, DestinationOrder, MayRun};
pub(crate) use source::{MayEnd, MayRunHere, Source, SourceEvent, SourceOrder};
