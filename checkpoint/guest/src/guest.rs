//! A whole guest.

use crate::contents::GuestContents;
use crate::dirty_log::DirtyLog;
use crate::hand_over::HandOver;
use crate::identity::GuestIdentity;
use crate::lifecycle::Lifecycle;
use crate::populate::Populate;
use crate::stateful::Stateful;
use crate::write_throttle::WriteThrottle;

/// A guest with all its parts. Implemented by every type with all of the part traits.
///
/// All methods may be called from any thread; implementations pass them as messages to the thread
/// that owns the state concerned. Code that needs only some parts takes the traits of those parts.
pub trait Guest:
    GuestIdentity
    + GuestContents
    + Populate
    + DirtyLog
    + WriteThrottle
    + Lifecycle
    + Stateful
    + HandOver
{
}

impl<T> Guest for T where
    T: GuestIdentity
        + GuestContents
        + Populate
        + DirtyLog
        + WriteThrottle
        + Lifecycle
        + Stateful
        + HandOver
        + ?Sized
{
}
