//! Views of a guest: types that change one part of a guest and pass the others through.

/// Passes one part of a guest through to another guest, whole.
///
/// A type that implements `Delegate<dyn DirtyLog>` is a [`DirtyLog`](crate::DirtyLog); the same
/// holds for each of the guest traits. A view of a guest implements the traits that it changes and
/// delegates the others, so it cannot omit one of their methods. [`delegate!`](crate::delegate!)
/// writes the implementations.
pub trait Delegate<Part: ?Sized>: Send + Sync {
    /// Returns the guest that has this part.
    fn delegate(&self) -> &Part;
}

/// Makes a type delegate parts of a guest to the guest that an expression names.
///
/// ```
/// use std::sync::Arc;
/// use driftline_guest::{DirtyLog, Guest, GuestIdentity, HandOver};
///
/// struct View(Arc<dyn Guest>);
/// driftline_guest::delegate!(View as view => *view.0; GuestIdentity, DirtyLog, HandOver);
/// # fn is_part<T: GuestIdentity + DirtyLog + HandOver>() {}
/// # is_part::<View>();
/// ```
#[macro_export]
macro_rules! delegate {
    ($view:ty as $this:ident => $guest:expr; $($part:path),+ $(,)?) => {
        $(
            impl $crate::Delegate<dyn $part> for $view {
                fn delegate(&self) -> &(dyn $part + 'static) {
                    let $this = self;
                    &$guest
                }
            }
        )+
    };
}
