//! The parts of a guest that its checkpoints need.

use driftline_guest::{DirtyLog, GuestContents, GuestIdentity, Lifecycle, Stateful};

/// A guest that can be checkpointed. Implemented by every type with these traits.
pub trait Checkpointable: GuestIdentity + GuestContents + DirtyLog + Lifecycle + Stateful {}

impl<T> Checkpointable for T where
    T: GuestIdentity + GuestContents + DirtyLog + Lifecycle + Stateful + ?Sized
{
}
