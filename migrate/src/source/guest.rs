//! The parts of a guest that its migration needs at the source.

use driftline_guest::{
    DirtyLog, GuestContents, GuestIdentity, HandOver, Lifecycle, Stateful, WriteThrottle,
};

/// A guest that can be moved to another host. Implemented by every type with these traits.
pub trait Migratable:
    GuestIdentity + GuestContents + DirtyLog + WriteThrottle + Lifecycle + Stateful + HandOver
{
}

impl<T> Migratable for T where
    T: GuestIdentity
        + GuestContents
        + DirtyLog
        + WriteThrottle
        + Lifecycle
        + Stateful
        + HandOver
        + ?Sized
{
}
